// What the choice of a forward kernel and its launch both ask.
#pragma once
#include <bit>

#include "error.h"
#include "launch.h"

namespace mha::cuda {

inline int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

constexpr int kGroupedRows = 128;  // of a query tile

// Few queries leave most of a tile empty. Plain kernels for compute capability 9.0 then take those of the
// 2^bits query heads that share a key/value head side by side, where that makes fewer tiles: returns the bits, or 0.
inline int group_bits(const AttentionForward& p) {
  const int64_t group = p.H / p.Hk, tiles_apart = group * ((p.Sq + kGroupedRows - 1) / kGroupedRows),
                tiles = (p.Sq * group + kGroupedRows - 1) / kGroupedRows;
  if (p.q_starts || group > kGroupedRows || !std::has_single_bit(uint64_t(group)) || tiles >= tiles_apart) return 0;
  return std::countr_zero(uint64_t(group));
}

}  // namespace mha::cuda
