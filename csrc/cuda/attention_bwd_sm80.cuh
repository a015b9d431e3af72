// Gradients of keys and values and, if C::kQueryGradient, of queries, on tensor cores (mma.sync m16n8k16; compute
// capability 8.0 and later), fp16 and bf16, head sizes up to kHead (smaller ones are filled up with zeros).
//
// A block takes kKeys keys of one key/value head and walks over the tiles of query rows that see any of them, of all
// query heads of the group, one after the other. A warp owns 16 * kMt keys and works in steps of 16 queries: S^T = K
// Q^T and dP^T = V dO^T in registers become P^T and dS^T, which are, as they lie, operand A of dV += P^T dO and dK +=
// dS^T Q: nothing is exchanged between warps, and sums run in a fixed order. Beyond head size 128, two warps share
// their keys and split the columns of dK and dV.
//
// For dQ = dS K the warps put dS^T of a tile of queries into shared memory, share out the product's tile, and add it to
// p.dq_sum in global memory, where blocks meet in any order. Its elements lie as the accumulators do, so that each
// instruction adds to 128 bytes in a row; attention_bwd_dq_round puts them in order.
#pragma once
#include "attention_bwd_scores_sm80.cuh"
#include "error.h"

namespace mha::cuda {

template <int kHead_, bool kGeneral_, bool kQueryGradient_>
struct BackwardSm80 {
  static constexpr int kHead = kHead_;
  static constexpr bool kGeneral = kGeneral_, kQueryGradient = kQueryGradient_;
  static constexpr int kMt = kHead <= (kGeneral ? 32 : 64) ? 2 : 1;
  static constexpr int kWarps = kMt == 2 ? 4 : 8, kThreads = 32 * kWarps;
  static constexpr int kColumnSplit = kHead <= 128 ? 1 : 2;
  static constexpr int kWarpKeys = 16 * kMt, kKeys = kWarpKeys * kWarps / kColumnSplit;
  static constexpr int kQueries = kHead <= 128 ? 64 : 32, kStages = kHead <= 128 ? 2 : 1;
  static constexpr int kOt = kHead / kColumnSplit / 8;
  // Keys and values are held in registers, where they fit; they come in through the stages of the query tiles.
  static constexpr bool kHeld = kHead <= 128;
  static constexpr int kBlocksPerSm = kWarps == 4 ? 2 : 1;
  static constexpr int kTileBytes = kQueries * kHead * 2, kKeyBytes = kKeys * kHead * 2;
  static constexpr int kStageBytes = 2 * kTileBytes + int(sizeof(RowBlock<float>));
  static constexpr int kGradientBytes = kQueryGradient ? kKeys * kQueries * 2 : 0;  // dS^T
  static constexpr int kKeysAt = kHeld && !kQueryGradient ? 0 : kStages * kStageBytes;
  static constexpr int kValuesAt = kHeld && kQueryGradient ? 0 : kKeysAt + kKeyBytes;
  static constexpr int kGradientAt = kKeysAt + kKeyBytes;
  static constexpr int kSharedBytes =
      kStages * kStageBytes + (kQueryGradient ? kKeyBytes + kGradientBytes : 0) + (kHeld ? 0 : 2 * kKeyBytes);
  static_assert(kHead / kColumnSplit % 64 == 0 || kColumnSplit == 1);
  static_assert(!kHeld || 2 * kKeyBytes <= kStages * kStageBytes);
  // A warp's part of a tile of dQ: 16 * kDqMt queries, 32 columns.
  static constexpr int kDqMt = kHead / 8 / kWarps, kDqRowWarps = 4 / (kDqMt ? kDqMt : 1);
  static_assert(!kQueryGradient ||
                (kHeld && kDqMt * 8 * kWarps == kHead && kKeys * kHead / 8 == 2 * kQueries * kHead / 8));
};

// Walks over those tiles of kQueries rows that see a key of [key_begin, key_end). Every warp does the same.
template <int kQueries>
struct RowTileWalk {
  static constexpr int kPerBlock = kRowBlock / kQueries;
  int base = -32;
  uint32_t seen = 0;  // which of tiles base..base + 31 are to be visited

  // The next of `count` tiles, or -1. shows: whether the mask's blocks and the like show something of a tile.
  template <class F>
  __device__ int next(const Span* spans, int count, int key_begin, int key_end, unsigned lane, F shows) {
    while (!seen) {
      base += 32;
      if (base >= count) return -1;
      const int n = base + int(lane);
      seen = __ballot_sync(
          ~0u, n < count && spans[n / kPerBlock].begin < key_end && spans[n / kPerBlock].end > key_begin && shows(n));
    }
    const int bit = __ffs(seen) - 1;
    seen &= seen - 1;
    return base + bit;
  }
};

// Adds this warp's part of dQ = dS K, for a tile of queries, to the sums at `to`. Both tiles are in shared memory, dS
// transposed.
template <class T, class C, class Tile>
__device__ inline void add_query_gradient(uint32_t ds_tile, uint32_t k_tile, float* to, unsigned thread) {
  using GradientTile = TileSm80<T, C::kQueries, C::kThreads>;
  float dq[C::kDqMt][4][4] = {};
  const unsigned warp = thread / 32, lane = thread % 32;
  const unsigned first_row = warp % C::kDqRowWarps * 16 * C::kDqMt, column = warp / C::kDqRowWarps * 32;
  const uint32_t a_lane = ds_tile + GradientTile::lane_b(lane), b_lane = k_tile + Tile::lane_a(lane);
#pragma unroll 2
  for (int key = 0; key < C::kKeys; key += 16) {
    uint32_t a[C::kDqMt][4];
#pragma unroll
    for (int m = 0; m < C::kDqMt; ++m)
      ldmatrix_x4_transposed(a[m], GradientTile::at_step(a_lane, first_row / 16 + m) + key * GradientTile::kRowBytes);
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      uint32_t b[4];
      ldmatrix_x4_transposed(b, Tile::at_step(b_lane, column / 16 + d) + key * Tile::kRowBytes);
#pragma unroll
      for (int m = 0; m < C::kDqMt; ++m) {
        mma_16x8x16<T>(dq[m][2 * d], a[m], b[0], b[1]);
        mma_16x8x16<T>(dq[m][2 * d + 1], a[m], b[2], b[3]);
      }
    }
  }
  to += warp * (C::kDqMt * 16 * 32) + lane;
  unroll<C::kDqMt * 16>([&](auto i) { add_global<i * 128>(to, dq[i / 16][i / 4 % 4][i % 4]); });
}

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    attention_bwd_sm80(const __grid_constant__ AttentionBackwardLaunch p) {
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  using GradientTile = TileSm80<T, C::kQueries, C::kThreads>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ uint16_t specials[2][C::kQueries * C::kHead / 8];  // of a tile of queries and one of dout
  const unsigned thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const unsigned key_tiles = (unsigned(p.Sk) + C::kKeys - 1) / C::kKeys;
  const int first_key = blockIdx.x % key_tiles * C::kKeys, own_keys = warp / C::kColumnSplit * C::kWarpKeys;
  const unsigned column = warp % C::kColumnSplit * (C::kHead / C::kColumnSplit);
  struct Place {
    unsigned hk, first_head;  // the group's first query head
    unsigned first_block;     // and its first row block
    unsigned tiles;           // of queries, of a head
  };
  __shared__ Sequence sequence;
  __shared__ Place shared_place;
  const unsigned bhk = blockIdx.x / key_tiles, hk = bhk % unsigned(p.Hk),
                 first_head = hk * (unsigned(p.H) / unsigned(p.Hk));
  if (thread == 0) sequence = cuda::sequence(p, bhk / unsigned(p.Hk));
  __syncthreads();
  if (first_key >= sequence.Sk) return;
  const Place own_place = {hk, first_head, row_block(sequence, first_head, 0),
                           sequence.row_blocks * (kRowBlock / C::kQueries)};
  // Without dQ, registers are shorter: the numbers are read anew at each use.
  if (!C::kQueryGradient && thread == 0) shared_place = own_place;
  if (!C::kQueryGradient) __syncthreads();
  const Place& place = C::kQueryGradient ? own_place : shared_place;
  const uint32_t base = shared_address(shared), k_tile = base + C::kKeysAt, v_tile = base + C::kValuesAt;
  const bool aligned = !C::kGeneral || p.aligned;

  load_tile<Tile, C::kKeys>(key_rows<T>(p.k, sequence, place.hk, p.D), first_key, aligned, k_tile, thread);
  load_tile<Tile, C::kKeys>(key_rows<T>(p.v, sequence, place.hk, p.Dv), first_key, aligned, v_tile, thread);
  cp_async_commit();
  const uint32_t k_lane = k_tile + own_keys * Tile::kRowBytes + Tile::lane_a(lane);
  const uint32_t v_lane = v_tile + own_keys * Tile::kRowBytes + Tile::lane_a(lane);
  uint32_t k[C::kMt][C::kHeld ? C::kHead / 16 : 1][4], v[C::kMt][C::kHeld ? C::kHead / 16 : 1][4];
  if constexpr (C::kHeld) {
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < C::kMt; ++m)
#pragma unroll
      for (int d = 0; d < C::kHead / 16; ++d) {
        ldmatrix_x4(k[m][d], Tile::at_step(k_lane, d) + m * 16 * Tile::kRowBytes);
        ldmatrix_x4(v[m][d], Tile::at_step(v_lane, d) + m * 16 * Tile::kRowBytes);
      }
    // NaN or Inf in a key makes dS of those rows that see it NaN: the key itself need not, and must not, do so in dQ =
    // dS K.
    const bool nonfinite = C::kQueryGradient && Tile::template any_nonfinite<C::kKeys>(k_tile, thread);
    __syncthreads();
    if (nonfinite) Tile::template take_specials<C::kKeys>(k_tile, specials[0], thread);
  }

  constexpr int kPerBlock = kRowBlock / C::kQueries, kChunks = C::kHead / 8;
  auto load_queries = [&](int tile, uint32_t stage) {
    const unsigned thread = thread_index();
    const unsigned h = place.first_head + unsigned(tile) / place.tiles;
    const int row = unsigned(tile) % place.tiles * C::kQueries;
    load_tile<Tile, C::kQueries>(query_rows<T>(p.q, sequence, h, p.D), row, aligned, stage, thread);
    load_tile<Tile, C::kQueries>(query_rows<T>(p.dout, sequence, h, p.Dv), row, aligned, stage + C::kTileBytes, thread);
    const auto* rows = static_cast<const RowBlock<float>*>(p.rows) + place.first_block + tile / kPerBlock;
    if (thread < sizeof(*rows) / 16)
      cp_async_16(stage + 2 * C::kTileBytes + thread * 16, reinterpret_cast<const char*>(rows) + thread * 16, 16);
    cp_async_commit();
  };

  auto tile_code = [&](int tile) -> uint32_t {
    if constexpr (!C::kGeneral) return kShowsSome;
    const unsigned h = place.first_head + unsigned(tile) / place.tiles;
    const int row = unsigned(tile) % place.tiles * C::kQueries;
    return mask_tile_code(p.tiles, sequence.b, h, row, C::kQueries, first_key, C::kKeys);
  };
  RowTileWalk<C::kQueries> walk;
  auto next_tile = [&] {
    return walk.next(p.spans + place.first_block, int(unsigned(p.H / p.Hk) * place.tiles), first_key,
                     first_key + C::kKeys, thread_index() % 32, [&](int tile) { return tile_code(tile) & kShowsSome; });
  };
  int tile = next_tile();
  uint32_t stage = base;
  if (tile >= 0) load_queries(tile, stage);
  float dk[C::kMt][C::kOt][4] = {}, dv[C::kMt][C::kOt][4] = {};

  while (tile >= 0) {
    const bool elementwise = tile_code(tile) & kHidesSome;
    cp_async_wait<0>();
    __syncthreads();
    const auto& rows = *reinterpret_cast<const RowBlock<float>*>(shared + (stage - base) + 2 * C::kTileBytes);
    const bool edge = elementwise || rows.span.full_begin > first_key || rows.span.full_end < first_key + C::kKeys;
    const int next = next_tile();
    auto next_stage = [&] { return C::kStages == 1 ? base : base + (base + C::kStageBytes - stage); };
    if (C::kStages > 1 && next >= 0) load_queries(next, next_stage());
    bool nonfinite = false;
    if (edge) {
      const unsigned thread = thread_index();
      nonfinite = __syncthreads_or(Tile::template any_nonfinite<C::kQueries>(stage, thread) ||
                                   Tile::template any_nonfinite<C::kQueries>(stage + C::kTileBytes, thread));
    }
    if (nonfinite) {
      const unsigned thread = thread_index();
      Tile::template take_specials<C::kQueries>(stage, specials[0], thread);
      Tile::template take_specials<C::kQueries>(stage + C::kTileBytes, specials[1], thread);
      __syncthreads();
    }
    const unsigned h = place.first_head + unsigned(tile) / place.tiles;
    const int row = unsigned(tile) % place.tiles * C::kQueries;
#pragma unroll 1
    for (int step = 0; step < C::kQueries; step += 16) {
      const uint32_t q_tile = stage + step * Tile::kRowBytes, dout_tile = q_tile + C::kTileBytes;
      const int i = row % kRowBlock + step;
      const GradientPlace at = {&sequence,
                                h,
                                row + step,
                                first_key + own_keys,
                                rows.negative_lse + i,
                                rows.negative_rest + i,
                                rows.negative_delta + i,
                                rows.ranges + i};
      uint32_t visible = ~0u, a[C::kMt][4] = {};
      bool seen = true, hides = false;
      if (edge) {
        const RowRange r = at.ranges[lane % 16];
        seen = __any_sync(~0u, r.begin < at.key + C::kWarpKeys && r.end > at.key);
        hides = elementwise || !__all_sync(~0u, r.begin <= at.key && r.end >= at.key + C::kWarpKeys);
      }
      if (seen && (C::kGeneral || hides)) {
        if (C::kGeneral && elementwise)
          visible = visible_pairs<C::kMt, 2, true, false>(p.mask, at, thread_index() % 32);
        else
          visible = visible_pairs<C::kMt, 2, true, true>(p.mask, at, thread_index() % 32);
        if (C::kGeneral) seen = __any_sync(~0u, visible);
      }
      if (seen) {
        float s[C::kMt][2][4] = {}, ds[C::kMt][2][4];
        start_gradients<true, C::kGeneral>(ds, at, lane);
        multiply_rows<T, Tile, C::kHead, !C::kHeld>(s, k, k_lane, q_tile + Tile::lane_b(lane));
        multiply_rows<T, Tile, C::kHead, !C::kHeld>(ds, v, v_lane, dout_tile + Tile::lane_b(lane));
        to_gradients<T, true, C::kGeneral, false>(s, ds, p, at, C::kGeneral || hides, visible,
                                                  C::kGeneral ? thread_index() % 32 : lane);
#pragma unroll
        for (int m = 0; m < C::kMt; ++m) pack_operand<T>(a[m], s[m], 0);
        multiply_columns<T, Tile>(dv, a, Tile::at_step(dout_tile + Tile::lane_a(lane), column / 16));
#pragma unroll
        for (int m = 0; m < C::kMt; ++m) pack_operand<T>(a[m], ds[m], 0);
        multiply_columns<T, Tile>(dk, a, Tile::at_step(q_tile + Tile::lane_a(lane), column / 16));
        if (nonfinite) {
          add_specials<C::kMt, 2>(dv, visible, specials[1] + step * kChunks + column / 8, lane, kChunks);
          add_specials<C::kMt, 2>(dk, visible, specials[0] + step * kChunks + column / 8, lane, kChunks);
        }
      }
      if constexpr (C::kQueryGradient) {
        const unsigned lane = thread_index() % 32;
        const uint32_t ds_lane = base + C::kGradientAt + GradientTile::offset(own_keys + lane / 4, 0) + lane % 4 * 4;
        unroll<C::kMt * 4>([&](auto i) {
          constexpr int m = i / 4, e = i % 4;
          store_shared_4<(16 * m + e % 2 * 8) * GradientTile::kRowBytes>(ds_lane ^ (step / 8 + e / 2) << 4, a[m][e]);
        });
      }
    }
    if constexpr (C::kQueryGradient) {
      __syncthreads();
      float* to = p.dq_sum + int64_t(place.first_block + tile) * (C::kQueries * C::kHead);
      add_query_gradient<T, C, Tile>(base + C::kGradientAt, k_tile, to, thread_index());
    }
    if (C::kStages == 1) {
      __syncthreads();
      if (next >= 0) load_queries(next, next_stage());
    }
    tile = next;
    stage = next_stage();
  }
  cp_async_wait<0>();
  __syncthreads();
  const uint32_t staging = base + warp * C::kWarpKeys * Tile::kRowBytes;
  const int own = first_key + own_keys;
  store_rows<T, Tile>(dv, 1.0f, key_rows<T>(p.dv, sequence, place.hk, p.Dv), own, column, p.aligned_dv, staging, lane);
  store_rows<T, Tile>(dk, float(p.scale), key_rows<T>(p.dk, sequence, place.hk, p.D), own, column, p.aligned_dk,
                      staging, lane);
}

template <class T, class C>
void launch_attention_bwd_sm80(const char* name, const AttentionBackwardLaunch& p, cudaStream_t stream) {
  auto kernel = attention_bwd_sm80<T, C>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes), name);
  const int64_t blocks = (p.Sk + C::kKeys - 1) / C::kKeys * p.B * p.Hk;
  if (blocks == 0) return;
  kernel<<<grid_size(blocks, name), C::kThreads, C::kSharedBytes, stream>>>(p);
  check(cudaGetLastError(), name);
}

}  // namespace mha::cuda
