// Written by generate_instances.py.
#include "../attention_fwd_sm90.cuh"

namespace mha::cuda {

void attention_fwd_sm90_f16_256_general(const AttentionForwardLaunch& p, cudaStream_t stream) {
  launch_attention_fwd_sm90<__half, ForwardSm90<256, 256, true>>("attention_fwd_sm90_f16_256_general", p, stream);
}

}  // namespace mha::cuda
