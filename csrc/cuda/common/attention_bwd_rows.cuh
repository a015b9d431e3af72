// The first kernel of attention's backward: for each query row delta = rowsum(dout * out) - dlse, lse, and the keys
// that it sees; for each block of rows the span of those, and what it adds to the gradient of the sink. It zeroes what
// the next kernel adds to.
#pragma once
#include "attention_bwd_launch.h"
#include "error.h"
#include "exact_sum.cuh"
#include "tile.cuh"

namespace mha::cuda {

constexpr int kRowsThreads = 256;

// rowsum(x * y) over n elements by eight neighbouring lanes; all of them get it.
template <class T, class A>
__device__ inline A row_dot(const T* x, const T* y, int64_t n, bool aligned, unsigned lane) {
  constexpr int kVector = 16 / sizeof(T);
  A sum = 0;
  if (aligned) {
    for (int64_t d = lane * kVector; d < n; d += 8 * kVector) {
      if (d + kVector <= n) {
        uint4 u = *reinterpret_cast<const uint4*>(x + d), w = *reinterpret_cast<const uint4*>(y + d);
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          sum += A(reinterpret_cast<const T*>(&u)[i]) * A(reinterpret_cast<const T*>(&w)[i]);
      } else {
        for (int64_t i = d; i < n; ++i) sum += A(x[i]) * A(y[i]);
      }
    }
  } else {
    for (int64_t d = lane; d < n; d += 8) sum += A(x[d]) * A(y[d]);
  }
#pragma unroll
  for (int i = 4; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  return sum;
}

// Zeroes a row block's sums of dq, and its turns.
__device__ inline void zero_sums(const AttentionBackwardLaunch& p, unsigned own, int thread) {
  if (p.turns && thread == 0) p.turns[1 + own] = 0;
  if (!p.dq_sum) return;
  const int fours = kRowBlock / 4 * p.dq_head;
  float4* to = reinterpret_cast<float4*>(p.dq_sum) + int64_t(own) * fours;
  for (int i = thread; i < fours; i += kRowsThreads) to[i] = {};
}

template <class T, class A>
__global__ void __launch_bounds__(kRowsThreads, 1)
    attention_bwd_rows(const __grid_constant__ AttentionBackwardLaunch p) {
  __shared__ A delta[kRowBlock];
  const int thread = threadIdx.x, block = blockIdx.x % p.row_blocks, first = block * kRowBlock;
  const unsigned bh = blockIdx.x / unsigned(p.row_blocks), h = bh % unsigned(p.H);
  const Sequence sequence = cuda::sequence(p, bh / unsigned(p.H));
  if (p.turns && blockIdx.x == 0 && thread == 0) p.turns[0] = 0;
  if (block >= int(sequence.row_blocks)) return;
  const unsigned own = row_block(sequence, h, block);
  zero_sums(p, own, thread);
  const T* dout = query_rows<T>(p.dout, sequence, h, p.Dv).data;
  const T* out = query_rows<T>(p.out, sequence, h, p.Dv).data;
  for (int r = thread / 8; r < kRowBlock; r += kRowsThreads / 8) {
    const int64_t i = first + r;
    A sum = row_dot<T, A>(dout + i * p.dout.stride[2], out + i * p.out.stride[2], i < sequence.Sq ? p.Dv : 0,
                          p.aligned_rows, thread % 8);
    if (thread % 8 == 0) delta[r] = sum;
  }
  __syncthreads();
  if (thread >= 32) return;

  RowBlock<A>& rows = static_cast<RowBlock<A>*>(p.rows)[own];
  const A sink = p.sinks ? static_cast<const A*>(p.sinks)[h] : A(-INFINITY);
  A sink_sum = 0;
  Span span = {kKeyMax, 0, 0, kKeyMax};
#pragma unroll
  for (int r = thread; r < kRowBlock; r += 32) {
    const int64_t i = first + r, row = first_row(p, sequence, h) + i;
    RowRange range = {0, 0};
    A lse = -INFINITY, rest = 0, d = 0;
    if (i < sequence.Sq) {
      Interval interval = row_interval(p.mask, sequence.b, i, sequence.Sk, sequence.shift);
      lse = static_cast<const A*>(p.lse)[row];
      if (p.lse_rest) rest = static_cast<const A*>(p.lse_rest)[row];
      // A row that sees nothing but the sink has out 0, whatever its dout holds.
      const A above = sink - lse, dot = above == 0 && rest == 0 && !isfinite(delta[r]) ? A(0) : delta[r];
      const A gradient = (p.dlse ? static_cast<const A*>(p.dlse)[row] : A(0)) - dot;
      if (sink != A(-INFINITY)) sink_sum += exp(above - rest) * gradient;
      if (interval.begin < interval.end && lse != A(-INFINITY)) {
        range = {int(interval.begin), int(interval.end)};
        d = gradient;
      }
      span = merge(span, {range.begin < range.end ? range.begin : kKeyMax, range.end, range.begin, range.end});
    }
    if (p.base_2) {
      const A high = lse * A(kLog2eHigh);
      rest = fma(lse, A(kLog2eHigh), -high) + (lse * A(kLog2eLow) + rest * A(kLog2eHigh));
      lse = high;
    }
    const bool empty = range.begin >= range.end;
    rows.negative_lse[r] = empty ? A(-INFINITY) : -lse;
    rows.negative_rest[r] = empty || isinf(lse) ? A(0) : -rest;
    rows.negative_delta[r] = d;
    rows.ranges[r] = range;
  }
  span = warp_merge(span);
#pragma unroll
  for (int i = 16; i; i /= 2) sink_sum += __shfl_xor_sync(~0u, sink_sum, i);
  if (thread == 0) {
    p.spans[own] = rows.span = span;
    if (p.dsinks) static_cast<A*>(p.sink_sums)[own] = sink_sum;
  }
}

// dsinks: one block per head sums what the row blocks add, in a fixed order.
template <class A>
__global__ void __launch_bounds__(kRowsThreads) attention_bwd_sinks(const __grid_constant__ AttentionBackwardLaunch p) {
  __shared__ A sums[kRowsThreads / 32];
  const unsigned h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  A sum = 0;
  for (unsigned b = warp; b < p.B; b += kRowsThreads / 32) {
    const Sequence sequence = cuda::sequence(p, b);
    for (unsigned block = lane; block < sequence.row_blocks; block += 32)
      sum += static_cast<const A*>(p.sink_sums)[row_block(sequence, h, block)];
  }
#pragma unroll
  for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < kRowsThreads / 32; ++w) sum += sums[w];
  static_cast<A*>(p.dsinks)[h] = sum;
}

template <class T, class A>
void launch_attention_bwd_rows(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  const char* name = "attention_bwd_rows";
  if (p.B * p.H * p.row_blocks == 0) return;
  attention_bwd_rows<T, A><<<grid_size(p.B * p.H * p.row_blocks, name), kRowsThreads, 0, stream>>>(p);
  check(cudaGetLastError(), name);
  if (!p.dsinks) return;
  attention_bwd_sinks<A><<<grid_size(p.H, "attention_bwd_sinks"), kRowsThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "attention_bwd_sinks");
}

}  // namespace mha::cuda
