// Gradients of keys and values on tensor cores (mma.sync m16n8k16; compute capability 8.0 and later), fp16 and bf16,
// head sizes up to kHead (smaller ones are filled up with zeros).
//
// A block takes kKeys keys of one key/value head and walks over the tiles of query rows that see any of them, of all
// query heads of the group, one after the other. A warp owns 16 * kMt keys and works in steps of 16 queries: S^T = K
// Q^T and dP^T = V dO^T in registers become P^T and dS^T, which are, as they lie, operand A of dV += P^T dO and dK +=
// dS^T Q: nothing is exchanged between warps, and sums run in a fixed order. Beyond head size 128, two warps share
// their keys and split the columns of dK and dV.
#pragma once
#include "attention_bwd_scores_sm80.cuh"
#include "error.h"

namespace mha::cuda {

template <int kHead_, bool kGeneral_>
struct BackwardKeysSm80 {
  static constexpr int kHead = kHead_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kMt = kHead <= 64 ? 2 : 1;
  static constexpr int kWarps = kHead <= 64 ? 4 : 8, kThreads = 32 * kWarps;
  static constexpr int kColumnSplit = kHead <= 128 ? 1 : 2;
  static constexpr int kWarpKeys = 16 * kMt, kKeys = kWarpKeys * kWarps / kColumnSplit;
  static constexpr int kQueries = kHead <= 128 ? 64 : 32, kStages = kHead <= 128 ? 2 : 1;
  static constexpr int kOt = kHead / kColumnSplit / 8;
  // Keys and values are held in registers, where they fit; they come in through the stages of the query tiles.
  static constexpr bool kHeld = kHead <= 128;
  static constexpr int kBlocksPerSm = kWarps == 4 ? 2 : 1;
  static constexpr int kTileBytes = kQueries * kHead * 2, kKeyBytes = kKeys * kHead * 2;
  static constexpr int kStageBytes = 2 * kTileBytes + int(sizeof(RowBlock<float>));
  static constexpr int kSharedBytes = kStages * kStageBytes + (kHeld ? 0 : 2 * kKeyBytes);
  static_assert(kHead / kColumnSplit % 64 == 0 || kColumnSplit == 1);
  static_assert(!kHeld || 2 * kKeyBytes <= kStages * kStageBytes);
};

// Walks over those tiles of kQueries rows that see a key of [key_begin, key_end). Every warp does the same.
template <int kQueries>
struct RowTileWalk {
  static constexpr int kPerBlock = kRowBlock / kQueries;
  const Span* spans;
  int count, key_begin, key_end, base = -32;
  uint32_t seen = 0, full = 0;  // of tiles base..base + 31: to be visited; with every pair in its row's interval
  bool last_full = false;

  __device__ int next(int lane) {
    while (!seen) {
      base += 32;
      if (base >= count) return -1;
      bool sees = false, all = false;
      if (base + lane < count) {
        const Span s = spans[(base + lane) / kPerBlock];
        sees = s.begin < key_end && s.end > key_begin;
        all = s.full_begin <= key_begin && s.full_end >= key_end;
      }
      seen = __ballot_sync(~0u, sees);
      full = __ballot_sync(~0u, all);
    }
    const int bit = __ffs(seen) - 1;
    seen &= seen - 1;
    last_full = full >> bit & 1;
    return base + bit;
  }
};

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    attention_bwd_dkv_sm80(const __grid_constant__ AttentionBackwardLaunch p) {
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ uint16_t specials[2][C::kQueries * C::kHead / 8];  // of a tile of queries and one of dout
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int key_tiles = (int(p.Sk) + C::kKeys - 1) / C::kKeys;
  const int first_key = int(blockIdx.x % key_tiles) * C::kKeys, own_keys = warp / C::kColumnSplit * C::kWarpKeys;
  const int column = warp % C::kColumnSplit * (C::kHead / C::kColumnSplit);
  const int64_t bhk = blockIdx.x / key_tiles, b = bhk / p.Hk, hk = bhk % p.Hk, group = p.H / p.Hk;
  const uint32_t base = shared_address(shared), key_at = base + (C::kHeld ? 0 : C::kStages * C::kStageBytes);
  const bool aligned = !C::kGeneral || p.aligned;

  Tile::template load<C::kKeys>(aligned, key_at, matrix<T>(p.k, b, hk, p.Sk, p.D), first_key, thread);
  Tile::template load<C::kKeys>(aligned, key_at + C::kKeyBytes, matrix<T>(p.v, b, hk, p.Sk, p.Dv), first_key, thread);
  cp_async_commit();
  const uint32_t k_lane = key_at + own_keys * Tile::kRowBytes + Tile::lane_a(lane), v_lane = k_lane + C::kKeyBytes;
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
    __syncthreads();
  }

  constexpr int kPerBlock = kRowBlock / C::kQueries, kChunks = C::kHead / 8;
  const int tiles_per_head = p.row_blocks * kPerBlock;
  const int64_t first_block = (b * p.H + hk * group) * p.row_blocks;
  auto load_tile = [&](int tile, uint32_t stage) {
    const int64_t h = hk * group + tile / tiles_per_head;
    const int row = tile % tiles_per_head * C::kQueries;
    Tile::template load<C::kQueries>(aligned, stage, matrix<T>(p.q, b, h, p.Sq, p.D), row, thread);
    Tile::template load<C::kQueries>(aligned, stage + C::kTileBytes, matrix<T>(p.dout, b, h, p.Sq, p.Dv), row, thread);
    if (thread < int(sizeof(RowBlock<float>)) / 16)
      cp_async_16(
          stage + 2 * C::kTileBytes + thread * 16,
          reinterpret_cast<const char*>(static_cast<const RowBlock<float>*>(p.rows) + first_block + tile / kPerBlock) +
              thread * 16,
          16);
    cp_async_commit();
  };

  RowTileWalk<C::kQueries> walk = {p.spans + first_block, int(group) * tiles_per_head, first_key, first_key + C::kKeys};
  int tile = walk.next(lane);
  uint32_t stage = base;
  if (tile >= 0) load_tile(tile, stage);
  float dk[C::kMt][C::kOt][4] = {}, dv[C::kMt][C::kOt][4] = {};
  const bool elementwise = C::kGeneral && (p.mask.query_ids || p.mask.dense);

  while (tile >= 0) {
    const bool hides = C::kGeneral || !walk.last_full, edge = elementwise || !walk.last_full;
    cp_async_wait<0>();
    bool nonfinite = false;
    if (edge)
      nonfinite = __syncthreads_or(Tile::template any_nonfinite<C::kQueries>(stage, thread) |
                                   Tile::template any_nonfinite<C::kQueries>(stage + C::kTileBytes, thread));
    else
      __syncthreads();
    const int next = walk.next(lane);
    const uint32_t next_stage = C::kStages == 1 ? base : base + (base + C::kStageBytes - stage);
    if (C::kStages > 1 && next >= 0) load_tile(next, next_stage);
    if (nonfinite) {
      Tile::template take_specials<C::kQueries>(stage, specials[0], thread);
      Tile::template take_specials<C::kQueries>(stage + C::kTileBytes, specials[1], thread);
      __syncthreads();
    }
    const int row = tile % tiles_per_head * C::kQueries;
    const auto& rows = *reinterpret_cast<const RowBlock<float>*>(shared + (stage - base) + 2 * C::kTileBytes);
#pragma unroll 1
    for (int step = 0; step < C::kQueries; step += 16) {
      const uint32_t q_tile = stage + step * Tile::kRowBytes, dout_tile = q_tile + C::kTileBytes;
      const int i = row % kRowBlock + step;
      const GradientPlace at = {b,
                                hk * group + tile / tiles_per_head,
                                row + step,
                                first_key + own_keys,
                                rows.negative_lse + i,
                                rows.delta + i,
                                rows.ranges + i};
      uint32_t visible = ~0u;
      if (hides) {
        visible = visible_pairs<C::kMt, 2, true, !C::kGeneral>(p.mask, at, lane);
        if (!__any_sync(~0u, visible)) continue;
      }
      float s[C::kMt][2][4] = {}, ds[C::kMt][2][4] = {};
      multiply_rows<T, Tile, C::kHead, !C::kHeld>(s, k, k_lane, q_tile + Tile::lane_b(lane));
      multiply_rows<T, Tile, C::kHead, !C::kHeld>(ds, v, v_lane, dout_tile + Tile::lane_b(lane));
      to_gradients<T, true, C::kGeneral, false>(s, ds, p, at, hides, visible, lane);
      uint32_t a[C::kMt][4];
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
    if (C::kStages == 1) {
      __syncthreads();
      if (next >= 0) load_tile(next, next_stage);
    }
    tile = next;
    stage = next_stage;
  }
  cp_async_wait<0>();
  __syncthreads();
  const uint32_t staging = base + warp * C::kWarpKeys * Tile::kRowBytes;
  store_rows<T, Tile>(dv, 1.0f, matrix<T>(p.dv, b, hk, p.Sk, p.Dv), first_key + own_keys, column, p.aligned_dv, staging,
                      lane);
  store_rows<T, Tile>(dk, float(p.scale), matrix<T>(p.dk, b, hk, p.Sk, p.D), first_key + own_keys, column, p.aligned_dk,
                      staging, lane);
}

template <class T, class C>
void launch_attention_bwd_dkv_sm80(const char* name, const AttentionBackwardLaunch& p, cudaStream_t stream) {
  auto kernel = attention_bwd_dkv_sm80<T, C>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes), name);
  const int64_t blocks = (p.Sk + C::kKeys - 1) / C::kKeys * p.B * p.Hk;
  if (blocks == 0) return;
  kernel<<<grid_size(blocks, name), C::kThreads, C::kSharedBytes, stream>>>(p);
  check(cudaGetLastError(), name);
}

}  // namespace mha::cuda
