// Merges the partial results of a key-split attention forward by their logsumexps. One warp per query row.
#pragma once
#include "error.h"
#include "launch.h"
#include "prim/math.cuh"

namespace mha::cuda {

template <class T>
__global__ void __launch_bounds__(128)
    attention_combine(const __grid_constant__ AttentionForwardLaunch p, int head) {
  const int64_t rows = p.B * p.H * p.Sq, row = int64_t(blockIdx.x) * 4 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  float top = -INFINITY, sum = 0;
  for (int s = 0; s < p.splits; ++s) top = fmaxf(top, p.partial_lse[s * rows + row]);
  const float base = top == -INFINITY ? 0 : top;
  for (int s = 0; s < p.splits; ++s) sum += expf(p.partial_lse[s * rows + row] - base);
  const float lse = sum == 0 ? -INFINITY : base + logf(sum);
  if (lane == 0) static_cast<float*>(p.lse)[row] = lse;
  T* out = static_cast<T*>(p.out.data) + row / p.Sq / p.H * p.out.stride[0] + row / p.Sq % p.H * p.out.stride[1] +
           row % p.Sq * p.out.stride[2];
  for (int d = lane; d < p.Dv; d += 32) {
    float x = 0;
    for (int s = 0; s < p.splits; ++s) {
      const float part = p.partial_lse[s * rows + row];
      if (part != -INFINITY) x += expf(part - lse) * p.partial_out[(s * rows + row) * head + d];
    }
    out[d] = T(x);
  }
}

}  // namespace mha::cuda
