// Elements of tensors whose type is known at compile time or only at run time, one by one or as 16-byte packs.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../dtype.h"
#include "../prim/math.cuh"

namespace mha::cuda {

// Shifted into a half, an e4m3 is its value / 256; but NaN is 0x7F.
__device__ inline float from_e4m3(uint8_t x) {
  if ((x & 0x7F) == 0x7F) return NAN;
  return 256.0f * float(__ushort_as_half(static_cast<unsigned short>((x & 0x80) << 8 | (x & 0x7F) << 7)));
}

template <class Acc>
__device__ inline Acc element(const void* data, DType type, int64_t at) {
  switch (type) {
    case DType::f64:
      return Acc(static_cast<const double*>(data)[at]);
    case DType::f32:
      return Acc(static_cast<const float*>(data)[at]);
    case DType::bf16:
      return Acc(float(static_cast<const __nv_bfloat16*>(data)[at]));
    case DType::e4m3:
      return Acc(from_e4m3(static_cast<const uint8_t*>(data)[at]));
    case DType::i8:
      return Acc(static_cast<const int8_t*>(data)[at]);
    default:
      return Acc(float(static_cast<const __half*>(data)[at]));
  }
}

// What moves in one access.
template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T x[kSize];
};

template <class T>
__device__ inline Pack<T> load_pack(const T* from) {
  return __builtin_bit_cast(Pack<T>, load_global_16(from));
}

template <class T>
__device__ inline void store_pack(T* to, const Pack<T>& pack) {
  store_global_16(to, __builtin_bit_cast(uint4, pack));
}

// float for T of 16 and 32 bits, double for double.
template <class T>
struct AccumulateOf {
  using type = float;
};
template <>
struct AccumulateOf<double> {
  using type = double;
};
template <class T>
using Accumulate = typename AccumulateOf<T>::type;

// Calls f with a value of the C++ type of a dtype.
template <class F>
void with_type(DType type, F f) {
  switch (type) {
    case DType::f64:
      return f(double());
    case DType::f32:
      return f(float());
    case DType::bf16:
      return f(__nv_bfloat16());
    case DType::f16:
      return f(__half());
    default:
      return;  // only keys and values of caches have another type
  }
}

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

}  // namespace mha::cuda
