// Attention forward, blocked: a block of queries lies in vector lanes, visits its key tiles, and keeps a running
// maximum and sum per lane. Per tile:
//   S^T[j][q] = sum_d K[j][d] Q^T[d][q];   softmax down the columns;   O^T[d][q] += sum_j V[j][d] P^T[j][q]
#pragma once

#include "finite_rows.h"
#include "operands.h"
#include "parallel.h"
#include "philox_vec.h"
#include "score_tile.h"
#include "sequence.h"
#include "tile_mask.h"

MHA_ISA_BEGIN

// How the queries are cut into blocks. Where a head has less than a block of queries, a block takes rows of all query
// heads of a key/value head, so that its keys and values are read once.
struct ForwardPlan {
  int64_t lists, heads_per_list, rows_per_list, block_rows, blocks_per_list, tasks;

  explicit ForwardPlan(const AttentionProblem& p) {
    const int64_t group = p.Hk > 0 ? p.H / p.Hk : 1;
    heads_per_list = p.Sq < kMaxRows ? group : 1;
    lists = p.B * (p.H / (heads_per_list > 0 ? heads_per_list : 1));
    rows_per_list = heads_per_list * p.Sq;
    block_rows = kMaxRows;
    blocks_per_list = (rows_per_list + block_rows - 1) / block_rows;
    tasks = lists * blocks_per_list;
  }
};

// The packed keys and values of a whole head, which serve all its blocks.
template <class Unit>
struct PackedHead {
  int64_t head;  // b * Hk + key/value head; -1: none yet
  Broadcast<Unit> k, v;
};

// What one thread works in. Unit is what the products multiply, T what they sum.
template <class Unit>
struct ForwardScratch {
  using T = typename Product<Unit>::Acc;
  RowBlock* block;
  TileMask<T>* mask;
  T *row_max, *row_sum, *rescale;  // [kMaxRows]
  uint32_t *batch_head, *query;    // [kMaxRows]
  Unit* q;                         // [units(D)][kMaxRows]
  bool whole_head;                 // k and v hold a packed head, not a tile
  PackedHead<Unit>* packed;
  Unit *k, *v;           // keys and values, packed
  Unit* finite_v;        // values of a tile for FiniteRows
  T* score;              // [kMaxKeys][kMaxRows]
  T *bias, *multiplier;  // [kMaxKeys][kMaxRows]
  Unit* weight;          // [units(kMaxKeys)][kMaxRows]
  T* out;                // [Dv][kMaxRows]
  std::size_t bytes;

  ForwardScratch(const AttentionForward& p, void* base) {
    Arena arena(base);
    const int64_t D = p.D, Dv = p.Dv, tile = kMaxKeys * kMaxRows;
    block = arena.take<RowBlock>(1);
    mask = arena.take<TileMask<T>>(1);
    row_max = arena.take<T>(kMaxRows);
    row_sum = arena.take<T>(kMaxRows);
    rescale = arena.take<T>(kMaxRows);
    batch_head = arena.take<uint32_t>(kMaxRows);
    query = arena.take<uint32_t>(kMaxRows);
    q = arena.take<Unit>(units<Unit>(int(D)) * kMaxRows);
    const bool packs = sizeof(Unit) != size_of(p.dtype);
    const int64_t head_bytes = p.Sk * (D + Dv) * int64_t(sizeof(Unit)) / kUnitK<Unit>;
    whole_head = packs && p.Sq > kMaxRows && head_bytes <= kPackedHeadBytes;
    const int packed_keys = whole_head ? int(p.Sk) : kMaxKeys;
    packed = arena.take<PackedHead<Unit>>(1);
    k = arena.take<Unit>(packed_keys * units<Unit>(int(D)));
    v = arena.take<Unit>(units<Unit>(packed_keys) * Dv);
    finite_v = whole_head ? arena.take<Unit>(units<Unit>(kMaxKeys) * Dv) : v;
    score = arena.take<T>(tile);
    bias = arena.take<T>(p.bias.data ? tile : 0);
    multiplier = arena.take<T>(p.dropout.rng_state ? tile : 0);
    weight = arena.take<Unit>(std::is_same_v<Unit, Pair> ? tile : 0);
    out = arena.take<T>(Dv * kMaxRows);
    bytes = arena.used();
  }
};

// The forward pass of one block of queries. Degree: of the exp2 polynomial.
template <class Unit, int Degree>
struct ForwardBlock {
  using T = typename Product<Unit>::Acc;
  using V = Vec<T>;
  static constexpr int L = V::lanes;
  static constexpr T kInf = std::numeric_limits<T>::infinity();

  const AttentionForward& p;
  const ScoreRule<T> rule;
  ForwardScratch<Unit> s;
  const void *k_base = nullptr, *v_base = nullptr;  // of the block's batch and key/value head
  int lanes = 0;                                    // rows rounded up to whole vectors

  ForwardBlock(const AttentionForward& problem, void* scratch) : p(problem), rule(problem), s(problem, scratch) {}

  void run(int64_t b, int64_t first_head, int64_t first_row, int rows) {
    set_rows(s.block, p.mask, b, first_head, first_row, rows, p.Sq, p.Sk);
    lanes = round_up(rows, L);
    const int64_t kv_head = first_head / (p.H / p.Hk);
    k_base = element(p.k.data, p.dtype, b * p.k.stride[0] + kv_head * p.k.stride[1]);
    v_base = element(p.v.data, p.dtype, b * p.v.stride[0] + kv_head * p.v.stride[1]);
    load_rows();
    if (s.whole_head) pack_head(b * p.Hk + kv_head);
    bool first = true;
    // Tiles of a packed head are whole units; a key that this may add is hidden like any other.
    const int64_t unit = s.whole_head ? kUnitK<Unit> : 1;
    const int64_t begin = s.block->any_begin / unit * unit;
    const int64_t end = min64(p.Sk, (s.block->any_end + unit - 1) / unit * unit);
    for (int64_t j = begin; j < end; j += kMaxKeys) first = !visit(j, int(min64(kMaxKeys, end - j)), first) && first;
    if (first) std::fill_n(s.out, p.Dv * kMaxRows, T(0));
    store_rows();
    if (p.weights.data) store_weights();
  }

  void pack_head(int64_t head) {
    if (s.packed->head == head) return;
    s.packed->head = head;
    s.packed->k = rows_operand(k_base, p.dtype, p.k.stride[2], int(p.Sk), int(p.D), s.k);
    s.packed->v = columns_operand(v_base, p.dtype, p.v.stride[2], int(p.Sk), int(p.Dv), s.v);
  }

  Broadcast<Unit> key_operand(int64_t first_key, int keys) {
    if (s.whole_head) return {s.packed->k.a + first_key * s.packed->k.am, s.packed->k.am, s.packed->k.ak};
    const void* k = element(k_base, p.dtype, first_key * p.k.stride[2]);
    return rows_operand(k, p.dtype, p.k.stride[2], keys, int(p.D), s.k);
  }

  Broadcast<Unit> value_operand(const void* v, int64_t first_key, int keys) {
    if (s.whole_head) {
      return {s.packed->v.a + first_key / kUnitK<Unit> * s.packed->v.ak, s.packed->v.am, s.packed->v.ak};
    }
    return columns_operand(v, p.dtype, p.v.stride[2], keys, int(p.Dv), s.v);
  }

  void row_offsets(int64_t* offset, const int64_t* stride) const {
    for (int r = 0; r < s.block->rows; ++r) offset[r] = s.block->b * stride[0] + s.block->offset(stride, r);
  }

  void load_rows() {
    int64_t offset[kMaxRows];
    row_offsets(offset, p.q.stride);
    transposed_operand(s.q, kMaxRows, p.q.data, p.dtype, offset, s.block->rows, int(p.D));
    for (int r = 0; r < lanes; ++r) s.row_max[r] = -kInf, s.row_sum[r] = T(0);
    if (!p.dropout.rng_state) return;
    for (int r = 0; r < kMaxRows; ++r) {
      const int i = std::min(r, s.block->rows - 1);
      s.batch_head[r] = uint32_t(p.dropout.first_head + s.block->b * p.H + s.block->head[i]);
      s.query[r] = uint32_t(s.block->query[i]);
    }
  }

  // Scores of a tile, hidden ones -inf.
  TileKind compute_scores(int64_t first_key, int keys) {
    TileKind kind = classify(s.mask, p.mask, *s.block, first_key, keys);
    if (kind == TileKind::none) return kind;
    Broadcast<Unit> key = key_operand(first_key, keys);
    gemm<Unit>(keys, lanes, units<Unit>(int(p.D)), key.a, key.am, key.ak, s.q, kMaxRows, s.score, kMaxRows,
               Start::zero);
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

  // Adds a tile to the running softmax and output. Returns whether it did (some pair is visible).
  bool visit(int64_t first_key, int keys, bool first) {
    const TileKind kind = compute_scores(first_key, keys);
    if (kind == TileKind::none) return false;
    const bool moved = softmax(keys);
    if (p.dropout.rng_state) apply_dropout(first_key, keys);
    const Start start = first ? Start::zero : moved ? Start::scale : Start::add;
    const void* v = element(v_base, p.dtype, first_key * p.v.stride[2]);
    FiniteRows<Unit> finite;
    const Broadcast<Unit> value = kind == TileKind::all || all_finite<T>(v, p.dtype, p.v.stride[2], keys, int(p.Dv))
                                      ? value_operand(v, first_key, keys)
                                      : finite.take(v, p.dtype, p.v.stride[2], keys, int(p.Dv), s.finite_v);
    const Unit* weight = lanes_operand<Unit>(s.score, kMaxRows, keys, lanes, s.weight);
    gemm<Unit>(int(p.Dv), lanes, units<Unit>(keys), value.a, value.am, value.ak, weight, kMaxRows, s.out, kMaxRows,
               start, s.rescale);
    finite.add_keys(s.out, s.score, *s.mask, lanes);
    return true;
  }

  // Scores to unnormalised weights, in place. Returns whether some lane's maximum moved, so that rescale matters.
  bool softmax(int keys) {
    bool moved = false;
    const V exponent = set1(rule.exponent), lowest = set1(-kInf);
    for (int r = 0; r < lanes; r += L) {
      V old_max = load(s.row_max + r), top = old_max;
      for (int j = 0; j < keys; ++j) top = max(load(s.score + j * kMaxRows + r), top);
      // A lane that has seen nothing keeps -inf; subtracting 0 then gives weights of 0, not NaN.
      V base = select(equal(top, lowest), set1(T(0)), top);
      V factor = exp2<Degree>((old_max - base) * exponent);
      moved |= !all(equal(old_max, top));
      V sum = set1(T(0));
      for (int j = 0; j < keys; ++j) {
        T* x = s.score + j * kMaxRows + r;
        V weight = exp2<Degree>((load(x) - base) * exponent);
        sum = sum + weight;
        store(x, weight);
      }
      store(s.row_max + r, top);
      store(s.row_sum + r, fma(load(s.row_sum + r), factor, sum));
      store(s.rescale + r, factor);
    }
    return moved;
  }

  void apply_dropout(int64_t first_key, int keys) {
    dropout_multipliers(s.multiplier, kMaxRows, p.dropout, s.batch_head, s.query, lanes, first_key, keys);
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
    finish_rows(s.rescale);
    for (int r = 0; r < lanes; r += L) {
      V inverse = load(s.rescale + r);  // what store_weights multiplies by, too
      VecMask<T> empty = equal(load(s.row_sum + r), zero);
      for (int64_t d = 0; d < p.Dv; ++d) {
        T* out = s.out + d * kMaxRows + r;
        store(out, select(empty, zero, load(out) * inverse));
      }
    }
    int64_t offset[kMaxRows];
    row_offsets(offset, p.out.stride);
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
      if (compute_scores(first, keys) == TileKind::none) continue;
      for (int r = 0; r < lanes; r += L) {
        const V sum = load(s.row_sum + r), inverse = load(s.rescale + r);
        const V base = select(equal(sum, zero), zero, load(s.row_max + r));
        for (int j = 0; j < keys; ++j) {
          T* x = s.score + j * kMaxRows + r;
          store(x, exp2<Degree>((load(x) - base) * exponent) * inverse);
        }
      }
      if (p.dropout.rng_state) apply_dropout(first, keys);
      untranspose_rows(element(p.weights.data, p.dtype, first), p.dtype, offset, s.score, kMaxRows, s.block->rows,
                       keys);
    }
  }
};

template <class Unit, int Degree>
inline void run_forward(const AttentionForward& p, const Threads& threads, void* workspace) {
  const ForwardPlan plan(p);
  const ForwardScratch<Unit> sizes(p, nullptr);
  const std::size_t bytes = sizes.bytes;
  for (int thread = 0; thread < threads.count; ++thread) {
    ForwardScratch<Unit>(p, static_cast<char*>(workspace) + std::size_t(thread) * bytes).packed->head = -1;
  }
  // Where there are lists enough to go round evenly, a thread takes whole ones, so that it alone packs their heads.
  const int64_t run = sizes.whole_head && plan.lists >= 16 * threads.count ? plan.blocks_per_list : 1;
  for_each_task(threads, plan.tasks / run, [&](int64_t task, int thread) {
    ForwardBlock<Unit, Degree> block(p, static_cast<char*>(workspace) + std::size_t(thread) * bytes);
    for (int64_t n = task * run; n < (task + 1) * run; ++n) {
      const int64_t list = n / plan.blocks_per_list, lists_per_batch = plan.lists / p.B;
      // The last queries first: under a causal mask they see the most keys.
      const int64_t first = (plan.blocks_per_list - 1 - n % plan.blocks_per_list) * plan.block_rows;
      block.run(list / lists_per_batch, list % lists_per_batch * plan.heads_per_list, first,
                int(min64(plan.block_rows, plan.rows_per_list - first)));
    }
  });
}

// Half types compute in float; their results are rounded so coarsely that a shorter polynomial does.
inline void run_attention_fwd(const AttentionForward& p, const Threads& threads, void* workspace) {
  if (p.dtype == DType::f64) return run_forward<double, 5>(p, threads, workspace);
  if (p.dtype == DType::f32) return run_forward<float, 5>(p, threads, workspace);
#ifdef MHA_HAS_BF16_DOT
  if (p.dtype == DType::bf16) return run_forward<Pair, 4>(p, threads, workspace);
#endif
  run_forward<float, 4>(p, threads, workspace);
}

inline void attention_fwd(const AttentionForward& p, const Threads& threads, void* workspace) {
  for_each_sequence(p, [&](const AttentionForward& s) { run_attention_fwd(s, threads, workspace); });
}

inline std::size_t sequence_fwd_workspace(const AttentionForward& p, int threads) {
  std::size_t bytes =
      p.dtype == DType::f64 ? ForwardScratch<double>(p, nullptr).bytes : ForwardScratch<float>(p, nullptr).bytes;
#ifdef MHA_HAS_BF16_DOT
  if (p.dtype == DType::bf16) bytes = ForwardScratch<Pair>(p, nullptr).bytes;
#endif
  return bytes * std::size_t(threads);
}

inline std::size_t attention_fwd_workspace(const AttentionForward& p, int threads) {
  std::size_t bytes = 0;
  for_each_sequence(p, [&](const AttentionForward& s) { bytes = std::max(bytes, sequence_fwd_workspace(s, threads)); });
  return bytes;
}

MHA_ISA_END
