// Logsumexps with what rounding took from them. Beside a score of -1e9 the logarithm of a sum is below the last bit of
// an fp32 number, so that exp(score - lse) would be off by a factor.
#pragma once
#include "../prim/math.cuh"

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

// The logsumexp of a row whose denominator a sink joins, and the factor by which that makes the weights of keys
// smaller. own: of the keys alone.
template <class Acc>
struct WithSink {
  ExactSum<Acc> lse;
  Acc factor;
};

template <class Acc>
__device__ inline WithSink<Acc> add_sink(const ExactSum<Acc>& own, Acc sink) {
  if (own.value == -Acc(INFINITY)) return {{sink, 0}, 0};
  const Acc above = own.value - sink + own.rest, more = log1p(exp(-abs(above)));
  return {above >= 0 ? exact_sum(own.value, own.rest + more) : exact_sum(sink, more), 1 / (1 + exp(-above))};
}

// ln(2^max * sum); -inf when sum is 0.
__device__ inline ExactSum<float> natural_log(float max, float sum) {
  if (sum == 0) return {-INFINITY, 0};
  const float product = max * kLn2High, error = fmaf(max, kLn2High, -product);
  return exact_sum(product, error + max * kLn2Low + log2_approx(sum) * kLn2High);
}

// ln(e^max * sum), with max natural if kNatural, else in powers of two; -inf when sum is 0.
template <bool kNatural>
__device__ inline ExactSum<float> logsumexp(float max, float sum) {
  if (!kNatural) return natural_log(max, sum);
  return sum == 0 ? ExactSum<float>{-INFINITY, 0} : exact_sum(max, log2_approx(sum) * kLn2High);
}

// log2(e) * x. Of a difference, not of what it is a difference of: the product of a score at the end of the range of
// float would be infinite.
__device__ inline float to_power_of_two(float x) { return x * kLog2eHigh; }

}  // namespace mha::cuda
