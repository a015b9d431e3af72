// Written by generate_instances.py.
#include "../attention_bwd_dq_sm80.cuh"

namespace mha::cuda {

void attention_bwd_dbias_sm80_f16_32_general(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  launch_attention_bwd_dbias_sm80<__half, BackwardQueriesSm80<32, true, true>>("attention_bwd_dbias_sm80_f16_32_general", p, stream);
}

}  // namespace mha::cuda
