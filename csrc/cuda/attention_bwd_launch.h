// What the host works out for the kernels of attention's backward, and what they hand to each other in the workspace.
#pragma once
#include "launch.h"
#include "span.cuh"

namespace mha::cuda {

constexpr int kRowBlock = 64;  // query rows whose numbers lie together in the workspace

// What backward needs to know of kRowBlock query rows of one head. A row that sees nothing, or lies beyond Sq, has
// negative_lse -inf (so that its weights are 0), negative_delta 0 and an empty range.
template <class A>
struct alignas(128) RowBlock {
  A negative_lse[kRowBlock];    // of the natural logarithm for the simple kernel, in powers of two for the others
  A negative_rest[kRowBlock];   // what is to be added to negative_lse for full accuracy
  A negative_delta[kRowBlock];  // dlse - rowsum(dout * out)
  RowRange ranges[kRowBlock];
  Span span;  // of the ranges. Rows beyond Sq don't count
};

struct AttentionBackwardLaunch : AttentionBackward, Numbers {
  bool aligned = false;       // the rows of q, k, v and dout start at multiples of 16 bytes
  bool aligned_rows = false;  // those of dout and out do
  bool aligned_dq = false, aligned_dk = false, aligned_dv = false;
  bool base_2 = false;      // lse in powers of two
  int row_blocks = 0;       // per head; even, so that a tile may have 128 rows
  void* rows = nullptr;     // RowBlock [B,H,row_blocks]
  Span* spans = nullptr;    // [B,H,row_blocks]: the spans of all row blocks
  float* dq_sum = nullptr;  // [B,H,row_blocks * kRowBlock, head size of the instance], zeroed: where blocks add up dq
};

// The merged spans of all lanes of a warp.
__device__ inline Span warp_merge(const Span& s) {
  return {__reduce_min_sync(~0u, s.begin), __reduce_max_sync(~0u, s.end), __reduce_max_sync(~0u, s.full_begin),
          __reduce_min_sync(~0u, s.full_end)};
}

}  // namespace mha::cuda
