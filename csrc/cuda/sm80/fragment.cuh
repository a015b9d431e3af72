// What is done to score tiles in the registers of mma accumulators: mask, bias, softcap, dropout.
//
// A warp's scores are s[kMt][kNt][4]: lane l, with g = l / 4 and t = l % 4, holds in s[m][n][2 * half + e] the score of
// row 16 * m + 8 * half + g and key 8 * n + 2 * t + e. Bit fragment_bit(m, n, half, e) of a word of bits speaks of it.
//
// This room includes prim, common.
#pragma once
#include "../common/launch.h"
#include "../common/sequence.cuh"
#include "../common/span.cuh"
#include "../prim/math.cuh"

namespace mha::cuda {

template <int kNt>
__device__ constexpr int fragment_bit(int m, int n, int half, int e) {
  return ((m * kNt + n) * 2 + half) * 2 + e;
}

// Where a warp's score tile is.
struct FragmentPlace {
  const Sequence* sequence;
  unsigned h;
  int row, key;            // of the tile's first element
  const RowRange* ranges;  // of the tile's rows
};

// The pairs that the mask shows. With kIntervalOnly, documents and the dense mask are not looked at.
template <int kMt, int kNt, bool kIntervalOnly>
__device__ inline uint32_t visible_bits(const Mask& mask, const FragmentPlace& at, unsigned lane) {
  static_assert(kMt * kNt * 4 <= 32);
  constexpr int kHalvesAtOnce = kIntervalOnly || kNt > 1 ? 2 : 1;  // who asks for so few keys is short of registers
  uint32_t bits = 0;
  int g = lane / 4, key = at.key + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < kMt; ++m)
#pragma unroll kHalvesAtOnce
    for (int half = 0; half < 2; ++half) {
      int i = 16 * m + 8 * half + g;
      RowRange r = at.ranges[i];
      uint32_t from = key - r.begin, length = r.end - r.begin;
#pragma unroll
      for (int n = 0; n < kNt; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          bool visible = from + 8 * n + e < length;
          if constexpr (!kIntervalOnly)
            visible = visible && visible_in_interval(mask, at.sequence->b, at.h, at.row + i, key + 8 * n + e);
          bits |= uint32_t(visible) << fragment_bit<kNt>(m, n, half, e);
        }
    }
  return bits;
}

template <int kMt, int kNt>
__device__ inline void hide(float (&s)[kMt][kNt][4], uint32_t visible, float value) {
#pragma unroll
  for (int m = 0; m < kMt; ++m)
#pragma unroll
    for (int n = 0; n < kNt; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!(visible >> fragment_bit<kNt>(m, n, e / 2, e % 2) & 1)) s[m][n][e] = value;
}

// Hides what lies outside the rows' intervals: the same as hide with visible_bits, for fewer instructions.
template <int kMt, int kNt>
__device__ inline void hide_outside(float (&s)[kMt][kNt][4], const FragmentPlace& at, unsigned lane) {
  const int key = at.key + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < kMt; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowRange r = at.ranges[16 * m + 8 * half + lane / 4];
      const uint32_t from = key - r.begin, length = r.end - r.begin;
#pragma unroll
      for (int n = 0; n < kNt; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (from + 8 * n + e >= length) s[m][n][2 * half + e] = -INFINITY;
    }
}

// Adds the NaN and Inf that TileSm80::take_specials took out of a value tile to the outputs o[kMt][kOt][4] (laid out as
// scores, with columns for keys) of those rows that see their key. A product with weight 0 would put them into every
// row.
template <int kMt, int kNt, int kOt>
__device__ inline void add_specials(float (&o)[kMt][kOt][4], uint32_t visible, const uint16_t* specials, int lane,
                                    int stride = kOt) {
#pragma unroll 1
  for (int j = 0; j < 8 * kNt; ++j) {
    // Which rows see key j is known to the lane of this row group that holds the key's scores.
    uint32_t rows = __shfl_sync(~0u, visible, (lane & ~3) | j % 8 / 2) >> fragment_bit<kNt>(0, j / 8, 0, j % 2);
#pragma unroll
    for (int n = 0; n < kOt; ++n) {
      const uint32_t bits = *reinterpret_cast<const volatile uint16_t*>(specials + j * stride + n) >> lane % 4 * 2;
      if (!__any_sync(~0u, bits)) continue;
#pragma unroll
      for (int m = 0; m < kMt; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          bool sees = rows >> fragment_bit<kNt>(m, 0, e / 2, 0) & 1;
          if (sees && bits >> e % 2 & 1) o[m][n][e] += INFINITY;
          if (sees && bits >> (8 + e % 2) & 1) o[m][n][e] -= INFINITY;
        }
    }
  }
}

// cap * tanh(x), absolute error about 1e-7 * cap.
__device__ inline float soft_cap(float x, float cap) {
  return cap * (1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(x * 2.8853900817779268f)));
}

template <class T, int kMt, int kNt, class Problem>
__device__ inline void add_bias(float (&s)[kMt][kNt][4], const Problem& p, const FragmentPlace& at, unsigned lane) {
  const T* base = static_cast<const T*>(p.bias.data) + bias_offset(p, p.bias, *at.sequence, at.h, 0, 0);
  const int Sq = at.sequence->Sq, Sk = at.sequence->Sk, g = lane / 4, key = at.key + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < kMt; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = at.row + 16 * m + 8 * half + g;
      if (row >= Sq) continue;
      const T* from = base + row * p.bias.stride[2];
#pragma unroll
      for (int n = 0; n < kNt; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int j = key + 8 * n + e;
          if (j < Sk) s[m][n][2 * half + e] = __fadd_rn(s[m][n][2 * half + e], float(from[j * p.bias.stride[3]]));
        }
    }
}

// Raw products q.k become scores: softcap(scale * s) + bias. Rounded after each step, as in backward: beside a huge
// bias nothing else would be left of the score.
template <class T, int kMt, int kNt, class Problem>
__device__ inline void to_scores(float (&s)[kMt][kNt][4], const Problem& p, const FragmentPlace& at, unsigned lane) {
#pragma unroll
  for (int m = 0; m < kMt; ++m)
#pragma unroll
    for (int n = 0; n < kNt; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[m][n][e] = p.cap == 0 ? __fmul_rn(s[m][n][e], p.scale_f32) : soft_cap(s[m][n][e] * p.softcap_scale, p.cap);
  if (p.bias.data && p.bias_dtype == DType::f32)
    add_bias<float>(s, p, at, lane);
  else if (p.bias.data)
    add_bias<T>(s, p, at, lane);
}

// The weights that dropout keeps. One Philox call decides four neighbouring keys of a row, which two lanes share: the
// even one makes the words of row g, the odd one those of row g + 8, and they trade.
template <int kMt, int kNt>
__device__ inline uint32_t kept_bits(const DropoutKey& key, uint32_t threshold, const FragmentPlace& at,
                                     unsigned lane) {
  uint32_t bits = 0;
  unsigned g = lane / 4, t = lane % 4, odd = t & 1;
#pragma unroll
  for (int m = 0; m < kMt; ++m)
#pragma unroll
    for (int n = 0; n < kNt; ++n) {
      Philox4 w = dropout_words(key, 0, 0, at.row + 16 * m + 8 * odd + g, at.key / 4 + 2 * n + t / 2);
      uint32_t low = uint32_t(w.word[0] >= threshold) | uint32_t(w.word[1] >= threshold) << 1;
      uint32_t high = uint32_t(w.word[2] >= threshold) | uint32_t(w.word[3] >= threshold) << 1;
      uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 1);
      uint32_t four = odd ? other | high << 2 : low | other << 2;  // row g's two keys, then row g + 8's
      bits |= four << fragment_bit<kNt>(m, n, 0, 0);
    }
  return bits;
}

}  // namespace mha::cuda
