// Vectors of 128 bits (NEON, which every ARM64 processor has): 4 floats or 2 doubles. The names are those of
// avx512.h. With MHA_HAS_BF16_DOT, bf16 by its instructions.
#pragma once

MHA_ISA_BEGIN

template <class T>
struct Vec;
template <class T>
struct VecMask;

template <>
struct Vec<float> {
  static constexpr int lanes = 4;
  float32x4_t v;
};
template <>
struct Vec<double> {
  static constexpr int lanes = 2;
  float64x2_t v;
};
template <>
struct VecMask<float> {
  uint32x4_t m;
};
template <>
struct VecMask<double> {
  uint64x2_t m;
};
using VecF = Vec<float>;
using VecD = Vec<double>;

constexpr int kVecRegisters = 32;

// ---- float and double
MHA_INLINE VecF set1(float x) { return {vdupq_n_f32(x)}; }
MHA_INLINE VecD set1(double x) { return {vdupq_n_f64(x)}; }

// max and min: b when either is NaN.
#define MHA_VEC_OPS(T, F, U)                                                                        \
  MHA_INLINE Vec<T> load(const T* p) { return {vld1q_##F(p)}; }                                     \
  MHA_INLINE void store(T* p, Vec<T> a) { vst1q_##F(p, a.v); }                                      \
  MHA_INLINE Vec<T> load_n(const T* p, int n) {                                                     \
    T x[Vec<T>::lanes] = {};                                                                        \
    for (int l = 0; l < Vec<T>::lanes && l < n; ++l) x[l] = p[l];                                   \
    return load(x);                                                                                 \
  }                                                                                                 \
  MHA_INLINE void store_n(T* p, Vec<T> a, int n) {                                                  \
    T x[Vec<T>::lanes];                                                                             \
    store(x, a);                                                                                    \
    for (int l = 0; l < Vec<T>::lanes && l < n; ++l) p[l] = x[l];                                   \
  }                                                                                                 \
  MHA_INLINE Vec<T> operator+(Vec<T> a, Vec<T> b) { return {vaddq_##F(a.v, b.v)}; }                 \
  MHA_INLINE Vec<T> operator-(Vec<T> a, Vec<T> b) { return {vsubq_##F(a.v, b.v)}; }                 \
  MHA_INLINE Vec<T> operator*(Vec<T> a, Vec<T> b) { return {vmulq_##F(a.v, b.v)}; }                 \
  MHA_INLINE Vec<T> operator/(Vec<T> a, Vec<T> b) { return {vdivq_##F(a.v, b.v)}; }                 \
  MHA_INLINE Vec<T> fma(Vec<T> a, Vec<T> b, Vec<T> c) { return {vfmaq_##F(c.v, a.v, b.v)}; }        \
  MHA_INLINE Vec<T> abs(Vec<T> a) { return {vabsq_##F(a.v)}; }                                      \
  MHA_INLINE VecMask<T> less(Vec<T> a, Vec<T> b) { return {vcltq_##F(a.v, b.v)}; }                  \
  MHA_INLINE VecMask<T> less_equal(Vec<T> a, Vec<T> b) { return {vcleq_##F(a.v, b.v)}; }            \
  MHA_INLINE VecMask<T> equal(Vec<T> a, Vec<T> b) { return {vceqq_##F(a.v, b.v)}; }                 \
  MHA_INLINE VecMask<T> operator&(VecMask<T> a, VecMask<T> b) { return {vandq_##U(a.m, b.m)}; }     \
  MHA_INLINE Vec<T> select(VecMask<T> m, Vec<T> a, Vec<T> b) { return {vbslq_##F(m.m, a.v, b.v)}; } \
  MHA_INLINE Vec<T> max(Vec<T> a, Vec<T> b) { return select(less(b, a), a, b); }                    \
  MHA_INLINE Vec<T> min(Vec<T> a, Vec<T> b) { return select(less(a, b), a, b); }                    \
  MHA_INLINE T reduce_add(Vec<T> a) { return vaddvq_##F(a.v); }                                     \
  MHA_INLINE T reduce_max(Vec<T> a) { return vmaxvq_##F(a.v); }
MHA_VEC_OPS(float, f32, u32)
MHA_VEC_OPS(double, f64, u64)
#undef MHA_VEC_OPS

MHA_INLINE bool any(VecMask<float> a) { return vmaxvq_u32(a.m) != 0; }
MHA_INLINE bool all(VecMask<float> a) { return vminvq_u32(a.m) != 0; }
MHA_INLINE bool any(VecMask<double> a) { return vmaxvq_u32(vreinterpretq_u32_u64(a.m)) != 0; }
MHA_INLINE bool all(VecMask<double> a) { return vminvq_u32(vreinterpretq_u32_u64(a.m)) != 0; }

MHA_INLINE VecF round(VecF a) { return {vrndnq_f32(a.v)}; }
MHA_INLINE VecF split_round(VecF a, VecF* n) {
  *n = round(a);
  return a - *n;
}
MHA_INLINE VecF copysign(VecF a, VecF sign) { return {vbslq_f32(vdupq_n_u32(0x80000000u), sign.v, a.v)}; }
MHA_INLINE VecMask<float> not_less(VecF a, VecF b) { return {vmvnq_u32(vcltq_f32(a.v, b.v))}; }
// a * 2^n for integral n; 0 below the normal range and, whatever they are, where not to keep.
MHA_INLINE VecF scale_pow2(VecF a, VecF n, VecMask<float> keep) {
  int32x4_t exponent = vmaxq_s32(vcvtq_s32_f32(n.v), vdupq_n_s32(-127));
  exponent = vshlq_n_s32(vaddq_s32(exponent, vdupq_n_s32(127)), 23);
  const float32x4_t scaled = vmulq_f32(a.v, vreinterpretq_f32_s32(exponent));
  return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(scaled), keep.m))};
}

// Four, or two, bytes in the lower 16-bit lanes.
MHA_INLINE uint16x4_t widen_bytes(const uint8_t* p, int n) {
  uint32_t bits = 0;
  std::memcpy(&bits, p, std::size_t(n));
  return vget_low_u16(vmovl_u8(vcreate_u8(bits)));
}
// Lane l is set where p[l] != 0 (reads one byte per lane).
MHA_INLINE void nonzero_bytes(const uint8_t* p, VecMask<float>* m) {
  const uint32x4_t x = vmovl_u16(widen_bytes(p, 4));
  m->m = vtstq_u32(x, x);
}
MHA_INLINE void nonzero_bytes(const uint8_t* p, VecMask<double>* m) {
  const uint64x2_t x = vmovl_u32(vget_low_u32(vmovl_u16(widen_bytes(p, 2))));
  m->m = vtstq_u64(x, x);
}
// Bit j: whether p[j] != 0, of n <= 64.
MHA_INLINE uint64_t nonzero_bits(const uint8_t* p, int n) {
  uint8_t some[64] = {};
  if (n < 64) p = static_cast<const uint8_t*>(std::memcpy(some, p, std::size_t(n)));
  const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
  auto bits = [&](int at) MHA_INLINE_LAMBDA {
    const uint8x16_t x = vld1q_u8(p + at);
    return vandq_u8(vtstq_u8(x, x), bit);
  };
  const uint8x16_t pairs = vpaddq_u8(vpaddq_u8(bits(0), bits(16)), vpaddq_u8(bits(32), bits(48)));
  return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(pairs, pairs)), 0);
}
// Lane l is set where a[l] has the bit.
MHA_INLINE void has_bit(const uint32_t* a, int bit, VecMask<float>* m) {
  m->m = vtstq_u32(vld1q_u32(a), vdupq_n_u32(1u << bit));
}
MHA_INLINE void has_bit(const uint32_t* a, int bit, VecMask<double>* m) {
  m->m = vtstq_u64(vmovl_u32(vld1_u32(a)), vdupq_n_u64(1u << bit));
}
// Lane l is set where a[l] >= threshold as unsigned integers.
MHA_INLINE void at_least(const uint32_t* a, uint32_t threshold, VecMask<float>* m) {
  m->m = vcgeq_u32(vld1q_u32(a), vdupq_n_u32(threshold));
}
MHA_INLINE void at_least(const uint32_t* a, uint32_t threshold, VecMask<double>* m) {
  m->m = vcgeq_u64(vmovl_u32(vld1_u32(a)), vdupq_n_u64(threshold));
}

MHA_INLINE void transpose_block(VecF* x) {
  float64x2_t even[2], odd[2];
  for (int i = 0; i < 2; ++i) {
    even[i] = vreinterpretq_f64_f32(vtrn1q_f32(x[2 * i].v, x[2 * i + 1].v));
    odd[i] = vreinterpretq_f64_f32(vtrn2q_f32(x[2 * i].v, x[2 * i + 1].v));
  }
  x[0].v = vreinterpretq_f32_f64(vtrn1q_f64(even[0], even[1])),
  x[1].v = vreinterpretq_f32_f64(vtrn1q_f64(odd[0], odd[1]));
  x[2].v = vreinterpretq_f32_f64(vtrn2q_f64(even[0], even[1])),
  x[3].v = vreinterpretq_f32_f64(vtrn2q_f64(odd[0], odd[1]));
}
MHA_INLINE void transpose_block(VecD* x) {
  const float64x2_t first = vtrn1q_f64(x[0].v, x[1].v);
  x[1].v = vtrn2q_f64(x[0].v, x[1].v), x[0].v = first;
}
// Lane l: the sum of x[l] over its lanes.
MHA_INLINE VecF reduce_block(VecF* x) { return {vpaddq_f32(vpaddq_f32(x[0].v, x[1].v), vpaddq_f32(x[2].v, x[3].v))}; }
MHA_INLINE VecD reduce_block(VecD* x) { return {vpaddq_f64(x[0].v, x[1].v)}; }

// ---- half storage
MHA_INLINE VecF widen(uint16x4_t bits, const bf16*) { return {vreinterpretq_f32_u32(vshll_n_u16(bits, 16))}; }
MHA_INLINE VecF widen(uint16x4_t bits, const f16*) { return {vcvt_f32_f16(vreinterpret_f16_u16(bits))}; }
MHA_INLINE uint16x4_t narrow(VecF a, const f16*) { return vreinterpret_u16_f16(vcvt_f16_f32(a.v)); }
MHA_INLINE uint16x4_t narrow(VecF a, const bf16*) {
#ifdef MHA_HAS_BF16_DOT
  // Instructions for bf16 are assembly: clang before 16 has no intrinsics for them in a region of a file.
  uint16x4_t bits;
  asm("bfcvtn %0.4h, %1.4s" : "=w"(bits) : "w"(a.v));
  return bits;
#else
  const uint32x4_t x = vreinterpretq_u32_f32(a.v), odd = vandq_u32(vshrq_n_u32(x, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(x, odd), vdupq_n_u32(0x7FFF));
  const uint32x4_t quiet = vorrq_u32(x, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(a.v, a.v), rounded, quiet), 16);
#endif
}
template <class Half, class = std::enable_if_t<sizeof(Half) == 2>>
MHA_INLINE VecF load(const Half* p) {
  return widen(vld1_u16(&p->bits), p);
}
template <class Half, class = std::enable_if_t<sizeof(Half) == 2>>
MHA_INLINE VecF load_n(const Half* p, int n) {
  uint16_t bits[4] = {};
  for (int l = 0; l < 4 && l < n; ++l) bits[l] = p[l].bits;
  return widen(vld1_u16(bits), p);
}
template <class Half, class = std::enable_if_t<sizeof(Half) == 2>>
MHA_INLINE void store(Half* p, VecF a) {
  vst1_u16(&p->bits, narrow(a, p));
}
template <class Half, class = std::enable_if_t<sizeof(Half) == 2>>
MHA_INLINE void store_n(Half* p, VecF a, int n) {
  uint16_t bits[4];
  vst1_u16(bits, narrow(a, p));
  for (int l = 0; l < 4 && l < n; ++l) p[l].bits = bits[l];
}

// ---- 8-bit storage of caches
MHA_INLINE VecF load(const int8_t* p) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bits)))))};
}
// The values / 256, but NaN is 480 / 256: shifted into a half, that is what an e4m3 is.
MHA_INLINE VecF load_256th(const e4m3* p) {
  const uint16x4_t x = widen_bytes(&p->bits, 4), sign = vshl_n_u16(vand_u16(x, vdup_n_u16(0x80)), 8);
  return widen(vorr_u16(sign, vshl_n_u16(vand_u16(x, vdup_n_u16(0x7F)), 7)), static_cast<const f16*>(nullptr));
}

// ---- 32-bit words, for Philox, each in the lower half of a 64-bit lane; the upper half may hold anything
struct VecU {
  static constexpr int lanes = 4;
  uint64x2_t low, high;
};
MHA_INLINE VecU set1(uint32_t x) { return {vdupq_n_u64(x), vdupq_n_u64(x)}; }
MHA_INLINE VecU high(VecU a) { return {vshrq_n_u64(a.low, 32), vshrq_n_u64(a.high, 32)}; }
MHA_INLINE VecU load(const uint32_t* p) {
  const uint32x4_t x = vld1q_u32(p);
  return {vmovl_u32(vget_low_u32(x)), vmovl_high_u32(x)};
}
MHA_INLINE void store(uint32_t* p, VecU a) {
  vst1q_u32(p, vuzp1q_u32(vreinterpretq_u32_u64(a.low), vreinterpretq_u32_u64(a.high)));
}
MHA_INLINE VecU product(VecU a, VecU b) {
  return {vmull_u32(vmovn_u64(a.low), vmovn_u64(b.low)), vmull_u32(vmovn_u64(a.high), vmovn_u64(b.high))};
}
MHA_INLINE VecU xor3(VecU a, VecU b, VecU c) {
  return {veorq_u64(veorq_u64(a.low, b.low), c.low), veorq_u64(veorq_u64(a.high, b.high), c.high)};
}

#ifdef MHA_HAS_BF16_DOT
// ---- pairs of bf16 in 32-bit lanes
struct VecPair {
  static constexpr int lanes = 4;
  uint32x4_t v;
};
MHA_INLINE VecPair set1_pair(const void* p) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  return {vdupq_n_u32(bits)};
}
MHA_INLINE VecPair load_pairs(const void* p) {
  VecPair a;
  std::memcpy(&a.v, p, 16);
  return a;
}
MHA_INLINE VecPair load_pairs(const void* p, int n) {
  uint32_t x[4] = {};
  std::memcpy(x, p, std::size_t(n < 4 ? n : 4) * 4);
  return load_pairs(x);
}
MHA_INLINE void store(void* p, VecPair a) { std::memcpy(p, &a.v, 16); }
MHA_INLINE void store_n(void* p, VecPair a, int n) { std::memcpy(p, &a.v, std::size_t(n < 4 ? n : 4) * 4); }
// The two products of a lane, their sum, and its sum with c are each rounded to odd; denormal numbers count as 0.
MHA_INLINE VecF dot(VecPair a, VecPair b, VecF c) {
  asm("bfdot %0.4s, %1.8h, %2.8h" : "+w"(c.v) : "w"(a.v), "w"(b.v));
  return c;
}
// Lane l holds even[l] and odd[l], rounded to nearest even.
MHA_INLINE VecPair interleave_bf16(VecF even, VecF odd) {
  const bf16* type = nullptr;
  const uint16x4_t a = narrow(even, type), b = narrow(odd, type);
  return {vreinterpretq_u32_u16(vcombine_u16(vzip1_u16(a, b), vzip2_u16(a, b)))};
}
// Pair l of the 8 of two vectors holds row[l] and next[l], or 0 without next.
MHA_INLINE void interleave_rows(VecPair* pairs, const bf16* row, const bf16* next) {
  const uint16x8_t a = vld1q_u16(&row->bits), b = next ? vld1q_u16(&next->bits) : vdupq_n_u16(0);
  pairs[0].v = vreinterpretq_u32_u16(vzip1q_u16(a, b)), pairs[1].v = vreinterpretq_u32_u16(vzip2q_u16(a, b));
}
// There is one plane.
template <int N>
MHA_INLINE void split(VecF x, VecF* plane) {
  static_assert(N == 1);
  *plane = x;
}
template <int N>
MHA_INLINE void interleave_planes(VecF even, VecF odd, VecPair* plane) {
  static_assert(N == 1);
  *plane = interleave_bf16(even, odd);
}
#endif

MHA_ISA_END
