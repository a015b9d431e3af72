// Written by generate_instances.py.
#include "../attention_fwd_sm90.cuh"

namespace mha::cuda {

void attention_fwd_sm90_bf16_256_plain(const AttentionForwardLaunch& p, cudaStream_t stream) {
  launch_attention_fwd_sm90<__nv_bfloat16, ForwardSm90<256, 256, false>>("attention_fwd_sm90_bf16_256_plain", p, stream);
}

}  // namespace mha::cuda
