// Written by generate_instances.py.
#include "../attention_fwd_sm90.cuh"

namespace mha::cuda {

void attention_fwd_sm90_f16_128_general(const AttentionForwardLaunch& p, cudaStream_t stream) {
  launch_attention_fwd_sm90<__half, ForwardSm90<128, 128, true>>("attention_fwd_sm90_f16_128_general", p, stream);
}

}  // namespace mha::cuda
