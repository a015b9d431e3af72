// Written by generate_instances.py.
#include "../attention_bwd_sm90.cuh"

namespace mha::cuda {

void attention_bwd_sm90_f16_128_plain(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  launch_attention_bwd_sm90<__half, BackwardSm90<128, false>>("attention_bwd_sm90_f16_128_plain", p, stream);
}

}  // namespace mha::cuda
