// What the host works out for the kernels of attention's backward, and what they hand to each other in the workspace.
#pragma once
#include "launch.h"
#include "sequence.cuh"
#include "span.cuh"

namespace mha::cuda {

// What backward needs to know of kRowBlock query rows of one head. A row that sees nothing, or lies beyond Sq, has
// negative_lse -inf (so that its weights are 0), negative_delta 0 and an empty range.
template <class A>
struct alignas(128) RowBlock {
  A negative_lse[kRowBlock];    // of the natural logarithm, or in powers of two (base_2)
  A negative_rest[kRowBlock];   // what is to be added to negative_lse for full accuracy
  A negative_delta[kRowBlock];  // dlse - rowsum(dout * out)
  RowRange ranges[kRowBlock];
  Span span;  // of the ranges. Rows beyond Sq don't count
};

struct AttentionBackwardLaunch : AttentionBackward, Numbers {
  bool aligned = false;       // the rows of q, k, v and dout start at multiples of 16 bytes
  bool aligned_rows = false;  // those of dout and out do
  bool aligned_dq = false, aligned_dk = false, aligned_dv = false;
  bool base_2 = false;  // lse in powers of two, as the plain kernels on tensor cores want it
  MaskTiles tiles;
  int row_blocks = 0;         // of a head of the longest sequence
  void* rows = nullptr;       // RowBlock [row blocks in all], by row_block()
  Span* spans = nullptr;      // likewise: their spans
  void* sink_sums = nullptr;  // likewise, accumulate type: what they add to dsinks
  float* dq_sum = nullptr;    // likewise, [kRowBlock, dq_head], zeroed by attention_bwd_rows: where blocks add up dq
  int dq_head = 0;            // head size of the instance that does
  // Of attention_bwd_sm90, where the order of additions is fixed; zeroed likewise. [0]: how many blocks have started;
  // [1 + row block]: how many have added to it.
  unsigned* turns = nullptr;
};

// The place of a row block among all.
__device__ inline unsigned row_block(const Sequence& s, unsigned h, unsigned block) {
  return s.first_row_block + h * s.row_blocks + block;
}

// The merged spans of all lanes of a warp.
__device__ inline Span warp_merge(const Span& s) {
  return {__reduce_min_sync(~0u, s.begin), __reduce_max_sync(~0u, s.end), __reduce_max_sync(~0u, s.full_begin),
          __reduce_min_sync(~0u, s.full_end)};
}

}  // namespace mha::cuda
