// [B,H,S,D] -> [B,S,H*D], with or without a mix of the heads.
#include "../kernels.h"
#include "heads.cuh"

namespace mha::cuda {
namespace {

template <class T, int kPack, bool kMix>
__global__ void __launch_bounds__(kHeadThreads)
    merge_heads_kernel(const __grid_constant__ MergeHeads p, unsigned rows_per_block) {
  using Values = HeadPack<T, kPack>;
  each_head_pack<kPack>(p, rows_per_block, [&](unsigned b, unsigned g, int64_t s, unsigned d) {
    Values v;
    if constexpr (kMix) {
      // The heads' rows are read H times, from the caches after the first.
      Accumulate<T> sum[kPack] = {};
      const T* from = head_row<const T>(p.in, b, 0, s) + d * p.in.stride[3];
      for (int64_t h = 0; h < p.H; ++h, from += p.in.stride[1]) {
        const auto m = Accumulate<T>(static_cast<const T*>(p.mix)[h * p.H + g]);
        const Values in = *reinterpret_cast<const Values*>(from);
#pragma unroll
        for (int i = 0; i < kPack; ++i) sum[i] += Accumulate<T>(in.x[i]) * m;
      }
#pragma unroll
      for (int i = 0; i < kPack; ++i) v.x[i] = T(sum[i]);
    } else {
      v = *reinterpret_cast<const Values*>(head_row<const T>(p.in, b, g, s) + d * p.in.stride[3]);
    }
    *reinterpret_cast<Values*>(head_row<T>(p.out, b, g, s) + d) = v;
  });
}

template <class T, int kPack>
void launch(const MergeHeads& p, cudaStream_t stream) {
  const unsigned rows = head_rows_per_block(p.D / kPack), blocks = head_blocks(p, rows, "merge_heads");
  if (p.mix)
    merge_heads_kernel<T, kPack, true><<<blocks, kHeadThreads, 0, stream>>>(p, rows);
  else
    merge_heads_kernel<T, kPack, false><<<blocks, kHeadThreads, 0, stream>>>(p, rows);
  check(cudaGetLastError(), "merge_heads");
}

}  // namespace

void merge_heads(const MergeHeads& p, cudaStream_t stream) {
  if (p.B * p.H * p.S * p.D == 0) return;
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (head_packs(p))
      launch<T, Pack<T>::kSize>(p, stream);
    else
      launch<T, 1>(p, stream);
  });
}

}  // namespace mha::cuda
