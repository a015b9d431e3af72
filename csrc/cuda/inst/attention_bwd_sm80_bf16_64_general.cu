// Written by generate_instances.py.
#include "../attention_bwd_sm80.cuh"

namespace mha::cuda {

void attention_bwd_sm80_bf16_64_general(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  launch_attention_bwd_sm80<__nv_bfloat16, BackwardSm80<64, true, true>>("attention_bwd_sm80_bf16_64_general", p, stream);
}

}  // namespace mha::cuda
