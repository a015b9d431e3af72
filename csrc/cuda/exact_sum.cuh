// Logsumexps with what rounding took from them. Beside a score of -1e9 the logarithm of a sum is below the last bit of
// an fp32 number, so that exp(score - lse) would be off by a factor.
#pragma once
#include "prim/math.cuh"

namespace mha::cuda {

template <class Acc>
struct ExactSum {
  Acc value, rest;  // value + rest is exact (rest 0 where value is infinite)
};

template <class Acc>
__device__ inline ExactSum<Acc> exact_sum(Acc a, Acc b) {
  const Acc s = a + b, t = s - a;
  return {s, isinf(s) ? Acc(0) : (a - (s - t)) + (b - t)};
}

constexpr float kLog2eHigh = 1.44269502f, kLog2eLow = 1.925963e-8f;  // log2(e)
constexpr float kLn2High = 0.693147182f, kLn2Low = -1.904654e-9f;

// ln(2^max * sum); -inf when sum is 0.
__device__ inline ExactSum<float> natural_log(float max, float sum) {
  if (sum == 0) return {-INFINITY, 0};
  const float product = max * kLn2High, error = fmaf(max, kLn2High, -product);
  return exact_sum(product, error + max * kLn2Low + log2_approx(sum) * kLn2High);
}

// log2(e) * (score - lse), for a score that is in powers of two already.
__device__ inline float power_above(float score, float lse, float rest) {
  return fmaf(-lse, kLog2eHigh, score) - (lse * kLog2eLow + rest * kLog2eHigh);
}

}  // namespace mha::cuda
