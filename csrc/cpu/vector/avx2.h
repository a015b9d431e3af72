// Vectors of 256 bits (AVX2, FMA, F16C): 8 floats or 4 doubles. The names are those of avx512.h.
#pragma once

MHA_ISA_BEGIN

template <class T>
struct Vec;
template <class T>
struct VecMask;

template <>
struct Vec<float> {
  static constexpr int lanes = 8;
  __m256 v;
};
template <>
struct Vec<double> {
  static constexpr int lanes = 4;
  __m256d v;
};
template <>
struct VecMask<float> {
  __m256 m;
};
template <>
struct VecMask<double> {
  __m256d m;
};
using VecF = Vec<float>;
using VecD = Vec<double>;

constexpr int kVecRegisters = 16;

// ---- float
MHA_INLINE __m256i lanes8(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
MHA_INLINE VecF set1(float x) { return {_mm256_set1_ps(x)}; }
MHA_INLINE VecF load(const float* p) { return {_mm256_loadu_ps(p)}; }
MHA_INLINE void store(float* p, VecF a) { _mm256_storeu_ps(p, a.v); }
MHA_INLINE VecF load_n(const float* p, int n) { return {_mm256_maskload_ps(p, lanes8(n))}; }
MHA_INLINE void store_n(float* p, VecF a, int n) { _mm256_maskstore_ps(p, lanes8(n), a.v); }
MHA_INLINE VecF operator+(VecF a, VecF b) { return {_mm256_add_ps(a.v, b.v)}; }
MHA_INLINE VecF operator-(VecF a, VecF b) { return {_mm256_sub_ps(a.v, b.v)}; }
MHA_INLINE VecF operator*(VecF a, VecF b) { return {_mm256_mul_ps(a.v, b.v)}; }
MHA_INLINE VecF operator/(VecF a, VecF b) { return {_mm256_div_ps(a.v, b.v)}; }
MHA_INLINE VecF fma(VecF a, VecF b, VecF c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
MHA_INLINE VecF max(VecF a, VecF b) { return {_mm256_max_ps(a.v, b.v)}; }  // b when either is NaN
MHA_INLINE VecF min(VecF a, VecF b) { return {_mm256_min_ps(a.v, b.v)}; }
MHA_INLINE VecF abs(VecF a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
MHA_INLINE VecF round(VecF a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
MHA_INLINE VecF split_round(VecF a, VecF* n) {
  *n = round(a);
  return a - *n;
}
MHA_INLINE VecF copysign(VecF a, VecF sign) {
  __m256 top = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(top, a.v), _mm256_and_ps(top, sign.v))};
}
// a * 2^n for integral n of the normal range or NaN; 0, whatever they are, where not to keep: the product is one with
// 0.
MHA_INLINE VecF scale_pow2(VecF a, VecF n, VecMask<float> keep) {
  __m256i exponent = _mm256_cvtps_epi32(n.v);
  exponent = _mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23);
  const __m256 power = _mm256_and_ps(_mm256_castsi256_ps(exponent), keep.m);
  return {_mm256_and_ps(_mm256_mul_ps(a.v, power), keep.m)};
}
MHA_INLINE VecMask<float> less(VecF a, VecF b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
MHA_INLINE VecMask<float> not_less(VecF a, VecF b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_NLT_UQ)}; }
MHA_INLINE VecMask<float> less_equal(VecF a, VecF b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)}; }
MHA_INLINE VecMask<float> equal(VecF a, VecF b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
MHA_INLINE VecMask<float> operator&(VecMask<float> a, VecMask<float> b) { return {_mm256_and_ps(a.m, b.m)}; }
MHA_INLINE bool any(VecMask<float> a) { return _mm256_movemask_ps(a.m) != 0; }
MHA_INLINE bool all(VecMask<float> a) { return _mm256_movemask_ps(a.m) == 0xFF; }
MHA_INLINE VecF select(VecMask<float> m, VecF a, VecF b) { return {_mm256_blendv_ps(b.v, a.v, m.m)}; }
MHA_INLINE float reduce_add(VecF a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
MHA_INLINE float reduce_max(VecF a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
// Lane l is set where p[l] != 0 (reads one byte per lane).
MHA_INLINE void nonzero_bytes(const uint8_t* p, VecMask<float>* m) {
  __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  m->m = _mm256_castsi256_ps(_mm256_cmpgt_epi32(x, _mm256_setzero_si256()));
}
// Bit j: whether p[j] != 0, of n <= 64.
MHA_INLINE uint64_t nonzero_bits(const uint8_t* p, int n) {
  uint8_t some[64] = {};
  if (n < 64) p = static_cast<const uint8_t*>(std::memcpy(some, p, std::size_t(n)));
  auto zeros = [](const uint8_t* at) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_setzero_si256())));
  };
  return ~(uint64_t(zeros(p + 32)) << 32 | zeros(p));
}
// Lane l is set where a[l] has the bit.
MHA_INLINE void has_bit(const uint32_t* a, int bit, VecMask<float>* m) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)), one = _mm256_set1_epi32(int(1u << bit));
  m->m = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(x, one), one));
}
// Lane l is set where a[l] >= threshold as unsigned integers.
MHA_INLINE void at_least(const uint32_t* a, uint32_t threshold, VecMask<float>* m) {
  __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  m->m = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_max_epu32(x, _mm256_set1_epi32(int(threshold))), x));
}

// ---- double
MHA_INLINE __m256i lanes4(int n) { return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3)); }
MHA_INLINE VecD set1(double x) { return {_mm256_set1_pd(x)}; }
MHA_INLINE VecD load(const double* p) { return {_mm256_loadu_pd(p)}; }
MHA_INLINE void store(double* p, VecD a) { _mm256_storeu_pd(p, a.v); }
MHA_INLINE VecD load_n(const double* p, int n) { return {_mm256_maskload_pd(p, lanes4(n))}; }
MHA_INLINE void store_n(double* p, VecD a, int n) { _mm256_maskstore_pd(p, lanes4(n), a.v); }
MHA_INLINE VecD operator+(VecD a, VecD b) { return {_mm256_add_pd(a.v, b.v)}; }
MHA_INLINE VecD operator-(VecD a, VecD b) { return {_mm256_sub_pd(a.v, b.v)}; }
MHA_INLINE VecD operator*(VecD a, VecD b) { return {_mm256_mul_pd(a.v, b.v)}; }
MHA_INLINE VecD operator/(VecD a, VecD b) { return {_mm256_div_pd(a.v, b.v)}; }
MHA_INLINE VecD fma(VecD a, VecD b, VecD c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
MHA_INLINE VecD max(VecD a, VecD b) { return {_mm256_max_pd(a.v, b.v)}; }
MHA_INLINE VecD min(VecD a, VecD b) { return {_mm256_min_pd(a.v, b.v)}; }
MHA_INLINE VecD abs(VecD a) { return {_mm256_andnot_pd(_mm256_set1_pd(-0.0), a.v)}; }
MHA_INLINE VecMask<double> less(VecD a, VecD b) { return {_mm256_cmp_pd(a.v, b.v, _CMP_LT_OQ)}; }
MHA_INLINE VecMask<double> less_equal(VecD a, VecD b) { return {_mm256_cmp_pd(a.v, b.v, _CMP_LE_OQ)}; }
MHA_INLINE VecMask<double> equal(VecD a, VecD b) { return {_mm256_cmp_pd(a.v, b.v, _CMP_EQ_OQ)}; }
MHA_INLINE VecMask<double> operator&(VecMask<double> a, VecMask<double> b) { return {_mm256_and_pd(a.m, b.m)}; }
MHA_INLINE bool any(VecMask<double> a) { return _mm256_movemask_pd(a.m) != 0; }
MHA_INLINE bool all(VecMask<double> a) { return _mm256_movemask_pd(a.m) == 0xF; }
MHA_INLINE VecD select(VecMask<double> m, VecD a, VecD b) { return {_mm256_blendv_pd(b.v, a.v, m.m)}; }
MHA_INLINE double reduce_add(VecD a) {
  __m128d x = _mm_add_pd(_mm256_castpd256_pd128(a.v), _mm256_extractf128_pd(a.v, 1));
  return _mm_cvtsd_f64(_mm_add_sd(x, _mm_unpackhi_pd(x, x)));
}
MHA_INLINE double reduce_max(VecD a) {
  __m128d x = _mm_max_pd(_mm256_castpd256_pd128(a.v), _mm256_extractf128_pd(a.v, 1));
  return _mm_cvtsd_f64(_mm_max_sd(x, _mm_unpackhi_pd(x, x)));
}
MHA_INLINE void nonzero_bytes(const uint8_t* p, VecMask<double>* m) {
  int32_t four;
  std::memcpy(&four, p, 4);
  __m256i x = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
  m->m = _mm256_castsi256_pd(_mm256_cmpgt_epi64(x, _mm256_setzero_si256()));
}
MHA_INLINE void has_bit(const uint32_t* a, int bit, VecMask<double>* m) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a)), one = _mm_set1_epi32(int(1u << bit));
  m->m = _mm256_castsi256_pd(_mm256_cvtepi32_epi64(_mm_cmpeq_epi32(_mm_and_si128(x, one), one)));
}
MHA_INLINE void at_least(const uint32_t* a, uint32_t threshold, VecMask<double>* m) {
  __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
  __m128i kept = _mm_cmpeq_epi32(_mm_max_epu32(x, _mm_set1_epi32(int(threshold))), x);
  m->m = _mm256_castsi256_pd(_mm256_cvtepi32_epi64(kept));
}

// ---- half storage
template <class Half>
MHA_INLINE __m128i load_half_bits(const Half* p, int n) {
  alignas(16) uint16_t bits[8] = {};
  std::memcpy(bits, p, 2 * size_t(n < 8 ? n : 8));
  return _mm_load_si128(reinterpret_cast<const __m128i*>(bits));
}
template <class Half>
MHA_INLINE void store_half_bits(Half* p, __m128i x, int n) {
  alignas(16) uint16_t bits[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(bits), x);
  std::memcpy(p, bits, 2 * size_t(n < 8 ? n : 8));
}
MHA_INLINE VecF widen_bf16(__m128i x) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16))}; }
MHA_INLINE __m128i narrow_bf16(VecF a) {
  __m256i x = _mm256_castps_si256(a.v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  __m256i quiet = _mm256_or_si256(x, _mm256_set1_epi32(0x400000));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
MHA_INLINE VecF load(const bf16* p) { return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
MHA_INLINE VecF load_n(const bf16* p, int n) { return widen_bf16(load_half_bits(p, n)); }
MHA_INLINE void store(bf16* p, VecF a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bf16(a)); }
MHA_INLINE void store_n(bf16* p, VecF a, int n) { store_half_bits(p, narrow_bf16(a), n); }
MHA_INLINE VecF load(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
MHA_INLINE VecF load_n(const f16* p, int n) { return {_mm256_cvtph_ps(load_half_bits(p, n))}; }
MHA_INLINE void store(f16* p, VecF a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
MHA_INLINE void store_n(f16* p, VecF a, int n) {
  store_half_bits(p, _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT), n);
}

// ---- 8-bit storage of caches
MHA_INLINE VecF load(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
// The values / 256, but NaN is 480 / 256: shifted into a half, that is what an e4m3 is.
MHA_INLINE VecF load_256th(const e4m3* p) {
  const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
  return {_mm256_cvtph_ps(_mm_or_si128(sign, _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7F)), 7)))};
}

// ---- 32-bit words, for Philox, each in the lower half of a 64-bit lane; the upper half may hold anything
struct VecU {
  static constexpr int lanes = 8;
  __m256i even, odd;
};
MHA_INLINE VecU set1(uint32_t x) { return {_mm256_set1_epi32(int(x)), _mm256_set1_epi32(int(x))}; }
MHA_INLINE VecU high(VecU a) { return {_mm256_srli_epi64(a.even, 32), _mm256_srli_epi64(a.odd, 32)}; }
MHA_INLINE VecU load(const uint32_t* p) {
  const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {all, _mm256_srli_epi64(all, 32)};
}
MHA_INLINE void store(uint32_t* p, VecU a) {
  const __m256i all = _mm256_blend_epi32(a.even, _mm256_slli_epi64(a.odd, 32), 0xAA);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), all);
}
MHA_INLINE VecU product(VecU a, VecU b) { return {_mm256_mul_epu32(a.even, b.even), _mm256_mul_epu32(a.odd, b.odd)}; }
MHA_INLINE VecU xor3(VecU a, VecU b, VecU c) {
  return {_mm256_xor_si256(_mm256_xor_si256(a.even, b.even), c.even),
          _mm256_xor_si256(_mm256_xor_si256(a.odd, b.odd), c.odd)};
}

MHA_ISA_END
