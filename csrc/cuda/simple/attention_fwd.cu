#include "../kernels.h"
#include "attention_fwd.cuh"

namespace mha::cuda {
namespace {

// Over keys and values in pages, or quantised.
void attention_fwd_stored(const char* name, const AttentionForwardLaunch& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::f64:
      return launch_attention_fwd_simple<SimpleForward<double, double, 1, true>>(name, p, stream);
    case DType::f32:
      return launch_attention_fwd_simple<SimpleForward<float, float, 4, true>>(name, p, stream);
    case DType::bf16:
      return launch_attention_fwd_simple<SimpleForward<__nv_bfloat16, float, 4, true>>(name, p, stream);
    case DType::f16:
      return launch_attention_fwd_simple<SimpleForward<__half, float, 4, true>>(name, p, stream);
    default:
      break;
  }
}

}  // namespace

void attention_fwd_simple(const AttentionForwardLaunch& p, cudaStream_t stream) {
  const char* name = "attention_fwd_simple";
  if (p.store.table || p.store.quantised) return attention_fwd_stored(name, p, stream);
  switch (p.dtype) {
    case DType::f64:
      return launch_attention_fwd_simple<SimpleForward<double, double, 1>>(name, p, stream);
    case DType::f32:
      if (p.Dv <= 64) return launch_attention_fwd_simple<SimpleForward<float, float, 2>>(name, p, stream);
      return launch_attention_fwd_simple<SimpleForward<float, float, 4>>(name, p, stream);
    case DType::bf16:
      return launch_attention_fwd_simple<SimpleForward<__nv_bfloat16, float, 4>>(name, p, stream);
    case DType::f16:
      return launch_attention_fwd_simple<SimpleForward<__half, float, 4>>(name, p, stream);
    default:
      break;  // queries have no other type
  }
}

}  // namespace mha::cuda
