// What a block of attention_bwd_sm80 does with one tile of queries that lies in shared memory.
#pragma once
#include "../prim/warpgroup.cuh"
#include "attention_bwd_scores.cuh"

namespace mha::cuda {

// What a warp keeps in registers: its keys and values as operands (C::kHeld), and the sums of their gradients. With
// C::kApart there is one operand, keys or (C::of_values) values, and one sum, dv or dk, and they are called k and dk.
template <class C>
struct WarpKeys {
  uint32_t k[C::kMt][C::kHeld ? C::kHead / 16 : 1][4], v[C::kMt][C::kHeld && !C::kApart ? C::kHead / 16 : 1][4];
  float dk[C::kMt][C::kOt][4] = {}, dv[C::kMt][C::kApart ? 1 : C::kOt][4] = {};
};

// Keeps the compiler from loading operands of what follows before this point, for which registers are short.
__device__ inline void no_loads_ahead() { __syncwarp(); }

// A tile of queries, as every warp sees it.
struct QueryTile {
  uint32_t stage;  // queries, then dout
  const RowBlock<float>* rows;
  // For kernels that do everything: also whether pairs need more of a look than their rows' intervals.
  const Sequence* sequence = nullptr;
  unsigned h = 0;
  bool elementwise = false;
  int row = 0;  // the first one; where a tile is a row block, also only for these
};

template <class C>
__device__ inline GradientPlace gradient_place(const QueryTile& tile, int step, int key) {
  // A stage has the numbers of a whole row block, the tile's rows among them.
  const int i = C::kQueries == kRowBlock ? step : tile.row % kRowBlock + step;
  return {tile.sequence,
          tile.h,
          tile.row + step,
          key,
          tile.rows->negative_lse + i,
          tile.rows->negative_rest + i,
          tile.rows->negative_delta + i,
          tile.rows->ranges + i};
}

// Whether any of kRows rows sees any of the warp's keys by the rows' intervals, and whether each sees all. Asked anew
// at each use: registers are short.
template <class C, int kRows>
__device__ inline bool any_seen(const GradientPlace& at, unsigned lane) {
  const RowRange r = at.ranges[lane % kRows];
  return __any_sync(~0u, r.begin < at.key + C::kWarpKeys && r.end > at.key);
}

template <class C, int kRows>
__device__ inline bool all_seen(const GradientPlace& at, unsigned lane) {
  const RowRange r = at.ranges[lane % kRows];
  return __all_sync(~0u, r.begin <= at.key && r.end >= at.key + C::kWarpKeys);
}

// Adds the NaN and Inf of 16 queries and their dout to the gradients of those keys that they see.
template <class C>
__device__ inline void add_query_specials(WarpKeys<C>& own, const QueryTile& tile, int step, uint32_t visible,
                                          unsigned thread) {
  constexpr int kChunks = C::kHead / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint16_t* specials =
      reinterpret_cast<const uint16_t*>(shared + C::specials_at(tile.stage - shared_address(shared))) + step * kChunks +
      C::column(thread) / 8;
  if constexpr (C::kApart) {
    add_specials<C::kMt, 2>(own.dk, visible, specials + (C::of_values(thread) ? 0 : C::kSpecials), thread % 32,
                            kChunks);
  } else {
    add_specials<C::kMt, 2>(own.dv, visible, specials + C::kSpecials, thread % 32, kChunks);
    add_specials<C::kMt, 2>(own.dk, visible, specials, thread % 32, kChunks);
  }
}

// Packed scores (keys down) of 16 queries, from a chunk of 8 on, into a tile of shared memory whose rows are keys, kRow
// rows on.
template <class Tile, int kRow = 0, int kMt>
__device__ inline void store_transposed(uint32_t lane_address, int chunk, const uint32_t (&a)[kMt][4]) {
  unroll<kMt * 4>([&](auto i) {
    constexpr int m = i / 4, e = i % 4;
    store_shared_4<(kRow + 16 * m + e % 2 * 8) * Tile::kRowBytes>(lane_address ^ (chunk + e / 2) << 4, a[m][e]);
  });
}

// The address of a lane's first pair for store_transposed.
template <class Tile>
__device__ inline uint32_t transposed_lane(uint32_t tile, int key, unsigned lane) {
  return tile + Tile::offset(key + lane / 4, 0) + lane % 4 * 4;
}

// Adds the 16 queries from `step` on to the warp's dk and dv and puts dS^T into shared memory. query_lane: this lane's
// address of those queries; gradient_lane: of dS^T.
template <class T, class C, class Place, class Walk>
__device__ inline void add_queries(WarpKeys<C>& own, const AttentionBackwardLaunch& p, const QueryTile& tile, int step,
                                   bool edge, const Place& place, const Walk& walk, uint32_t query_lane,
                                   uint32_t gradient_lane) {
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  const unsigned thread = thread_index(), lane = thread % 32;
  const int key = C::kGeneral || edge ? place.first_key + int(C::own_keys(thread)) : 0;  // otherwise not looked at
  const GradientPlace at = gradient_place<C>(tile, step, key);
  uint32_t visible = ~0u, a[C::kMt][4] = {};
  bool seen = !edge || any_seen<C, 16>(at, lane);
  if (C::kGeneral && seen) {
    visible = tile.elementwise ? visible_pairs<C::kMt, 2, true, false>(p.mask, at, lane)
                               : visible_pairs<C::kMt, 2, true, true>(p.mask, at, lane);
    seen = __any_sync(~0u, visible);
  }
  if (seen) {
    float s[C::kMt][2][4] = {}, ds[C::kMt][2][4];
    start_gradients<true, C::kGeneral>(ds, at, lane);
    multiply_rows<T, Tile, C::kHead, false>(s, own.k, 0, query_lane);
    if (C::kGeneral || edge) no_loads_ahead();
    multiply_rows<T, Tile, C::kHead, false, 0, C::kQueries>(ds, own.v, 0, query_lane);
    to_gradients<T, true, C::kGeneral, false>(s, ds, p, at, C::kGeneral, visible, lane);
    if (!C::kGeneral && edge) hide_outside_transposed(at, lane, s, ds);
#pragma unroll
    for (int m = 0; m < C::kMt; ++m) pack_operand<T>(a[m], s[m], 0);
    multiply_columns<T, Tile, C::kQueries>(own.dv, a, query_lane);
#pragma unroll
    for (int m = 0; m < C::kMt; ++m) pack_operand<T>(a[m], ds[m], 0);
    multiply_columns<T, Tile>(own.dk, a, query_lane);
    if (C::kGeneral && edge && walk.nonfinite) add_query_specials(own, tile, step, visible, thread);
  }
  if constexpr (C::kQueryGradient) store_transposed<TileSm80<T, C::kQueries, C::kThreads>>(gradient_lane, step / 8, a);
}

// The same where two warps share the keys (C::kApart). handed_lane: where they hand over this step's scores.
template <class T, class C, class Place, class Walk>
__device__ inline void add_queries_apart(WarpKeys<C>& own, const AttentionBackwardLaunch& p, const QueryTile& tile,
                                         int step, bool edge, const Place& place, const Walk& walk, uint32_t query_lane,
                                         uint32_t handed_lane) {
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  const unsigned thread = thread_index(), lane = thread % 32;
  const bool of_values = C::of_values(thread);
  const int key = C::kGeneral || edge ? place.first_key + int(C::own_keys(thread)) : 0;  // otherwise not looked at
  const GradientPlace at = gradient_place<C>(tile, step, key);
  uint32_t visible = ~0u, a[1][4];
  if (edge && !any_seen<C, 16>(at, lane)) return;
  if constexpr (C::kGeneral) {
    visible = tile.elementwise ? visible_pairs<1, 2, true, false>(p.mask, at, lane)
                               : visible_pairs<1, 2, true, true>(p.mask, at, lane);
    if (!__any_sync(~0u, visible)) return;
  }
  float x[1][2][4] = {};
  if (of_values) start_gradients<true, C::kGeneral>(x, at, lane);
  multiply_rows<T, Tile, C::kHead, false>(x, own.k, 0, query_lane + (of_values ? C::kTileBytes : 0));
  if (!of_values) {
    if constexpr (!C::kGeneral) to_weights<true>(x, p, at, lane);
    store_accumulators(handed_lane, x);
  }
  named_barrier<64>(1 + thread / 64);
  float s[1][2][4];
  if (of_values) load_accumulators(s, handed_lane);
  if constexpr (C::kGeneral) {
    if (of_values) {
      to_gradients<T, true, true, false>(s, x, p, at, true, visible, lane);
    } else {
      float unused[1][2][4] = {};
      to_gradients<T, true, true, false>(x, unused, p, at, true, visible, lane);
    }
  } else {
    if (of_values)
      for_fragment<1, 2>([&](int m, int n, int half, int e) { x[m][n][2 * half + e] *= s[m][n][2 * half + e]; });
    if (edge) hide_outside_transposed(at, lane, x);
  }
  pack_operand<T>(a[0], x[0], 0);
  multiply_columns<T, Tile>(own.dk, a, query_lane + (of_values ? 0 : C::kTileBytes));
  if (C::kGeneral && edge && walk.nonfinite) add_query_specials(own, tile, step, visible, thread);
}

// P^T and dS^T of the warp's keys and of kSteps * 16 queries from `first` on, packed. Returns false, and leaves them
// alone, where these queries see none of the keys.
template <class T, class C, int kSteps>
__device__ inline bool pair_scores(uint32_t (&weights)[kSteps][C::kMt][4], uint32_t (&gradients)[kSteps][C::kMt][4],
                                   const AttentionBackwardLaunch& p, const QueryTile& tile, int first, int key,
                                   bool edge, uint32_t k_tile, unsigned thread) {
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  constexpr int kRows = 16 * kSteps;
  const unsigned lane = thread % 32;
  const GradientPlace at = gradient_place<C>(tile, first, key);
  if (edge && !any_seen<C, kRows>(at, lane)) return false;
  const uint32_t query_lane = tile.stage + first * Tile::kRowBytes + Tile::lane_b(lane);
  const uint32_t k_lane = k_tile + C::own_keys(thread) * Tile::kRowBytes + Tile::lane_b(lane);
  const uint32_t none[C::kMt][1][4] = {};
  float s[C::kMt][kRows / 8][4] = {}, ds[C::kMt][kRows / 8][4];
  start_gradients<true, false>(ds, at, lane);
  multiply_rows<T, Tile, C::kHead, true>(s, none, k_lane, query_lane);
  no_loads_ahead();
  multiply_rows<T, Tile, C::kHead, true, C::kKeys, C::kQueries>(ds, none, k_lane, query_lane);
  to_gradients<T, true, false, false>(s, ds, p, at, false, ~0u, lane);
  if (edge && !all_seen<C, kRows>(at, lane)) hide_outside_transposed(at, lane, s, ds);
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int m = 0; m < C::kMt; ++m) {
      pack_operand<T>(weights[step][m], s[m], 2 * step);
      pack_operand<T>(gradients[step][m], ds[m], 2 * step);
    }
  return true;
}

// All queries of a tile, for warps that work in pairs. gradient_tile: for dS^T, and after it P^T.
template <class T, class C, class Place>
__device__ inline void add_queries_in_pairs(WarpKeys<C>& own, const AttentionBackwardLaunch& p, const QueryTile& tile,
                                            bool edge, const Place& place, uint32_t k_tile, uint32_t gradient_tile) {
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  using GradientTile = TileSm80<T, C::kQueries, C::kThreads>;
  constexpr int kRows = C::kQueries / 2, kSteps = kRows / 16;
  uint32_t weights[kSteps][C::kMt][4] = {}, gradients[kSteps][C::kMt][4] = {};
  const unsigned thread = thread_index(), lane = thread % 32, half = thread / 32 % 2;
  const unsigned own_keys = C::own_keys(thread), column = C::column(thread);
  const int key = edge ? place.first_key + int(own_keys) : 0;  // otherwise not looked at
  const bool seen = pair_scores<T, C, kSteps>(weights, gradients, p, tile, half * kRows, key, edge, k_tile, thread);

  const uint32_t b_lane = tile.stage + half * kRows * Tile::kRowBytes + Tile::lane_b(lane) + column * 2;
  const uint32_t store_lane = transposed_lane<GradientTile>(gradient_tile, own_keys, lane) ^ (half * kRows / 8) << 4;
  unroll<kSteps>([&](auto step) {
    store_transposed<GradientTile, C::kKeys>(store_lane, 2 * step, weights[step]);
    store_transposed<GradientTile>(store_lane, 2 * step, gradients[step]);
  });
  if (seen)
    unroll<kSteps>([&](auto step) {
      multiply_columns<T, Tile, C::kQueries + 16 * step>(own.dv, weights[step], b_lane);
      multiply_columns<T, Tile, 16 * step>(own.dk, gradients[step], b_lane);
    });
  __syncthreads();
  // The other half of the queries.
  if (!edge || any_seen<C, kRows>(gradient_place<C>(tile, (1 - half) * kRows, key), lane)) {
    const uint32_t other_lane = b_lane + (half ? -kRows : kRows) * Tile::kRowBytes;
    const uint32_t a_lane = (gradient_tile + own_keys * GradientTile::kRowBytes + GradientTile::lane_b(lane)) ^
                            ((1 - half) * kRows / 8) << 4;
    unroll<kSteps>([&](auto step) {
      uint32_t a[C::kMt][4];
      unroll<C::kMt>([&](auto m) { load_operand_a<GradientTile, step, C::kKeys + 16 * m>(a[m], a_lane); });
      multiply_columns<T, Tile, C::kQueries + 16 * step>(own.dv, a, other_lane);
      unroll<C::kMt>([&](auto m) { load_operand_a<GradientTile, step, 16 * m>(a[m], a_lane); });
      multiply_columns<T, Tile, 16 * step>(own.dk, a, other_lane);
    });
  }
}

// All queries of a tile. base: of shared memory.
template <class T, class C, class Place, class Walk>
__device__ inline void add_tile(WarpKeys<C>& own, const AttentionBackwardLaunch& p, const QueryTile& tile, bool edge,
                                const Place& place, const Walk& walk, uint32_t k_tile, uint32_t base) {
  const uint32_t gradient_tile = base + C::kGradientAt;
  if constexpr (C::kPairs) {
    add_queries_in_pairs<T, C>(own, p, tile, edge, place, k_tile, gradient_tile);
  } else if constexpr (C::kApart) {
    using Tile = TileSm80<T, C::kHead, C::kThreads>;
    const unsigned thread = thread_index();
    const uint32_t query_lane = tile.stage + Tile::lane_b(thread % 32),
                   handed_lane = base + C::kHandedAt + C::own_keys(thread) * C::kQueries * 4 + thread % 32 * 16;
#pragma unroll 1
    for (int step = 0; step < C::kQueries; step += 16)  // each has a place of its own, free again at the next tile
      add_queries_apart<T, C>(own, p, tile, step, edge, place, walk, query_lane + step * Tile::kRowBytes,
                              handed_lane + step * C::kWarpKeys * 4);
  } else {
    using Tile = TileSm80<T, C::kHead, C::kThreads>;
    const unsigned thread = thread_index();
    const uint32_t query_lane = tile.stage + Tile::lane_b(thread % 32);
    uint32_t gradient_lane = 0;
    if constexpr (C::kQueryGradient)
      gradient_lane =
          transposed_lane<TileSm80<T, C::kQueries, C::kThreads>>(gradient_tile, C::own_keys(thread), thread % 32);
#pragma unroll 1
    for (int step = 0; step < C::kQueries; step += 16)
      add_queries<T, C>(own, p, tile, step, edge, place, walk, query_lane + step * Tile::kRowBytes, gradient_lane);
    if (C::kQueryGradient) __syncthreads();
  }
  if constexpr (!C::kGeneral) {
    if (!edge || !walk.nonfinite) return;
#pragma unroll 1
    for (int step = 0; step < C::kQueries; step += 16) {
      const unsigned thread = thread_index();
      const GradientPlace at = gradient_place<C>(tile, step, place.first_key + int(C::own_keys(thread)));
      const uint32_t visible = visible_pairs<C::kMt, 2, true, true>(p.mask, at, thread % 32);
      add_query_specials(own, tile, step, visible, thread);
    }
  }
}

// Adds this warp's part of dQ = dS K, for a tile of queries, to the sums at `to`. Both tiles are in shared memory, dS
// transposed. kClean: NaN and Inf of keys count as 0, as they have made dS of those rows NaN that see them, and must
// not reach others.
template <class T, class C, bool kClean>
__device__ inline void add_query_gradient(uint32_t ds_tile, uint32_t k_tile, float* to, unsigned thread) {
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  using GradientTile = TileSm80<T, C::kQueries, C::kThreads>;
  constexpr int kChunk = kClean ? 1 : C::kKeys / 16;  // steps written out
  float dq[C::kDqMt][4][4] = {};
  const unsigned warp = thread / 32, lane = thread % 32;
  const unsigned first_row = warp % C::kDqRowWarps * 16 * C::kDqMt, column = warp / C::kDqRowWarps * 32;
  uint32_t a_lane[C::kDqMt], b_lane[2];
#pragma unroll
  for (int m = 0; m < C::kDqMt; ++m)
    a_lane[m] = GradientTile::at_step(ds_tile + GradientTile::lane_b(lane), first_row / 16 + m);
#pragma unroll
  for (int d = 0; d < 2; ++d) b_lane[d] = Tile::at_step(k_tile + Tile::lane_b(lane), column / 16 + d);
#pragma unroll 1
  for (int key = 0; key < C::kKeys; key += 16 * kChunk) {
    unroll<kChunk>([&](auto i) {
      if (i % 2 == 0 && i) no_loads_ahead();
      uint32_t a[C::kDqMt][4];
#pragma unroll
      for (int m = 0; m < C::kDqMt; ++m)
        ldmatrix_x4_transposed<i * 16 * GradientTile::kRowBytes>(a[m], a_lane[m] + key * GradientTile::kRowBytes);
#pragma unroll
      for (int d = 0; d < 2; ++d) {
        uint32_t b[4];
        ldmatrix_x4_transposed<i * 16 * Tile::kRowBytes>(b, b_lane[d] + key * Tile::kRowBytes);
        if constexpr (kClean)
          for (uint32_t& pair : b) pair = finite_or_zero<T>(pair);
#pragma unroll
        for (int m = 0; m < C::kDqMt; ++m) {
          mma_16x8x16<T>(dq[m][2 * d], a[m], b[0], b[2]);
          mma_16x8x16<T>(dq[m][2 * d + 1], a[m], b[1], b[3]);
        }
      }
    });
  }
  to += warp * (C::kDqMt * 16 * 32) + lane;
  unroll<C::kDqMt * 16>([&](auto i) { add_global<i * 128>(to, dq[i / 16][i / 4 % 4][i % 4]); });
}

}  // namespace mha::cuda
