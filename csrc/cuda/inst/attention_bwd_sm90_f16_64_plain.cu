// Written by generate_instances.py.
#include "../attention_bwd_sm90.cuh"

namespace mha::cuda {

void attention_bwd_sm90_f16_64_plain(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  launch_attention_bwd_sm90<__half, BackwardSm90<64, false>>("attention_bwd_sm90_f16_64_plain", p, stream);
}

}  // namespace mha::cuda
