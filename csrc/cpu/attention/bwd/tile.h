// One tile of attention_bwd between its matrix products: from the scores S = K Q^T and the products dP = V dO^T to the
// weights P and the score gradients dS. Keys run down, the queries of a block lie in lanes.
//
// This room includes csrc/cpu, vector, threads, tile, attention/fwd.
#pragma once

#include "../../tile/operands.h"
#include "../../tile/score.h"
#include "../../vector/math.h"
#include "../../vector/philox.h"

MHA_ISA_BEGIN

// What a block of queries carries from tile to tile, besides the operands of its products.
template <class T>
struct QueryBlock {
  RowBlock rows;
  T lse[kMaxRows];                    // +inf where a row sees nothing, so that its weights are 0
  T lse_rest[kMaxRows];               // what rounding took from lse
  T base[kMaxRows], above[kMaxRows];  // see RowExponent
  T delta[kMaxRows];                  // rowsum(dout * out) - dlse
  int few_begin;                      // the rows from here on were few in forward; see few_from
  bool finite;                        // query and dout hold neither NaN nor Inf
};

// The tiles of one thread. Pairs round P and dS to bf16, dS in two layouts.
template <class Unit>
struct TileScratch {
  using T = typename Product<Unit>::Acc;
  T *s, *dp;         // S, then P after dropout; dP, then dS without the scale
  T *bias, *factor;  // general_tile: bias or dweights, then the gradient of the bias; what dropout multiplies with
  Unit *p_rows, *ds_rows, *ds_lanes;
};

template <class Unit>
struct TileOperands {
  Broadcast<Unit> p, ds;  // A operands of dV and dK: key, then pairs of queries
  const Unit* ds_lanes;   // B operand of dQ
};

inline bool plain_scores(const AttentionBackward& p) {
  return !p.bias.data && !p.dweights.data && !p.dbias.data && p.softcap == 0 && !p.dropout.rng_state;
}

#ifdef MHA_HAS_BF16_DOT
// The operands of keys j and j + 1 (odd key numbers round up: the second may lie past the tile, and is 0 then).
template <int N>
MHA_INLINE void store_pairs(const TileScratch<Pairs<N>>& t, int j, int r, const VecF* weight, const VecF* ds) {
  constexpr int64_t plane = kLanesPlane<Pairs<N>>;
  VecF p_planes[2][N], ds_planes[2][N];
  for (int i = 0; i < 2; ++i) split<N>(weight[i], p_planes[i]), split<N>(ds[i], ds_planes[i]);
  for (int n = 0; n < N; ++n) {
    bf16* p_rows = &t.p_rows[n * plane].x[0] + j * kMaxRows + r;
    bf16* ds_rows = &t.ds_rows[n * plane].x[0] + j * kMaxRows + r;
    for (int i = 0; i < 2; ++i) {
      store(p_rows + i * kMaxRows, p_planes[i][n]);
      store(ds_rows + i * kMaxRows, ds_planes[i][n]);
    }
    store(t.ds_lanes + n * plane + j / 2 * kMaxRows + r, interleave_bf16(ds_planes[0][n], ds_planes[1][n]));
  }
}
#endif

template <class Unit>
MHA_INLINE TileOperands<Unit> operands_of(const TileScratch<Unit>& t) {
  if constexpr (kPairs<Unit>) {
    constexpr int64_t plane = kLanesPlane<Unit>;
    return {{t.p_rows, kMaxRows / 2, 1, plane}, {t.ds_rows, kMaxRows / 2, 1, plane}, t.ds_lanes};
  } else {
    return {{t.s, kMaxRows, 1}, {t.dp, kMaxRows, 1}, t.dp};
  }
}

// P and dS lie in the tiles s and dp.
template <class Unit>
inline TileOperands<Unit> tile_operands(const TileScratch<Unit>& t, int keys, int lanes) {
#ifdef MHA_HAS_BF16_DOT
  if constexpr (kPairs<Unit>) {
    for (int j = 0; j < keys; j += 2) {
      const int next = j + 1 < keys ? kMaxRows : 0;
      for (int r = 0; r < lanes; r += VecF::lanes) {
        const float *p = t.s + j * kMaxRows + r, *ds = t.dp + j * kMaxRows + r;
        const VecF zero = set1(0.0f), weight[2] = {load(p), next ? load(p + next) : zero};
        const VecF gradient[2] = {load(ds), next ? load(ds + next) : zero};
        store_pairs(t, j, r, weight, gradient);
      }
    }
  }
#endif
  (void)keys, (void)lanes;
  return operands_of(t);
}

// Weights from products S alone: P = exp(scale * S - lse) = 2^((S - base) * scale2 + above). In fp32 and wider base is
// near lse / scale, so that the difference comes first, as in forward: else both products with log2(e) would be rounded
// by the size of the scores.
template <class T>
inline void set_exponent(QueryBlock<T>& block, int r, const AttentionBackward& p) {
  const T scale = T(p.scale), lse = block.lse[r];
  T base = 0;
  if (accumulate_type(p.dtype) == p.dtype && scale != 0 && std::isfinite(lse / scale)) base = lse / scale;
  block.base[r] = base;
  block.above[r] = (std::fma(base, scale, -lse) - block.lse_rest[r]) * T(kLog2e);
}

template <int Degree, class T>
struct RowExponent {
  Vec<T> scale2, base, above;

  RowExponent(const QueryBlock<T>& block, int r, double scale)
      : scale2(set1(T(scale * kLog2e))), base(load(block.base + r)), above(load(block.above + r)) {}
  MHA_INLINE Vec<T> weight(Vec<T> s) const {
    if constexpr (Degree >= 5) s = s - base;  // of half types it is 0
    return exp2<Degree>(fma(s, scale2, above));
  }
};

// Nothing between S and the softmax but the scale: P = exp(scale * S - lse), dS = P * (dP - delta). What is visible has
// the same bits with a mask and without.
template <class Unit, int Degree, bool kMasked, class T>
inline TileOperands<Unit> plain_tile(const TileScratch<Unit>& t, const QueryBlock<T>& block, double scale,
                                     [[maybe_unused]] const TileMask<T>* mask, int keys) {
  constexpr int L = Vec<T>::lanes;
  const int lanes = round_up(block.rows.rows, L);
  for (int r = 0; r < lanes; r += L) {
    const RowExponent<Degree, T> exponent(block, r, scale);
    const Vec<T> delta = load(block.delta + r);
    auto step = [&](int j, Vec<T>* weight, Vec<T>* ds) {
      *weight = exponent.weight(load(t.s + j * kMaxRows + r));
      *ds = *weight * (load(t.dp + j * kMaxRows + r) - delta);
      if constexpr (kMasked) {
        const VecMask<T> seen = mask->visible(j, r);
        *weight = select(seen, *weight, set1(T(0))), *ds = select(seen, *ds, set1(T(0)));
      }
      if constexpr (kMasked || !kPairs<Unit>) {  // rows that are not finite are added one by one
        store(t.s + j * kMaxRows + r, *weight);
        store(t.dp + j * kMaxRows + r, *ds);
      }
    };
    if constexpr (kPairs<Unit>) {
#ifdef MHA_HAS_BF16_DOT
      for (int j = 0; j < keys; j += 2) {
        VecF weight[2] = {set1(0.0f), set1(0.0f)}, ds[2] = {set1(0.0f), set1(0.0f)};
        step(j, weight, ds);
        if (j + 1 < keys) step(j + 1, weight + 1, ds + 1);
        store_pairs(t, j, r, weight, ds);
      }
#endif
    } else {
      Vec<T> weight, ds;
      for (int j = 0; j < keys; ++j) step(j, &weight, &ds);
    }
  }
  return operands_of(t);
}

template <class T>
inline void load_tile(T* tile, const Tensor4& x, DType type, const RowBlock& block, int64_t first_key, int keys) {
  with_storage<T>(type, [&](auto* s) {
    load_bias(tile, kMaxRows, static_cast<decltype(s)>(x.data), x.stride, block, first_key, keys);
  });
}

template <class T>
inline void load_dropout(T* factor, const AttentionBackward& p, const RowBlock& block, int64_t first_key, int keys) {
  uint32_t head[kMaxRows] = {}, query[kMaxRows] = {};
  for (int r = 0; r < block.rows; ++r) {
    head[r] = uint32_t(block.head[r]);
    query[r] = uint32_t(block.query[r]);
  }
  dropout_multipliers(factor, kMaxRows, p.dropout, block.b, head, query, block.rows, first_key, keys);
}

// The sums of a relative bias's gradient are wide: rounding leaves something of a row's sum, which is 0, and slopes
// multiply it by the distance.
//
// sum[i - j] += tile[j][i] for the rows i, all of one head.
template <class T>
inline void add_diagonals(double* sum, const T* tile, int rows, int keys) {
  for (int j = 0; j < keys; ++j, --sum, tile += kMaxRows) {
    for (int r = 0; r < rows; ++r) sum[r] += double(tile[r]);
  }
}

// Adds such sums to x: those of some queries and keys of a head, from the first query and the last key on.
template <class T>
inline void store_diagonals(const Tensor4& x, const double* sum, int64_t b, int64_t h, int64_t first_query,
                            int64_t rows, int64_t first_key, int64_t keys) {
  const int64_t last_query = first_query + rows - 1, count = rows + keys - 1;
  T* to = static_cast<T*>(x.data) + b * x.stride[0] + h * x.stride[1] + first_key - last_query;
  for (int64_t n = 0; n < count; ++n) to[n] += T(sum[count - 1 - n]);
}

// Adds tile[j][r] to x, whose elements are of type T; those that meet through strides of 0 are summed in a fixed order.
template <class T>
inline void add_tile(const Tensor4& x, T* tile, const RowBlock& block, int64_t first_key, int keys) {
  constexpr int L = Vec<T>::lanes;
  const int lanes = round_up(block.rows, L);
  T* first = static_cast<T*>(x.data) + block.b * x.stride[0] + first_key * x.stride[3];
  if (x.stride[3] == 0) {  // sum over the keys
    for (int j = 1; j < keys; ++j) {
      for (int r = 0; r < lanes; r += L) store(tile + r, load(tile + r) + load(tile + j * kMaxRows + r));
    }
    keys = 1;
  }
  if (x.stride[2] == 0) {  // sum over the queries, all of one head
    T* to = first + block.offset(x.stride, 0);
    for (int j = 0; j < keys; ++j, to += x.stride[3]) {
      std::fill(tile + j * kMaxRows + block.rows, tile + j * kMaxRows + lanes, T(0));
      Vec<T> sum = set1(T(0));
      for (int r = 0; r < lanes; r += L) sum = sum + load(tile + j * kMaxRows + r);
      *to += reduce_add(sum);
    }
    return;
  }
  if (x.stride[2] == -1) {  // relative: sum over the diagonals
    double sum[kMaxRows + kMaxKeys] = {};
    add_diagonals(sum + keys - 1, tile, block.rows, keys);
    store_diagonals<T>(x, sum, block.b, block.head[0], block.query[0], block.rows, first_key, keys);
    return;
  }
  T rows[kMaxRows * kMaxKeys];
  int64_t offset[kMaxRows];
  for (int r = 0; r < block.rows; ++r) offset[r] = r * kMaxKeys;
  untranspose_rows(rows, offset, tile, int64_t(kMaxRows), block.rows, keys);
  for (int r = 0; r < block.rows; ++r) {
    T* to = first + block.offset(x.stride, r);
    const T* from = rows + r * kMaxKeys;
    if (x.stride[3] == 1) {
      int j = 0;
      for (; j + L <= keys; j += L) store(to + j, load(to + j) + load(from + j));
      if (j < keys) store_n(to + j, load_n(to + j, keys - j) + load_n(from + j, keys - j), keys - j);
    } else {
      for (int j = 0; j < keys; ++j) to[j * x.stride[3]] += from[j];
    }
  }
}

// What comes of a weight, P before dropout: P after it, and the gradients of a score after and before its soft cap.
template <class T>
struct ScoreGradients {
  Vec<T> weight, ds, dqk;

  // factor: what dropout multiplies with, or null.
  MHA_INLINE ScoreGradients(Vec<T> p, Vec<T> dp, Vec<T> delta, Vec<T> slope, const T* factor) : weight(p) {
    if (factor) {
      const Vec<T> f = load(factor);
      dp = dp * f, weight = p * f;
    }
    ds = p * (dp - delta), dqk = ds * slope;
  }
  MHA_INLINE void hide(VecMask<T> seen) {
    const Vec<T> zero = set1(T(0));
    weight = select(seen, weight, zero), ds = select(seen, ds, zero), dqk = select(seen, dqk, zero);
  }
};

// P of a score that is more than a product. The difference comes first: log2(e) times the smallest floats, a common
// bias, would be -inf.
template <class T>
MHA_INLINE Vec<T> exponent_of(Vec<T> score, Vec<T> lse, Vec<T> lse_rest) {
  return ((score - lse) - lse_rest) * set1(T(kLog2e));
}

// Every feature; mask is null when all is visible. Where a gradient of the bias is asked for, the tile bias holds it.
template <class Unit, int Degree, class T>
inline TileOperands<Unit> general_tile(const TileScratch<Unit>& t, const AttentionBackward& p,
                                       const QueryBlock<T>& block, const TileMask<T>* mask, int64_t first_key,
                                       int keys) {
  constexpr int L = Vec<T>::lanes;
  const RowBlock& rows = block.rows;
  const int lanes = round_up(rows.rows, L);
  if (p.dweights.data) {
    load_tile(t.bias, p.dweights, p.dtype, rows, first_key, keys);
    for (int j = 0; j < keys; ++j) {
      for (int r = 0; r < lanes; r += L) {
        T* dp = t.dp + j * kMaxRows + r;
        store(dp, load(dp) + load(t.bias + j * kMaxRows + r));
      }
    }
  }
  if (p.bias.data) load_tile(t.bias, p.bias, p.bias_dtype, rows, first_key, keys);
  if (p.dropout.rng_state) load_dropout(t.factor, p, rows, first_key, keys);
  const ScoreRule<T> rule(p);
  const CappedScores<T> capped(rule);
  for (int j = 0; j < keys; ++j) {
    for (int r = 0; r < lanes; r += L) {
      const int at = j * kMaxRows + r;
      Vec<T> weight, slope = set1(T(1));
      if (rule.raw) {
        weight = RowExponent<Degree, T>(block, r, p.scale).weight(load(t.s + at));
      } else {
        Vec<T> x = capped(load(t.s + at), &slope);
        if (p.bias.data) x = x + load(t.bias + at);
        weight = exp2<Degree>(exponent_of(x, load(block.lse + r), load(block.lse_rest + r)));
      }
      ScoreGradients<T> g(weight, load(t.dp + at), load(block.delta + r), slope,
                          p.dropout.rng_state ? t.factor + at : nullptr);
      if (mask) g.hide(mask->visible(j, r));
      if (p.dbias.data) store(t.bias + at, g.ds);
      store(t.s + at, g.weight);
      store(t.dp + at, g.dqk);
    }
  }
  return tile_operands(t, keys, lanes);
}

MHA_ISA_END
