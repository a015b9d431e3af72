// Written by generate_instances.py.
#include "../attention_bwd_sm90.cuh"

namespace mha::cuda {

void attention_bwd_sm90_f16_256_plain(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  launch_attention_bwd_sm90<__half, BackwardSm90<256, false>>("attention_bwd_sm90_f16_256_plain", p, stream);
}

}  // namespace mha::cuda
