// Written by generate_instances.py.
#include "../attention_weights_sm80.cuh"

namespace mha::cuda {

void attention_weights_sm80_bf16_64_general(const AttentionForwardLaunch& p, cudaStream_t stream) {
  launch_attention_weights_sm80<__nv_bfloat16, ForwardSm80<64, true>>("attention_weights_sm80_bf16_64_general", p, stream);
}

}  // namespace mha::cuda
