// Written by generate_instances.py.
#include "../attention_bwd_sm80.cuh"

namespace mha::cuda {

void attention_bwd_dkv_sm80_bf16_96_plain(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  launch_attention_bwd_sm80<__nv_bfloat16, BackwardSm80<96, false, false>>("attention_bwd_dkv_sm80_bf16_96_plain", p, stream);
}

}  // namespace mha::cuda
