// Written by generate_instances.py.
#include "../attention_fwd_sm90.cuh"

namespace mha::cuda {

void attention_fwd_sm90_f16_64_plain(const AttentionForwardLaunch& p, cudaStream_t stream) {
  launch_attention_fwd_sm90<__half, ForwardSm90<64, 64, false>>("attention_fwd_sm90_f16_64_plain", p, stream);
}

}  // namespace mha::cuda
