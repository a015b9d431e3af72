// Between the products of attention backward on AMX tiles: from 32 x 32 scores S and products dP, keys down, to weights
// P and score gradients dS as operands of the products that follow.
#pragma once

#include "../bwd/tile.h"
#include "exp2.h"
#include "products.h"

MHA_ISA_BEGIN

// Queries of a run of 32, where they lie in the lanes of the dS that dQ's product takes: dS is interleaved within
// quarters of a vector. Column `column` of the half's tile.
MHA_INLINE int query_of_column(int half, int column) { return column / 4 * 8 + half * 4 + column % 4; }

// What the queries of a run bring along.
struct RowStatistics {
  VecF minus_lse2[2];
  const float *lse, *lse_rest, *delta;
  RowStatistics(const QueryBlock<float>& block, int first)
      : lse(block.lse + first), lse_rest(block.lse_rest + first), delta(block.delta + first) {
    const VecF minus_log2e = set1(float(-kLog2e));
    for (int i = 0; i < 2; ++i) {
      const int r = first + 16 * i;
      minus_lse2[i] = fma(load(block.lse + r), minus_log2e, load(block.lse_rest + r) * minus_log2e);
    }
  }
};

// S and dP - delta of 32 keys and 32 queries, made in 16 parts while something else is computed: tiles and vectors work
// side by side where their instructions lie close together. Four groups of four parts: S and dP of 16 queries, then of
// the other 16. Two groups take turns with the tiles of sums, so that one is stored while the next is multiplied.
struct ScoreProducts {
  const ProductSteps *s_steps, *dp_steps;
  const HalfTile *k, *v, *q, *dout;  // A operands, B operands
  const float* minus_delta;          // of the 32 queries
  SumTile *s, *dp;                   // four tiles, by rows

  template <int kGroup>
  MHA_INLINE void part(int i) const {
    constexpr bool kScores = kGroup % 2 == 0;
    constexpr int kSum = kScores ? 0 : 2, kB = kScores ? 6 : 7, kHalf = kGroup / 2;
    if (i == 0) {
      if constexpr (kScores) {
        amx_zero<kSum>(), amx_zero<kSum + 1>();
      } else {
        amx_load<kSum>(minus_delta + 16 * kHalf, 0), amx_load<kSum + 1>(minus_delta + 16 * kHalf, 0);
      }
    }
    const ProductSteps& steps = kScores ? *s_steps : *dp_steps;
    const HalfTile *a = kScores ? k : v, *b = (kScores ? q : dout) + kHalf;
    for (int n = (steps.count * i + 3) / 4; n < (steps.count * (i + 1) + 3) / 4; ++n) {
      load_operand<kB, Pass::by>(b + steps.b[n]);
      load_operand<4, Pass::stays>(a + steps.a[n]);
      amx_dot<kSum, 4, kB>();
      load_operand<5, Pass::stays>(a + steps.a[n] + 1);
      amx_dot<kSum + 1, 5, kB>();
    }
    if constexpr (kGroup > 0) {
      if (i < 2) store_half<kGroup - 1>(i);
    }
    if (kGroup == 3 && i == 3) store_half<3>(0), store_half<3>(1);
  }
  void all() const {
    repeat<4>([&](int i) { part<0>(i); });
    repeat<4>([&](int i) { part<1>(i); });
    repeat<4>([&](int i) { part<2>(i); });
    repeat<4>([&](int i) { part<3>(i); });
  }

 private:
  template <int kGroup>
  MHA_INLINE void store_half(int i) const {
    constexpr int kSum = kGroup % 2 == 0 ? 0 : 2;
    SumTile* to = (kGroup % 2 == 0 ? s : dp) + kGroup / 2;
    i == 0 ? amx_store<kSum>(to, 64) : amx_store<kSum + 1>(to + 2, 64);
  }
};

// Operands of 32 keys x 32 queries, for each plane.
template <int N>
struct WeightTiles {
  HalfTile *p, *ds, *ds_lanes;  // A of dV and dK: by halves of the keys; B of dQ: by halves of the queries
  int64_t rows_plane, lanes_plane;
};

// A mask's part for these keys and queries; null: all are visible.
struct RunMask {
  const TileMask<float>* mask = nullptr;
  int first_key = 0, first_row = 0;
  VecMask<float> visible(int j, int r) const { return mask->visible(first_key + j, first_row + r); }
  bool visible_pair(int j, int r) const { return !mask || mask->visible_pair(first_key + j, first_row + r); }
};

// Two rows of 32 numbers, as planes. (Unlike split, this makes NaN of what is infinite: nothing here is, unless
// gradients come out infinite or NaN anyway.)
template <int N>
MHA_INLINE void round_rows(const VecF (*x)[2], Line (*row)[N]) {
  for (int i = 0; i < 2; ++i) {
    VecF low = x[i][0], high = x[i][1];
    if constexpr (N == 2) {
      auto top = [](VecF& rest) MHA_INLINE_LAMBDA {
        const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(rest.v), _mm512_set1_epi32(0x8000));
        const VecF first{_mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(int(0xFFFF0000u))))};
        rest = rest - first;
        return first;
      };
      const VecF first_low = top(low), first_high = top(high);
      row[i][0].v = __m512i(_mm512_cvtne2ps_pbh(first_high.v, first_low.v));
    }
    row[i][N - 1].v = __m512i(_mm512_cvtne2ps_pbh(high.v, low.v));
  }
}

// P = exp(scale * S - lse), dS = P * (dP - delta), where dp holds the difference.
template <int N, bool kMasked>
struct PlainPairs {
  const RunMask& mask;
  const VecF scale2, minus_lse2[2];

  PlainPairs(const AttentionBackward& p, const RowStatistics& rows, const RunMask& visible)
      : mask(visible), scale2(set1(float(p.scale * kLog2e))), minus_lse2{rows.minus_lse2[0], rows.minus_lse2[1]} {}
  // Of key j and half q of the queries.
  MHA_INLINE void operator()(int j, int q, VecF s, VecF dp, VecF* weight, VecF* gradient) const {
    VecF w = exp2_for_planes<N>(fma(s, scale2, minus_lse2[q]));
    if constexpr (kMasked) {
      const VecMask<float> seen = mask.visible(j, 16 * q);
      w.v = _mm512_maskz_mov_ps(seen.m, w.v);
      gradient->v = _mm512_maskz_mul_ps(seen.m, w.v, dp.v);
    } else {
      *gradient = w * dp;
    }
    *weight = w;
  }
};

// What a run of keys and one of queries have besides, [kRun][kMaxRows]; null: nothing.
struct Modifiers {
  float *bias, *factor;  // the bias, and afterwards its gradient; what dropout multiplies with
  float* dweights;       // what joins dP
};

// The same with dropout, where dp holds dP, with gradients of the weights, and, but for kRaw, where a soft cap or a
// bias lies between S and the softmax. P has more digits then, as its errors may be summed up in the gradient of a
// bias. (Everything is held by value: what lies in memory would be read again after each store.)
template <int N, bool kRaw>
struct ModifiedPairs {
  const TileMask<float>* const mask;
  const int first_key, first_row;
  float* const bias;
  const float *const factor, *const dweights, *const lse, *const lse_rest, *const delta;
  const bool gradient_of_bias;
  const VecF scale2, minus_lse2[2];
  const CappedScores<float> capped;

  ModifiedPairs(const AttentionBackward& p, const RowStatistics& rows, const RunMask& visible, const Modifiers& m)
      : mask(visible.mask),
        first_key(visible.first_key),
        first_row(visible.first_row),
        bias(m.bias),
        factor(m.factor),
        dweights(m.dweights),
        lse(rows.lse),
        lse_rest(rows.lse_rest),
        delta(rows.delta),
        gradient_of_bias(p.dbias.data != nullptr),
        scale2(set1(float(p.scale * kLog2e))),
        minus_lse2{rows.minus_lse2[0], rows.minus_lse2[1]},
        capped(ScoreRule<float>(p)) {}
  MHA_INLINE void operator()(int j, int q, VecF s, VecF dp, VecF* weight, VecF* gradient) const {
    const int at = j * kMaxRows + 16 * q;
    if (dweights) dp = dp + load(dweights + at);
    VecF w, slope = set1(1.0f);
    if constexpr (kRaw) {
      w = exp2_for_planes<N>(fma(s, scale2, minus_lse2[q]));
    } else {
      VecF x = capped(s, &slope);
      if (bias) x = x + load(bias + at);
      w = exp2_for_planes<2>(exponent_of(x, load(lse + 16 * q), load(lse_rest + 16 * q)));
    }
    ScoreGradients<float> g(w, dp, factor ? load(delta + 16 * q) : set1(0.0f), slope, factor ? factor + at : nullptr);
    if (mask) g.hide(mask->visible(first_key + j, first_row + 16 * q));
    if constexpr (!kRaw) {
      if (gradient_of_bias) store(bias + at, g.ds);
    }
    *weight = g.weight, *gradient = g.dqk;
  }
};

// P and dS by pairs(key, half of the queries, S, dP, &P, &dS), for a quarter of the keys, two at a time; before each
// two, beside(i) does something else.
template <int N, class Pairs, class F>
MHA_INLINE void weights(const SumTile* s, const SumTile* dp, const Pairs& pairs, const WeightTiles<N>& to, int quarter,
                        F beside) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int j = quarter * 8 + 2 * i;
    beside(i);
    const int half = j / 16, at = j % 16;
    VecF weight[2][2], gradient[2][2];
    for (int key = 0; key < 2; ++key) {
      for (int q = 0; q < 2; ++q) {
        pairs(j + key, q, load(s[2 * half + q].x[at + key]), load(dp[2 * half + q].x[at + key]), &weight[key][q],
              &gradient[key][q]);
      }
    }
    Line p[2][N], ds[2][N];
    round_rows<N>(weight, p);
    round_rows<N>(gradient, ds);
    for (int n = 0; n < N; ++n) {
      for (int key = 0; key < 2; ++key) {
        _mm512_store_si512(to.p[n * to.rows_plane + half].x[at + key], p[key][n].v);
        _mm512_store_si512(to.ds[n * to.rows_plane + half].x[at + key], ds[key][n].v);
      }
      HalfTile* lanes = to.ds_lanes + n * to.lanes_plane;
      _mm512_store_si512(lanes[0].x[j / 2], _mm512_unpacklo_epi16(ds[0][n].v, ds[1][n].v));
      _mm512_store_si512(lanes[1].x[j / 2], _mm512_unpackhi_epi16(ds[0][n].v, ds[1][n].v));
    }
  }
}

MHA_ISA_END
