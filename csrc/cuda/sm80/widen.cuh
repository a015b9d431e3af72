// Elements of 8 bits as pairs of fp16 or bf16, exactly, in registers.
#pragma once
#include "../../dtype.h"
#include "../prim/convert.cuh"

namespace mha::cuda {

// x * y + z
template <class T>
__device__ inline uint32_t fma_pair(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t r;
  if constexpr (Half16<T>::exponent == 0x7C00)
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
  else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
  return r;
}

// Byte i of x and byte j of y.
template <class T, DType kType, int i, int j>
__device__ inline uint32_t widened_pair(uint32_t x, uint32_t y) {
  constexpr bool kHalf = Half16<T>::exponent == 0x7C00;
  if constexpr (kType == DType::i8) {
    // Behind the bits of a number whose last place is 1, a byte is that number plus its value.
    const uint32_t t = __byte_perm(x, y, i | (4 + j) << 8);
    if constexpr (kHalf)
      return fma_pair<T>(t & 0x00FF00FF ^ 0x64806480, 0x3C003C00, 0xE480E480);  // 1152 + x, less 1152
    // bf16 has room for 7 bits; the sign bit decides what to take off, 128 or 256.
    return fma_pair<T>(t & 0x007F007F | 0x43004300, 0x3F803F80, t & 0x00800080 | 0xC300C300);
  } else {
    // Exponent and mantissa, shifted into place, are the value / 2^8, or / 2^120.
    const uint32_t t = __byte_perm(x, y, i << 4 | (4 + j) << 12), sign = t & 0x80008000;
    const uint32_t bits = (t & 0x7F007F00) >> (kHalf ? 1 : 4) | sign;
    return fma_pair<T>(bits, kHalf ? 0x5C005C00 : 0x7B807B80, 0x80008000);
  }
}

// Whether one of the bytes is e4m3's NaN, 0x7F, which widened_pair takes for 480.
__device__ inline bool has_nan_e4m3(const uint4& x) {
  auto of = [](uint32_t word) { return ((word & 0x7F7F7F7F) + 0x01010101) & 0x80808080; };
  return (of(x.x) | of(x.y) | of(x.z) | of(x.w)) != 0;
}

// widened_pair's result, put right: those that are +-480, which e4m3 does not have, become NaN.
template <class T>
__device__ inline uint32_t with_nan_e4m3(uint32_t pair) {
  constexpr uint32_t k480 = Half16<T>::exponent == 0x7C00 ? 0x5F80 : 0x43F0;
  return pair | ((pair & 0x7FFF) == k480 ? 0x7FFF : 0) | ((pair >> 16 & 0x7FFF) == k480 ? 0x7FFF0000 : 0);
}

}  // namespace mha::cuda
