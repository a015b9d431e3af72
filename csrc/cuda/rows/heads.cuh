// Moving heads: what split_heads and merge_heads share. A block takes some rows of one (batch, head), a thread packs of
// 16 bytes (or elements, where rows don't allow packs) of them; so there is one 32-bit division per pack.
#pragma once
#include "../common/element.cuh"
#include "../common/error.h"
#include "../common/launch.h"

namespace mha::cuda {

template <class T, int kPack>
struct alignas(kPack == 1 ? sizeof(T) : 16) HeadPack {
  T x[kPack];
};

constexpr int kHeadThreads = 256, kHeadPacks = 4;  // packs per thread

// Calls f(b, h, s, d) for the first element of each of the thread's packs.
template <int kPack, class Problem, class F>
__device__ inline void each_head_pack(const Problem& p, unsigned rows_per_block, F f) {
  const unsigned chunks = unsigned((p.S + rows_per_block - 1) / rows_per_block), packs = unsigned(p.D / kPack);
  const unsigned bh = blockIdx.x / chunks, H = unsigned(p.H), b = bh / H, h = bh - b * H;
  const int64_t first = int64_t(blockIdx.x - bh * chunks) * rows_per_block;
  const unsigned rows = unsigned(min64(p.S - first, rows_per_block));
#pragma unroll 4
  for (unsigned n = threadIdx.x; n < rows * packs; n += kHeadThreads) {
    const unsigned row = n / packs;
    f(b, h, first + row, (n - row * packs) * kPack);
  }
}

inline unsigned head_rows_per_block(int64_t packs) { return unsigned(max64(1, kHeadThreads * kHeadPacks / packs)); }

template <class Problem>
unsigned head_blocks(const Problem& p, unsigned rows_per_block, const char* name) {
  return grid_size(p.B * p.H * ((p.S + rows_per_block - 1) / rows_per_block), name);
}

template <class Problem>
bool head_packs(const Problem& p) {  // whether rows move in packs
  const std::size_t size = size_of(p.dtype);
  return p.in.stride[3] == 1 && p.D * size % 16 == 0 && aligned_16(p.in, size) && aligned_16(p.out, size);
}

template <class T>
__device__ inline T* head_row(const Tensor4& t, unsigned b, unsigned h, int64_t s) {
  return static_cast<T*>(t.data) + b * t.stride[0] + h * t.stride[1] + s * t.stride[2];
}

}  // namespace mha::cuda
