// The operands of attention_bwd's products: those of the query blocks of a head, those of a tile of keys, and the
// weights and score gradients of one tile. See product/gemm.h and tile/operands.h for the layouts.
#pragma once

#include "../../threads/parallel.h"
#include "../../tile/operands.h"
#include "../fwd/space.h"
#include "tile.h"

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

// Whether rows that lie apart ([B,S,H,D] in memory) are copied: each is in a page of its own, and they meet in few sets
// of the caches. That pays where tiles are many.
template <class Unit>
inline bool copies_rows(const AttentionProblem& p) {
  return !kPairs<Unit> && p.Sq >= kCopiedRows && p.Sk >= kCopiedRows;
}

template <class Unit>
inline QueryScratch<Unit> take_query_scratch(Arena& arena, const AttentionBackward& p, int64_t blocks) {
  blocks *= kPlanes<Unit>;
  const int64_t rows = !in_place<Unit>(p.dtype) || copies_rows<Unit>(p) ? blocks * units<Unit>(kMaxRows) : 0;
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

// The first of rows first .. first + rows of head h whose scores forward made as those of few rows: of a block of few.
// In fp32 and wider backward does, too: the logsumexp is that of scores as they were rounded.
inline int few_from(const AttentionProblem& p, int64_t h, int64_t first, int rows) {
  if (accumulate_type(p.dtype) != p.dtype) return rows;
  const ForwardPlan plan(p);
  const int64_t last_block = (plan.blocks_per_list - 1) * plan.block_rows;
  if (plan.rows_per_list - last_block > kFewRows) return rows;
  return int(min64(rows, max64(0, last_block - (h % plan.heads_per_list * p.Sq + first))));
}

template <class Unit>
inline RowsOperand<Unit> load_rows(const Tensor4& x, DType type, const RowBlock& block, int cols, Unit* lanes,
                                   Unit* rows, bool copy) {
  int64_t offset[kMaxRows], stride = x.stride[2];
  const void* src = first_row(x, type, block);
  if constexpr (!kPairs<Unit>) {
    if (copy && in_place<Unit>(type) && stride != cols) {  // and all that follows reads the copy
      copy_rows(rows, cols, src, type, stride, block.rows, cols);
      src = rows, stride = cols;
    }
  }
  for (int r = 0; r < block.rows; ++r) offset[r] = r * stride;
  transposed_operand(lanes, kMaxRows, src, type, offset, block.rows, cols);
  const Broadcast<Unit> features = columns_operand(src, type, stride, block.rows, cols, rows, Side::b);
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
  if constexpr (kPairs<Unit>) to.finite = all_finite<T>(k, p.dtype, p.k.stride[2], keys, int(p.D));
  if (kPlanes<Unit> > 1) to.finite_v = all_finite<T>(v, p.dtype, p.v.stride[2], keys, int(p.Dv));
  auto rows_of = [&](const void* rows, int64_t stride, int64_t cols, Unit* scratch) -> Broadcast<Unit> {
    if constexpr (!kPairs<Unit>) {
      if (copies_rows<Unit>(p) && stride != cols) {
        copy_rows(scratch, cols, rows, p.dtype, stride, keys, int(cols));
        return {scratch, cols, 1};
      }
    }
    return rows_operand(rows, p.dtype, stride, keys, int(cols), scratch);
  };
  to.k = rows_of(k, p.k.stride[2], p.D, to.k_scratch);
  to.v = rows_of(v, p.v.stride[2], p.Dv, to.v_scratch);
  if constexpr (!kPairs<Unit>) to.finite = all_finite<T>(to.k.a, to.k.am, keys, int(p.D));
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

// lse and dlse of a block, whose first row is first_row; row_dots comes before.
template <class T>
inline void load_statistics(QueryBlock<T>& block, const AttentionBackward& p, int64_t first_row) {
  constexpr T kInf = std::numeric_limits<T>::infinity();
  const T* lse = static_cast<const T*>(p.lse) + first_row;
  const T* lse_rest = p.lse_rest ? static_cast<const T*>(p.lse_rest) + first_row : nullptr;
  const T* dlse = p.dlse ? static_cast<const T*>(p.dlse) + first_row : nullptr;
  for (int r = 0; r < kMaxRows; ++r) {
    if (r < block.rows.rows && lse[r] != -kInf) {
      block.lse[r] = lse[r];
      block.lse_rest[r] = lse_rest ? lse_rest[r] : T(0);
      if (dlse) block.delta[r] -= dlse[r];
      set_exponent(block, r, p);
      continue;
    }
    // No such row, or one that sees nothing, be it that all its scores are -inf: no tile counts as visible to all
    // rows, and the test per lane finds an empty interval.
    block.lse[r] = kInf;
    block.lse_rest[r] = T(0);
    block.delta[r] = T(0);
    set_exponent(block, r, p);
    if (r < block.rows.rows) block.rows.begin[r] = block.rows.end[r] = 0;
    block.rows.all_end = 0;
  }
}

MHA_ISA_END
