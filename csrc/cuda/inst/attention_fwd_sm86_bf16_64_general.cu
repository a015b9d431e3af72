// Written by generate_instances.py.
#include "../attention_fwd_sm80.cuh"

namespace mha::cuda {

void attention_fwd_sm86_bf16_64_general(const AttentionForwardLaunch& p, cudaStream_t stream) {
  launch_attention_fwd_sm80<__nv_bfloat16, ForwardSm80<64, true, true>>("attention_fwd_sm86_bf16_64_general", p, stream);
}

}  // namespace mha::cuda
