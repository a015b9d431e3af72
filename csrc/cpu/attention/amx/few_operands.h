// Operands of products on tiles for few rows (few.h): keys that are copied, values in pairs, weights in planes.
#pragma once

#include "../fwd/few.h"
#include "operands.h"

MHA_ISA_BEGIN

// Tiles that 64 bytes of each of 32 rows of values make, as pairs.
template <class Value>
constexpr int kValueTiles = int(4 / sizeof(Value));

// Where a pair of a head's elements lies: its step of the product, and which of the step's 16. Unpacking bytes to bf16
// leaves 64 elements in this order.
struct PairPlace {
  int step, line;
};
inline PairPlace pair_place(int pair, bool eight_bits) {
  if (!eight_bits) return {pair / 16, pair % 16};
  return {pair / 32 * 2 + pair / 4 % 2, pair % 32 / 8 * 4 + pair % 4};
}

MHA_INLINE __m512i load_bytes(const void* row, int n) {
  return _mm512_maskz_loadu_epi8(n >= 64 ? ~__mmask64(0) : (__mmask64(1) << n) - 1, row);
}

// A key as row i of the tiles, zeros behind. Beside it, lines are fetched.
template <class Key>
inline void copy_key(HalfTile* to, int i, const Key* key, int cols, ReadAhead::Lines beside) {
  constexpr int kCols = int(64 / sizeof(Key));
  for (int c = 0; c < cols; c += kCols, key += kCols) {
    beside.fetch(c / kCols * 64);
    if constexpr (std::is_same_v<Key, e4m3>) {
      __m512i lower, upper;
      to_bf16<e4m3>(load_bytes(key, cols - c), lower, upper);
      _mm512_store_si512(to++->x[i], _mm512_unpacklo_epi8(lower, upper));
      _mm512_store_si512(to++->x[i], _mm512_unpackhi_epi8(lower, upper));
    } else {
      _mm512_store_si512(to++->x[i], load_bytes(key, (cols - c) * int(sizeof(Key))));
    }
  }
}

// A query in three planes of bytes, column r of tiles with so many columns, `steps` tiles to a plane, which hold zeros:
// its elements are (256 * (256 * third + second) + first) * what is returned, but for 2^-23 of the greatest. Of what is
// not finite, nothing, and NaN is returned.
inline float query_to_bytes(HalfTile* to, int steps, int columns, int r, const bf16* row, int cols) {
  VecF greatest = set1(0.0f);
  if (!all_finite<float>(row, 0, 1, cols)) return std::numeric_limits<float>::quiet_NaN();
  for (int d = 0; d < cols; d += 16) greatest = max(abs(load_n(row + d, cols - d)), greatest);
  const int exponent = std::max(std::ilogb(std::max(reduce_max(greatest), 1e-30f)) + 1, -90);
  const VecF unit = set1(std::ldexp(1.0f, 22 - exponent));
  for (int d = 0; d < cols; d += 16) {
    __m512i x = _mm512_cvtps_epi32((load_n(row + d, cols - d) * unit).v);
    for (int plane = 0; plane < 3; ++plane) {
      const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(x, 24), 24);
      x = _mm512_srai_epi32(_mm512_sub_epi32(x, low), 8);
      alignas(16) char bytes[16];
      _mm_store_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8(low));
      bf16* const tile = to[plane * steps + d / 64].x[0];
      for (int i = 0; i < 4; ++i) std::memcpy(tile + 2 * ((d % 64 / 4 + i) * columns + r), bytes + 4 * i, 4);
    }
  }
  return std::ldexp(1.0f, exponent - 22);
}

// Of a query that is not finite and a key.
inline float dot_product(const bf16* query, const int8_t* key, int cols) {
  VecF sum = set1(0.0f);
  for (int d = 0; d < cols; d += 16) sum = fma(load_n(query + d, cols - d), load_n(key + d, cols - d), sum);
  return reduce_add(sum);
}

// 64 bytes of two rows, n elements of which there are, as line i of the tiles: columns in the order that in_order sets
// right.
MHA_INLINE void pair_values(HalfTile* to, int i, const bf16* row, const bf16* next, int n) {
  const __m512i a = load_bits(row, n).v, b = load_bits(next, n).v;
  _mm512_store_si512(to[0].x[i], _mm512_unpacklo_epi16(a, b));
  _mm512_store_si512(to[1].x[i], _mm512_unpackhi_epi16(a, b));
}
template <class Byte>
MHA_INLINE void pair_values(HalfTile* to, int i, const Byte* row, const Byte* next, int n) {
  const __m512i a = load_bytes(row, n), b = load_bytes(next, n);
  for (int half = 0; half < 2; ++half) {
    __m512i lower, upper;
    to_bf16<Byte>(half ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b), lower, upper);
    _mm512_store_si512(to[2 * half].x[i], _mm512_unpacklo_epi8(lower, upper));
    _mm512_store_si512(to[2 * half + 1].x[i], _mm512_unpackhi_epi8(lower, upper));
  }
}

// A row of 16 * kTiles sums, quarter by quarter of the tiles.
template <int kTiles>
MHA_INLINE void in_order(VecF* x) {
  const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  for (int i = 0; i < kTiles; i += 2) {
    const __m512d a = _mm512_castps_pd(x[i].v), b = _mm512_castps_pd(x[i + 1].v);
    x[i].v = _mm512_castpd_ps(_mm512_permutex2var_pd(a, low, b));
    x[i + 1].v = _mm512_castpd_ps(_mm512_permutex2var_pd(a, high, b));
  }
  if constexpr (kTiles == 4) {
    const __m512 a = x[0].v, b = x[1].v, c = x[2].v, d = x[3].v;
    x[0].v = _mm512_shuffle_f32x4(a, c, 0x44), x[1].v = _mm512_shuffle_f32x4(a, c, 0xEE);
    x[2].v = _mm512_shuffle_f32x4(b, d, 0x44), x[3].v = _mm512_shuffle_f32x4(b, d, 0xEE);
  }
}

template <int kTiles>
MHA_INLINE bool finite(const VecF* x) {
  VecF sum = x[0];
  for (int i = 1; i < kTiles; ++i) sum = sum + x[i];
  constexpr int kNaNs = 0x81, kInfinities = 0x18;
  return _mm512_fpclass_ps_mask(sum.v, kNaNs | kInfinities) == 0;
}

// From 16 keys and kColumns rows, one key after the other, to 16 keys of each row.
template <int kColumns>
MHA_INLINE void turn_columns(VecF* x) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (int n = 1; n < kColumns; n *= 2) {
    VecF y[kColumns];
    for (int i = 0; i < kColumns / 2; ++i) {
      y[i].v = _mm512_permutex2var_ps(x[2 * i].v, even, x[2 * i + 1].v);
      y[kColumns / 2 + i].v = _mm512_permutex2var_ps(x[2 * i].v, odd, x[2 * i + 1].v);
    }
    for (int i = 0; i < kColumns; ++i) x[i] = y[i];
  }
}

// Weights of 32 keys of a row, none negative, as two planes of bf16: the first is cut off, the second rounded.
MHA_INLINE void store_planes(bf16* first, bf16* second, VecF low, VecF high) {
  auto put = [](bf16* to, __m512i a, __m512i b) MHA_INLINE_LAMBDA {
    _mm512_store_si512(to, _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(a, 16), b));
  };
  const __m512i top = _mm512_set1_epi32(int(0xFFFF0000)), half = _mm512_set1_epi32(0x8000);
  auto rest = [&](VecF x) MHA_INLINE_LAMBDA {
    const __m512 cut = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.v), top));
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_sub_ps(x.v, cut)), half);
  };
  put(first, _mm512_castps_si512(low.v), _mm512_castps_si512(high.v));
  put(second, rest(low), rest(high));
}

MHA_ISA_END
