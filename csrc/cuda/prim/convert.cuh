// The 16-bit types: packing pairs, and what is needed to tell finite from non-finite values.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace mha::cuda {

template <class T>
struct Half16;  // the numbers of a 16-bit type that bit tricks need

template <>
struct Half16<__half> {
  static constexpr uint32_t exponent = 0x7C00, one = 0x3C00;
};

template <>
struct Half16<__nv_bfloat16> {
  static constexpr uint32_t exponent = 0x7F80, one = 0x3F80;
};

// Rounds to nearest even; `low` comes first in memory.
template <class T>
__device__ inline uint32_t pack2(float low, float high) {
  uint32_t r;
  if constexpr (sizeof(T) == 2 && Half16<T>::exponent == 0x7C00)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// sum + pair * 0: stays (+-0, +-0) as long as every pair given was finite, else turns NaN.
template <class T>
__device__ inline uint32_t collect_nonfinite(uint32_t sum, uint32_t pair) {
  if constexpr (Half16<T>::exponent == 0x7C00)
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
  else
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
  return sum;
}

// A pair with NaN and Inf replaced by 0.
template <class T>
__device__ inline uint32_t finite_or_zero(uint32_t pair) {
  constexpr uint32_t e = Half16<T>::exponent;
  return ((pair & e) == e ? 0 : pair & 0xFFFF) | ((pair >> 16 & e) == e ? 0 : pair & 0xFFFF0000);
}

__device__ inline bool is_nonfinite(uint32_t collected) { return (collected & 0x7FFF7FFFu) != 0; }

}  // namespace mha::cuda
