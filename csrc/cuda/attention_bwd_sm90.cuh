// Gradients of keys, values and queries on Hopper (compute capability 9.0), fp16 and bf16, head sizes up to kHead.
//
// A block takes 128 keys of one key/value head and walks over the tiles of 64 query rows that see any of them, of all
// query heads of the group. A producer warp brings keys and values once and, through a ring, tiles of queries, of dout
// and their numbers (RowBlock). Each of two warpgroups owns 64 keys: S^T = K Q^T and dP^T = V dO^T from shared memory;
// P^T and dS^T are, as they lie in registers, operand A of dV += P^T dO and dK += dS^T Q. dS^T also goes to shared
// memory, from where dQ = dS K is made, half of its columns by each warpgroup, and added to p.dq_sum, whose elements
// lie as attention_bwd_sm80 adds them.
#pragma once
#include "attention_bwd_sm80.cuh"
#include "attention_fwd_sm90.cuh"
#include "prim/stmatrix.cuh"

namespace mha::cuda {

template <int kHead_, bool kGeneral_>
struct BackwardSm90 {
  static constexpr int kHead = kHead_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
  static constexpr int kKeys = 64 * kConsumers, kQueries = kRowBlock, kNt = kQueries / 8, kOt = kHead / 8;
  static constexpr int kColumns = kHead / 64, kStages = 2;
  static constexpr int kDqNt = kOt / kConsumers;  // of a warpgroup's columns of dQ
  static constexpr int kKeyBytes = kKeys * kHead * 2, kTileBytes = kQueries * kHead * 2;
  static constexpr int kRowBytes = int(sizeof(RowBlock<float>)), kStageBytes = 2 * kTileBytes;
  static constexpr int kGradientBytes = kKeys * kQueries * 2;
  // K, V and K without NaN and Inf; the ring's tiles; dS^T twice, so that one barrier per tile is enough; the rows'
  // numbers.
  static constexpr int kRingAt = 3 * kKeyBytes, kGradientAt = kRingAt + kStages * kStageBytes,
                       kRowsAt = kGradientAt + 2 * kGradientBytes, kSharedBytes = 1024 + kRowsAt + kStages * kRowBytes;
  using Round = BackwardSm80<kHead, kGeneral, true>;  // whose dq_sum this is
};

struct AttentionBackwardMaps {
  CUtensorMap q, dout, k, v;  // boxes of 64 columns: kQueries rows of q and dout, kKeys of k and v
};

// c = A B^T, started: both have rows along kHead, in boxes of 64 columns kARows and kBRows high.
template <class T, class C, int kARows, int kBRows, int kNt>
__device__ inline void start_rows(float (&c)[kNt][4], uint32_t a, uint32_t b, bool add) {
  const uint64_t rows_a = describe_rows(a), rows_b = describe_rows(b);
#pragma unroll
  for (int d = 0; d < C::kHead / 16; ++d)
    wgmma_rows<T, kNt>(c, further(rows_a, d / 4 * kARows * 128 + d % 4 * 32),
                       further(rows_b, d / 4 * kBRows * 128 + d % 4 * 32), add || d > 0);
}

// Two tiles of an accumulator, as the functions on fragments take them.
template <int kNt>
__device__ inline float (&two(float (&s)[kNt][4], int first))[1][2][4] {
  return reinterpret_cast<float (&)[1][2][4]>(s[first]);
}

// Where a warpgroup's columns of K are.
template <class C>
__device__ inline uint32_t dq_columns(uint32_t k_tile, unsigned half) {
  return C::kColumns == 1 ? k_tile + half * 64 : k_tile + half * (C::kColumns / 2) * C::kKeys * 128;
}

// Adds a warp's 16 rows of its warpgroup's columns of dQ to a tile of p.dq_sum, where attention_bwd_dq_round finds
// them.
template <class C>
__device__ inline void add_dq(float* to, const float (&dq)[C::kDqNt][4], unsigned half, unsigned warp, unsigned lane) {
  using R = typename C::Round;
  const unsigned m = warp % R::kDqMt, row_warp = warp / R::kDqMt;
  to += row_warp * (R::kDqMt * 512) + m * 512 + lane;
  unroll<C::kDqNt>([&](auto n) {
    // 32 columns further are kDqRowWarps parts further.
    float* part = to + (half * C::kDqNt / 4 + n / 4) * (R::kDqRowWarps * R::kDqMt * 512);
    unroll<4>([&](auto e) { add_global<((n % 4) * 4 + e) * 128>(part, dq[n][e]); });
  });
}

// The producer: one warp.
template <class T, class C>
__device__ inline void produce(const AttentionBackwardLaunch& p, const AttentionBackwardMaps& maps, unsigned b,
                               unsigned hk, int first_key, uint32_t base, uint32_t barriers, volatile int* tiles,
                               unsigned lane) {
  const Sequence sequence = cuda::sequence(p, b);
  const unsigned group = unsigned(p.H) / unsigned(p.Hk), first_head = hk * group;
  const unsigned first_block = row_block(sequence, first_head, 0);
  if (lane == 0) {
    mbarrier_arrive_expect(barriers, 2 * C::kKeyBytes);
    load_boxes<C::kKeys, C::kColumns>(base, &maps.k, barriers, first_key, hk, b);
    load_boxes<C::kKeys, C::kColumns>(base + C::kKeyBytes, &maps.v, barriers, first_key, hk, b);
  }
  RowTileWalk walk = {.tile = -1, .next = 0, .nonfinite = false, .seen = 0};
  for (RingPlace<C::kStages> at;; at.next()) {
    const int tile = walk.tile =
        next_row_tile<C::kQueries>(walk, p.spans + first_block, group * sequence.row_blocks, first_key,
                                   first_key + C::kKeys, lane, [](int) { return true; });
    if (lane == 0) {
      const uint32_t full = barriers + 8 * (1 + at.stage), empty = barriers + 8 * (1 + C::kStages + at.stage);
      mbarrier_wait(empty, at.parity ^ 1);
      tiles[at.stage] = tile;
      if (tile < 0) {
        mbarrier_arrive(full);
      } else {
        const int row = unsigned(tile) % sequence.row_blocks * C::kQueries,
                  h = first_head + unsigned(tile) / sequence.row_blocks;
        const uint32_t stage = base + C::kRingAt + at.stage * C::kStageBytes;
        mbarrier_arrive_expect(full, C::kStageBytes + C::kRowBytes);
        load_boxes<C::kQueries, C::kColumns>(stage, &maps.q, full, row, h, b);
        load_boxes<C::kQueries, C::kColumns>(stage + C::kTileBytes, &maps.dout, full, row, h, b);
        bulk_load(base + C::kRowsAt + at.stage * C::kRowBytes,
                  static_cast<const RowBlock<float>*>(p.rows) + first_block + tile, C::kRowBytes, full);
      }
    }
    if (tile < 0) return;
  }
}

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_bwd_sm90(const __grid_constant__ AttentionBackwardLaunch p,
                       const __grid_constant__ AttentionBackwardMaps maps) {
  using Box = TileSm80<T, 64, 128 * C::kConsumers>;
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  extern __shared__ unsigned char shared[];
  __shared__ uint64_t barrier_words[1 + 2 * C::kStages];
  __shared__ int tiles[C::kStages];
  __shared__ Sequence sequence;
  __shared__ uint16_t specials[2][C::kQueries * C::kHead / 8];  // of a tile of queries and one of dout
  const unsigned thread = threadIdx.x, lane = thread % 32, group = __shfl_sync(~0u, thread / 128, 0);
  const unsigned key_tiles = (unsigned(p.Sk) + C::kKeys - 1) / C::kKeys;
  const int first_key = blockIdx.x % key_tiles * C::kKeys;
  const unsigned bhk = blockIdx.x / key_tiles, hk = bhk % unsigned(p.Hk), b = bhk / unsigned(p.Hk);
  const uint32_t base = (shared_address(shared) + 1023) & ~1023u, barriers = shared_address(barrier_words);
  if (thread == 0) {
    sequence = cuda::sequence(p, b);
    mbarrier_init(barriers, 1);
    for (int s = 0; s < C::kStages; ++s) {
      mbarrier_init(barriers + 8 * (1 + s), 1);
      mbarrier_init(barriers + 8 * (1 + C::kStages + s), C::kConsumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (group == 0) {
    give_registers<24>();
    if (thread < 32) produce<T, C>(p, maps, b, hk, first_key, base, barriers, tiles, lane);
    return;
  }

  take_registers<240>();
  constexpr int kAll = 128 * C::kConsumers;
  const unsigned consumer = thread - 128, warp = consumer / 32 % 4;  // warp: of its warpgroup
  const uint32_t own_rows = (group - 1) * 64 * 128;                  // of this warpgroup's keys in a box
  const int own_key = first_key + (group - 1) * 64 + warp * 16;
  const unsigned query_heads = unsigned(p.H) / unsigned(p.Hk);
  uint32_t finite_k = base;
  mbarrier_wait(barriers, 0);
  // NaN or Inf in a key makes dS of those rows that see it NaN: the key itself need not, and must not, do so in dQ = dS
  // K.
  if (named_barrier_or<kAll>(1, Box::template any_nonfinite<C::kKeys * C::kColumns>(base, consumer))) {
    finite_k = base + 2 * C::kKeyBytes;
    for (unsigned i = consumer * 16; i < C::kKeyBytes; i += kAll * 16)
      store_shared_16(finite_k + i, load_shared_16(base + i));
    named_barrier<kAll>(1);
    for (int c = 0; c < C::kKeys * C::kColumns / C::kQueries / C::kColumns; ++c)
      Box::template take_specials<C::kQueries * C::kColumns>(finite_k + c * C::kQueries * C::kColumns * 128,
                                                             specials[0], consumer);
    fence_async_proxy();
    named_barrier<kAll>(1);
  }

  float dk[1][C::kOt][4] = {}, dv[1][C::kOt][4] = {};
  int buffer = 0;
  for (RingPlace<C::kStages> at;; at.next(), buffer ^= 1) {
    mbarrier_wait(barriers + 8 * (1 + at.stage), at.parity);
    const int tile = __shfl_sync(~0u, tiles[at.stage], 0);  // the compiler is to know that all threads agree
    if (tile < 0) break;
    // What is worked out from addresses must not be kept from turn to turn: registers are short.
    uint32_t k_tile = base, v_tile = base + C::kKeyBytes, own = own_rows, dq_k = finite_k;
    asm volatile("" : "+r"(k_tile), "+r"(v_tile), "+r"(own), "+r"(dq_k));
    const uint32_t q_tile = base + C::kRingAt + at.stage * C::kStageBytes, dout_tile = q_tile + C::kTileBytes;
    const auto& rows = *reinterpret_cast<const RowBlock<float>*>(shared + (base - shared_address(shared)) + C::kRowsAt +
                                                                 at.stage * C::kRowBytes);
    const bool elementwise = C::kGeneral && p.mask.elementwise();
    const bool edge = elementwise || rows.span.full_begin > first_key || rows.span.full_end < first_key + C::kKeys;
    bool nonfinite = false;
    if (edge) {
      nonfinite =
          named_barrier_or<kAll>(1, Box::template any_nonfinite<2 * C::kQueries * C::kColumns>(q_tile, consumer));
      if (nonfinite) {
        Box::template take_specials<C::kQueries * C::kColumns>(q_tile, specials[0], consumer);
        Box::template take_specials<C::kQueries * C::kColumns>(dout_tile, specials[1], consumer);
        fence_async_proxy();
        named_barrier<kAll>(1);
      }
    }
    const int row = unsigned(tile) % sequence.row_blocks * C::kQueries;
    const GradientPlace place = {&sequence,
                                 hk * query_heads + unsigned(tile) / sequence.row_blocks,
                                 row,
                                 own_key,
                                 rows.negative_lse,
                                 rows.negative_rest,
                                 rows.negative_delta,
                                 rows.ranges};
    const uint32_t visible =
        C::kGeneral || edge ? visible_pairs<1, C::kNt, true, !C::kGeneral>(p.mask, place, lane) : ~0u;
    float s[1][C::kNt][4], ds[1][C::kNt][4];
    start_gradients<true, C::kGeneral>(ds, place, lane);
    hold(ds[0]);
    wgmma_fence();
    start_rows<T, C, C::kKeys, C::kQueries>(s[0], k_tile + own, q_tile, false);
    start_rows<T, C, C::kKeys, C::kQueries>(ds[0], v_tile + own, dout_tile, true);
    wgmma_commit();
    wgmma_wait<0>();
    hold(s[0]);
    hold(ds[0]);
#pragma unroll
    for (int step = 0; step < C::kNt / 2; ++step) {  // 16 queries
      GradientPlace part = place;
      part.row += 16 * step;
      part.negative_lse += 16 * step, part.negative_rest += 16 * step, part.negative_delta += 16 * step;
      part.ranges += 16 * step;
      to_gradients<T, true, C::kGeneral, false>(two(s[0], 2 * step), two(ds[0], 2 * step), p, part, C::kGeneral || edge,
                                                visible >> 8 * step & 0xFF, lane);
    }
    uint32_t weights[C::kNt / 2][4], gradients[C::kNt / 2][4];
#pragma unroll
    for (int step = 0; step < C::kNt / 2; ++step) {
      pack_operand<T>(weights[step], s[0], 2 * step);
      pack_operand<T>(gradients[step], ds[0], 2 * step);
    }
    const uint64_t douts = describe_columns(dout_tile, C::kQueries * 128);
    const uint64_t queries = describe_columns(q_tile, C::kQueries * 128);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kNt / 2; ++step)
      wgmma_columns<T, C::kOt>(dv[0], weights[step], further(douts, step * 2048));
#pragma unroll
    for (int step = 0; step < C::kNt / 2; ++step)
      wgmma_columns<T, C::kOt>(dk[0], gradients[step], further(queries, step * 2048));
    wgmma_commit();
    // dS^T: a row for each key, 64 queries.
    const uint32_t gradient = base + C::kGradientAt + buffer * C::kGradientBytes;
    const unsigned key = (group - 1) * 64 + warp * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < C::kNt / 2; ++step)
      stmatrix_x4(gradient + Box::offset(key, 2 * step + lane / 16), gradients[step][0], gradients[step][1],
                  gradients[step][2], gradients[step][3]);
    fence_async_proxy();
    named_barrier<kAll>(2);
    wgmma_wait<0>();  // their registers are needed
    hold(dk[0]);
    hold(dv[0]);
    float dq[C::kDqNt][4];
    const uint64_t gradients_a = describe_columns(gradient, 0);
    const uint64_t keys_b = describe_columns(dq_columns<C>(dq_k, group - 1), C::kKeys * 128);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < C::kKeys / 16; ++j)
      wgmma_columns<T, C::kDqNt>(dq, further(gradients_a, j * 2048), further(keys_b, j * 2048), j > 0);
    wgmma_commit();
    wgmma_wait<0>();
    hold(dq);
    if (nonfinite) {
#pragma unroll
      for (int c = 0; c < C::kColumns; ++c) {
        add_specials<1, 8, 8>(eight(dv[0], 8 * c), visible, specials[1] + c * C::kQueries * 8, lane);
        add_specials<1, 8, 8>(eight(dk[0], 8 * c), visible, specials[0] + c * C::kQueries * 8, lane);
      }
      named_barrier<kAll>(1);  // before the next tile's specials
    }
    if (consumer % 128 == 0) mbarrier_arrive(barriers + 8 * (1 + C::kStages + at.stage));
    add_dq<C>(p.dq_sum + int64_t(row_block(sequence, hk * query_heads, 0) + tile) * (C::kQueries * C::kHead), dq,
              group - 1, warp, lane);
  }
  named_barrier<kAll>(1);  // the ring's place is used again, to stage the results
  const uint32_t staging = base + C::kRingAt + consumer / 32 * 16 * Tile::kRowBytes;
  store_rows<T, Tile>(dv, 1.0f, key_rows<T>(p.dv, sequence, hk, p.Dv), own_key, 0, p.aligned_dv, staging, lane);
  store_rows<T, Tile>(dk, float(p.scale), key_rows<T>(p.dk, sequence, hk, p.D), own_key, 0, p.aligned_dk, staging,
                      lane);
}

template <class T, class C>
void launch_attention_bwd_sm90(const char* name, const AttentionBackwardLaunch& p, cudaStream_t stream) {
  auto kernel = attention_bwd_sm90<T, C>;
  const int64_t blocks = (p.Sk + C::kKeys - 1) / C::kKeys * p.B * p.Hk;
  if (blocks == 0) return;
  AttentionBackwardMaps maps;
  maps.q = tensor_map<T>(p.q, {p.B, p.H, p.Sq, p.D}, C::kQueries);
  maps.dout = tensor_map<T>(p.dout, {p.B, p.H, p.Sq, p.Dv}, C::kQueries);
  maps.k = tensor_map<T>(p.k, {p.B, p.Hk, p.Sk, p.D}, C::kKeys);
  maps.v = tensor_map<T>(p.v, {p.B, p.Hk, p.Sk, p.Dv}, C::kKeys);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes), name);
  kernel<<<grid_size(blocks, name), C::kThreads, C::kSharedBytes, stream>>>(p, maps);
  check(cudaGetLastError(), name);
}

}  // namespace mha::cuda
