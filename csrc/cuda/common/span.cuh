// Which keys a group of query rows may see: what decides which tiles are visited and which pay for mask tests.
#pragma once
#include "mask_tiles.h"
#include "sequence.cuh"

namespace mha::cuda {

struct RowRange {
  int begin, end;  // of keys; empty is {0, 0}
};

struct Span {
  int begin, end;            // the keys that some row sees; empty when begin >= end
  int full_begin, full_end;  // the keys that every row sees (by interval); empty when full_begin >= full_end
};

constexpr int kKeyMax = 0x7FFFFFFF;

__device__ inline Span merge(const Span& a, const Span& b) {
  return {min(a.begin, b.begin), max(a.end, b.end), max(a.full_begin, b.full_begin), min(a.full_end, b.full_end)};
}

// The bits of all tiles that the rows and keys have a part in. Keys may be negative.
__device__ inline uint32_t mask_tile_code(const MaskTiles& tiles, unsigned b, unsigned h, int row, int rows, int key,
                                          int keys) {
  if (!tiles.code) return kShowsSome;
  const uint8_t* from = tiles.code + b * tiles.stride_b + h * tiles.stride_h;
  const int row_end = min((row + rows - 1) / kMaskTile + 1, tiles.row_tiles),
            key_end = min((key + keys - 1) / kMaskTile + 1, tiles.key_tiles);
  uint32_t code = 0;
#pragma unroll 1
  for (int i = row / kMaskTile; i < row_end; ++i)
#pragma unroll 1
    for (int j = max(key, 0) / kMaskTile; j < key_end; ++j) code |= from[int64_t(i) * tiles.key_tiles + j];
  return code;
}

// One warp works out the span of rows [first, first + kRows) (kRows 16 or 32), and their intervals in ranges[0..kRows).
// Rows from Sq on see nothing and don't count. Both results are for shared memory, and need a barrier.
template <int kRows>
__device__ inline void warp_span(const Mask& mask, const Sequence& s, int first, RowRange* ranges, Span* span,
                                 unsigned lane) {
  Span own = {kKeyMax, 0, 0, kKeyMax};
  const int i = lane % kRows;
  RowRange r = {0, 0};
  if (first + i < s.Sq) {
    Interval interval = row_interval(mask, s.b, first + i, s.Sk, s.shift);
    if (interval.begin < interval.end) r = {int(interval.begin), int(interval.end)};
    own = {r.begin < r.end ? r.begin : kKeyMax, r.end, r.begin, r.end};
  }
  if (lane < kRows) ranges[i] = r;
  own = {__reduce_min_sync(~0u, own.begin), __reduce_max_sync(~0u, own.end), __reduce_max_sync(~0u, own.full_begin),
         __reduce_min_sync(~0u, own.full_end)};
  if (lane == 0) *span = own;
}

}  // namespace mha::cuda
