// Written by generate_instances.py.
#include "../attention_bwd_sm90.cuh"

namespace mha::cuda {

void attention_bwd_sm90_f16_128_general(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  launch_attention_bwd_sm90<__half, BackwardSm90<128, true>>("attention_bwd_sm90_f16_128_general", p, stream);
}

}  // namespace mha::cuda
