// What a block of queries is to attention forward, whichever way its products are made (block.h, and
// few.h for few rows). Rows lie in vector lanes: a running maximum and sum for each, and from products to
// weights everything runs down the columns of a tile [key][row].
#pragma once

#include "../../tile/mask.h"
#include "../../tile/score.h"
#include "../../tile/stored_head.h"
#include "../../vector/philox.h"
#include "space.h"

MHA_ISA_BEGIN

// Degree: of the exp2 polynomial.
template <class Unit, int Degree>
struct ForwardRows {
  using T = typename Product<Unit>::Acc;
  using V = Vec<T>;
  static constexpr int L = V::lanes;
  static constexpr T kInf = std::numeric_limits<T>::infinity();

  const AttentionForward& p;
  ScoreRule<T> rule;
  ForwardScratch<Unit> s;
  StoredHead kv;  // of the block's batch and key/value head
  int lanes = 0;  // rows rounded up to whole vectors
  Ahead next_queries, own_out;
  int ahead_row = kMaxRows, ahead_step = 0;

  ForwardRows(const AttentionForward& problem, const ForwardPlan& plan, void* scratch)
      : p(problem), rule(problem), s(problem, plan, scratch) {}

  // Returns whether some row sees some of the keys first_key .. last_key, which visit_keys is to visit then.
  bool set_block(const ForwardPlan::Place& at, int64_t first_key, int64_t last_key) {
    set_rows(s.block, p.mask, at.b, at.first_head, at.first, at.rows, p.Sq, p.Sk);
    lanes = round_up(at.rows, L);
    kv = StoredHead(p, at.b, at.first_head / (p.H / p.Hk));
    if (p.store.quantised) rule = ScoreRule<T>(p, kv.k_scale);
    return max64(s.block->any_begin, first_key) < min64(s.block->any_end, last_key);
  }

  Ahead rows_in_memory(const Tensor4& x, int64_t b, int64_t head, int64_t row, int64_t cols) const {
    const int64_t size = int64_t(size_of(p.dtype)), first = b * x.stride[0] + head * x.stride[1] + row * x.stride[2];
    return {element(x.data, p.dtype, first), x.stride[2] * size, cols * size};
  }

  // What load_rows reads for the next block, and what store_rows writes for this one, is fetched during this one's
  // softmaxes, a few rows at a time, as memory is idle then. A list is of one head.
  void look_ahead(const ForwardPlan::Place& next) {
    next_queries = rows_in_memory(p.q, next.b, next.first_head, next.first, p.D);
    own_out = rows_in_memory(p.out, s.block->b, s.block->head[0], s.block->query[0], p.Dv);
    own_out.to_write = true;
    next_queries.rows = next.rows, own_out.rows = s.block->rows;
    const int64_t tiles = (s.block->any_end - s.block->any_begin + kMaxKeys - 1) / kMaxKeys;
    ahead_row = 0;
    ahead_step = int((kMaxRows - 1) / max64(1, tiles * (lanes / L)) + 1);
  }
  void fetch_ahead() {
    for (int n = 0; n < ahead_step && ahead_row < kMaxRows; ++n, ++ahead_row) {
      if (ahead_row < next_queries.rows) next_queries.fetch(ahead_row);
      if (ahead_row < own_out.rows) own_out.fetch(ahead_row);
    }
  }

  void row_offsets(int64_t* offset, const int64_t* stride) const {
    for (int r = 0; r < s.block->rows; ++r) offset[r] = s.block->b * stride[0] + s.block->offset(stride, r);
  }

  // To the state before the first key.
  void start_rows() {
    for (int r = 0; r < lanes; ++r) s.row_max[r] = -kInf, s.row_sum[r] = T(0);
    if (!p.dropout.rng_state) return;
    for (int r = 0; r < kMaxRows; ++r) {
      const int i = std::min(r, s.block->rows - 1);
      s.head[r] = uint32_t(s.block->head[i]);
      s.query[r] = uint32_t(s.block->query[i]);
    }
  }

  // Calls visit(first key, keys, whether it is the first) for the tiles of first_key .. last_key that some row may see;
  // it returns whether some does. Returns whether any did.
  template <class F>
  bool for_each_tile(int64_t first_key, int64_t last_key, F visit) {
    // Tiles of a packed head are whole units; a key that this may add is hidden like any other.
    const int64_t unit = s.whole_head ? kUnitK<Unit> : 1;
    const int64_t begin = max64(s.block->any_begin / unit * unit, first_key);
    const int64_t end = min64(last_key, (s.block->any_end + unit - 1) / unit * unit);
    bool first = true;
    for (int64_t j = begin; j < end;) {
      const int keys = kv.tile_keys(j, end);
      first = !visit(j, keys, first) && first;
      j += keys;
    }
    return !first;
  }

  // Products to scores, in place, hidden ones -inf.
  void products_to_scores(int64_t first_key, int keys, TileKind kind) {
    scale_keys(s.score, kMaxRows, kv.key_scales(first_key), lanes, keys);
    if (!rule.raw) {
      if (p.bias.data) {
        with_storage<T>(p.bias_dtype, [&](auto* src) {
          load_bias(s.bias, kMaxRows, static_cast<decltype(src)>(p.bias.data), p.bias.stride, *s.block, first_key,
                    keys);
        });
      }
      finish_scores(s.score, kMaxRows, p.bias.data ? s.bias : nullptr, kMaxRows, rule, lanes, keys);
    }
    if (kind == TileKind::some) hide(s.score, kMaxRows, *s.mask, lanes, keys, -kInf);
  }

  // Scores to unnormalised weights, in place, or directly to what lanes_operand makes of them. Returns whether some
  // lane's maximum moved, so that rescale matters.
  bool softmax(int keys, [[maybe_unused]] bool direct) {
    bool moved = false;
    const V exponent = set1(rule.exponent), lowest = set1(-kInf);
    for (int r = 0; r < lanes; r += L) {
      fetch_ahead();
      T* const score = s.score + r;
      const V old_max = load(s.row_max + r);
      V tops[8];  // that many, as each waits for itself
      repeat<8>([&](int i) MHA_INLINE_LAMBDA { tops[i] = i == 0 ? old_max : lowest; });
      int n = 0;
      for (; n + 8 <= keys; n += 8) {
        repeat<8>([&](int i) MHA_INLINE_LAMBDA { tops[i] = max(load(score + (n + i) * kMaxRows), tops[i]); });
      }
      for (; n < keys; ++n) tops[0] = max(load(score + n * kMaxRows), tops[0]);
      repeat<4>([&](int i) MHA_INLINE_LAMBDA { tops[i] = max(tops[i], tops[i + 4]); });
      const V top = max(max(tops[0], tops[1]), max(tops[2], tops[3]));
      // A lane that has seen nothing keeps -inf; subtracting 0 then gives weights of 0, not NaN.
      V base = select(equal(top, lowest), set1(T(0)), top);
      V factor = exp2<Degree>((old_max - base) * exponent);
      moved |= !all(equal(old_max, top));
      V sum = set1(T(0));
      auto weight_of = [&](int j) MHA_INLINE_LAMBDA {
        const V weight = exp2<Degree>((load(score + j * kMaxRows) - base) * exponent);
        sum = sum + weight;
        return weight;
      };
      int j = 0;
      if constexpr (kPairs<Unit>) {
        for (Unit* to = s.weight + r; direct && j < keys; j += 2, to += kMaxRows) {
          const V even = weight_of(j), odd = j + 1 < keys ? weight_of(j + 1) : set1(T(0));
          store_lanes_pair(to, even, odd);
        }
      }
      for (; j < keys; ++j) store(score + j * kMaxRows, weight_of(j));
      store(s.row_max + r, top);
      store(s.row_sum + r, fma(load(s.row_sum + r), factor, sum));
      store(s.rescale + r, factor);
    }
    return moved;
  }

  // To weights, what the values' scales and dropout multiply them by.
  void multiply_weights(int64_t first_key, int keys, TileKind kind) {
    const float* value_scales = kv.value_scales(first_key);
    scale_keys(s.score, kMaxRows, value_scales, lanes, keys);
    if (value_scales && kind == TileKind::some) hide(s.score, kMaxRows, *s.mask, lanes, keys, T(0));  // 0 times NaN
    if (p.dropout.rng_state) apply_dropout(first_key, keys);
  }

  void apply_dropout(int64_t first_key, int keys) {
    dropout_multipliers(s.multiplier, kMaxRows, p.dropout, s.block->b, s.head, s.query, lanes, first_key, keys);
    for (int j = 0; j < keys; ++j) {
      for (int r = 0; r < lanes; r += L) {
        T* x = s.score + j * kMaxRows + r;
        store(x, load(x) * load(s.multiplier + j * kMaxRows + r));
      }
    }
  }

  // Takes over what some keys have come to; the output has `size` elements.
  void take_sums(const Partial<T>& part, int64_t size) {
    std::copy_n(part.row_max, lanes, s.row_max);
    std::copy_n(part.row_sum, lanes, s.row_sum);
    std::copy_n(part.out, size, s.out);
  }

  // Adds what other keys have come to, but for the output: its factors are s.rescale, those of theirs are returned.
  const T* add_sums(const Partial<T>& part) {
    T* other = s.score;  // [kMaxRows]
    const V exponent = set1(rule.exponent), lowest = set1(-kInf);
    for (int r = 0; r < lanes; r += L) {
      const V a = load(s.row_max + r), b = load(part.row_max + r), top = max(a, b);
      const V base = select(equal(top, lowest), set1(T(0)), top);
      const V factor = exp2<Degree>((a - base) * exponent), other_factor = exp2<Degree>((b - base) * exponent);
      store(s.row_sum + r, fma(load(s.row_sum + r), factor, load(part.row_sum + r) * other_factor));
      store(s.row_max + r, top);
      store(s.rescale + r, factor);
      store(other + r, other_factor);
    }
    return other;
  }

  // s.rescale: per lane 1 / the softmax's denominator, in units of 2^(row_max * exponent), 0 where that is 0. factor:
  // what the output is multiplied by. Also lse and its rest.
  void finish_rows(T* factor) {
    const T* sinks = static_cast<const T*>(p.sinks);
    T *lse = static_cast<T*>(p.lse), *lse_rest = static_cast<T*>(p.lse_rest);
    for (int r = 0; r < s.block->rows; ++r) {
      const int64_t row = s.block->b * p.rows_stride_b + s.block->head[r] * p.rows_stride_h + s.block->query[r];
      const T sink = sinks ? sinks[s.block->head[r]] : -kInf;
      const FinishedRow<T> finished = finish_row(s.row_max[r], s.row_sum[r], rule.natural, sink);
      s.rescale[r] = finished.inverse;
      lse[row] = finished.lse;
      if (lse_rest) lse_rest[row] = finished.lse_rest;
    }
    for (int r = 0; r < lanes; ++r) factor[r] = s.rescale[r] * T(kv.v_scale);
  }

  // The weights, computed again now that each row's maximum and sum are known, from compute_scores(first key, keys).
  template <class F>
  void store_weights(F compute_scores) {
    int64_t offset[kMaxRows];
    row_offsets(offset, p.weights.stride);
    for (int r = 0; r < s.block->rows; ++r) {
      std::memset(element(p.weights.data, p.dtype, offset[r]), 0, std::size_t(p.Sk) * size_of(p.dtype));
    }
    const V zero = set1(T(0)), exponent = set1(rule.exponent);
    for (int64_t first = s.block->any_begin; first < s.block->any_end; first += kMaxKeys) {
      const int keys = int(min64(kMaxKeys, s.block->any_end - first));
      const TileKind kind = compute_scores(first, keys);
      if (kind == TileKind::none) continue;
      for (int r = 0; r < lanes; r += L) {
        const V sum = load(s.row_sum + r), inverse = load(s.rescale + r);
        const V base = select(equal(sum, zero), zero, load(s.row_max + r));
        for (int j = 0; j < keys; ++j) {
          T* x = s.score + j * kMaxRows + r;
          store(x, exp2<Degree>((load(x) - base) * exponent) * inverse);
        }
      }
      if (kind == TileKind::some) hide(s.score, kMaxRows, *s.mask, lanes, keys, T(0));  // a NaN row makes NaN of all
      if (p.dropout.rng_state) apply_dropout(first, keys);
      untranspose_rows(element(p.weights.data, p.dtype, first), p.dtype, offset, s.score, kMaxRows, s.block->rows,
                       keys);
    }
  }
};

MHA_ISA_END
