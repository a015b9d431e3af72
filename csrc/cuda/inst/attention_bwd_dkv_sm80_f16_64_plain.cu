// Written by generate_instances.py.
#include "../attention_bwd_sm80.cuh"

namespace mha::cuda {

void attention_bwd_dkv_sm80_f16_64_plain(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  launch_attention_bwd_sm80<__half, BackwardSm80<64, false, false>>("attention_bwd_dkv_sm80_f16_64_plain", p, stream);
}

}  // namespace mha::cuda
