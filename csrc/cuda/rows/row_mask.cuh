// Helpers of kernels that handle whole rows of scores.
//
// This room includes common, csrc/cuda.
#pragma once
#include "../common/element.cuh"
#include "../common/launch.h"

namespace mha::cuda {

// Reduces over the block's threads; every thread gets the result. scratch: 32 elements of shared memory.
template <class Acc, class Op>
__device__ inline Acc block_reduce(Acc x, Acc* scratch, Op op) {
#pragma unroll
  for (int d = 16; d; d /= 2) x = op(x, __shfl_xor_sync(~0u, x, d));
  if (blockDim.x == 32) return x;
  __syncthreads();  // scratch may still be read from the reduction before
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = scratch[0];
  for (unsigned w = 1; w < blockDim.x / 32; ++w) x = op(x, scratch[w]);
  return x;
}

// e^x for results of type T: half types need no more than the hardware's power of two (x below 100 or so in size, or of
// no weight).
template <class T, class Acc>
__device__ inline Acc row_exponential(Acc x) {
  if constexpr (sizeof(T) == 2)
    return exp2_approx(x * 1.4426950408889634f);
  else
    return exponential(x);
}

// One row of a masked softmax problem.
struct ScoreRow {
  int64_t b, h, i;
  Interval interval;

  // The number of rows fits into a grid, so 32 bits will do.
  __device__ ScoreRow(const MaskedSoftmaxProblem& p, int64_t row)
      : b(unsigned(row) / unsigned(p.Sq) / unsigned(p.H)),
        h(unsigned(row) / unsigned(p.Sq) % unsigned(p.H)),
        i(unsigned(row) % unsigned(p.Sq)),
        interval(row_interval(p.mask, b, i, p.Sk)) {}

  __device__ bool sees(const Mask& mask, int64_t j) const {
    return j >= interval.begin && j < interval.end && visible_in_interval(mask, b, h, i, j);
  }
  // Whether it is plain that all of count keys from j on are seen.
  __device__ bool sees_all(const Mask& mask, int64_t j, int count) const {
    return j >= interval.begin && j + count <= interval.end && !mask.elementwise();
  }
  __device__ int64_t offset(const Tensor4& t) const { return b * t.stride[0] + h * t.stride[1] + i * t.stride[2]; }
};

}  // namespace mha::cuda
