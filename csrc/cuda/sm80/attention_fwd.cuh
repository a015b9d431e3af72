// Attention forward on tensor cores (mma.sync m16n8k16; compute capability 8.0 and later), fp16 and bf16, head sizes up
// to kHead (smaller ones are filled up with zeros).
//
// A block of four warps takes kBlockM query rows of one head and walks over tiles of kBlockN keys, double-buffered by
// cp.async with one barrier per tile. A warp owns 16 * kMt rows and works in steps of kStep keys, each with S = Q K^T,
// the online softmax and O += P V in registers; it skips steps that its rows don't see, and tests masks only in steps
// that they see in part.
//
// The running maximum of a row is raised only when a score exceeds it by kSlack (in powers of two): then p stays below
// 2^kSlack, and most steps rescale nothing. The decision looks at one row alone, so a row's result does not depend on
// what other rows (or documents) hold.
#pragma once
#include <cstddef>
#include <type_traits>

#include "../common/error.h"
#include "../common/exact_sum.cuh"
#include "../common/launch.h"
#include "../common/tile.cuh"
#include "../prim/mma.cuh"
#include "fragment.cuh"

namespace mha::cuda {

// kSmall: so small that two blocks share the 100 KB of a multiprocessor of compute capability 8.6, 8.9 or 12.0.
template <int kHead_, bool kGeneral_, bool kSmall_ = false>
struct ForwardSm80 {
  static constexpr int kHead = kHead_;
  static constexpr bool kGeneral = kGeneral_, kSmall = kSmall_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  // With half of the rows, general kernels have registers for their queries, which then need no shared memory.
  static constexpr bool kNarrow = kGeneral && kSmall && kHead == 128;
  static constexpr int kMt = kHead <= 128 && !kNarrow ? 2 : 1;  // 16-row tiles per warp
  static constexpr int kRows = 16 * kMt, kBlockM = kRows * kWarps;
  static constexpr bool kQueryInRegisters = !(kGeneral && kHead >= 128) || kNarrow;
  // So many keys as leave room for the queries, where these stay in shared memory.
  static constexpr int kBlockN = (kHead <= 64 ? 128 : kHead <= 128 && kQueryInRegisters ? 64 : 32) / (kSmall ? 2 : 1);
  static constexpr int kStep = kHead == 128 && !kNarrow ? 16 : 32, kNt = kStep / 8;
  static constexpr int kOt = kHead / 8;
  static constexpr int kUnroll = !kGeneral && (kHead <= 64 || kHead == 128) ? 4 : 1;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kTileBytes = kBlockN * kHead * 2, kQueryBytes = kBlockM * kHead * 2;
  // Two stages of a key and a value tile. A query tile that goes to registers is staged in the second stage or, if it
  // is larger, in both, before there are keys in the first.
  static constexpr int kSharedBytes = 4 * kTileBytes + (kQueryInRegisters ? 0 : kQueryBytes);
  static constexpr bool kQueryFirst = kQueryInRegisters && kQueryBytes > 2 * kTileBytes;
  static_assert(kQueryBytes <= 4 * kTileBytes);  // the output is staged in all four
  static_assert(!kSmall || kQueryInRegisters);
  static constexpr float kSlack = 8;
  static constexpr float kUnset = kGeneral ? 3.40282347e38f : 1.7e38f;  // the negative maximum of no scores
};

template <class C>
struct ForwardState {
  float o[C::kMt][C::kOt][4] = {};
  float negative_max[C::kMt][2], sum[C::kMt][2];  // per row g + 8 * half
};

// How far a score is above the maximum, in powers of two. Plain kernels have scores without the scale, and the maximum
// in powers of two.
template <class C>
__device__ inline float power_above(float score, float scale_log2, float negative_max) {
  return C::kGeneral ? to_power_of_two(score + negative_max) : fmaf(score, scale_log2, negative_max);
}

// S = Q K^T for one step. q_lane, k_lane: this lane's ldmatrix addresses of step 0.
// q: its fragments when they are kept in registers, else null.
template <class T, class C, class Tile, class Query>
__device__ inline void scores(float (&s)[C::kMt][C::kNt][4], const Query& q, uint32_t q_lane, uint32_t k_lane) {
  unroll<C::kHead / 16>([&](auto d) {
    uint32_t a[C::kMt][4];
#pragma unroll
    for (int m = 0; m < C::kMt; ++m)
      if constexpr (std::is_array_v<Query>)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = q[m][d][i];
      else
        ldmatrix_x4(a[m], Tile::at_step(q_lane, d) + m * 16 * Tile::kRowBytes);
    unroll<C::kNt / 2>([&](auto n) {
      uint32_t b[4];
      load_fragment<Tile, d, n * 16>(b, k_lane);
#pragma unroll
      for (int m = 0; m < C::kMt; ++m) {
        mma_16x8x16<T>(s[m][2 * n], a[m], b[0], b[1]);
        mma_16x8x16<T>(s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    });
  });
}

// s becomes the weights relative to the maximum, with the state brought up to date.
template <class C>
__device__ inline void softmax_step(float (&s)[C::kMt][C::kNt][4], ForwardState<C>& state, float scale_log2) {
  float top[C::kMt][2];
  bool grows = false;
#pragma unroll
  for (int m = 0; m < C::kMt; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = fmaxf(s[m][0][2 * half], s[m][0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < C::kNt; ++n) x = fmaxf(fmaxf(x, s[m][n][2 * half]), s[m][n][2 * half + 1]);
      top[m][half] = x;
      grows |= power_above<C>(x, scale_log2, state.negative_max[m][half]) > C::kSlack;
    }
  if (__any_sync(~0u, grows)) {
#pragma unroll
    for (int m = 0; m < C::kMt; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = top[m][half], before = state.negative_max[m][half];
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        float highest = C::kGeneral ? -x : -x * scale_log2;
        float after = power_above<C>(x, scale_log2, before) > C::kSlack ? highest : before;
        float factor = exp2_approx(C::kGeneral ? to_power_of_two(after - before) : after - before);
        state.negative_max[m][half] = after;
        state.sum[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < C::kOt; ++n) {
          state.o[m][n][2 * half] *= factor;
          state.o[m][n][2 * half + 1] *= factor;
        }
      }
  }
#pragma unroll
  for (int m = 0; m < C::kMt; ++m)
#pragma unroll
    for (int n = 0; n < C::kNt; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[m][n][e] = exp2_approx(power_above<C>(s[m][n][e], scale_log2, state.negative_max[m][e / 2]));
        state.sum[m][e / 2] += s[m][n][e];
      }
}

// O += P V for one step.
template <class T, class C, class Tile>
__device__ inline void weigh_values(float (&o)[C::kMt][C::kOt][4], const float (&p)[C::kMt][C::kNt][4],
                                    uint32_t v_lane) {
  unroll<C::kNt / 2>([&](auto n) {
    uint32_t a[C::kMt][4];
#pragma unroll
    for (int m = 0; m < C::kMt; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[m][i] = pack2<T>(p[m][2 * n + i / 2][i % 2 * 2], p[m][2 * n + i / 2][i % 2 * 2 + 1]);
    unroll<C::kHead / 16>([&](auto d) {
      uint32_t b[4];
      load_fragment_transposed<Tile, d, n * 16>(b, v_lane);
#pragma unroll
      for (int m = 0; m < C::kMt; ++m) {
        mma_16x8x16<T>(o[m][2 * d], a[m], b[0], b[1]);
        mma_16x8x16<T>(o[m][2 * d + 1], a[m], b[2], b[3]);
      }
    });
  });
}

// The rows of a tile: the queries of a head or, side by side, those of a group of 2^bits heads.
struct RowsOfTile {
  unsigned h;  // the first head
  int first;   // the first row
  int bits = 0;

  __device__ int query(int r) const { return (first + r) >> bits; }
  __device__ unsigned head(int r) const { return (first + r) & ((1 << bits) - 1); }  // of the group
};

// The state's rows, normalised, and their logsumexps written; with several splits, both to this split's partial
// results.
template <class C>
__device__ inline void finish_rows(const AttentionForwardLaunch& p, ForwardState<C>& state, const Sequence& sequence,
                                   const RowsOfTile& rows, unsigned split, unsigned lane) {
  const int64_t first =
                    p.splits > 1 ? ((split * p.B + sequence.b) * p.H + rows.h) * p.Sq : first_row(p, sequence, rows.h),
                head_stride = p.splits > 1 ? p.Sq : p.rows_stride_h;
  float* partial = p.splits > 1 ? p.partial_out + first * C::kHead : nullptr;
  float* lse = (p.splits > 1 ? p.partial_lse : static_cast<float*>(p.lse)) + first;
  float* lse_rest = p.splits > 1 ? p.partial_rest + first
                    : p.lse_rest ? static_cast<float*>(p.lse_rest) + first
                                 : nullptr;
#pragma unroll
  for (int m = 0; m < C::kMt; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[m][half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int r = 16 * m + 8 * half + lane / 4, query = rows.query(r);
      const int64_t row = query + (rows.bits ? rows.head(r) * head_stride : 0);
      ExactSum<float> log = logsumexp<C::kGeneral>(-state.negative_max[m][half], sum);
      float factor = sum == 0 ? 0 : p.keep_scale * reciprocal_approx(sum);
      if (p.sinks && p.splits == 1) {  // otherwise it joins when the splits are combined
        const WithSink<float> all = add_sink(log, static_cast<const float*>(p.sinks)[rows.h + rows.head(r)]);
        log = all.lse;
        factor *= all.factor;
      }
      if (lane % 4 == 0 && query < sequence.Sq) {
        lse[row] = log.value;
        if (lse_rest) lse_rest[row] = log.rest;
      }
#pragma unroll
      for (int n = 0; n < C::kOt; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) state.o[m][n][2 * half + e] *= factor;
      if (partial && query < sequence.Sq) {
        float2* to = reinterpret_cast<float2*>(partial + row * C::kHead) + lane % 4;
#pragma unroll
        for (int n = 0; n < C::kOt; ++n) to[4 * n] = make_float2(state.o[m][n][2 * half], state.o[m][n][2 * half + 1]);
      }
    }
}

// A warp copies its rows, kRows at most, from where it staged them to out.
template <class T, class Tile, int kRows>
__device__ inline void copy_rows(const AttentionForwardLaunch& p, const Sequence& sequence, const RowsOfTile& rows,
                                 uint32_t staging, unsigned lane) {
  T* out = const_cast<T*>(query_rows<T>(p.out, sequence, rows.h, p.Dv).data);
  constexpr int kRowsPerPass = 32 / Tile::kLanes;
#pragma unroll 2
  for (unsigned r = lane / Tile::kLanes; r < kRows; r += kRowsPerPass) {
    if (rows.query(r) >= sequence.Sq) break;
    T* row = out + rows.query(r) * p.out.stride[2] + (rows.bits ? rows.head(r) * p.out.stride[1] : 0);
#pragma unroll
    for (int c = 0; c < Tile::kChunksPerLane; ++c) {
      int chunk = lane % Tile::kLanes + c * Tile::kLanes, n = int(p.Dv) - chunk * 8;
      uint4 v = load_shared_16(staging + Tile::offset(r, chunk));
      T* to = row + chunk * 8;
      if (n >= 8 && p.aligned_out) {
        store_global_16(to, v);
      } else {
        const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (i < n) reinterpret_cast<uint16_t*>(to)[i] = uint16_t(word[i / 2] >> i % 2 * 16);
      }
    }
  }
}

// The state's rows, normalised, to out and lse; or, with several splits, to this split's partial results.
template <class T, class C, class Tile>
__device__ inline void write_out(const AttentionForwardLaunch& p, ForwardState<C>& state, const Sequence& sequence,
                                 unsigned h, unsigned split, int block_row, uint32_t staging, unsigned lane) {
  const RowsOfTile rows = {h, block_row};
  finish_rows<C>(p, state, sequence, rows, split, lane);
  if (p.splits > 1) return;
  const uint32_t to = staging + Tile::offset(lane / 4, 0) + lane % 4 * 4;
#pragma unroll
  for (int m = 0; m < C::kMt; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      unroll<C::kOt>([&](auto n) {
        constexpr int kMoved = n & Tile::kSwizzle;  // by exclusive or; the rest of the address is an immediate
        store_shared_4<(n - kMoved) << 4>((to ^ kMoved << 4) + (16 * m + 8 * half) * Tile::kRowBytes,
                                          pack2<T>(state.o[m][n][2 * half], state.o[m][n][2 * half + 1]));
      });
  __syncwarp();
  copy_rows<T, Tile, C::kRows>(p, sequence, rows, staging, lane);
}

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    attention_fwd_sm80(const __grid_constant__ AttentionForwardLaunch p) {
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ RowRange ranges[C::kBlockM];
  // Registers are short in the main loop: what it seldom needs is here.
  __shared__ Span spans[C::kWarps + 1];  // of each warp's rows, and of all
  __shared__ struct {
    Sequence sequence;
    unsigned h, split;
    int row, tile, tile_end;  // the first query row, the range of key tiles
  } place;
  __shared__ uint16_t specials[C::kBlockN * C::kHead / 8];
  constexpr std::size_t kStaticBytes = sizeof(ranges) + sizeof(spans) + sizeof(place) + sizeof(specials);
  static_assert(fits_everywhere(C::kSharedBytes, kStaticBytes));
  static_assert(!C::kSmall ||
                fits_everywhere(2 * C::kSharedBytes, 2 * (kStaticBytes + 1024)));  // 1 KB a block is CUDA's
  const unsigned thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  // Late query tiles first: under a causal mask they have the most to do.
  const unsigned H = unsigned(p.H), rest = blockIdx.x / unsigned(p.query_tiles),
                 query_tile = p.query_tiles - 1 - blockIdx.x % p.query_tiles;
  const unsigned bh = rest / p.splits, split = rest % p.splits, b = bh / H, h = bh % H, hk = h / (H / unsigned(p.Hk));
  const int block_row = query_tile * C::kBlockM;
  const Sequence sequence = cuda::sequence(p, b);
  if (block_row >= sequence.Sq) return;

  const uint32_t stages = shared_address(shared);
  const uint32_t query_tile_at = stages + (C::kQueryFirst ? 0 : C::kQueryInRegisters ? 2 : 4) * C::kTileBytes;
  typename Tile::template Loader<C::kBlockM>(query_rows<T>(p.q, sequence, h, p.D), block_row, thread)
      .load(!C::kGeneral || p.aligned_q, query_tile_at, sequence.Sq - block_row);
  cp_async_commit();
  warp_span<C::kRows>(p.mask, sequence, block_row + warp * C::kRows, ranges + warp * C::kRows, spans + warp, lane);
  __syncthreads();
  if (thread == 0) {
    const Span s = merge(merge(spans[0], spans[1]), merge(spans[2], spans[3]));
    const int begin = s.begin / C::kBlockN, end = (s.end + C::kBlockN - 1) / C::kBlockN;
    const int share = (max(0, end - begin) + p.splits - 1) / p.splits;  // key tiles of one split
    spans[C::kWarps] = s;
    place = {sequence, h, split, block_row, begin + int(split) * share, min(end, begin + int(split + 1) * share)};
  }
  __syncthreads();
  const Span &own = spans[warp], &all = spans[C::kWarps];
  const int& tile_end = place.tile_end;
  // The first tile from there on that the mask's blocks and the like show something of, with its code.
  uint32_t code = kShowsSome;
  auto visible_tile = [&](int tile) -> int {
    if constexpr (C::kGeneral) {
      for (; tile < tile_end; ++tile) {
        code = mask_tile_code(p.tiles, place.sequence.b, place.h, place.row, C::kBlockM, tile * C::kBlockN, C::kBlockN);
        if (code & kShowsSome) break;
      }
    }
    return tile;
  };
  int tile = visible_tile(place.tile);
  typename Tile::template Loader<C::kBlockN> key_loader(key_rows<T>(p.k, sequence, hk, p.D), tile * C::kBlockN, thread),
      value_loader(key_rows<T>(p.v, sequence, hk, p.Dv), tile * C::kBlockN, thread);
  auto load_keys_and_values = [&](int tile, uint32_t stage) {
    const int keys_left = place.sequence.Sk - tile * C::kBlockN;
    key_loader.load(!C::kGeneral || p.aligned_k, stage, keys_left);
    value_loader.load(!C::kGeneral || p.aligned_v, stage + C::kTileBytes, keys_left);
    cp_async_commit();
  };
  if (!C::kQueryFirst && tile < tile_end) load_keys_and_values(tile, stages);

  ForwardState<C> state;
#pragma unroll
  for (int m = 0; m < C::kMt; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) state.negative_max[m][half] = C::kUnset, state.sum[m][half] = 0;

  const uint32_t q_lane = query_tile_at + warp * C::kRows * Tile::kRowBytes + Tile::lane_a(lane);
  std::conditional_t<C::kQueryInRegisters, uint32_t[C::kMt][C::kHead / 16][4], std::nullptr_t> q;
  if constexpr (C::kQueryInRegisters) {
    if (!C::kQueryFirst && tile < tile_end)
      cp_async_wait<1>();
    else
      cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < C::kMt; ++m)
#pragma unroll
      for (int d = 0; d < C::kHead / 16; ++d) ldmatrix_x4(q[m][d], Tile::at_step(q_lane, d) + m * 16 * Tile::kRowBytes);
    if constexpr (C::kQueryFirst) {
      __syncthreads();
      if (tile < tile_end) load_keys_and_values(tile, stages);
    }
  }

  for (uint32_t stage = stages; tile < tile_end;) {
    const bool elementwise = C::kGeneral && (code & kHidesSome);
    cp_async_wait<0>();
    bool nonfinite = false;
    if (elementwise || tile * C::kBlockN < all.full_begin || (tile + 1) * C::kBlockN > all.full_end)
      nonfinite = __syncthreads_or(Tile::template any_nonfinite<C::kBlockN>(stage + C::kTileBytes, thread));
    else
      __syncthreads();
    const uint32_t next = stages + (stages + 2 * C::kTileBytes - stage);
    const int next_tile = visible_tile(tile + 1);
    if (next_tile < tile_end) {
      if (C::kGeneral) key_loader.skip(next_tile - tile - 1), value_loader.skip(next_tile - tile - 1);
      load_keys_and_values(next_tile, next);
    }
    if (nonfinite) {
      Tile::template take_specials<C::kBlockN>(stage + C::kTileBytes, specials, thread);
      __syncthreads();
    }
    const uint32_t k_lane = stage + Tile::lane_b(lane), v_lane = stage + C::kTileBytes + Tile::lane_a(lane);
    const bool whole = !elementwise && tile * C::kBlockN >= own.full_begin && (tile + 1) * C::kBlockN <= own.full_end;
#pragma unroll C::kUnroll
    for (int step = 0; step < C::kBlockN / C::kStep; ++step) {
      const int key = tile * C::kBlockN + step * C::kStep;
      const FragmentPlace at = {&place.sequence, place.h, int(place.row + warp * C::kRows), key,
                                ranges + warp * C::kRows};
      uint32_t visible = ~0u;
      bool hides = false;
      if (!whole) {
        if (key >= own.end || key + C::kStep <= own.begin) continue;
        if constexpr (C::kGeneral) {
          visible = elementwise ? visible_bits<C::kMt, C::kNt, false>(p.mask, at, lane)
                                : visible_bits<C::kMt, C::kNt, true>(p.mask, at, lane);
          if (elementwise && !__any_sync(~0u, visible)) continue;
        }
        hides = true;
      }
      float s[C::kMt][C::kNt][4] = {};
      scores<T, C, Tile>(s, q, q_lane, k_lane + step * C::kStep * Tile::kRowBytes);
      if constexpr (C::kGeneral) to_scores<T>(s, p, at, lane);
      if (hides) {
        if constexpr (C::kGeneral)
          hide(s, visible, -INFINITY);
        else
          hide_outside(s, at, lane);
      }
      softmax_step<C>(s, state, p.scale_log2);
      if constexpr (C::kGeneral)
        if (p.dropout.rng_state)
          hide(s, kept_bits<C::kMt, C::kNt>(dropout_key(p.dropout, place.sequence.b, place.h), p.threshold, at, lane),
               0.0f);
      weigh_values<T, C, Tile>(state.o, s, v_lane + step * C::kStep * Tile::kRowBytes);
      if (!C::kGeneral && nonfinite) visible = visible_bits<C::kMt, C::kNt, true>(p.mask, at, lane);
      if (nonfinite) add_specials<C::kMt, C::kNt>(state.o, visible, specials + step * C::kStep * (C::kHead / 8), lane);
    }
    stage = next;
    tile = next_tile;
  }
  cp_async_wait<0>();
  __syncthreads();
  write_out<T, C, Tile>(p, state, place.sequence, place.h, place.split, place.row + warp * C::kRows,
                        stages + warp * C::kRows * Tile::kRowBytes, lane);
}

template <class T, class C>
void launch_attention_fwd_sm80(const char* name, AttentionForwardLaunch p, cudaStream_t stream) {
  auto kernel = attention_fwd_sm80<T, C>;
  p.query_tiles = int((p.Sq + C::kBlockM - 1) / C::kBlockM);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes), name);
  kernel<<<grid_size(p.query_tiles * p.splits * p.B * p.H, name), C::kThreads, C::kSharedBytes, stream>>>(p);
  check(cudaGetLastError(), name);
}

}  // namespace mha::cuda
