// From products q.k to the scores that softmax sees, on a tile [key][row] with one row (query) per lane: scale, soft
// cap, bias, mask. Forward and backward share it.
#pragma once

#include "../product/gemm.h"
#include "../product/pack.h"
#include "../vector/math.h"
#include "mask.h"

MHA_ISA_BEGIN

MHA_INLINE int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// How raw products become scores. Scores stay in units of which `exponent` make one step of a power of two: weights are
// 2^((score - max) * exponent), and score * natural is the score as the user knows it. Without bias and soft cap a
// positive scale is folded into these two factors and the tile is left as it is. (Bias is never multiplied by log2(e):
// the smallest floats would overflow to -inf, which means hidden.)
template <class T>
struct ScoreRule {
  bool raw;  // nothing to do to the tile
  T exponent, natural;
  T scale, cap, inverse_cap;  // cap == 0: none

  // Products are of keys divided by key_scale.
  explicit ScoreRule(const AttentionProblem& p, double key_scale = 1) {
    raw = !p.bias.data && p.softcap == 0 && T(p.scale * key_scale) > 0;
    scale = T(p.scale * key_scale);
    natural = raw ? scale : T(1);
    exponent = T((raw ? p.scale * key_scale : 1.0) * kLog2e);
    cap = T(p.softcap);
    inverse_cap = cap == 0 ? T(0) : T(1 / p.softcap);
  }
};

// bias[j][r] for the keys first .. first + keys. Whole vectors of rows are written.
template <class T, class S>
inline void load_bias(T* bias, int64_t ld, const S* src, const int64_t* stride, const RowBlock& block, int64_t first,
                      int keys) {
  constexpr int L = Vec<T>::lanes;
  src += block.b * stride[0] + first * stride[3];
  int64_t offset[kMaxRows];
  bool same = true;
  for (int r = 0; r < block.rows; ++r) {
    offset[r] = block.offset(stride, r);
    same &= offset[r] == offset[0];
  }
  if (!same && stride[3] == 1) {
    transpose_rows(bias, ld, src, offset, block.rows, keys);
    return;
  }
  const int lanes = round_up(block.rows, L);
  for (int j = 0; j < keys; ++j, src += stride[3], bias += ld) {
    if (same) {
      T one[L];
      store(one, load_n(src + offset[0], 1));
      for (int r = 0; r < lanes; r += L) store(bias + r, set1(one[0]));
    } else {
      for (int r = 0; r < block.rows; ++r) store_n(bias + r, load_n(src + offset[r], 1), 1);
      for (int r = block.rows; r < lanes; ++r) bias[r] = T(0);
    }
  }
}

// The part of a bias, or of its gradient, that a tile meets, where it lies in rows of its own.
inline Ahead bias_ahead(const Tensor4& bias, DType type, const RowBlock& block, int64_t first, int keys) {
  if (!bias.data || bias.stride[3] != 1 || bias.stride[2] < keys || block.head[0] != block.head[block.rows - 1])
    return {};
  const int64_t size = int64_t(size_of(type)), at = block.b * bias.stride[0] + block.offset(bias.stride, 0) + first;
  return {element(bias.data, type, at), bias.stride[2] * size, keys * size, block.rows};
}

// What becomes of products before a bias: scale and soft cap. `unit`, a power of two: scores are multiplied by it.
template <class T>
struct CappedScores {
  Vec<T> scale, cap, inverse_cap;
  bool capped;

  explicit CappedScores(const ScoreRule<T>& rule, T unit = 1)
      : scale(set1(rule.cap != 0 ? rule.scale : rule.scale * unit)),
        cap(set1(rule.cap * unit)),
        inverse_cap(set1(rule.inverse_cap)),
        capped(rule.cap != 0) {}
  // slope: of the soft cap, where it is one.
  MHA_INLINE Vec<T> operator()(Vec<T> product, Vec<T>* slope = nullptr) const {
    const Vec<T> s = product * scale;
    if (!capped) return s;
    const Vec<T> y = tanh(s * inverse_cap);
    if (slope) *slope = set1(T(1)) - y * y;
    return y * cap;
  }
};

// Raw products to scores, in place; rule.raw is false. bias may be null; lanes is a multiple of the vector length.
template <class T>
inline void finish_scores(T* score, int64_t ld, const T* bias, int64_t ld_bias, const ScoreRule<T>& rule, int lanes,
                          int keys) {
  constexpr int L = Vec<T>::lanes;
  const CappedScores<T> capped(rule);
  for (int j = 0; j < keys; ++j, score += ld) {
    for (int r = 0; r < lanes; r += L) {
      Vec<T> s = capped(load(score + r));
      if (bias) s = s + load(bias + j * ld_bias + r);
      store(score + r, s);
    }
  }
}

// What belongs to key j times scale[j]; without scales, nothing.
template <class T>
inline void scale_keys(T* x, int64_t ld, const float* scale, int lanes, int keys) {
  constexpr int L = Vec<T>::lanes;
  if (!scale) return;
  for (int j = 0; j < keys; ++j, x += ld) {
    const Vec<T> s = set1(T(scale[j]));
    for (int r = 0; r < lanes; r += L) store(x + r, load(x + r) * s);
  }
}

// A row's softmax, once its maximum and sum are known.
template <class T>
struct FinishedRow {
  T inverse;        // 1 / the denominator, in units of exp(row_max * natural); 0 where that is 0
  T lse, lse_rest;  // the denominator's logarithm, and what rounding took from it
};

// row_max * natural is the greatest score as the user knows it, NaN passed over, so that only row_sum tells of NaN;
// sink: -inf for none.
template <class T>
inline FinishedRow<T> finish_row(T row_max, T row_sum, T natural, T sink) {
  constexpr T kInf = std::numeric_limits<T>::infinity();
  const bool empty = row_sum == 0;
  T top = empty ? -kInf : row_max, total = row_sum, share = T(1);
  if (sink != -kInf) {  // a NaN sink must show
    const T keys_top = top * natural;
    top = keys_top > sink ? keys_top : sink, natural = T(1);
    share = empty ? T(0) : std::exp(keys_top - top);
    total = row_sum * share + std::exp(sink - top);
  }
  const T log_total = std::log(total);
  FinishedRow<T> row{empty ? T(0) : share / total, -kInf, T(0)};
  if (total == 0) return row;
  row.lse = std::fma(top, natural, log_total);
  row.lse_rest = std::fma(top, natural, -row.lse) + log_total;
  return row;
}

// Replaces (not adds to) the scores of hidden pairs, whatever they hold.
template <class T>
inline void hide(T* score, int64_t ld, const TileMask<T>& mask, int lanes, int keys, T hidden) {
  constexpr int L = Vec<T>::lanes;
  for (int j = 0; j < keys; ++j, score += ld) {
    for (int r = 0; r < lanes; r += L) store(score + r, select(mask.visible(j, r), load(score + r), set1(hidden)));
  }
}

MHA_ISA_END
