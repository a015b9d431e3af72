// Attention forward with talking heads: a block of queries with all heads visits its tiles of keys twice. The first
// pass finds the logsumexp of each mixed head, since the weights can only be mixed once they are normalised; the second
// mixes them and multiplies with the values.
#pragma once

#include "../../tile/sequence.h"
#include "tile.h"

MHA_ISA_BEGIN

template <class T>
struct MixedForwardScratch {
  MixedScores<T> scores;
  int64_t kept;
  T* tiles;                        // [kept + 1][H][kHeadTile]
  T* work;                         // [H][kHeadTile]
  T* values;                       // a tile of values, if they must be widened or cleared of NaN
  T *row_max, *row_sum, *inverse;  // [H][kMaxRows]
  T* out;                          // [H][Dv][kMaxRows]
  std::size_t bytes;

  MixedForwardScratch(const AttentionMixedForward& p, Arena arena)
      : scores(arena, p, p.pre_mix), kept(kept_tiles<T>(p, 1)) {
    tiles = arena.take<T>((kept + 1) * p.H * kHeadTile);
    work = arena.take<T>(p.H * kHeadTile);
    values = arena.take<T>(kMixKeys * p.Dv);
    row_max = arena.take<T>(p.H * kMaxRows);
    row_sum = arena.take<T>(p.H * kMaxRows);
    inverse = arena.take<T>(p.H * kMaxRows);
    out = arena.take<T>(p.H * p.Dv * kMaxRows);
    bytes = arena.used();
  }
};

template <class T, int Degree>
class MixedForwardBlock {
  using V = Vec<T>;
  static constexpr int L = V::lanes;
  static constexpr T kInf = std::numeric_limits<T>::infinity();

 public:
  MixedForwardBlock(const AttentionMixedForward& p, void* scratch) : p_(p), s_(p, Arena(scratch)) {}

  void run(int64_t b, int64_t first_row, int rows) {
    s_.scores.load_queries(b, first_row, rows);
    std::fill_n(s_.row_max, p_.H * kMaxRows, -kInf);
    std::fill_n(s_.row_sum, p_.H * kMaxRows, T(0));
    std::fill_n(s_.out, p_.H * p_.Dv * kMaxRows, T(0));
    if (p_.weights.data) clear_weights();
    for_each_tile([&](int64_t n, int64_t first, int keys) {
      T* tile = tile_of(n);
      compute(tile, first, keys);
      for (int64_t g = 0; g < p_.H; ++g) add_to_sums(g, tile + g * kHeadTile, keys);
    });
    for (int64_t g = 0; g < p_.H; ++g) finish_rows(g);
    for_each_tile([&](int64_t n, int64_t first, int keys) {
      if (n >= s_.kept) compute(tile_of(n), first, keys);
      add_values(tile_of(n), first, keys);
    });
    store_out();
  }

 private:
  // Calls f(number, first key, keys) for each tile of which some head sees something.
  template <class F>
  void for_each_tile(F f) {
    const RowBlock& block = *s_.scores.block;
    for (int64_t first = block.any_begin, n = 0; first < block.any_end; first += kMixKeys, ++n) {
      const int keys = int(min64(kMixKeys, block.any_end - first));
      if (s_.scores.look(first, keys) != TileKind::none) f(n, first, keys);
    }
  }

  T* tile_of(int64_t n) const { return s_.tiles + min64(n, s_.kept) * p_.H * kHeadTile; }

  // The mixed scores.
  void compute(T* tile, int64_t first_key, int keys) {
    T* capped = p_.pre_mix ? s_.work : tile;
    s_.scores.capped(capped, first_key, keys);
    s_.scores.mix(tile, capped, first_key, keys);
  }

  void add_to_sums(int64_t g, const T* score, int keys) {
    const V log2e = set1(T(kLog2e)), lowest = set1(-kInf);
    for (int r = 0; r < s_.scores.lanes; r += L) {
      T *row_max = s_.row_max + g * kMaxRows + r, *row_sum = s_.row_sum + g * kMaxRows + r;
      V old_max = load(row_max), top = old_max;
      for (int j = 0; j < keys; ++j) top = max(load(score + j * kMaxRows + r), top);
      const V base = select(equal(top, lowest), set1(T(0)), top);
      V sum = load(row_sum) * exp2<Degree>((old_max - base) * log2e);
      for (int j = 0; j < keys; ++j) sum = sum + exp2<Degree>((load(score + j * kMaxRows + r) - base) * log2e);
      store(row_max, top);
      store(row_sum, sum);
    }
  }

  void finish_rows(int64_t g) {
    const RowBlock& block = *s_.scores.block;
    const T sink = p_.sinks ? static_cast<const T*>(p_.sinks)[g] : -kInf;
    T *lse = static_cast<T*>(p_.lse), *lse_rest = static_cast<T*>(p_.lse_rest);
    for (int r = 0; r < kMaxRows; ++r) {
      const int64_t at = g * kMaxRows + r;
      if (r >= block.rows) {
        s_.inverse[at] = T(0);
        continue;
      }
      const FinishedRow<T> row = finish_row(s_.row_max[at], s_.row_sum[at], T(1), sink);
      s_.inverse[at] = row.inverse;
      any_nan_ |= std::isnan(row.inverse);
      const int64_t place = block.b * p_.rows_stride_b + g * p_.rows_stride_h + block.query[r];
      lse[place] = row.lse;
      if (lse_rest) lse_rest[place] = row.lse_rest;
    }
    // From here on row_max is what weights are relative to.
    for (int r = 0; r < kMaxRows; ++r) {
      T& top = s_.row_max[g * kMaxRows + r];
      if (top == -kInf) top = T(0);
    }
  }

  void add_values(T* tile, int64_t first_key, int keys) {
    const int lanes = s_.scores.lanes;
    const V log2e = set1(T(kLog2e));
    for (int64_t g = 0; g < p_.H; ++g) {
      T* score = tile + g * kHeadTile;
      for (int r = 0; r < lanes; r += L) {
        const V base = load(s_.row_max + g * kMaxRows + r), inverse = load(s_.inverse + g * kMaxRows + r);
        for (int j = 0; j < keys; ++j) {
          T* x = score + j * kMaxRows + r;
          store(x, exp2<Degree>((load(x) - base) * log2e) * inverse);
        }
      }
    }
    if (any_nan_) s_.scores.hide_weights(tile, keys);
    T* weights = p_.post_mix ? s_.work : tile;
    if (p_.post_mix) {
      mix_heads(weights, tile, static_cast<const T*>(p_.post_mix), Mix::plain, p_.H, lanes, keys);
      for (int64_t g = 0; g < p_.H; ++g) s_.scores.hide_from_all(weights + g * kHeadTile, keys);
    }
    s_.scores.apply_dropout(weights, first_key, keys);
    for (int64_t g = 0; g < p_.H; ++g) add_head(g, weights + g * kHeadTile, first_key, keys);
    if (p_.weights.data) store_weights(weights, first_key, keys);
  }

  void add_head(int64_t g, const T* weight, int64_t first_key, int keys) {
    const MixedScores<T>& scores = s_.scores;
    const HeadMasks<T>& masks = scores.masks;
    const bool mixed = p_.post_mix != nullptr;
    const TileKind kind = masks.kind(g, mixed);
    if (kind == TileKind::none) return;
    const int64_t group = p_.H / p_.Hk, stride = p_.v.stride[2];
    const void* v = scores.key_row(p_.v, g / group, first_key);
    T* out = s_.out + g * p_.Dv * kMaxRows;
    FiniteRows<T> finite;
    const Broadcast<T> value = kind == TileKind::all || all_finite<T>(v, p_.dtype, stride, keys, int(p_.Dv))
                                   ? columns_operand(v, p_.dtype, stride, keys, int(p_.Dv), s_.values)
                                   : finite.take(v, p_.dtype, stride, keys, int(p_.Dv), s_.values);
    gemm<T>(int(p_.Dv), scores.lanes, keys, value.a, value.am, value.ak, weight, kMaxRows, out, kMaxRows, Start::add);
    finite.add_keys(out, weight, masks.mask(g, mixed), scores.lanes);
  }

  void row_offsets(int64_t* offset, const int64_t* stride, int64_t g) const {
    const RowBlock& block = *s_.scores.block;
    for (int r = 0; r < block.rows; ++r) offset[r] = block.b * stride[0] + g * stride[1] + block.query[r] * stride[2];
  }

  void store_out() {
    int64_t offset[kMaxRows];
    for (int64_t g = 0; g < p_.H; ++g) {
      row_offsets(offset, p_.out.stride, g);
      const T* out = s_.out + g * p_.Dv * kMaxRows;
      untranspose_rows(p_.out.data, p_.dtype, offset, out, kMaxRows, s_.scores.block->rows, int(p_.Dv));
    }
  }

  void clear_weights() {
    int64_t offset[kMaxRows];
    for (int64_t g = 0; g < p_.H; ++g) {
      row_offsets(offset, p_.weights.stride, g);
      for (int r = 0; r < s_.scores.block->rows; ++r) {
        std::memset(element(p_.weights.data, p_.dtype, offset[r]), 0, std::size_t(p_.Sk) * size_of(p_.dtype));
      }
    }
  }

  void store_weights(const T* weights, int64_t first_key, int keys) {
    int64_t offset[kMaxRows];
    for (int64_t g = 0; g < p_.H; ++g) {
      row_offsets(offset, p_.weights.stride, g);
      untranspose_rows(element(p_.weights.data, p_.dtype, first_key), p_.dtype, offset, weights + g * kHeadTile,
                       kMaxRows, s_.scores.block->rows, keys);
    }
  }

  const AttentionMixedForward& p_;
  MixedForwardScratch<T> s_;
  bool any_nan_ = false;  // in a weight
};

inline int64_t mixed_forward_tasks(const AttentionProblem& p) { return p.B * ((p.Sq + kMaxRows - 1) / kMaxRows); }

template <class T, int Degree>
inline void run_mixed_forward(const AttentionMixedForward& p, const Threads& threads, void* workspace) {
  const std::size_t bytes = MixedForwardScratch<T>(p, Arena(nullptr)).bytes;
  const int64_t blocks = (p.Sq + kMaxRows - 1) / kMaxRows;
  if (p.H == 0) return;
  auto run_block = [&](int64_t task, int thread) {
    // The last queries of all sequences first: under a causal mask they see the most keys.
    const int64_t first = (blocks - 1 - task / p.B) * kMaxRows;
    MixedForwardBlock<T, Degree>(p, static_cast<char*>(workspace) + std::size_t(thread) * bytes)
        .run(task % p.B, first, int(min64(kMaxRows, p.Sq - first)));
  };
  for_each_task(threads, mixed_forward_tasks(p), run_block, Share::in_order);
}

inline void attention_mixed_fwd(const AttentionMixedForward& p, const Threads& threads, void* workspace) {
  for_each_sequence(p, [&](const AttentionMixedForward& s) {
    if (p.dtype == DType::f64) return run_mixed_forward<double, 5>(s, threads, workspace);
    if (p.dtype == DType::f32) return run_mixed_forward<float, 5>(s, threads, workspace);
    run_mixed_forward<float, 4>(s, threads, workspace);
  });
}

inline std::size_t attention_mixed_fwd_workspace(const AttentionMixedForward& p, int threads) {
  std::size_t bytes = 0;
  for_each_sequence(p, [&](const AttentionMixedForward& s) {
    const std::size_t own = p.dtype == DType::f64 ? MixedForwardScratch<double>(s, Arena(nullptr)).bytes
                                                  : MixedForwardScratch<float>(s, Arena(nullptr)).bytes;
    bytes = std::max(bytes, own);
  });
  return bytes * std::size_t(threads);
}

MHA_ISA_END
