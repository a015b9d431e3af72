// Written by generate_instances.py.
#include "../attention_bwd_sm80.cuh"

namespace mha::cuda {

void attention_bwd_dkv_sm80_f16_96_general(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  launch_attention_bwd_sm80<__half, BackwardSm80<96, true, false>>("attention_bwd_dkv_sm80_f16_96_general", p, stream);
}

}  // namespace mha::cuda
