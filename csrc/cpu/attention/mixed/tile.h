// Talking heads: the scores of all heads of a block of queries against a tile of keys, which meet where heads are
// mixed. One head's part of a tile is [key][query lane], as elsewhere (tile/score.h); the parts of the heads lie
// kHeadTile apart. A mix is a product of product/gemm.h, with pairs of key and query as its columns.
//
// This room includes threads, tile, attention/bwd, attention.
#pragma once

#include "../../threads/parallel.h"
#include "../../tile/finite_rows.h"
#include "../../tile/mask.h"
#include "../../tile/operands.h"
#include "../../tile/score.h"
#include "../bwd/tile.h"

MHA_ISA_BEGIN

// Fewer than kMaxKeys, so that several tiles of all heads stay in the second-level cache (12 heads of floats: 99 KB).
constexpr int kMixKeys = 32;
// No power of two: what one pair has in all heads would share one set of the first-level cache.
constexpr int64_t kHeadTile = kMixKeys * kMaxRows + 16;

// The tiles of a block of queries that the first pass over the keys keeps for the second take up to so many bytes of a
// thread's memory; the others are computed again. Reading one back, even from main memory, is faster.
constexpr int64_t kKeptBytes = 8 << 20;

template <class T>
inline int64_t kept_tiles(const AttentionProblem& p, int64_t tile_sets) {
  const int64_t bytes = max64(1, tile_sets * p.H * kHeadTile * int64_t(sizeof(T)));
  return min64((p.Sk + kMixKeys - 1) / kMixKeys, kKeptBytes / bytes);
}

enum class Mix { plain, transposed };

// to[g] = sum over h of from[h] * mix[h][g]; transposed: to[h] = sum over g of from[g] * mix[h][g].
template <class T>
inline void mix_heads(T* to, const T* from, const T* mix, Mix kind, int64_t H, int lanes, int keys) {
  const int64_t am = kind == Mix::plain ? 1 : H, ak = kind == Mix::plain ? H : 1;
  auto product = [&](int first, int columns) {
    gemm<T>(int(H), columns, int(H), mix, am, ak, from + first, kHeadTile, to + first, kHeadTile, Start::zero);
  };
  if (lanes == kMaxRows) return product(0, keys * kMaxRows);
  for (int j = 0; j < keys; ++j) product(j * kMaxRows, lanes);
}

// f(vector of lanes' place in the tile)
template <class T, class F>
MHA_INLINE void for_each_vector(int lanes, int keys, F f) {
  for (int j = 0; j < keys; ++j) {
    for (int r = 0; r < lanes; r += Vec<T>::lanes) f(j * kMaxRows + r);
  }
}

// What the heads of a block of queries see of a tile of keys.
template <class T>
struct HeadMasks {
  int64_t count;            // 1: all heads see the same
  TileMask<T>* masks;       // [count]
  TileKind* kinds;          // [count]
  TileMask<T>* union_mask;  // what some head sees
  TileKind some_head;       // its kind

  HeadMasks(Arena& arena, const AttentionProblem& p) {
    const Mask& m = p.mask;
    count = (m.dense && m.dense_stride_h != 0) || (m.blocks && m.blocks_stride_h != 0) ? p.H : 1;
    masks = arena.take<TileMask<T>>(count);
    kinds = arena.take<TileKind>(count);
    union_mask = count > 1 ? arena.take<TileMask<T>>(1) : masks;
  }

  TileKind kind(int64_t h) const { return kinds[count > 1 ? h : 0]; }
  const TileMask<T>& mask(int64_t h) const { return masks[count > 1 ? h : 0]; }

  // What may enter a product with head h; one of mixed heads has what any head sees in it.
  TileKind kind(int64_t h, bool mixed) const { return mixed ? some_head : kind(h); }
  const TileMask<T>& mask(int64_t h, bool mixed) const { return mixed ? *union_mask : mask(h); }

  void look(const Mask& m, RowBlock* block, int64_t first_key, int keys) {
    bool none = true, all = false;
    for (int64_t h = 0; h < count; ++h) {
      std::fill_n(block->head, block->rows, h);
      kinds[h] = classify(masks + h, m, *block, first_key, keys);
      none &= kinds[h] == TileKind::none;
      all |= kinds[h] == TileKind::all;
    }
    some_head = none ? TileKind::none : all ? TileKind::all : TileKind::some;
    if (count > 1 && some_head == TileKind::some) unite(block->rows, keys);
  }

  void unite(int rows, int keys) {
    TileMask<T>& u = *union_mask;
    u.listed = true;
    std::memset(u.bits, 0, sizeof(u.bits));
    for (int r = 0; r < kMaxRows; ++r) u.lo[r] = T(0), u.hi[r] = r < rows ? T(keys) : T(0);
    for (int64_t h = 0; h < count; ++h) {
      if (kinds[h] == TileKind::none) continue;
      for (int r = 0; r < rows; ++r) u.set_row(r, u.row(r) | masks[h].row(r));
    }
  }
};

// The scores of a block of queries.
template <class T>
struct MixedScores {
  using V = Vec<T>;
  const AttentionProblem& p;
  const T* pre_mix;  // null: none
  RowBlock* block;
  HeadMasks<T> masks;
  T* q;     // [H][D][kMaxRows]
  T* k;     // a tile of keys, if it must be widened
  T* bias;  // of one head
  int lanes = 0;

  MixedScores(Arena& arena, const AttentionProblem& problem, const void* mix)
      : p(problem),
        pre_mix(static_cast<const T*>(mix)),
        block(arena.take<RowBlock>(1)),
        masks(arena, problem),
        q(arena.take<T>(problem.H * problem.D * kMaxRows)),
        k(arena.take<T>(kMixKeys * problem.D)),
        bias(arena.take<T>(kHeadTile)) {}

  void load_queries(int64_t b, int64_t first, int rows) {
    set_rows(block, p.mask, b, 0, first, rows, p.Sq, p.Sk);
    lanes = round_up(rows, V::lanes);
    load_lanes(q, p.q, p.D);
  }

  // The rows of x of all heads, one per lane: [H][size][kMaxRows].
  void load_lanes(T* to, const Tensor4& x, int64_t size) const {
    int64_t offset[kMaxRows];
    for (int r = 0; r < block->rows; ++r) offset[r] = block->b * x.stride[0] + block->query[r] * x.stride[2];
    for (int64_t h = 0; h < p.H; ++h) {
      const void* head = element(x.data, p.dtype, h * x.stride[1]);
      transposed_operand(to + h * size * kMaxRows, kMaxRows, head, p.dtype, offset, block->rows, int(size));
    }
  }

  const void* key_row(const Tensor4& x, int64_t head, int64_t key) const {
    return element(x.data, p.dtype, block->b * x.stride[0] + head * x.stride[1] + key * x.stride[2]);
  }

  TileKind look(int64_t first_key, int keys) {
    masks.look(p.mask, block, first_key, keys);
    return masks.some_head;
  }

  // tile[h] = rows of x, [Hk,Sk,size], times right[h], [size][kMaxRows]; 0 where no head sees the pair, whatever is
  // there, and in lanes beyond the rows. scratch: for rows that must be widened.
  void products(T* tile, const Tensor4& x, int64_t size, const T* right, T* scratch, int64_t first_key,
                int keys) const {
    const int64_t group = p.Hk ? p.H / p.Hk : 1;
    for (int64_t h = 0; h < p.H; ++h, tile += kHeadTile) {
      const void* rows = key_row(x, h / group, first_key);
      if (h % group == 0) operand_ = rows_operand(rows, p.dtype, x.stride[2], keys, int(size), scratch);
      gemm<T>(keys, lanes, int(size), operand_.a, operand_.am, operand_.ak, right + h * size * kMaxRows, kMaxRows, tile,
              kMaxRows, Start::zero);
      hide_from_all(tile, keys);
      for (int j = 0; j < keys && block->rows < lanes; ++j)
        std::fill(tile + j * kMaxRows + block->rows, tile + j * kMaxRows + lanes, T(0));
    }
  }

  // 0 where no head sees the pair, be it that a mix has made NaN there.
  void hide_from_all(T* tile, int keys) const {
    if (masks.some_head == TileKind::some) hide(tile, kMaxRows, *masks.union_mask, lanes, keys, T(0));
  }

  // softcap(scale * q.k) of all heads
  void capped(T* tile, int64_t first_key, int keys) const {
    products(tile, p.k, p.D, q, k, first_key, keys);
    ScoreRule<T> rule(p);
    for (int64_t h = 0; h < p.H; ++h) finish_scores<T>(tile + h * kHeadTile, kMaxRows, nullptr, 0, rule, lanes, keys);
  }

  // From these to the scores that softmax sees, hidden ones -inf; in place without a mix.
  void mix(T* to, const T* capped, int64_t first_key, int keys) const {
    if (pre_mix)
      mix_heads(to, capped, pre_mix, Mix::plain, p.H, lanes, keys);
    else if (to != capped)
      std::memcpy(to, capped, size_t(p.H * kHeadTile) * sizeof(T));
    for (int64_t g = 0; g < p.H; ++g, to += kHeadTile) {
      if (masks.kind(g) == TileKind::none) {
        for_each_vector<T>(lanes, keys, [&](int at) { store(to + at, set1(-std::numeric_limits<T>::infinity())); });
        continue;
      }
      if (p.bias.data) {
        std::fill_n(block->head, block->rows, g);
        load_tile(bias, p.bias, p.bias_dtype, *block, first_key, keys);
        for_each_vector<T>(lanes, keys, [&](int at) { store(to + at, load(to + at) + load(bias + at)); });
      }
      if (masks.kind(g) == TileKind::some)
        hide(to, kMaxRows, masks.mask(g), lanes, keys, -std::numeric_limits<T>::infinity());
    }
  }

  // Weights of rows that see NaN are NaN, but not where hidden.
  void hide_weights(T* tile, int keys) const {
    for (int64_t g = 0; g < p.H; ++g, tile += kHeadTile) {
      if (masks.kind(g) == TileKind::none) std::fill_n(tile, kMaxRows * keys, T(0));
      if (masks.kind(g) == TileKind::some) hide(tile, kMaxRows, masks.mask(g), lanes, keys, T(0));
    }
  }

  // What dropout multiplies the weights of head g with, in `bias`.
  const T* dropout(int64_t g, int64_t first_key, int keys) const {
    uint32_t head[kMaxRows] = {}, query[kMaxRows] = {};
    std::fill_n(head, kMaxRows, uint32_t(g));
    for (int r = 0; r < block->rows; ++r) query[r] = uint32_t(block->query[r]);
    dropout_multipliers(bias, kMaxRows, p.dropout, block->b, head, query, lanes, first_key, keys);
    return bias;
  }
  void apply_dropout(T* tile, int64_t first_key, int keys) const {
    if (!p.dropout.rng_state) return;
    for (int64_t g = 0; g < p.H; ++g, tile += kHeadTile) {
      const T* factor = dropout(g, first_key, keys);
      for_each_vector<T>(lanes, keys, [&](int at) { store(tile + at, load(tile + at) * load(factor + at)); });
    }
  }

 private:
  mutable Broadcast<T> operand_{};
};

MHA_ISA_END
