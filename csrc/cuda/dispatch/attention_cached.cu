#include "../kernels.h"
#include "../sm80/attention_cached.cuh"

namespace mha::cuda {
namespace {

constexpr const char* kName = "attention_cached_sm80";

template <class T>
void launch(const AttentionForwardLaunch& p, cudaStream_t stream) {
  switch (p.kv_type()) {
    case DType::i8:
      return launch_attention_cached_sm80<CachedSm80<T, DType::i8, kCachedHead>>(kName, p, stream);
    case DType::e4m3:
      return launch_attention_cached_sm80<CachedSm80<T, DType::e4m3, kCachedHead>>(kName, p, stream);
    default:
      return launch_attention_cached_sm80<CachedSm80<T, DType::bf16, kCachedHead>>(kName, p, stream);
  }
}

}  // namespace

bool takes_cached(const AttentionForwardLaunch& p) {
  const std::size_t size = size_of(p.kv_type());
  const bool by_head = (p.mask.dense && p.mask.dense_stride_h) || (p.mask.blocks && p.mask.blocks_stride_h);
  // The scale of a key's value joins its weight, which fp16 has no room for.
  const bool scales = !p.store.scale_per_key || p.dtype == DType::bf16;
  return (p.store.table || p.store.quantised) && (p.dtype == DType::bf16 || p.dtype == DType::f16) && p.Sq == 1 &&
         p.D <= kCachedHead && p.Dv <= kCachedHead && aligned_16(p.k, size) && aligned_16(p.v, size) && !by_head &&
         scales && p.Hk > 0;
}

void attention_cached(const AttentionForwardLaunch& p, cudaStream_t stream) {
  return p.dtype == DType::f16 ? launch<__half>(p, stream) : launch<__nv_bfloat16>(p, stream);
}

}  // namespace mha::cuda
