// Written by generate_instances.py.
#include "../attention_bwd_dq_round.cuh"

namespace mha::cuda {

void attention_bwd_dq_round_bf16_64_plain(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  launch_attention_bwd_dq_round<__nv_bfloat16, BackwardSm80<64, false, true>>("attention_bwd_dq_round_bf16_64_plain", p, stream);
}

}  // namespace mha::cuda
