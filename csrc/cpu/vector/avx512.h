// Vectors of 512 bits: 16 floats or 8 doubles. scalar.h, avx2.h and neon.h offer the same names.
#pragma once

MHA_ISA_BEGIN

template <class T>
struct Vec;
template <class T>
struct VecMask;

template <>
struct Vec<float> {
  static constexpr int lanes = 16;
  __m512 v;
};
template <>
struct Vec<double> {
  static constexpr int lanes = 8;
  __m512d v;
};
template <>
struct VecMask<float> {
  __mmask16 m;
};
template <>
struct VecMask<double> {
  __mmask8 m;
};
using VecF = Vec<float>;
using VecD = Vec<double>;

constexpr int kVecRegisters = 32;

// ---- float
MHA_INLINE VecF set1(float x) { return {_mm512_set1_ps(x)}; }
MHA_INLINE VecF load(const float* p) { return {_mm512_loadu_ps(p)}; }
MHA_INLINE void store(float* p, VecF a) { _mm512_storeu_ps(p, a.v); }
MHA_INLINE __mmask16 lanes16(int n) { return n >= 16 ? __mmask16(0xFFFF) : __mmask16((1u << n) - 1); }
MHA_INLINE VecF load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(lanes16(n), p)}; }
MHA_INLINE void store_n(float* p, VecF a, int n) { _mm512_mask_storeu_ps(p, lanes16(n), a.v); }
MHA_INLINE VecF operator+(VecF a, VecF b) { return {_mm512_add_ps(a.v, b.v)}; }
MHA_INLINE VecF operator-(VecF a, VecF b) { return {_mm512_sub_ps(a.v, b.v)}; }
MHA_INLINE VecF operator*(VecF a, VecF b) { return {_mm512_mul_ps(a.v, b.v)}; }
MHA_INLINE VecF operator/(VecF a, VecF b) { return {_mm512_div_ps(a.v, b.v)}; }
MHA_INLINE VecF fma(VecF a, VecF b, VecF c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
MHA_INLINE VecF max(VecF a, VecF b) { return {_mm512_max_ps(a.v, b.v)}; }  // b when either is NaN
MHA_INLINE VecF min(VecF a, VecF b) { return {_mm512_min_ps(a.v, b.v)}; }
MHA_INLINE VecF abs(VecF a) { return {_mm512_abs_ps(a.v)}; }
MHA_INLINE VecF round(VecF a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a - round(a), and round(a): VREDUCEPS is one operation where VRNDSCALEPS is two.
MHA_INLINE VecF split_round(VecF a, VecF* n) {
  const VecF f = {_mm512_reduce_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  *n = a - f;
  return f;
}
MHA_INLINE VecF copysign(VecF a, VecF sign) {
  __m512i bits = _mm512_set1_epi32(int(0x80000000u));
  return {_mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(bits, _mm512_castps_si512(sign.v), _mm512_castps_si512(a.v), 0xCA))};
}
// a * 2^n for integral n; 0, whatever they are, where not to keep.
MHA_INLINE VecF scale_pow2(VecF a, VecF n, VecMask<float> keep) { return {_mm512_maskz_scalef_ps(keep.m, a.v, n.v)}; }
MHA_INLINE VecMask<float> less(VecF a, VecF b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
MHA_INLINE VecMask<float> not_less(VecF a, VecF b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ)}; }
MHA_INLINE VecMask<float> less_equal(VecF a, VecF b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
MHA_INLINE VecMask<float> equal(VecF a, VecF b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
MHA_INLINE VecMask<float> operator&(VecMask<float> a, VecMask<float> b) { return {__mmask16(a.m & b.m)}; }
MHA_INLINE bool any(VecMask<float> a) { return a.m != 0; }
MHA_INLINE bool all(VecMask<float> a) { return a.m == 0xFFFF; }
MHA_INLINE VecF select(VecMask<float> m, VecF a, VecF b) { return {_mm512_mask_blend_ps(m.m, b.v, a.v)}; }
MHA_INLINE float reduce_add(VecF a) { return _mm512_reduce_add_ps(a.v); }
MHA_INLINE float reduce_max(VecF a) { return _mm512_reduce_max_ps(a.v); }
// Lane l is set where p[l] != 0 (reads one byte per lane).
MHA_INLINE void nonzero_bytes(const uint8_t* p, VecMask<float>* m) {
  __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  m->m = _mm_test_epi8_mask(x, x);
}
// Bit j: whether p[j] != 0, of n <= 64.
MHA_INLINE uint64_t nonzero_bits(const uint8_t* p, int n) {
  const __mmask64 there = n >= 64 ? ~__mmask64(0) : (__mmask64(1) << n) - 1;
  const __m512i x = _mm512_maskz_loadu_epi8(there, p);
  return _mm512_test_epi8_mask(x, x);
}
// Lane l is set where a[l] has the bit.
MHA_INLINE void has_bit(const uint32_t* a, int bit, VecMask<float>* m) {
  m->m = _mm512_test_epi32_mask(_mm512_loadu_si512(a), _mm512_set1_epi32(int(1u << bit)));
}
// Lane l is set where a[l] >= threshold as unsigned integers.
MHA_INLINE void at_least(const uint32_t* a, uint32_t threshold, VecMask<float>* m) {
  m->m = _mm512_cmpge_epu32_mask(_mm512_loadu_si512(a), _mm512_set1_epi32(int(threshold)));
}

// A 16 x 16 transpose in registers: pairs of rows, then of pairs, then of quarters.
MHA_INLINE void transpose_block(VecF* x) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int h = 0; h < 2; ++h) {
      const __m512d low = _mm512_castps_pd(a[i + h]), high = _mm512_castps_pd(a[i + 2 + h]);
      b[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      b[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  // Now quarter c of b[4 * g + r] holds column 4 * c + r of rows 4 * g .. 4 * g + 3.
  for (int r = 0; r < 4; ++r) {
    const __m512 low01 = _mm512_shuffle_f32x4(b[r], b[4 + r], 0x88),
                 high01 = _mm512_shuffle_f32x4(b[r], b[4 + r], 0xDD);
    const __m512 low23 = _mm512_shuffle_f32x4(b[8 + r], b[12 + r], 0x88);
    const __m512 high23 = _mm512_shuffle_f32x4(b[8 + r], b[12 + r], 0xDD);
    x[r].v = _mm512_shuffle_f32x4(low01, low23, 0x88);
    x[8 + r].v = _mm512_shuffle_f32x4(low01, low23, 0xDD);
    x[4 + r].v = _mm512_shuffle_f32x4(high01, high23, 0x88);
    x[12 + r].v = _mm512_shuffle_f32x4(high01, high23, 0xDD);
  }
}

// Lane l: the sum of x[l] over its lanes. Halving from vectors to vectors takes 30 shuffles, a transpose first 64.
MHA_INLINE VecF reduce_block(VecF* x) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {
    a[i] =
        _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i].v, x[2 * i + 1].v), _mm512_unpackhi_ps(x[2 * i].v, x[2 * i + 1].v));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d low = _mm512_castps_pd(a[2 * i]), high = _mm512_castps_pd(a[2 * i + 1]);
    b[i] =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  // Now quarter q of b[i] holds the sums over the quarters q of x[4 * i] .. x[4 * i + 3].
  for (int i = 0; i < 2; ++i) {
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xDD));
  }
  return {_mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xDD))};
}

// ---- double
MHA_INLINE VecD set1(double x) { return {_mm512_set1_pd(x)}; }
MHA_INLINE VecD load(const double* p) { return {_mm512_loadu_pd(p)}; }
MHA_INLINE void store(double* p, VecD a) { _mm512_storeu_pd(p, a.v); }
MHA_INLINE __mmask8 lanes8(int n) { return n >= 8 ? __mmask8(0xFF) : __mmask8((1u << n) - 1); }
MHA_INLINE VecD load_n(const double* p, int n) { return {_mm512_maskz_loadu_pd(lanes8(n), p)}; }
MHA_INLINE void store_n(double* p, VecD a, int n) { _mm512_mask_storeu_pd(p, lanes8(n), a.v); }
MHA_INLINE VecD operator+(VecD a, VecD b) { return {_mm512_add_pd(a.v, b.v)}; }
MHA_INLINE VecD operator-(VecD a, VecD b) { return {_mm512_sub_pd(a.v, b.v)}; }
MHA_INLINE VecD operator*(VecD a, VecD b) { return {_mm512_mul_pd(a.v, b.v)}; }
MHA_INLINE VecD operator/(VecD a, VecD b) { return {_mm512_div_pd(a.v, b.v)}; }
MHA_INLINE VecD fma(VecD a, VecD b, VecD c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
MHA_INLINE VecD max(VecD a, VecD b) { return {_mm512_max_pd(a.v, b.v)}; }
MHA_INLINE VecD min(VecD a, VecD b) { return {_mm512_min_pd(a.v, b.v)}; }
MHA_INLINE VecD abs(VecD a) { return {_mm512_abs_pd(a.v)}; }
MHA_INLINE VecMask<double> less(VecD a, VecD b) { return {_mm512_cmp_pd_mask(a.v, b.v, _CMP_LT_OQ)}; }
MHA_INLINE VecMask<double> less_equal(VecD a, VecD b) { return {_mm512_cmp_pd_mask(a.v, b.v, _CMP_LE_OQ)}; }
MHA_INLINE VecMask<double> equal(VecD a, VecD b) { return {_mm512_cmp_pd_mask(a.v, b.v, _CMP_EQ_OQ)}; }
MHA_INLINE VecMask<double> operator&(VecMask<double> a, VecMask<double> b) { return {__mmask8(a.m & b.m)}; }
MHA_INLINE bool any(VecMask<double> a) { return a.m != 0; }
MHA_INLINE bool all(VecMask<double> a) { return a.m == 0xFF; }
MHA_INLINE VecD select(VecMask<double> m, VecD a, VecD b) { return {_mm512_mask_blend_pd(m.m, b.v, a.v)}; }
MHA_INLINE double reduce_add(VecD a) { return _mm512_reduce_add_pd(a.v); }
MHA_INLINE double reduce_max(VecD a) { return _mm512_reduce_max_pd(a.v); }
MHA_INLINE void nonzero_bytes(const uint8_t* p, VecMask<double>* m) {
  __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  m->m = __mmask8(_mm_test_epi8_mask(x, x));
}
MHA_INLINE void has_bit(const uint32_t* a, int bit, VecMask<double>* m) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  m->m = _mm256_test_epi32_mask(x, _mm256_set1_epi32(int(1u << bit)));
}
MHA_INLINE void at_least(const uint32_t* a, uint32_t threshold, VecMask<double>* m) {
  __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  m->m = _mm256_cmpge_epu32_mask(x, _mm256_set1_epi32(int(threshold)));
}

// ---- half storage
MHA_INLINE VecF widen_bf16(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
MHA_INLINE __m256i narrow_bf16(VecF a) {
#ifdef MHA_HAS_BF16_DOT
  return __m256i(_mm512_cvtneps_pbh(a.v));
#else
  __m512i x = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  __m512i quiet = _mm512_or_si512(x, _mm512_set1_epi32(0x400000));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), quiet);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
MHA_INLINE VecF load(const bf16* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
MHA_INLINE VecF load_n(const bf16* p, int n) { return widen_bf16(_mm256_maskz_loadu_epi16(lanes16(n), p)); }
MHA_INLINE void store(bf16* p, VecF a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a)); }
MHA_INLINE void store_n(bf16* p, VecF a, int n) { _mm256_mask_storeu_epi16(p, lanes16(n), narrow_bf16(a)); }
MHA_INLINE VecF load(const f16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
MHA_INLINE VecF load_n(const f16* p, int n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes16(n), p))}; }
MHA_INLINE void store(f16* p, VecF a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
MHA_INLINE void store_n(f16* p, VecF a, int n) {
  _mm256_mask_storeu_epi16(p, lanes16(n), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

// ---- 8-bit storage of caches
MHA_INLINE VecF load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// The values / 256, but NaN is 480 / 256: shifted into a half, that is what an e4m3 is.
MHA_INLINE VecF load_256th(const e4m3* p) {
  const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
  return {_mm512_cvtph_ps(_mm256_or_si256(sign, _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7F)), 7)))};
}

// ---- 32-bit words, for Philox, each in the lower half of a 64-bit lane; the upper half may hold anything
struct VecU {
  static constexpr int lanes = 16;
  __m512i even, odd;
};
MHA_INLINE VecU set1(uint32_t x) { return {_mm512_set1_epi32(int(x)), _mm512_set1_epi32(int(x))}; }
MHA_INLINE VecU high(VecU a) { return {_mm512_srli_epi64(a.even, 32), _mm512_srli_epi64(a.odd, 32)}; }
MHA_INLINE VecU load(const uint32_t* p) {
  const __m512i all = _mm512_loadu_si512(p);
  return {all, _mm512_srli_epi64(all, 32)};
}
MHA_INLINE void store(uint32_t* p, VecU a) {
  _mm512_storeu_si512(p, _mm512_mask_blend_epi32(0xAAAA, a.even, _mm512_slli_epi64(a.odd, 32)));
}
MHA_INLINE VecU product(VecU a, VecU b) { return {_mm512_mul_epu32(a.even, b.even), _mm512_mul_epu32(a.odd, b.odd)}; }
MHA_INLINE VecU xor3(VecU a, VecU b, VecU c) {
  return {_mm512_ternarylogic_epi32(a.even, b.even, c.even, 0x96),
          _mm512_ternarylogic_epi32(a.odd, b.odd, c.odd, 0x96)};
}

#ifdef MHA_HAS_BF16_DOT
// ---- pairs of bf16 in 32-bit lanes
struct VecPair {
  static constexpr int lanes = 16;
  __m512i v;
};
MHA_INLINE VecPair set1_pair(const void* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return {_mm512_set1_epi32(bits)};
}
MHA_INLINE VecPair load_pairs(const void* p) { return {_mm512_loadu_si512(p)}; }
MHA_INLINE VecPair load_pairs(const void* p, int n) { return {_mm512_maskz_loadu_epi32(lanes16(n), p)}; }
MHA_INLINE VecF dot(VecPair a, VecPair b, VecF c) { return {_mm512_dpbf16_ps(c.v, __m512bh(a.v), __m512bh(b.v))}; }
// Lane l holds even[l] and odd[l], rounded to nearest even.
MHA_INLINE VecPair interleave_bf16(VecF even, VecF odd) {
  __m512i both = __m512i(_mm512_cvtne2ps_pbh(odd.v, even.v));
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return {_mm512_permutexvar_epi16(order, both)};
}
// Pair l of the 32 of two vectors holds row[l] and next[l], or 0 without next.
MHA_INLINE void interleave_rows(VecPair* pairs, __m512i row, __m512i next) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  pairs[0].v = _mm512_permutex2var_epi16(row, low, next);
  pairs[1].v = _mm512_permutex2var_epi16(row, high, next);
}
MHA_INLINE void interleave_rows(VecPair* pairs, const bf16* row, const bf16* next) {
  interleave_rows(pairs, _mm512_loadu_si512(row), next ? _mm512_loadu_si512(next) : _mm512_setzero_si512());
}
MHA_INLINE void store(void* p, VecPair a) { _mm512_storeu_si512(p, a.v); }
MHA_INLINE void store_n(void* p, VecPair a, int n) { _mm512_mask_storeu_epi32(p, lanes16(n), a.v); }

// The planes of x, to be rounded to bf16 where they are stored. What is not finite leaves nothing for the others.
template <int N>
MHA_INLINE void split(VecF x, VecF* plane) {
  for (int i = 0; i + 1 < N; ++i) {
    plane[i] = widen_bf16(narrow_bf16(x));
    const VecMask<float> finite = less(abs(x), set1(std::numeric_limits<float>::infinity()));
    x.v = _mm512_maskz_sub_ps(finite.m, x.v, plane[i].v);
  }
  plane[N - 1] = x;
}
template <int N>
MHA_INLINE void interleave_planes(VecF even, VecF odd, VecPair* plane) {
  VecF a[N], b[N];
  split<N>(even, a);
  split<N>(odd, b);
  for (int i = 0; i < N; ++i) plane[i] = interleave_bf16(a[i], b[i]);
}
#endif

MHA_ISA_END
