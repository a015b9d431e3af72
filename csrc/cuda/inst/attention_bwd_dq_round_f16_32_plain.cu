// Written by generate_instances.py.
#include "../attention_bwd_dq_round.cuh"

namespace mha::cuda {

void attention_bwd_dq_round_f16_32_plain(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  launch_attention_bwd_dq_round<__half, BackwardSm80<32, false, true>>("attention_bwd_dq_round_f16_32_plain", p, stream);
}

}  // namespace mha::cuda
