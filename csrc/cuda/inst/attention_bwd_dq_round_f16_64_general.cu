// Written by generate_instances.py.
#include "../attention_bwd_dq_round.cuh"

namespace mha::cuda {

void attention_bwd_dq_round_f16_64_general(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  launch_attention_bwd_dq_round<__half, BackwardSm80<64, true, true>>("attention_bwd_dq_round_f16_64_general", p, stream);
}

}  // namespace mha::cuda
