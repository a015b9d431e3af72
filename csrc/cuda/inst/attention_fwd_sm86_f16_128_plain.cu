// Written by generate_instances.py.
#include "../attention_fwd_sm80.cuh"

namespace mha::cuda {

void attention_fwd_sm86_f16_128_plain(const AttentionForwardLaunch& p, cudaStream_t stream) {
  launch_attention_fwd_sm80<__half, ForwardSm80<128, false, true>>("attention_fwd_sm86_f16_128_plain", p, stream);
}

}  // namespace mha::cuda
