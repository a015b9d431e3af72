// Attention forward of one block of queries, which lie in vector lanes. It visits its key tiles and keeps a running
// maximum and sum per lane. Per tile:
//   S^T[j][q] = sum_d K[j][d] Q^T[d][q];   softmax down the columns;   O^T[d][q] += sum_j V[j][d] P^T[j][q]
#pragma once

#include "attention_fwd_space.h"
#include "finite_rows.h"
#include "philox_vec.h"
#include "score_tile.h"
#include "stored_head.h"
#include "tile_mask.h"

MHA_ISA_BEGIN

// The forward pass of one block of queries. Degree: of the exp2 polynomial.
template <class Unit, int Degree>
struct ForwardBlock {
  using T = typename Product<Unit>::Acc;
  using V = Vec<T>;
  static constexpr int L = V::lanes;
  static constexpr T kInf = std::numeric_limits<T>::infinity();
  static constexpr bool kPlanar = kPlanes<Unit> > 1;  // never few rows

  const AttentionForward& p;
  ScoreRule<T> rule;
  ForwardScratch<Unit> s;
  StoredHead kv;          // of the block's batch and key/value head
  int lanes = 0;          // rows rounded up to whole vectors
  bool few = false;       // few rows: head elements in lanes, not rows
  bool finite_q = false;  // known of more planes than one
  ProductState<Unit> products;
  Strips<Unit> strips;       // of the tile; few rows have but one
  bool in_group = false;     // of one head
  bool tile_packed = false;  // s.k and s.v hold the tile
  Ahead next_queries, own_out;
  int ahead_row = kMaxRows, ahead_step = 0;

  ForwardBlock(const AttentionForward& problem, const ForwardPlan& plan, void* scratch)
      : p(problem), rule(problem), s(problem, plan, scratch) {}

  // Returns whether some row sees some of the keys first_key .. last_key, which visit_keys is to visit then.
  bool set_block(const ForwardPlan::Place& at, int64_t first_key, int64_t last_key) {
    set_rows(s.block, p.mask, at.b, at.first_head, at.first, at.rows, p.Sq, p.Sk);
    lanes = round_up(at.rows, L);
    few = !kAmxUnit<Unit> && at.rows <= kFewRows;  // with AMX, few rows alone are floats; else a list's last
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

  // Visits the keys first_key .. last_key that some row sees. Returns whether there are any.
  bool visit_keys(int64_t first_key, int64_t last_key) {
    load_rows();
    if (s.whole_head) pack_head();
    bool first = true;
    // Tiles of a packed head are whole units; a key that this may add is hidden like any other.
    const int64_t unit = s.whole_head ? kUnitK<Unit> : 1;
    const int64_t begin = max64(s.block->any_begin / unit * unit, first_key);
    const int64_t end = min64(last_key, (s.block->any_end + unit - 1) / unit * unit);
    for (int64_t j = begin; j < end;) {
      const int keys = kv.tile_keys(j, end);
      first = !visit(j, keys, first) && first;
      j += keys;
    }
    return !first;
  }

  // Copies a tile, for all blocks of a group, where it is not an operand as it lies. Returns whether it did.
  bool pack_tile(int64_t first_key, int keys) {
    if (sizeof(Unit) == size_of(kv.type) && p.k.stride[2] == p.D && p.v.stride[2] == p.Dv) return false;
    copy_rows(s.k, p.D, kv.key(first_key), kv.type, p.k.stride[2], keys, int(p.D));
    copy_rows(s.v, p.Dv, kv.value(first_key), kv.type, p.v.stride[2], keys, int(p.Dv));
    return true;
  }

  void finish(bool any) {
    if (!any) std::fill_n(s.out, p.Dv * (few ? s.block->rows : kMaxRows), T(0));
    store_rows();
    if (p.weights.data) store_weights();
  }

  void pack_head() {
    if (s.packed->head == kv.index) return;
    s.packed->head = kv.index;
    s.packed->k = rows_operand(kv.key(0), kv.type, p.k.stride[2], int(p.Sk), int(p.D), s.k);
    s.packed->v = columns_operand(kv.value(0), kv.type, p.v.stride[2], int(p.Sk), int(p.Dv), s.v);
    if constexpr (kPlanar) {
      s.packed->finite_k = all_finite<T>(kv.key(0), kv.type, p.k.stride[2], int(p.Sk), int(p.D));
      s.packed->finite_v = all_finite<T>(kv.value(0), kv.type, p.v.stride[2], int(p.Sk), int(p.Dv));
    }
  }

  Broadcast<Unit> key_operand(int64_t first_key, int keys) {
    if (s.whole_head) {
      const Broadcast<Unit>& whole = s.packed->k;
      return {whole.a + first_key * whole.am, whole.am, whole.ak, whole.plane};
    }
    if (tile_packed) return {s.k, p.D, 1};
    const void* k = kv.key(first_key);
    if constexpr (kPairs<Unit>) {  // few rows read each key once: no copy, wherever its rows lie
      if (few && kv.type == DType::bf16 && p.D % 2 == 0 && p.k.stride[2] % 2 == 0)
        return {static_cast<const Unit*>(k), p.k.stride[2] / 2, 1};
    }
    return rows_operand(k, kv.type, p.k.stride[2], keys, int(p.D), s.k);
  }

  // Few rows read each key and value once: where they are halves of Unit, they are widened on the way, not copied.
  // Calls f(typed pointer) then, and returns whether it did.
  template <class F>
  bool as_halves(const void* rows, F f) const {
    if constexpr (std::is_same_v<Unit, float>) {
      if (!few || s.whole_head) return false;
      if (kv.type == DType::f16) return f(static_cast<const f16*>(rows)), true;
      if (kv.type == DType::bf16) return f(static_cast<const bf16*>(rows)), true;
      if (kv.type == DType::i8) return f(static_cast<const int8_t*>(rows)), true;
      if (kv.type == DType::e4m3) return f(static_cast<const e4m3*>(rows)), true;
    }
    return false;
  }

  // The same of values, of which two rows of bf16 make pairs on the way.
  template <class F>
  bool as_values(const void* rows, F f) const {
    if constexpr (std::is_same_v<Unit, Pair> && !kPlanar) {
      if (few && !s.whole_head && kv.type == DType::bf16) return f(static_cast<const bf16*>(rows)), true;
    }
    return as_halves(rows, f);
  }

  Ahead keys_in_memory(int64_t first_key) const {
    const int64_t size = int64_t(size_of(kv.type));
    return {kv.key(first_key), p.k.stride[2] * size, p.D * size};
  }
  Ahead values_in_memory(int64_t first_key) const {
    const int64_t size = int64_t(size_of(kv.type));
    return {kv.value(first_key), p.v.stride[2] * size, p.Dv * size};
  }

  Side value_side() const { return few ? Side::b : Side::a; }

  Broadcast<Unit> value_operand(const void* v, int64_t first_key, int keys) {
    if (s.whole_head) {
      const Broadcast<Unit>& whole = s.packed->v;
      return {whole.a + first_key / kUnitK<Unit> * whole.ak, whole.am, whole.ak, whole.plane};
    }
    if (tile_packed) return {s.v, 1, p.Dv};
    return columns_operand(v, kv.type, p.v.stride[2], keys, int(p.Dv), s.v, value_side());
  }

  void row_offsets(int64_t* offset, const int64_t* stride) const {
    for (int r = 0; r < s.block->rows; ++r) offset[r] = s.block->b * stride[0] + s.block->offset(stride, r);
  }

  const void* query(int r) const {
    return element(p.q.data, p.dtype, s.block->b * p.q.stride[0] + s.block->offset(p.q.stride, r));
  }

  void load_rows() {
    int64_t offset[kMaxRows];
    row_offsets(offset, p.q.stride);
    if constexpr (!kPlanar) {
      if (few) {
        few_queries(s.q, p.q.data, p.dtype, offset, s.block->rows, int(p.D));
        std::fill_n(s.score, kMaxKeys * kMaxRows, T(0));  // lanes beyond the rows stay finite
      }
    } else {
      finite_q = true;
      for (int r = 0; r < s.block->rows; ++r) finite_q &= all_finite<T>(query(r), p.dtype, 0, 1, int(p.D));
    }
    if (!few) transposed_operand(s.q, kMaxRows, p.q.data, p.dtype, offset, s.block->rows, int(p.D));
    for (int r = 0; r < lanes; ++r) s.row_max[r] = -kInf, s.row_sum[r] = T(0);
    if (!p.dropout.rng_state) return;
    for (int r = 0; r < kMaxRows; ++r) {
      const int i = std::min(r, s.block->rows - 1);
      s.head[r] = uint32_t(s.block->head[i]);
      s.query[r] = uint32_t(s.block->query[i]);
    }
  }

  void multiply_scores(int64_t first_key, int keys) {
    const int D = int(p.D), n = units<Unit>(D);
    if constexpr (!kPlanar) {
      if (few) return multiply_few(first_key, keys, n);
    }
    const Broadcast<Unit> key = key_operand(first_key, keys);
    const Ahead bias = bias_ahead(p.bias, p.bias_dtype, *s.block, first_key, keys);
    strips.for_each_by_keys([&](const Strip& t) {
      gemm<Unit>(t.keys, t.end - t.begin, n, key.a + t.first * key.am, key.am, key.ak, s.q + t.begin, kMaxRows,
                 s.score + t.first * kMaxRows + t.begin, kMaxRows, Start::zero, nullptr,
                 {key.plane, n * kMaxRows, true},  // an error here is multiplied by the scale, in lse as it is
                 t.first == strips.by_keys[0].first ? bias : Ahead());
    });
    if constexpr (kPlanar) {
      const void* k = kv.key(first_key);
      const bool finite_k = (s.whole_head && s.packed->finite_k) || all_finite<T>(k, kv.type, p.k.stride[2], keys, D);
      if (finite_k && finite_q) return;
      repair_products(
          s.score, [&](int j) { return element(k, kv.type, j * p.k.stride[2]); }, keys, [&](int r) { return query(r); },
          s.block->rows, kv.type, p.dtype, D);
    }
  }

  void multiply_few(int64_t first_key, int keys, int n) {
    const void* k = kv.key(first_key);
    const ReadAhead ahead(keys_in_memory(first_key), keys, kv.value(first_key), values_in_memory(first_key).stride);
    auto multiply = [&](const auto* key, int64_t stride) {
      few_scores(key, stride, keys, n, s.q, few_ld<Unit>(int(p.D)), s.block->rows, s.score, ahead);
    };
    if (as_halves(k, [&](const auto* key) { multiply(key, p.k.stride[2]); })) return;
    const Broadcast<Unit> key = key_operand(first_key, keys);
    multiply(key.a, key.am);
  }

  // Scores of a tile, hidden ones -inf.
  TileKind compute_scores(int64_t first_key, int keys) {
    TileKind kind = classify(s.mask, p.mask, *s.block, first_key, keys);
    if (kind == TileKind::none) return kind;
    if (kind == TileKind::some && !few)
      strips.take(*s.mask, lanes, keys);
    else
      strips.take_whole(lanes, keys);
    multiply_scores(first_key, keys);
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
    return kind;
  }

  // Whether the product may take all values of a tile as they are.
  bool finite_values(const void* v, int keys, TileKind kind) {
    const bool whole_head = kPlanar && s.whole_head && s.packed->finite_v;
    if (whole_head || (!kPlanar && kind == TileKind::all)) return true;
    bool finite;
    if constexpr (!kPairs<Unit>)
      finite = tile_packed ? all_finite<T>(s.v, p.Dv, keys, int(p.Dv))
                           : all_finite<T>(v, kv.type, p.v.stride[2], keys, int(p.Dv));
    else
      finite = all_finite<T>(v, kv.type, p.v.stride[2], keys, int(p.Dv));
    if (!finite && kind == TileKind::all) s.mask->show_all(s.block->rows, keys);
    return finite;
  }

  // Adds a tile to the running softmax and output. Returns whether it did (some pair is visible).
  bool visit(int64_t first_key, int keys, bool first) {
    const TileKind kind = compute_scores(first_key, keys);
    if (kind == TileKind::none) return false;
    const void* v = kv.value(first_key);
    const bool clean = finite_values(v, keys, kind);
    // Where nobody else asks for the weights, they go straight into the operand of the product.
    const float* value_scales = kv.value_scales(first_key);
    const bool direct = kPairs<Unit> && !few && clean && !p.dropout.rng_state && !value_scales;
    const bool moved = softmax(keys, direct);
    scale_keys(s.score, kMaxRows, value_scales, lanes, keys);
    if (value_scales && kind == TileKind::some) hide(s.score, kMaxRows, *s.mask, lanes, keys, T(0));  // 0 times NaN
    if (p.dropout.rng_state) apply_dropout(first_key, keys);
    FiniteRows<Unit> finite;
    const Unit* weight = direct ? s.weight : lanes_operand<Unit>(s.score, keys, lanes, s.weight);
    auto add_few = [&](const auto* rows, int64_t stride) {
      const ReadAhead ahead(values_in_memory(first_key), keys, kv.likely_key(first_key + keys),
                            keys_in_memory(first_key).stride);
      few_values<Unit>(weight, rows, stride, keys, s.out, int(p.Dv), s.block->rows, !first, p.store.quantised ? 32 : 16,
                       ahead);
    };
    if constexpr (!kPlanar) {
      if (few && moved && !first) few_rescale(s.out, int(p.Dv), s.rescale, s.block->rows);
      if (clean && as_values(v, [&](const auto* rows) { add_few(rows, p.v.stride[2]); })) return true;
    }
    const Broadcast<Unit> value =
        clean ? value_operand(v, first_key, keys)
              : finite.take(v, kv.type, p.v.stride[2], keys, int(p.Dv), s.finite_v, value_side());
    if constexpr (!kPlanar) {
      if (few) {
        add_few(value.a, value.ak);
        finite.add_keys_by_row(s.out, s.score, *s.mask, s.block->rows);
        return true;
      }
    }
    const Start start = first ? Start::zero : moved ? Start::scale : Start::add;
    strips.for_each_by_rows([&](const Strip& t) {
      const int64_t first_unit = t.first / kUnitK<Unit>;
      gemm<Unit>(int(p.Dv), t.end - t.begin, units<Unit>(t.keys), value.a + first_unit * value.ak, value.am, value.ak,
                 weight + first_unit * kMaxRows + t.begin, kMaxRows, s.out + t.begin, kMaxRows, start,
                 s.rescale + t.begin, {value.plane, kLanesPlane<Unit>});
    });
    finite.add_keys(s.out, s.score, *s.mask, lanes);
    return true;
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

  // Adds what other keys have come to; the first replaces what there is.
  void add(const Partial<T>& part, bool first) {
    const int size = int(p.Dv) * (few ? s.block->rows : kMaxRows);
    if (first) {
      std::copy_n(part.row_max, lanes, s.row_max);
      std::copy_n(part.row_sum, lanes, s.row_sum);
      std::copy_n(part.out, size, s.out);
      return;
    }
    T* other = s.score;  // [kMaxRows], factors
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
    if (few) return few_add(s.out, part.out, int(p.Dv), s.rescale, other, s.block->rows);
    for (int64_t d = 0; d < p.Dv; ++d) {
      for (int r = 0; r < lanes; r += L) {
        T* out = s.out + d * kMaxRows + r;
        store(out, fma(load(out), load(s.rescale + r), load(part.out + d * kMaxRows + r) * load(other + r)));
      }
    }
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

  // Per lane: 1 / the softmax's denominator, in units of 2^(row_max * exponent); 0 where that is 0. Also lse and its
  // rest.
  void finish_rows(T* inverse) {
    const T* sinks = static_cast<const T*>(p.sinks);
    T *lse = static_cast<T*>(p.lse), *lse_rest = static_cast<T*>(p.lse_rest);
    for (int r = 0; r < s.block->rows; ++r) {
      const int64_t row = s.block->b * p.rows_stride_b + s.block->head[r] * p.rows_stride_h + s.block->query[r];
      const T sink = sinks ? sinks[s.block->head[r]] : -kInf;
      const FinishedRow<T> finished = finish_row(s.row_max[r], s.row_sum[r], rule.natural, sink);
      inverse[r] = finished.inverse;
      lse[row] = finished.lse;
      if (lse_rest) lse_rest[row] = finished.lse_rest;
    }
  }

  void store_rows() {
    const V zero = set1(T(0));
    if (in_group) {
      Ahead rows = rows_in_memory(p.out, s.block->b, s.block->head[0], s.block->query[0], p.Dv);
      rows.to_write = true;
      for (int r = 0; r < s.block->rows; ++r) rows.fetch(r);
    }
    finish_rows(s.rescale);
    T factor[kMaxRows];  // s.rescale is what store_weights multiplies by, too
    for (int r = 0; r < lanes; ++r) factor[r] = s.rescale[r] * T(kv.v_scale);
    int64_t offset[kMaxRows];
    row_offsets(offset, p.out.stride);
    if (few) {
      for (int r = 0; r < s.block->rows; ++r) {
        if (s.row_sum[r] == 0) std::fill_n(s.out + r * p.Dv, p.Dv, T(0));
      }
      few_rescale(s.out, int(p.Dv), factor, s.block->rows);
      few_store(p.out.data, p.dtype, offset, s.out, s.block->rows, int(p.Dv));
      return;
    }
    for (int r = 0; r < lanes; r += L) {
      V inverse = load(factor + r);
      VecMask<T> empty = equal(load(s.row_sum + r), zero);
      for (int64_t d = 0; d < p.Dv; ++d) {
        T* out = s.out + d * kMaxRows + r;
        store(out, select(empty, zero, load(out) * inverse));
      }
    }
    untranspose_rows(p.out.data, p.dtype, offset, s.out, kMaxRows, s.block->rows, int(p.Dv));
  }

  // The weights, computed again now that each row's maximum and sum are known.
  void store_weights() {
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
