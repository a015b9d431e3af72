// What attention's backward does to tiles of scores in the registers of mma accumulators: from q.k and dout.v to the
// weights and the gradients of the scores.
//
// Fragments are as in fragment.cuh; with kTransposed they hold S^T: keys down, queries across.
#pragma once
#include "../common/attention_bwd_launch.h"
#include "../common/exact_sum.cuh"
#include "../common/tile.cuh"
#include "../prim/mma.cuh"
#include "fragment.cuh"

namespace mha::cuda {

// Where a warp's score tile is, and the numbers of its rows.
struct GradientPlace {
  const Sequence* sequence;
  unsigned h;
  int row, key;  // of the tile's first element
  const float *negative_lse, *negative_rest, *negative_delta;
  const RowRange* ranges;
};

// Brings rows [first, first + kRows) of a matrix into a tile.
template <class Tile, int kRows, class T>
__device__ inline void load_tile(const Matrix<T>& m, int first, bool aligned, uint32_t tile, unsigned thread) {
  typename Tile::template Loader<kRows>(m, first, thread).load(aligned, tile, m.rows - first);
}

template <bool kTransposed>
__device__ inline int fragment_row(int m, int n, int half, int e, unsigned lane) {
  return kTransposed ? 8 * n + lane % 4 * 2 + e : 16 * m + 8 * half + lane / 4;
}

template <bool kTransposed>
__device__ inline int fragment_key(int m, int n, int half, int e, unsigned lane) {
  return fragment_row<!kTransposed>(m, n, half, e, lane);
}

// Calls f(m, n, half, e) for each of a fragment's elements.
template <int kMt, int kNt, class F>
__device__ inline void for_fragment(F f) {
#pragma unroll
  for (int m = 0; m < kMt; ++m)
#pragma unroll
    for (int n = 0; n < kNt; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 2; ++e) f(m, n, half, e);
}

template <int kMt, int kNt, bool kTransposed, bool kIntervalOnly>
__device__ inline uint32_t visible_pairs(const Mask& mask, const GradientPlace& at, unsigned lane) {
  static_assert(kMt * kNt * 4 <= 32);
  uint32_t bits = 0;
  for_fragment<kMt, kNt>([&](int m, int n, int half, int e) {
    const int i = fragment_row<kTransposed>(m, n, half, e, lane),
              key = at.key + fragment_key<kTransposed>(m, n, half, e, lane);
    const RowRange r = at.ranges[i];
    bool visible = uint32_t(key - r.begin) < uint32_t(r.end - r.begin);
    if constexpr (!kIntervalOnly) visible = visible && visible_in_interval(mask, at.sequence->b, at.h, at.row + i, key);
    bits |= uint32_t(visible) << fragment_bit<kNt>(m, n, half, e);
  });
  return bits;
}

// The weights that dropout keeps, keys down. Four neighbouring keys of a query, which one Philox call decides, belong
// to the lanes g = 4 * i + 0..3: lane c of these works out the words of row half c / 2, query c % 2, and they trade.
template <int kMt, int kNt>
__device__ inline uint32_t kept_bits_transposed(const DropoutKey& key, uint32_t threshold, const GradientPlace& at,
                                                unsigned lane) {
  const unsigned g = lane / 4, t = lane % 4, c = g % 4;
  uint32_t own = 0;
#pragma unroll
  for (int m = 0; m < kMt; ++m)
#pragma unroll
    for (int n = 0; n < kNt; ++n) {
      Philox4 w = dropout_words(key, 0, 0, at.row + 8 * n + 2 * t + c % 2, at.key / 4 + 4 * m + 2 * (c / 2) + g / 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) own |= uint32_t(w.word[i] >= threshold) << (4 * (m * kNt + n) + i);
    }
  uint32_t bits = 0;
#pragma unroll
  for (int x = 0; x < 4; ++x) bits |= (__shfl_xor_sync(~0u, own, 4 * x) >> c & 0x11111111u) << (c ^ x);
  return bits;
}

// A number of each of a lane's rows.
template <bool kTransposed, int kMt, int kNt>
constexpr int kRowNumbers = 2 * (kTransposed ? kNt : kMt);

template <bool kTransposed>
__device__ constexpr int row_number(int m, int n, int half, int e) {
  return kTransposed ? 2 * n + e : 2 * m + half;
}

template <bool kTransposed, int kMt, int kNt>
__device__ inline void row_numbers(float (&to)[kRowNumbers<kTransposed, kMt, kNt>], const float* from, unsigned lane) {
#pragma unroll
  for (int i = 0; i < kRowNumbers<kTransposed, kMt, kNt>; i += 2) {
    if constexpr (kTransposed) {
      const float2 two = *reinterpret_cast<const float2*>(from + 4 * i + lane % 4 * 2);
      to[i] = two.x;
      to[i + 1] = two.y;
    } else {
      to[i] = from[8 * i + lane / 4];
      to[i + 1] = from[8 * i + 8 + lane / 4];
    }
  }
}

// What to_gradients wants dp's accumulator to start from.
template <bool kTransposed, bool kGeneral, int kMt, int kNt>
__device__ inline void start_gradients(float (&dp)[kMt][kNt][4], const GradientPlace& at, unsigned lane) {
  float start[kRowNumbers<kTransposed, kMt, kNt>] = {};
  if constexpr (!kGeneral) row_numbers<kTransposed, kMt, kNt>(start, at.negative_delta, lane);
  for_fragment<kMt, kNt>(
      [&](int m, int n, int half, int e) { dp[m][n][2 * half + e] = start[row_number<kTransposed>(m, n, half, e)]; });
}

// q.k becomes the weights, in plain kernels.
template <bool kTransposed, int kMt, int kNt>
__device__ inline void to_weights(float (&s)[kMt][kNt][4], const AttentionBackwardLaunch& p, const GradientPlace& at,
                                  unsigned lane) {
  float negative_lse[kRowNumbers<kTransposed, kMt, kNt>];
  row_numbers<kTransposed, kMt, kNt>(negative_lse, at.negative_lse, lane);
  for_fragment<kMt, kNt>([&](int m, int n, int half, int e) {
    float& x = s[m][n][2 * half + e];
    x = exp2_approx(fmaf(x, p.scale_log2, negative_lse[row_number<kTransposed>(m, n, half, e)]));
  });
}

// One warp leaves accumulators in shared memory, another reads them: 16 bytes of each lane lie side by side.
template <int kMt, int kNt>
__device__ inline void store_accumulators(uint32_t lane_address, const float (&x)[kMt][kNt][4]) {
  unroll<kMt * kNt>([&](auto i) {
    const auto& four = x[i / kNt][i % kNt];
    store_shared_16(lane_address + i * 512, make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]),
                                                       __float_as_uint(four[2]), __float_as_uint(four[3])));
  });
}

template <int kMt, int kNt>
__device__ inline void load_accumulators(float (&x)[kMt][kNt][4], uint32_t lane_address) {
  unroll<kMt * kNt>([&](auto i) {
    auto& four = x[i / kNt][i % kNt];
    const uint4 v = load_shared_16(lane_address + i * 512);
    four[0] = __uint_as_float(v.x), four[1] = __uint_as_float(v.y);
    four[2] = __uint_as_float(v.z), four[3] = __uint_as_float(v.w);
  });
}

// s: q.k becomes the weights, after dropout. dp: dout.v (with !kGeneral, less delta) becomes the gradient of q.k, but
// for the factor scale (or, with kOfBias, the gradient of the bias). Both are 0 for pairs that `visible` hides (looked
// at only if `hides`).
template <class T, bool kTransposed, bool kGeneral, bool kOfBias, int kMt, int kNt>
__device__ inline void to_gradients(float (&s)[kMt][kNt][4], float (&dp)[kMt][kNt][4], const AttentionBackwardLaunch& p,
                                    const GradientPlace& at, bool hides, uint32_t visible, unsigned lane) {
  float bias[kGeneral ? kMt : 1][kGeneral ? kNt : 1][4];
  uint32_t kept = ~0u;
  if constexpr (kGeneral) {
    auto read = [&](const Tensor4& t, bool f32, int64_t start, auto use) {
      for_fragment<kMt, kNt>([&](int m, int n, int half, int e) {
        if (!(visible >> fragment_bit<kNt>(m, n, half, e) & 1)) return;
        const int64_t i = at.row + fragment_row<kTransposed>(m, n, half, e, lane),
                      j = at.key + fragment_key<kTransposed>(m, n, half, e, lane);
        const int64_t from = start + i * t.stride[2] + j * t.stride[3];
        use(m, n, 2 * half + e,
            f32 ? static_cast<const float*>(t.data)[from] : float(static_cast<const T*>(t.data)[from]));
      });
    };
    for_fragment<kMt, kNt>([&](int m, int n, int half, int e) { bias[m][n][2 * half + e] = 0; });
    if (p.bias.data) {
      const int64_t start = bias_offset(p, p.bias, *at.sequence, at.h, 0, 0);
      auto use = [&](int m, int n, int e, float x) { bias[m][n][e] = x; };
      if (p.bias_dtype == DType::f32)
        read(p.bias, true, start, use);
      else
        read(p.bias, false, start, use);
    }
    if (p.dweights.data)
      read(p.dweights, false, at.sequence->b * p.dweights.stride[0] + at.h * p.dweights.stride[1],
           [&](int m, int n, int e, float x) { dp[m][n][e] += x; });
    if (p.dropout.rng_state) {
      const DropoutKey key = dropout_key(p.dropout, uint32_t(at.sequence->b), uint32_t(at.h));
      if constexpr (kTransposed)
        kept = kept_bits_transposed<kMt, kNt>(key, p.threshold, at, lane);
      else
        kept = kept_bits<kMt, kNt>(key, p.threshold, {at.sequence, at.h, at.row, at.key, at.ranges}, lane);
    }
  }
  float negative_lse[kRowNumbers<kTransposed, kMt, kNt>], negative_delta[kRowNumbers<kTransposed, kMt, kNt>];
  row_numbers<kTransposed, kMt, kNt>(negative_lse, at.negative_lse, lane);
  float negative_rest[kRowNumbers<kTransposed, kMt, kNt>];
  if constexpr (kGeneral) row_numbers<kTransposed, kMt, kNt>(negative_delta, at.negative_delta, lane);
  if constexpr (kGeneral) row_numbers<kTransposed, kMt, kNt>(negative_rest, at.negative_rest, lane);
  for_fragment<kMt, kNt>([&](int m, int n, int half, int e) {
    const int i = row_number<kTransposed>(m, n, half, e);
    float &x = s[m][n][2 * half + e], &g = dp[m][n][2 * half + e];
    if constexpr (!kGeneral) {
      x = exp2_approx(fmaf(x, p.scale_log2, negative_lse[i]));
      g *= x;
    } else {
      float derivative = 1;
      if (p.cap == 0) {
        x = __fmul_rn(x, p.scale_f32);
      } else {
        const float t = soft_cap(x * p.softcap_scale, 1);
        x = __fmul_rn(p.cap, t);
        derivative = kOfBias ? 1 : 1 - t * t;
      }
      // Rounded as forward rounds it, since a huge bias leaves nothing else of the score.
      x = exp2_approx(to_power_of_two(__fadd_rn(x, bias[m][n][2 * half + e]) + negative_lse[i] + negative_rest[i]));
      const float factor = kept >> fragment_bit<kNt>(m, n, half, e) & 1 ? p.keep_scale : 0;
      g = x * (g * factor + negative_delta[i]) * derivative;
      x *= factor;
    }
  });
  if (!hides) return;
  asm volatile("" : "+r"(visible));  // keeps what follows a branch, which most tiles don't take
  for_fragment<kMt, kNt>([&](int m, int n, int half, int e) {
    if (!(visible >> fragment_bit<kNt>(m, n, half, e) & 1)) s[m][n][2 * half + e] = dp[m][n][2 * half + e] = 0;
  });
}

// Weights, gradients or both, keys down, become 0 outside the rows' intervals: as to_gradients does with visible_pairs,
// for fewer instructions and registers.
template <int kMt, int kNt, class... Same>
__device__ inline void hide_outside_transposed(const GradientPlace& at, unsigned lane, float (&s)[kMt][kNt][4],
                                               Same&... others) {
  const int first = at.key + int(lane / 4);
#pragma unroll
  for (int n = 0; n < kNt; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const RowRange r = at.ranges[8 * n + lane % 4 * 2 + e];
      const uint32_t from = first - r.begin, length = r.end - r.begin;
#pragma unroll
      for (int i = 0; i < 2 * kMt; ++i)
        if (from + 8 * i >= length) s[i / 2][n][i % 2 * 2 + e] = 0, (..., (others[i / 2][n][i % 2 * 2 + e] = 0));
    }
}

// Two neighbouring tiles of an accumulator, rounded, as operand A of the next product.
template <class T, int kNt>
__device__ inline void pack_operand(uint32_t (&a)[4], const float (&x)[kNt][4], int n) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pack2<T>(x[n + i / 2][i % 2 * 2], x[n + i / 2][i % 2 * 2 + 1]);
}

// The lane addresses of both products below are those that Tile::lane_b gives, so that a tile that serves several
// purposes needs one only.

// Operand A of 16 rows from the address that lane_b gives, which then serves for both operands: the second and the
// third tile change places.
template <class Tile, int kStep, int kRow>
__device__ inline void load_operand_a(uint32_t (&r)[4], uint32_t step_0) {
  uint32_t tile[4];
  load_fragment<Tile, kStep, kRow>(tile, step_0);
  r[0] = tile[0], r[1] = tile[2], r[2] = tile[1], r[3] = tile[3];
}

// c += A B^T with the rows of both along kHead: A's fragments come from registers (or, kFromShared, from the rows of
// a_lane, kRowA on), B are 8 * kNt rows of a tile, from kRowB on.
template <class T, class Tile, int kHead, bool kFromShared, int kRowA = 0, int kRowB = 0, int kMt, int kNt>
__device__ inline void multiply_rows(float (&c)[kMt][kNt][4],
                                     const uint32_t (&held)[kMt][kFromShared ? 1 : kHead / 16][4], uint32_t a_lane,
                                     uint32_t b_lane) {
  unroll<kHead / 16>([&](auto d) {
    uint32_t a[kMt][4];
    unroll<kMt>([&](auto m) {
      if constexpr (kFromShared)
        load_operand_a<Tile, d, kRowA + 16 * m>(a[m], a_lane);
      else
        for (int i = 0; i < 4; ++i) a[m][i] = held[m][d][i];
    });
    unroll<kNt / 2>([&](auto n) {
      uint32_t b[4];
      load_fragment<Tile, d, kRowB + 16 * n>(b, b_lane);
#pragma unroll
      for (int m = 0; m < kMt; ++m) {
        mma_16x8x16<T>(c[m][2 * n], a[m], b[0], b[1]);
        mma_16x8x16<T>(c[m][2 * n + 1], a[m], b[2], b[3]);
      }
    });
  });
}

// c += A B for B of 16 rows of a tile, from kRow on, kOt / 2 of its 16-column steps.
template <class T, class Tile, int kRow = 0, int kMt, int kOt>
__device__ inline void multiply_columns(float (&c)[kMt][kOt][4], const uint32_t (&a)[kMt][4], uint32_t b_lane) {
  unroll<kOt / 2>([&](auto d) {
    uint32_t b[4];
    load_fragment_transposed<Tile, d, kRow>(b, b_lane);
#pragma unroll
    for (int m = 0; m < kMt; ++m) {
      mma_16x8x16<T>(c[m][2 * d], a[m], b[0], b[2]);
      mma_16x8x16<T>(c[m][2 * d + 1], a[m], b[1], b[3]);
    }
  });
}

// A warp's sums * factor, rounded, to rows [first, first + 16 * kMt) of a matrix, through the warp's own part of shared
// memory. Columns from `column` on.
template <class T, class Tile, int kMt, int kOt>
__device__ inline void store_rows(const float (&c)[kMt][kOt][4], float factor, const Matrix<T>& m, int first,
                                  int column, bool aligned, uint32_t staging, unsigned lane) {
#pragma unroll
  for (int i = 0; i < kMt; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kOt; ++n)
        store_shared_4(staging + Tile::offset(16 * i + 8 * half + lane / 4, n) + lane % 4 * 4,
                       pack2<T>(c[i][n][2 * half] * factor, c[i][n][2 * half + 1] * factor));
  __syncwarp();
#pragma unroll 2
  for (int i = lane; i < 16 * kMt * kOt; i += 32) {
    const int r = i / kOt, chunk = i % kOt, row = first + r, left = min(8, m.columns - column - chunk * 8);
    if (row >= m.rows) break;
    T* to = const_cast<T*>(m.data) + row * m.stride + column + chunk * 8;
    const uint4 v = load_shared_16(staging + Tile::offset(r, chunk));
    if (left == 8 && aligned) {
      store_global_16(to, v);
    } else {
      const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (j < left) reinterpret_cast<uint16_t*>(to)[j] = uint16_t(word[j / 2] >> j % 2 * 16);
    }
  }
  __syncwarp();
}

}  // namespace mha::cuda
