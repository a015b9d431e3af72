// What a query may see. Structured masks give each query row one interval of keys; document ids, blocks and a dense
// bool tensor take elements out of it. All parts apply together (AND). Used by every kernel, forward and backward.
#pragma once
#include <cstdint>

#include "host_device.h"

namespace mha {

constexpr int64_t kNoLimit = int64_t(1) << 60;

struct Mask {
  // Band around the diagonal: key j is visible to query i only if band_lo <= j - i <= band_hi.
  int64_t band_lo = -kNoLimit, band_hi = kNoLimit;
  bool top_left = false;  // moreover j <= i

  // Intervals: key j is visible only if begin[b,i] <= j < end[b,i]. Null: no limit. Stride 0 broadcasts. Values may lie
  // outside [0, Sk].
  const int64_t* begin = nullptr;  // [B,Sq]
  int64_t begin_stride_b = 0, begin_stride_q = 0;
  const int64_t* end = nullptr;  // [B,Sq]
  int64_t end_stride_b = 0, end_stride_q = 0;

  // Documents: key j is visible only if query_ids[b,i] == key_ids[b,j]. Both null or neither. Unit stride in i and j.
  const int64_t* query_ids = nullptr;  // [B,Sq]
  int64_t query_ids_stride_b = 0;
  const int64_t* key_ids = nullptr;  // [B,Sk]
  int64_t key_ids_stride_b = 0;

  // Dense: key j is visible only if dense[b,h,i,j] != 0. Null: no limit. Stride 0 broadcasts.
  const uint8_t* dense = nullptr;  // [B,H,Sq,Sk]
  int64_t dense_stride_b = 0, dense_stride_h = 0, dense_stride_q = 0, dense_stride_k = 0;

  // Blocks: key j is visible only if blocks[b,h,i/block_size,j/block_size] != 0. Null: no limit. Stride 0 broadcasts.
  const uint8_t* blocks = nullptr;  // [B,H,ceil(Sq/block_size),ceil(Sk/block_size)]
  int64_t blocks_stride_b = 0, blocks_stride_h = 0, blocks_stride_q = 0, blocks_stride_k = 0;
  int64_t block_size = 1;

  // Whether something takes elements out of the intervals.
  MHA_HD bool elementwise() const { return query_ids || dense || blocks; }
};

struct Interval {
  int64_t begin, end;  // [begin, end); empty when begin >= end
};

MHA_HD inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
MHA_HD inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// The keys that row (b, i) may see, before documents, blocks and the dense mask; always inside [0, num_keys]. shift
// moves the band (but not top_left) to the right: the diagonal of one of several packed sequences less the band's own.
MHA_HD inline Interval row_interval(const Mask& m, int64_t b, int64_t i, int64_t num_keys, int64_t shift = 0) {
  int64_t begin = max64(0, m.band_lo + shift + i), end = min64(num_keys, m.band_hi + shift + i + 1);
  if (m.top_left) end = min64(end, i + 1);
  if (m.begin) begin = max64(begin, m.begin[b * m.begin_stride_b + i * m.begin_stride_q]);
  if (m.end) end = min64(end, m.end[b * m.end_stride_b + i * m.end_stride_q]);
  begin = min64(begin, num_keys);
  return {begin, max64(begin, end)};
}

// The place of a row's or key's block among the others. GPUs divide 32 bits much faster, and their problems are
// smaller.
MHA_HD inline int64_t block_of(const Mask& m, int64_t i) {
#ifdef __CUDA_ARCH__
  return m.block_size > i ? 0 : uint32_t(i) / uint32_t(m.block_size);
#else
  return i / m.block_size;
#endif
}

// Documents, blocks and the dense mask, for a key inside row_interval.
MHA_HD inline bool visible_in_interval(const Mask& m, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (m.query_ids && m.query_ids[b * m.query_ids_stride_b + i] != m.key_ids[b * m.key_ids_stride_b + j]) return false;
  if (m.blocks && !m.blocks[b * m.blocks_stride_b + h * m.blocks_stride_h + block_of(m, i) * m.blocks_stride_q +
                            block_of(m, j) * m.blocks_stride_k])
    return false;
  return !m.dense ||
         m.dense[b * m.dense_stride_b + h * m.dense_stride_h + i * m.dense_stride_q + j * m.dense_stride_k] != 0;
}

}  // namespace mha
