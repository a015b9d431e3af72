// Vectors of 128 bits by the compiler's vector extension: whatever the base target has (SSE2 on x86-64). The names are
// those of avx512.h.
#pragma once

MHA_ISA_BEGIN

template <class T>
struct Vec;
template <class T>
struct VecMask;

typedef float Float4 __attribute__((vector_size(16)));
typedef double Double2 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef int64_t Long2 __attribute__((vector_size(16)));

template <>
struct Vec<float> {
  static constexpr int lanes = 4;
  Float4 v;
};
template <>
struct Vec<double> {
  static constexpr int lanes = 2;
  Double2 v;
};
template <>
struct VecMask<float> {
  Int4 m;
};
template <>
struct VecMask<double> {
  Long2 m;
};
using VecF = Vec<float>;
using VecD = Vec<double>;

constexpr int kVecRegisters = 16;

MHA_INLINE VecF set1(float x) { return {Float4{x, x, x, x}}; }
MHA_INLINE VecD set1(double x) { return {Double2{x, x}}; }

#define MHA_VEC_OPS(T, V)                                                                  \
  MHA_INLINE Vec<T> load(const T* p) {                                                     \
    Vec<T> a;                                                                              \
    std::memcpy(&a.v, p, sizeof(a.v));                                                     \
    return a;                                                                              \
  }                                                                                        \
  MHA_INLINE void store(T* p, Vec<T> a) { std::memcpy(p, &a.v, sizeof(a.v)); }             \
  MHA_INLINE Vec<T> load_n(const T* p, int n) {                                            \
    Vec<T> a = set1(T(0));                                                                 \
    for (int l = 0; l < Vec<T>::lanes && l < n; ++l) a.v[l] = p[l];                        \
    return a;                                                                              \
  }                                                                                        \
  MHA_INLINE void store_n(T* p, Vec<T> a, int n) {                                         \
    for (int l = 0; l < Vec<T>::lanes && l < n; ++l) p[l] = a.v[l];                        \
  }                                                                                        \
  MHA_INLINE Vec<T> operator+(Vec<T> a, Vec<T> b) { return {a.v + b.v}; }                  \
  MHA_INLINE Vec<T> operator-(Vec<T> a, Vec<T> b) { return {a.v - b.v}; }                  \
  MHA_INLINE Vec<T> operator*(Vec<T> a, Vec<T> b) { return {a.v * b.v}; }                  \
  MHA_INLINE Vec<T> operator/(Vec<T> a, Vec<T> b) { return {a.v / b.v}; }                  \
  MHA_INLINE Vec<T> fma(Vec<T> a, Vec<T> b, Vec<T> c) { return {a.v * b.v + c.v}; }        \
  MHA_INLINE Vec<T> max(Vec<T> a, Vec<T> b) { return {a.v > b.v ? a.v : b.v}; }            \
  MHA_INLINE Vec<T> min(Vec<T> a, Vec<T> b) { return {a.v < b.v ? a.v : b.v}; }            \
  MHA_INLINE Vec<T> abs(Vec<T> a) { return {a.v < T(0) ? -a.v : a.v}; }                    \
  MHA_INLINE VecMask<T> less(Vec<T> a, Vec<T> b) { return {a.v < b.v}; }                   \
  MHA_INLINE VecMask<T> less_equal(Vec<T> a, Vec<T> b) { return {a.v <= b.v}; }            \
  MHA_INLINE VecMask<T> equal(Vec<T> a, Vec<T> b) { return {a.v == b.v}; }                 \
  MHA_INLINE VecMask<T> operator&(VecMask<T> a, VecMask<T> b) { return {a.m & b.m}; }      \
  MHA_INLINE Vec<T> select(VecMask<T> m, Vec<T> a, Vec<T> b) { return {m.m ? a.v : b.v}; } \
  MHA_INLINE bool any(VecMask<T> a) {                                                      \
    bool r = false;                                                                        \
    for (int l = 0; l < Vec<T>::lanes; ++l) r |= a.m[l] != 0;                              \
    return r;                                                                              \
  }                                                                                        \
  MHA_INLINE bool all(VecMask<T> a) {                                                      \
    bool r = true;                                                                         \
    for (int l = 0; l < Vec<T>::lanes; ++l) r &= a.m[l] != 0;                              \
    return r;                                                                              \
  }                                                                                        \
  MHA_INLINE T reduce_add(Vec<T> a) {                                                      \
    T r = a.v[0];                                                                          \
    for (int l = 1; l < Vec<T>::lanes; ++l) r += a.v[l];                                   \
    return r;                                                                              \
  }                                                                                        \
  MHA_INLINE T reduce_max(Vec<T> a) {                                                      \
    T r = a.v[0];                                                                          \
    for (int l = 1; l < Vec<T>::lanes; ++l) r = a.v[l] > r ? a.v[l] : r;                   \
    return r;                                                                              \
  }                                                                                        \
  MHA_INLINE void nonzero_bytes(const uint8_t* p, VecMask<T>* m) {                         \
    for (int l = 0; l < Vec<T>::lanes; ++l) m->m[l] = p[l] ? -1 : 0;                       \
  }                                                                                        \
  MHA_INLINE void has_bit(const uint32_t* a, int bit, VecMask<T>* m) {                     \
    for (int l = 0; l < Vec<T>::lanes; ++l) m->m[l] = a[l] >> bit & 1 ? -1 : 0;            \
  }                                                                                        \
  MHA_INLINE void at_least(const uint32_t* a, uint32_t threshold, VecMask<T>* m) {         \
    for (int l = 0; l < Vec<T>::lanes; ++l) m->m[l] = a[l] >= threshold ? -1 : 0;          \
  }
MHA_VEC_OPS(float, Float4)
MHA_VEC_OPS(double, Double2)
#undef MHA_VEC_OPS

// Bit j: whether p[j] != 0, of n <= 64.
MHA_INLINE uint64_t nonzero_bits(const uint8_t* p, int n) {
  uint64_t bits = 0;
  for (int j = 0; j < n; ++j) bits |= uint64_t(p[j] != 0) << j;
  return bits;
}

// Adding and subtracting 1.5 * 2^23 rounds to an integer while |a| < 2^22.
MHA_INLINE VecF round(VecF a) { return (a + set1(12582912.0f)) - set1(12582912.0f); }
MHA_INLINE VecF split_round(VecF a, VecF* n) {
  *n = round(a);
  return a - *n;
}
MHA_INLINE VecF copysign(VecF a, VecF sign) {
  Int4 top = {INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN};
  return {Float4((Int4(a.v) & ~top) | (Int4(sign.v) & top))};
}
MHA_INLINE VecMask<float> not_less(VecF a, VecF b) { return {~(a.v < b.v)}; }
// a * 2^n for integral n of the normal range or NaN; 0, whatever they are, where not to keep: the product is one with
// 0.
MHA_INLINE VecF scale_pow2(VecF a, VecF n, VecMask<float> keep) {
  Int4 exponent = (__builtin_convertvector(max(set1(-127.0f), n).v, Int4) + 127) << 23;
  return select(keep, {a.v * Float4(exponent & keep.m)}, set1(0.0f));
}

// ---- half storage
MHA_INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
MHA_INLINE bf16 to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (f != f) return {uint16_t((bits >> 16) | 0x40)};
  return {uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}
inline float to_float(f16 x) {
  uint32_t magnitude = uint32_t(x.bits & 0x7FFF) << 13, sign = uint32_t(x.bits & 0x8000) << 16;
  if (magnitude >= 0x0F800000u) {
    magnitude |= 0x7F800000u;
  } else if (magnitude >= 0x00800000u) {
    magnitude += 0x38000000u;
  } else {  // a denormal half is a normal float; through a denormal one it would be flushed
    const float f = float(x.bits & 0x3FF) * 0x1p-24f;
    std::memcpy(&magnitude, &f, 4);
  }
  magnitude |= sign;
  float f;
  std::memcpy(&f, &magnitude, 4);
  return f;
}
inline f16 to_f16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  uint16_t sign = uint16_t(bits >> 16) & 0x8000;
  bits &= 0x7FFFFFFFu;
  if (bits > 0x7F800000u) return {uint16_t(sign | 0x7E00 | ((bits >> 13) & 0x3FF))};
  if (bits >= 0x47800000u) return {uint16_t(sign | 0x7C00)};
  if (bits < 0x38800000u) {  // below the normal range: let the float adder round at 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return {uint16_t(sign | (bits - 0x3F000000u))};
  }
  bits += 0xFFF + ((bits >> 13) & 1);
  return {uint16_t(sign | ((bits - 0x38000000u) >> 13))};
}
MHA_INLINE void from_float(bf16* p, float f) { *p = to_bf16(f); }
MHA_INLINE void from_float(f16* p, float f) { *p = to_f16(f); }

template <class Half, class = std::enable_if_t<sizeof(Half) == 2>>
MHA_INLINE VecF load_n(const Half* p, int n) {
  VecF a = set1(0.0f);
  for (int l = 0; l < 4 && l < n; ++l) a.v[l] = to_float(p[l]);
  return a;
}
template <class Half, class = std::enable_if_t<sizeof(Half) == 2>>
MHA_INLINE VecF load(const Half* p) {
  return load_n(p, 4);
}
template <class Half, class = std::enable_if_t<sizeof(Half) == 2>>
MHA_INLINE void store_n(Half* p, VecF a, int n) {
  for (int l = 0; l < 4 && l < n; ++l) from_float(p + l, a.v[l]);
}
template <class Half, class = std::enable_if_t<sizeof(Half) == 2>>
MHA_INLINE void store(Half* p, VecF a) {
  store_n(p, a, 4);
}

// ---- 8-bit storage of caches
MHA_INLINE VecF load(const int8_t* p) {
  VecF a;
  for (int l = 0; l < 4; ++l) a.v[l] = float(p[l]);
  return a;
}
// The values / 256, but NaN is 480 / 256: shifted into a half, that is what an e4m3 is.
MHA_INLINE VecF load_256th(const e4m3* p) {
  f16 half[4];
  for (int l = 0; l < 4; ++l) half[l] = {uint16_t((p[l].bits & 0x80) << 8 | (p[l].bits & 0x7F) << 7)};
  return load(half);
}

// ---- 32-bit words, for Philox, each in the lower half of a 64-bit lane; the upper half may hold anything
struct VecU {
  static constexpr int lanes = 4;
  uint64_t v[4];
};
MHA_INLINE VecU set1(uint32_t x) { return {{x, x, x, x}}; }
MHA_INLINE VecU high(VecU a) { return {{a.v[0] >> 32, a.v[1] >> 32, a.v[2] >> 32, a.v[3] >> 32}}; }
MHA_INLINE VecU load(const uint32_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
MHA_INLINE void store(uint32_t* p, VecU a) {
  for (int l = 0; l < 4; ++l) p[l] = uint32_t(a.v[l]);
}
MHA_INLINE VecU product(VecU a, VecU b) {
  for (int l = 0; l < 4; ++l) a.v[l] = uint64_t(uint32_t(a.v[l])) * uint32_t(b.v[l]);
  return a;
}
MHA_INLINE VecU xor3(VecU a, VecU b, VecU c) {
  for (int l = 0; l < 4; ++l) a.v[l] ^= b.v[l] ^ c.v[l];
  return a;
}

MHA_ISA_END
