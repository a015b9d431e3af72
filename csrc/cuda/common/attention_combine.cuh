// Merges the partial results of a key-split attention forward by their logsumexps. One warp per query row.
#pragma once
#include "error.h"
#include "exact_sum.cuh"
#include "launch.h"
#include "sequence.cuh"

namespace mha::cuda {

constexpr int kMaxSplits = 32;  // a warp's lanes hold one factor each

template <class T>
__global__ void __launch_bounds__(128) attention_combine(const __grid_constant__ AttentionForwardLaunch p, int head) {
  const int64_t rows = p.B * p.H * p.Sq, row = int64_t(blockIdx.x) * 4 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  const unsigned bh = unsigned(row / p.Sq), i = unsigned(row - int64_t(bh) * p.Sq), H = unsigned(p.H), h = bh % H;
  const Sequence sequence = cuda::sequence(p, bh / H);
  if (int(i) >= sequence.Sq) return;
  const float part = lane < p.splits ? p.partial_lse[lane * rows + row] : -INFINITY;
  float top = part;
#pragma unroll
  for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  // Each logsumexp less the largest, with what rounding took from it. NaN stays.
  const float rest = lane < p.splits ? p.partial_rest[lane * rows + row] : 0;
  const float weight = part == -INFINITY ? 0 : expf(part - top + rest);
  float sum = weight;
#pragma unroll
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  ExactSum<float> log = sum == 0 ? ExactSum<float>{-INFINITY, 0} : exact_sum(top, logf(sum));
  float factor = sum == 0 ? 0 : weight / sum;
  if (p.sinks) {
    const WithSink<float> all = add_sink(log, static_cast<const float*>(p.sinks)[h]);
    log = all.lse;
    factor *= all.factor;
  }
  if (lane == 0) {
    const int64_t at = first_row(p, sequence, h) + i;
    static_cast<float*>(p.lse)[at] = log.value;
    if (p.lse_rest) static_cast<float*>(p.lse_rest)[at] = log.rest;
  }
  T* out = static_cast<T*>(p.out.data) + sequence.b * p.out.stride[0] + h * p.out.stride[1] +
           (sequence.first_query + i) * p.out.stride[2];
  const float* from = p.partial_out + row * head;
  for (int d = lane; d - lane < p.Dv; d += 32) {
    float x = 0;
    for (int s = 0; s < p.splits; ++s) {
      const float f = __shfl_sync(~0u, factor, s);
      if (f != 0 && d < p.Dv) x += f * from[s * rows * head + d];
    }
    if (d < p.Dv) out[d] = T(x);
  }
}

}  // namespace mha::cuda
