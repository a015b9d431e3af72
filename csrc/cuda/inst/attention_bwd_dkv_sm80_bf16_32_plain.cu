// Written by generate_instances.py.
#include "../attention_bwd_sm80.cuh"

namespace mha::cuda {

void attention_bwd_dkv_sm80_bf16_32_plain(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  launch_attention_bwd_sm80<__nv_bfloat16, BackwardSm80<32, false, false>>("attention_bwd_dkv_sm80_bf16_32_plain", p, stream);
}

}  // namespace mha::cuda
