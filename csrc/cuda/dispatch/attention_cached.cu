#include <algorithm>

#include "../common/attention_combine.cuh"
#include "../common/attention_fwd_plan.h"
#include "../kernels.h"
#include "../sm80/attention_cached.cuh"

namespace mha::cuda {
namespace {

constexpr const char* kName = "attention_cached_sm80";

// Rows of a tile: as many as are worth it, for those that are none cost instructions.
int rows_of_tile(const AttentionForward& p) { return p.H / p.Hk * p.Sq <= 8 ? 8 : 16; }

template <class T, DType kStored>
void launch(const AttentionForwardLaunch& p, cudaStream_t stream) {
  if (rows_of_tile(p) == 8)
    launch_attention_cached_sm80<CachedSm80<T, kStored, kCachedHead, 8>>(kName, p, stream);
  else
    launch_attention_cached_sm80<CachedSm80<T, kStored, kCachedHead, 16>>(kName, p, stream);
}

template <class T>
void launch(const AttentionForwardLaunch& p, cudaStream_t stream) {
  switch (p.kv_type()) {
    case DType::i8:
      return launch<T, DType::i8>(p, stream);
    case DType::e4m3:
      return launch<T, DType::e4m3>(p, stream);
    default:
      return launch<T, DType::bf16>(p, stream);
  }
}

}  // namespace

bool takes_cached(const AttentionForwardLaunch& p) {
  const std::size_t size = size_of(p.kv_type());
  return (p.store.table || p.store.quantised) && (p.dtype == DType::bf16 || p.dtype == DType::f16) &&
         p.D <= kCachedHead && p.Dv <= kCachedHead && aligned_16(p.k, size) && aligned_16(p.v, size) && p.Hk > 0;
}

// Two blocks and more run on a multiprocessor at once.
int cached_splits(const AttentionForward& p) {
  const int rows = rows_of_tile(p);
  const int64_t blocks = p.B * p.Hk * ((p.H / p.Hk * p.Sq + rows - 1) / rows),
                wanted = 2 * multiprocessors() / std::max<int64_t>(blocks, 1);
  return int(std::max<int64_t>(1, std::min({wanted, p.Sk / 256, int64_t(kMaxSplits)})));
}

void attention_cached(const AttentionForwardLaunch& p, cudaStream_t stream) {
  return p.dtype == DType::f16 ? launch<__half>(p, stream) : launch<__nv_bfloat16>(p, stream);
}

}  // namespace mha::cuda
