// The operands of attention_bwd's products: those of the query blocks of a head, those of a tile of keys, and the
// weights and score gradients of one tile. See gemm.h and operands.h for the layouts.
#pragma once

#include "attention_bwd_tile.h"
#include "operands.h"
#include "parallel.h"

MHA_ISA_BEGIN

// Rows with features in lanes: the B operand of dK and dV.
template <class Unit>
struct RowsOperand {
  const Unit* b;
  int64_t ld, plane = 0;
};

template <class Unit>
struct QueryOperands {
  const Unit *q_lanes, *dout_lanes;  // [units(D)][kMaxRows], [units(Dv)][kMaxRows]
  RowsOperand<Unit> q_rows, dout_rows;
};

// Scratch for one block of queries; rows that lie right in their tensor are used in place.
template <class Unit>
struct QueryScratch {
  Unit *q_lanes, *dout_lanes, *q_rows, *dout_rows;
};

// A tile of keys: K and V as the A operands of S and dP, and K as the one of dQ.
template <class Unit>
struct KeyOperands {
  Broadcast<Unit> k, v, k_features;
  const void *k_rows, *v_rows;  // K and V as they lie
  bool finite;                  // no NaN or Inf in K
  bool finite_v;                // nor in V; known of more planes than one
  Unit *k_scratch, *v_scratch, *k_features_scratch;
};

// Whether rows of that type are an operand of Unit's products as they lie.
template <class Unit>
inline bool in_place(DType type) {
  return !kPairs<Unit> && sizeof(Unit) == size_of(type);
}

template <class Unit>
inline QueryScratch<Unit> take_query_scratch(Arena& arena, const AttentionBackward& p, int64_t blocks) {
  blocks *= kPlanes<Unit>;
  const int64_t rows = in_place<Unit>(p.dtype) ? 0 : blocks * units<Unit>(kMaxRows);
  QueryScratch<Unit> s;
  s.q_lanes = arena.take<Unit>(blocks * units<Unit>(int(p.D)) * kMaxRows);
  s.dout_lanes = arena.take<Unit>(blocks * units<Unit>(int(p.Dv)) * kMaxRows);
  s.q_rows = arena.take<Unit>(rows * p.D);
  s.dout_rows = arena.take<Unit>(rows * p.Dv);
  return s;
}

template <class Unit>
inline KeyOperands<Unit> take_key_operands(Arena& arena, const AttentionBackward& p) {
  KeyOperands<Unit> k{};
  k.k_scratch = arena.take<Unit>(kPlanes<Unit> * kMaxKeys * units<Unit>(int(p.D)));
  k.v_scratch = arena.take<Unit>(kPlanes<Unit> * kMaxKeys * units<Unit>(int(p.Dv)));
  k.k_features_scratch = arena.take<Unit>(kPairs<Unit> ? columns_size<Unit>(kMaxKeys, p.D) : 0);
  return k;
}

// The first row of a block; x: query or dout.
inline const void* first_row(const Tensor4& x, DType type, const RowBlock& block) {
  return element(x.data, type, block.b * x.stride[0] + block.offset(x.stride, 0));
}

template <class Unit>
inline RowsOperand<Unit> load_rows(const Tensor4& x, DType type, const RowBlock& block, int cols, Unit* lanes,
                                   Unit* rows) {
  int64_t offset[kMaxRows];
  for (int r = 0; r < block.rows; ++r) offset[r] = r * x.stride[2];
  const void* src = first_row(x, type, block);
  transposed_operand(lanes, kMaxRows, src, type, offset, block.rows, cols);
  const Broadcast<Unit> features = columns_operand(src, type, x.stride[2], block.rows, cols, rows, Side::b);
  return {features.a, features.ak, features.plane};
}

template <class T>
inline bool rows_finite(const Tensor4& x, DType type, const RowBlock& block, int cols) {
  return all_finite<T>(first_row(x, type, block), type, x.stride[2], block.rows, cols);
}

template <class T, class Unit>
inline void load_keys(KeyOperands<Unit>& to, const AttentionBackward& p, int64_t b, int64_t hk, int64_t first,
                      int keys) {
  const void* k = element(p.k.data, p.dtype, b * p.k.stride[0] + hk * p.k.stride[1] + first * p.k.stride[2]);
  const void* v = element(p.v.data, p.dtype, b * p.v.stride[0] + hk * p.v.stride[1] + first * p.v.stride[2]);
  to.k_rows = k, to.v_rows = v;
  to.finite = all_finite<T>(k, p.dtype, p.k.stride[2], keys, int(p.D));
  if (kPlanes<Unit> > 1) to.finite_v = all_finite<T>(v, p.dtype, p.v.stride[2], keys, int(p.Dv));
  to.k = rows_operand(k, p.dtype, p.k.stride[2], keys, int(p.D), to.k_scratch);
  to.v = rows_operand(v, p.dtype, p.v.stride[2], keys, int(p.Dv), to.v_scratch);
  if constexpr (kPairs<Unit>) {
    to.k_features = columns_operand(k, p.dtype, p.k.stride[2], keys, int(p.D), to.k_features_scratch);
  } else {
    to.k_features = {to.k.a, to.k.ak, to.k.am};
  }
}

// delta[r] = sum over the features of dout * out
template <class T>
inline void row_dots(const AttentionBackward& p, const RowBlock& block, T* delta) {
  constexpr int L = Vec<T>::lanes;
  with_storage<T>(p.dtype, [&](auto* s) {
    for (int r = 0; r < block.rows; ++r) {
      auto at = [&](const Tensor4& x) {
        return static_cast<decltype(s)>(x.data) + block.b * x.stride[0] + block.offset(x.stride, r);
      };
      auto *dout = at(p.dout), *out = at(p.out);
      Vec<T> sum = set1(T(0));
      int64_t d = 0;
      for (; d + L <= p.Dv; d += L) sum = fma(load(dout + d), load(out + d), sum);
      if (d < p.Dv) sum = fma(load_n(dout + d, int(p.Dv - d)), load_n(out + d, int(p.Dv - d)), sum);
      delta[r] = reduce_add(sum);
    }
  });
}

MHA_ISA_END
