// The first kernel of attention's backward: for each query row delta = rowsum(dout * out) - dlse, lse, and the keys
// that it sees; for each block of rows the span of those.
#pragma once
#include "attention_bwd_launch.h"
#include "error.h"
#include "exact_sum.cuh"

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

template <class T, class A>
__global__ void __launch_bounds__(kRowsThreads, 1)
    attention_bwd_rows(const __grid_constant__ AttentionBackwardLaunch p) {
  __shared__ A delta[kRowBlock];
  const int thread = threadIdx.x, block = blockIdx.x % p.row_blocks, first = block * kRowBlock;
  const int64_t bh = blockIdx.x / p.row_blocks, b = bh / p.H, h = bh % p.H;
  const T* dout = static_cast<const T*>(p.dout.data) + b * p.dout.stride[0] + h * p.dout.stride[1];
  const T* out = static_cast<const T*>(p.out.data) + b * p.out.stride[0] + h * p.out.stride[1];
  for (int r = thread / 8; r < kRowBlock; r += kRowsThreads / 8) {
    const int64_t i = first + r;
    A sum = row_dot<T, A>(dout + i * p.dout.stride[2], out + i * p.out.stride[2], i < p.Sq ? p.Dv : 0, p.aligned_rows,
                          thread % 8);
    if (thread % 8 == 0) delta[r] = sum;
  }
  __syncthreads();
  if (thread >= 32) return;

  RowBlock<A>& rows = static_cast<RowBlock<A>*>(p.rows)[blockIdx.x];
  Span span = {kKeyMax, 0, 0, kKeyMax};
#pragma unroll
  for (int r = thread; r < kRowBlock; r += 32) {
    const int64_t i = first + r, row = bh * p.Sq + i;
    RowRange range = {0, 0};
    A lse = -INFINITY, rest = 0, d = 0;
    if (i < p.Sq) {
      Interval interval = row_interval(p.mask, b, i, p.Sk);
      lse = static_cast<const A*>(p.lse)[row];
      if (interval.begin < interval.end && lse != A(-INFINITY)) {
        range = {int(interval.begin), int(interval.end)};
        if (p.lse_rest) rest = static_cast<const A*>(p.lse_rest)[row];
        d = (p.dlse ? static_cast<const A*>(p.dlse)[row] : A(0)) - delta[r];
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
  if (thread == 0) p.spans[blockIdx.x] = rows.span = span;
}

template <class T, class A>
void launch_attention_bwd_rows(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  const char* name = "attention_bwd_rows";
  if (p.B * p.H * p.row_blocks == 0) return;
  attention_bwd_rows<T, A><<<grid_size(p.B * p.H * p.row_blocks, name), kRowsThreads, 0, stream>>>(p);
  check(cudaGetLastError(), name);
}

}  // namespace mha::cuda
