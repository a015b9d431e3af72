// Attention forward of a block of few rows, as in decoding: the products of tile/few_rows.h, which read each key and
// value once, as they lie in memory where they can.
#pragma once

#include "../../tile/finite_rows.h"
#include "rows.h"

MHA_ISA_BEGIN

template <class Unit, int Degree>
struct FewRowsBlock : ForwardRows<Unit, Degree> {
  using Rows = ForwardRows<Unit, Degree>;
  using Rows::p, Rows::s, Rows::kv, Rows::lanes;
  using typename Rows::T;
  static_assert(!kAmxUnit<Unit>);

  using Rows::Rows;

  // Visits the keys first_key .. last_key that some row sees. Returns whether there are any.
  bool visit_keys(int64_t first_key, int64_t last_key) {
    load_rows();
    return this->for_each_tile(first_key, last_key,
                               [&](int64_t j, int keys, bool first) { return visit(j, keys, first); });
  }

  void finish(bool any) {
    if (!any) std::fill_n(s.out, p.Dv * s.block->rows, T(0));
    store_rows();
    if (p.weights.data) this->store_weights([&](int64_t first, int keys) { return compute_scores(first, keys); });
  }

  void load_rows() {
    int64_t offset[kMaxRows];
    this->row_offsets(offset, p.q.stride);
    few_queries(s.q, p.q.data, p.dtype, offset, s.block->rows, int(p.D));
    std::fill_n(s.score, kMaxKeys * kMaxRows, T(0));  // lanes beyond the rows stay finite
    this->start_rows();
    s.packed->head = -1;  // tiles that must be copied take its place
  }

  // Calls f(first of the keys, stride): what is not Unit becomes it on the way, or is copied if there is no such way.
  template <class F>
  void with_keys(const void* k, int keys, F f) {
    const int64_t stride = p.k.stride[2];
    if constexpr (kPairs<Unit>) {
      if (kv.type == DType::bf16 && p.D % 2 == 0 && stride % 2 == 0) return f(static_cast<const Unit*>(k), stride / 2);
      const Broadcast<Unit> key = rows_operand(k, kv.type, stride, keys, int(p.D), s.k);
      f(key.a, key.am);
    } else {
      with_stored<T>(kv.type, [&](auto* type) { f(static_cast<decltype(type)>(k), stride); });
    }
  }

  // The same of values, of which two rows of bf16 make pairs on the way.
  template <class F>
  void with_values(const void* v, int keys, F f) {
    const int64_t stride = p.v.stride[2];
    if constexpr (kPairs<Unit>) {
      if (kv.type == DType::bf16) return f(static_cast<const bf16*>(v), stride);
      const Broadcast<Unit> value = columns_operand(v, kv.type, stride, keys, int(p.Dv), s.v, Side::b);
      f(value.a, value.ak);
    } else {
      with_stored<T>(kv.type, [&](auto* type) { f(static_cast<decltype(type)>(v), stride); });
    }
  }

  Ahead keys_in_memory(const void* k) const {
    const int64_t size = int64_t(size_of(kv.type));
    return {k, p.k.stride[2] * size, p.D * size};
  }
  Ahead values_in_memory(const void* v) const {
    const int64_t size = int64_t(size_of(kv.type));
    return {v, p.v.stride[2] * size, p.Dv * size};
  }

  // Scores of a tile, hidden ones -inf.
  TileKind compute_scores(int64_t first_key, int keys) {
    const TileKind kind = classify(s.mask, p.mask, *s.block, first_key, keys);
    if (kind == TileKind::none) return kind;
    const void *k = kv.key(first_key), *v = kv.value(first_key);
    const ReadAhead ahead(keys_in_memory(k), keys, v, values_in_memory(v).stride);
    with_keys(k, keys, [&](const auto* key, int64_t stride) {
      const int D = int(p.D);
      few_scores(key, stride, keys, units<Unit>(D), s.q, few_ld<Unit>(D), s.block->rows, s.score, ahead);
    });
    this->products_to_scores(first_key, keys, kind);
    return kind;
  }

  // Adds a tile to the running softmax and output. Returns whether it did (some pair is visible).
  bool visit(int64_t first_key, int keys, bool first) {
    const TileKind kind = compute_scores(first_key, keys);
    if (kind == TileKind::none) return false;
    const int Dv = int(p.Dv), rows = s.block->rows;
    const bool moved = this->softmax(keys, false);
    this->multiply_weights(first_key, keys, kind);
    if (moved && !first) few_rescale(s.out, Dv, s.rescale, rows);
    const void* v = kv.value(first_key);
    const Unit* weight = lanes_operand<Unit>(s.score, keys, lanes, s.weight);
    const ReadAhead ahead(values_in_memory(v), keys, kv.likely_key(first_key + keys), keys_in_memory(v).stride);
    auto add = [&](const auto* value, int64_t stride) {
      few_values<Unit>(weight, value, stride, keys, s.out, Dv, rows, !first, p.store.quantised ? 32 : 16, ahead);
    };
    if (kind == TileKind::all || all_finite<T>(v, kv.type, p.v.stride[2], keys, Dv)) {
      with_values(v, keys, add);
      return true;
    }
    FiniteRows<Unit> finite;
    const Broadcast<Unit> value = finite.take(v, kv.type, p.v.stride[2], keys, Dv, s.finite_v, Side::b);
    add(value.a, value.ak);
    finite.add_keys_by_row(s.out, s.score, *s.mask, rows);
    return true;
  }

  // Adds what other keys have come to; the first replaces what there is.
  void add(const Partial<T>& part, bool first) {
    if (first) return this->take_sums(part, p.Dv * s.block->rows);
    const T* other = this->add_sums(part);
    few_add(s.out, part.out, int(p.Dv), s.rescale, other, s.block->rows);
  }

  void store_rows() {
    T factor[kMaxRows];
    this->finish_rows(factor);
    for (int r = 0; r < s.block->rows; ++r) {
      if (s.row_sum[r] == 0) std::fill_n(s.out + r * p.Dv, p.Dv, T(0));
    }
    few_rescale(s.out, int(p.Dv), factor, s.block->rows);
    int64_t offset[kMaxRows];
    this->row_offsets(offset, p.out.stride);
    few_store(p.out.data, p.dtype, offset, s.out, s.block->rows, int(p.Dv));
  }
};

MHA_ISA_END
