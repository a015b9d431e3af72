// [B,S,H*D] -> [B,H,S,D], with the projection's bias added on the way if there is one.
#include "../kernels.h"
#include "heads.cuh"

namespace mha::cuda {
namespace {

template <class T, int kPack>
__global__ void __launch_bounds__(kHeadThreads)
    split_heads_kernel(const __grid_constant__ SplitHeads p, unsigned rows_per_block) {
  using Values = HeadPack<T, kPack>;
  each_head_pack<kPack>(p, rows_per_block, [&](unsigned b, unsigned h, int64_t s, unsigned d) {
    Values v = *reinterpret_cast<const Values*>(head_row<const T>(p.in, b, h, s) + d * p.in.stride[3]);
    if (p.bias) {
      const T* bias = static_cast<const T*>(p.bias) + h * p.D + d;
#pragma unroll
      for (int i = 0; i < kPack; ++i) v.x[i] = T(Accumulate<T>(v.x[i]) + Accumulate<T>(bias[i]));
    }
    *reinterpret_cast<Values*>(head_row<T>(p.out, b, h, s) + d) = v;
  });
}

template <class T, int kPack>
void launch(const SplitHeads& p, cudaStream_t stream) {
  const unsigned rows = head_rows_per_block(p.D / kPack);
  split_heads_kernel<T, kPack><<<head_blocks(p, rows, "split_heads"), kHeadThreads, 0, stream>>>(p, rows);
  check(cudaGetLastError(), "split_heads");
}

}  // namespace

void split_heads(const SplitHeads& p, cudaStream_t stream) {
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
