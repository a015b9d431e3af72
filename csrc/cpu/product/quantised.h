// Loads of quantised keys and values; the scale is applied later.
#pragma once

MHA_ISA_BEGIN

MHA_INLINE VecF load(const e4m3* p) {
  const VecF x = load_256th(p) * set1(256.0f);
  return select(equal(abs(x), set1(480.0f)), set1(std::numeric_limits<float>::quiet_NaN()), x);
}
template <class Byte, class = std::enable_if_t<sizeof(Byte) == 1>, class = void>
MHA_INLINE VecF load_n(const Byte* p, int n) {
  Byte bytes[VecF::lanes] = {};
  std::memcpy(bytes, p, std::size_t(std::min(n, VecF::lanes)));
  return load(bytes);
}

// How many vectors of these are loaded together, for that is done faster than one by one.
template <class T, class S>
constexpr int kTogether = 1;

#ifdef MHA_HAS_VBMI
template <>
inline constexpr int kTogether<float, e4m3> = 4;

// mantissa * 2^exponent as bf16.
constexpr int bf16_bits(int mantissa, int exponent) {
  if (mantissa == 0) return 0;
  for (; mantissa < 128; --exponent) mantissa *= 2;
  return (exponent + 7 + 127) << 7 | (mantissa - 128);
}
// The bytes of bf16 that 7 bits stand for, upper and lower: those of e4m3 without sign, or numbers from 0 to 127.
template <class Byte>
struct alignas(64) Bf16Table {
  uint8_t upper[128], lower[128];
  constexpr Bf16Table() : upper(), lower() {
    for (int x = 0; x < 128; ++x) {
      int bits = bf16_bits(x, 0);
      if (std::is_same_v<Byte, e4m3>)
        bits = x == 127 ? 0x7FC0 : x < 8 ? bf16_bits(x, -9) : bf16_bits(8 + x % 8, x / 8 - 10);
      upper[x] = uint8_t(bits >> 8), lower[x] = uint8_t(bits & 0xFF);
    }
  }
};
template <class Byte>
constexpr Bf16Table<Byte> kBf16Table;

// The upper and lower bytes of 64 of them as bf16.
template <class Byte>
MHA_INLINE void to_bf16(__m512i x, __m512i& lower, __m512i& upper) {
  const Bf16Table<Byte>& table = kBf16Table<Byte>;
  const __m512i sign = _mm512_set1_epi8(char(0x80)), size = std::is_same_v<Byte, e4m3> ? x : _mm512_abs_epi8(x);
  lower = _mm512_permutex2var_epi8(_mm512_load_si512(table.lower), size, _mm512_load_si512(table.lower + 64));
  upper = _mm512_permutex2var_epi8(_mm512_load_si512(table.upper), size, _mm512_load_si512(table.upper + 64));
  upper = _mm512_ternarylogic_epi32(upper, x, sign, 0xF8);  // a | (b & c)
  if constexpr (!std::is_same_v<Byte, e4m3>)                // -128
    upper = _mm512_mask_mov_epi8(upper, _mm512_cmpeq_epi8_mask(x, sign), _mm512_set1_epi8(char(0xC3)));
}
// Of a vector of bytes, which of 64 elements each is to be, so that unpacking and splitting leaves them in order.
struct alignas(64) E4m3Order {
  uint8_t byte[64];
  constexpr E4m3Order() : byte() {
    constexpr int at[4] = {0, 1, 8, 9};
    for (int vector = 0; vector < 4; ++vector) {
      for (int lane = 0; lane < 16; ++lane)
        byte[lane / 4 * 16 + at[vector] + lane % 4 * 2] = uint8_t(vector * 16 + lane);
    }
  }
};
constexpr E4m3Order kE4m3Order;

MHA_INLINE void widen_together(__m512i bytes, VecF* x) {
  const __m512i e = _mm512_permutexvar_epi8(_mm512_load_si512(kE4m3Order.byte), bytes);
  __m512i lower, upper;
  to_bf16<e4m3>(e, lower, upper);
  const __m512i a = _mm512_unpacklo_epi8(lower, upper), b = _mm512_unpackhi_epi8(lower, upper);
  const __m512i top = _mm512_set1_epi32(int(0xFFFF0000));
  x[0].v = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), x[1].v = _mm512_castsi512_ps(_mm512_and_si512(a, top));
  x[2].v = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), x[3].v = _mm512_castsi512_ps(_mm512_and_si512(b, top));
}
MHA_INLINE void load_together(const e4m3* p, VecF* x) { widen_together(_mm512_loadu_si512(p), x); }
// Those beyond n are 0.
MHA_INLINE void load_together_n(const e4m3* p, int n, VecF* x) {
  widen_together(_mm512_maskz_loadu_epi8(n >= 64 ? ~__mmask64(0) : (__mmask64(1) << n) - 1, p), x);
}
#endif

MHA_ISA_END
