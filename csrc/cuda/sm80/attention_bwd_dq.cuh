// The gradient of queries on tensor cores, without atomics (mma.sync m16n8k16; compute capability 8.0 and later), fp16
// and bf16, head sizes up to kHead (smaller ones are filled up with zeros).
//
// A block takes kRows query rows of one head and walks over the tiles of keys that they see. A warp owns 16 * kMt rows
// and works in steps of kStep keys: S = Q K^T and dP = dO V^T in registers become dS, operand A of dQ += dS K. Beyond
// head size 128, registers have room for half of that, and two warps share their rows (kApart): one makes S, the other
// dP, they trade these through shared memory, and each sums half of dQ's columns.
//
// attention_bwd_dbias_sm80 walks in the same way, over a few tiles of keys and all heads and samples that share the
// bias, one after the other, and adds dS to the gradient of the bias, each element of which belongs to one thread.
#pragma once
#include "../common/error.h"
#include "../prim/warpgroup.cuh"
#include "attention_bwd_scores.cuh"

namespace mha::cuda {

template <int kHead_, bool kGeneral_, bool kOfBias_ = false>
struct BackwardQueriesSm80 {
  static constexpr int kHead = kHead_;
  static constexpr bool kGeneral = kGeneral_, kOfBias = kOfBias_;
  static constexpr bool kApart = kHead > 128;
  static constexpr int kMt = kHead <= (kGeneral ? 32 : 64) ? 2 : 1;
  static constexpr int kWarps = kMt == 2 ? 4 : 8, kThreads = 32 * kWarps;
  static constexpr int kSharing = kApart ? 2 : 1;  // warps with the same rows
  static constexpr int kWarpRows = 16 * kMt, kRows = kWarpRows * kWarps / kSharing;
  static constexpr int kKeys = kApart ? 32 : 64;
  static constexpr int kStep = kGeneral || kMt == 2 ? 16 : 32, kNt = kStep / 8, kOt = kHead / kSharing / 8;
  static constexpr int kBlocksPerSm = kWarps == 4 ? 2 : 1;
  // Two stages, through which queries and dout come on their way to registers, and what warps trade of a tile.
  static constexpr int kTileBytes = kKeys * kHead * 2, kRowsBytes = kRows * kHead * 2, kTradedAt = 2 * 2 * kTileBytes;
  static constexpr int kSharedBytes = kTradedAt + (kApart ? 2 * kRows * kKeys * 4 : 0);
  static_assert(2 * kRowsBytes <= 2 * 2 * kTileBytes);
};

// One of two warps has s, q.k, in x, the other (of_dout) dout.v, as start_gradients wants it: both get the gradients.
// own, other: their lanes' addresses of what is traded.
template <class T, class C>
__device__ inline void trade_gradients(float (&x)[1][C::kNt][4], const AttentionBackwardLaunch& p,
                                       const GradientPlace& at, bool of_dout, bool hides, uint32_t visible,
                                       uint32_t own, uint32_t other, unsigned thread) {
  const unsigned lane = thread % 32;
  float y[1][C::kNt][4];
  if constexpr (!C::kGeneral)
    if (!of_dout) to_weights<false>(x, p, at, lane);
  store_accumulators(own, x);
  named_barrier<64>(1 + thread / 64);
  load_accumulators(y, other);
  if constexpr (C::kGeneral) {
    for_fragment<1, C::kNt>([&](int m, int n, int half, int e) {
      float &s = y[m][n][2 * half + e], &dp = x[m][n][2 * half + e];
      const float from_other = s;
      s = of_dout ? from_other : dp;
      dp = of_dout ? dp : from_other;
    });
    to_gradients<T, false, true, C::kOfBias>(y, x, p, at, hides, visible, lane);
  } else {
    for_fragment<1, C::kNt>([&](int m, int n, int half, int e) { x[m][n][2 * half + e] *= y[m][n][2 * half + e]; });
    if (hides) hide(x, visible, 0.0f);
  }
}

template <int kMt, int kNt>
__device__ inline void add_bias_gradient(const Tensor4& dbias, const float (&ds)[kMt][kNt][4], const GradientPlace& at,
                                         uint32_t visible, unsigned lane) {
  float* base = static_cast<float*>(dbias.data) + at.sequence->b * dbias.stride[0] + at.h * dbias.stride[1];
  for_fragment<kMt, kNt>([&](int m, int n, int half, int e) {
    if (!(visible >> fragment_bit<kNt>(m, n, half, e) & 1)) return;
    const int64_t row = at.row + fragment_row<false>(m, n, half, e, lane),
                  key = at.key + fragment_key<false>(m, n, half, e, lane);
    base[row * dbias.stride[2] + key * dbias.stride[3]] += ds[m][n][2 * half + e];
  });
}

template <int kRows>
__device__ inline Span span_of(const RowRange* ranges, int first, int Sq, unsigned lane) {
  const RowRange r = ranges[lane % kRows];
  Span s = {kKeyMax, 0, 0, kKeyMax};
  if (first + lane % kRows < Sq) s = {r.begin < r.end ? r.begin : kKeyMax, r.end, r.begin, r.end};
  return warp_merge(s);
}

// dQ of rows [first_row, first_row + kRows) of a head; or, of the tiles of keys [tile, tile_end), their part of dbias.
template <class T, class C>
__device__ inline void walk_keys(const AttentionBackwardLaunch& p, unsigned b, unsigned h, int first_row, int tile,
                                 int tile_end) {
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ RowBlock<float> row_blocks[C::kRows / kRowBlock];
  __shared__ Sequence sequence;
  __shared__ uint16_t specials[C::kKeys * C::kHead / 8];
  static_assert(fits_everywhere(C::kSharedBytes, sizeof(row_blocks) + sizeof(sequence) + sizeof(specials)));
  const unsigned thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int own_rows = warp / C::kSharing * C::kWarpRows, column = C::kApart ? warp % 2 * (C::kHead / 2) : 0;
  const bool of_dout = C::kApart && warp % 2;
  const unsigned hk = h / (unsigned(p.H) / unsigned(p.Hk));
  if (thread == 0) sequence = cuda::sequence(p, b);
  __syncthreads();
  if (first_row >= sequence.Sq) return;
  const uint32_t base = shared_address(shared);
  const bool aligned = !C::kGeneral || p.aligned;

  load_tile<Tile, C::kRows>(query_rows<T>(p.q, sequence, h, p.D), first_row, aligned, base, thread);
  load_tile<Tile, C::kRows>(query_rows<T>(p.dout, sequence, h, p.Dv), first_row, aligned, base + C::kRowsBytes, thread);
  const unsigned first_block = row_block(sequence, h, first_row / kRowBlock);
  const auto* blocks = static_cast<const RowBlock<float>*>(p.rows) + first_block;
  for (unsigned i = thread; i < sizeof(row_blocks) / 16; i += C::kThreads)
    cp_async_16(shared_address(row_blocks) + i * 16, reinterpret_cast<const char*>(blocks) + i * 16, 16);
  cp_async_commit();
  const Span* spans = p.spans + first_block;
  Span all = spans[0];
  if (C::kRows > kRowBlock) all = merge(all, spans[1]);
  cp_async_wait<0>();
  __syncthreads();

  const uint32_t q_lane = base + own_rows * Tile::kRowBytes + Tile::lane_b(lane), dout_lane = q_lane + C::kRowsBytes;
  // With kApart one of the two, called q.
  uint32_t q[C::kMt][C::kHead / 16][4], dout[C::kMt][C::kApart ? 1 : C::kHead / 16][4];
  unroll<C::kMt>([&](auto m) {
    unroll<C::kHead / 16>([&](auto d) {
      load_operand_a<Tile, d, 16 * m>(q[m][d], of_dout ? dout_lane : q_lane);
      if constexpr (!C::kApart) load_operand_a<Tile, d, 16 * m>(dout[m][d], dout_lane);
    });
  });
  __syncthreads();
  const RowBlock<float>& rows = row_blocks[own_rows / kRowBlock];
  const int i = own_rows % kRowBlock;
  const Span own = span_of<C::kWarpRows>(rows.ranges + i, first_row + own_rows, sequence.Sq, lane);

  tile = all.begin < all.end ? max(tile, all.begin / C::kKeys) : 0;
  tile_end = all.begin < all.end ? min(tile_end, (all.end + C::kKeys - 1) / C::kKeys) : 0;
  auto load_keys = [&](int n, uint32_t stage) {
    load_tile<Tile, C::kKeys>(key_rows<T>(p.k, sequence, hk, p.D), n * C::kKeys, aligned, stage, thread);
    load_tile<Tile, C::kKeys>(key_rows<T>(p.v, sequence, hk, p.Dv), n * C::kKeys, aligned, stage + C::kTileBytes,
                              thread);
    cp_async_commit();
  };
  uint32_t code = kShowsSome;
  auto visible_tile = [&](int tile) -> int {
    if constexpr (C::kGeneral) {
      for (; tile < tile_end; ++tile) {
        code = mask_tile_code(p.tiles, sequence.b, h, first_row, C::kRows, tile * C::kKeys, C::kKeys);
        if (code & kShowsSome) break;
      }
    }
    return tile;
  };
  tile = visible_tile(tile);
  if (tile < tile_end) load_keys(tile, base);
  float dq[C::kMt][C::kOt][4] = {};

  for (uint32_t stage = base; tile < tile_end;) {
    const bool elementwise = C::kGeneral && (code & kHidesSome);
    cp_async_wait<0>();
    bool nonfinite = false;
    if (elementwise || tile * C::kKeys < all.full_begin || (tile + 1) * C::kKeys > all.full_end)
      nonfinite = __syncthreads_or(Tile::template any_nonfinite<C::kKeys>(stage, thread));
    else
      __syncthreads();
    const uint32_t next = base + (base + 2 * C::kTileBytes - stage);
    const int next_tile = visible_tile(tile + 1);
    if (next_tile < tile_end) load_keys(next_tile, next);
    if (nonfinite) {
      Tile::template take_specials<C::kKeys>(stage, specials, thread);
      __syncthreads();
    }
#pragma unroll 1
    for (int step = 0; step < C::kKeys; step += C::kStep) {
      const int key = tile * C::kKeys + step;
      if (key >= own.end || key + C::kStep <= own.begin) continue;
      const GradientPlace at = {&sequence,
                                h,
                                first_row + own_rows,
                                key,
                                rows.negative_lse + i,
                                rows.negative_rest + i,
                                rows.negative_delta + i,
                                rows.ranges + i};
      const bool hides = C::kGeneral || key < own.full_begin || key + C::kStep > own.full_end;
      uint32_t visible = ~0u;
      if (hides) {
        if (C::kGeneral && elementwise)
          visible = visible_pairs<C::kMt, C::kNt, false, false>(p.mask, at, lane);
        else
          visible = visible_pairs<C::kMt, C::kNt, false, true>(p.mask, at, lane);
        if (!__any_sync(~0u, visible)) continue;
      }
      const uint32_t k_tile = stage + step * Tile::kRowBytes, v_tile = k_tile + C::kTileBytes;
      float ds[C::kMt][C::kNt][4] = {};
      if constexpr (C::kApart) {
        if (of_dout) start_gradients<false, C::kGeneral>(ds, at, lane);
        multiply_rows<T, Tile, C::kHead, false>(ds, q, 0, (of_dout ? v_tile : k_tile) + Tile::lane_b(lane));
        constexpr int kWarpBytes = C::kWarpRows * C::kKeys * 4;  // each step has a place of its own
        const uint32_t traded = base + C::kTradedAt + step * C::kWarpRows * 4 + lane * 16;
        trade_gradients<T, C>(ds, p, at, of_dout, hides, visible, traded + warp * kWarpBytes,
                              traded + (warp ^ 1) * kWarpBytes, thread);
        if constexpr (C::kOfBias) visible &= of_dout ? 0xF0u : 0x0Fu;  // half of the keys each
      } else {
        float s[C::kMt][C::kNt][4] = {};
        start_gradients<false, C::kGeneral>(ds, at, lane);
        multiply_rows<T, Tile, C::kHead, false>(s, q, 0, k_tile + Tile::lane_b(lane));
        multiply_rows<T, Tile, C::kHead, false>(ds, dout, 0, v_tile + Tile::lane_b(lane));
        to_gradients<T, false, C::kGeneral, C::kOfBias>(s, ds, p, at, hides, visible, lane);
      }
      if constexpr (C::kOfBias) {
        add_bias_gradient<C::kMt, C::kNt>(p.dbias, ds, at, visible, lane);
      } else {
#pragma unroll
        for (int n = 0; n < C::kNt; n += 2) {
          uint32_t a[C::kMt][4];
#pragma unroll
          for (int m = 0; m < C::kMt; ++m) pack_operand<T>(a[m], ds[m], n);
          multiply_columns<T, Tile>(dq, a, k_tile + n * 8 * Tile::kRowBytes + Tile::lane_b(lane) + column * 2);
        }
        if (nonfinite)
          add_specials<C::kMt, C::kNt>(dq, visible, specials + step * (C::kHead / 8) + column / 8, lane, C::kHead / 8);
      }
    }
    stage = next;
    tile = next_tile;
  }
  cp_async_wait<0>();
  __syncthreads();
  if constexpr (!C::kOfBias)
    store_rows<T, Tile>(dq, float(p.scale), query_rows<T>(p.dq, sequence, h, p.D), first_row + own_rows, column,
                        p.aligned_dq, base + own_rows * Tile::kRowBytes + column * 2, lane);
}

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    attention_bwd_dq_sm80(const __grid_constant__ AttentionBackwardLaunch p) {
  const unsigned row_tiles = (unsigned(p.Sq) + C::kRows - 1) / C::kRows, bh = blockIdx.x / row_tiles;
  // Late query tiles first: under a causal mask they have the most to do.
  const int first_row = (row_tiles - 1 - blockIdx.x % row_tiles) * C::kRows;
  walk_keys<T, C>(p, bh / unsigned(p.H), bh % unsigned(p.H), first_row, 0, kKeyMax);
}

template <class C>
constexpr int kBiasTiles = (C::kHead <= 128 ? 128 : 64) / C::kKeys;  // of keys per block

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    attention_bwd_dbias_sm80(const __grid_constant__ AttentionBackwardLaunch p) {
  const unsigned row_tiles = (unsigned(p.Sq) + C::kRows - 1) / C::kRows, key_step = kBiasTiles<C> * C::kKeys;
  const unsigned key_blocks = (unsigned(p.Sk) + key_step - 1) / key_step;
  const int first_row = blockIdx.x % row_tiles * C::kRows, tile = blockIdx.x / row_tiles % key_blocks * kBiasTiles<C>;
  const unsigned own = blockIdx.x / row_tiles / key_blocks, B = p.B, H = p.H;
  const unsigned own_heads = p.dbias.stride[1] ? H : 1;
  for (unsigned b = own / own_heads; b < B; b += p.dbias.stride[0] ? B : 1)
    for (unsigned h = own % own_heads; h < H; h += p.dbias.stride[1] ? H : 1) {
      walk_keys<T, C>(p, b, h, first_row, tile, tile + kBiasTiles<C>);
      __syncthreads();
    }
}

template <class T, class C>
void launch_attention_bwd_dq_sm80(const char* name, const AttentionBackwardLaunch& p, cudaStream_t stream) {
  auto kernel = attention_bwd_dq_sm80<T, C>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes), name);
  const int64_t blocks = (p.Sq + C::kRows - 1) / C::kRows * p.B * p.H;
  if (blocks == 0) return;
  kernel<<<grid_size(blocks, name), C::kThreads, C::kSharedBytes, stream>>>(p);
  check(cudaGetLastError(), name);
}

// For a bias that has all queries and keys.
template <class T, class C>
void launch_attention_bwd_dbias_sm80(const char* name, const AttentionBackwardLaunch& p, cudaStream_t stream) {
  auto kernel = attention_bwd_dbias_sm80<T, C>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes), name);
  const int64_t key_step = kBiasTiles<C> * C::kKeys;
  const int64_t blocks = (p.Sq + C::kRows - 1) / C::kRows * ((p.Sk + key_step - 1) / key_step) *
                         (p.dbias.stride[0] ? p.B : 1) * (p.dbias.stride[1] ? p.H : 1);
  if (blocks == 0) return;
  kernel<<<grid_size(blocks, name), C::kThreads, C::kSharedBytes, stream>>>(p);
  check(cudaGetLastError(), name);
}

}  // namespace mha::cuda
