// Gradients of keys, values and queries on Hopper (compute capability 9.0), fp16 and bf16, head sizes up to kHead.
//
// A block takes kKeys keys of one key/value head and walks over the tiles of 64 query rows that see any of them, of all
// query heads of the group. A producer warp brings keys and values once and, through a ring, tiles of queries, of dout
// and their numbers (RowBlock). Each of two warpgroups owns 64 keys: S^T = K Q^T and dP^T = V dO^T from shared memory
// (where there is room, K and V from registers); P^T and dS^T are, as they lie in registers, operand A of dV += P^T dO
// and dK += dS^T Q. dS^T also goes to shared memory, from where dQ = dS K is made, half of its columns by each
// warpgroup, and added to p.dq_sum. In plain kernels up to head size 128 a product goes on beside all else: dP^T beside
// the softmax, dV beside dS^T, dK beside the additions to dQ and the next tile's first two products. In general ones up
// to 64 dV and dK do so, too.
//
// Beyond head size 128 (kShared) registers hold the sums of 64 keys only together: the two warpgroups share the keys,
// each works out P^T and dS^T for half of a tile's queries, gets the rest through shared memory, and owns half of the
// columns of dK and dV.
#pragma once
#include "../sm80/attention_bwd.cuh"
#include "attention_bwd_dq.cuh"
#include "attention_bwd_tile.cuh"

namespace mha::cuda {

template <int kHead_, bool kGeneral_>
struct BackwardSm90 {
  static constexpr int kHead = kHead_;
  static constexpr bool kGeneral = kGeneral_, kShared = kHead > 128;
  static constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers), kStages = 2;
  static constexpr int kKeys = kShared ? 64 : 64 * kConsumers, kQueries = kRowBlock;
  static constexpr bool kHeld = kHead == 64 && !kGeneral;  // whether registers have room for keys and values
  static constexpr int kHeldSteps = kHeld ? kHead / 16 : 1;
  // Queries whose scores a warpgroup works out at once: what registers allow.
  static constexpr int kPart = kShared || (kGeneral && kHead > 64) ? 32 : kQueries, kNt = kPart / 8;
  // Whether registers have room for sums of dV and dK that go on beside dS^T, the additions to dQ and the next tile.
  static constexpr bool kOverlaps = !kShared && (!kGeneral || kHead == 64);
  static constexpr int kColumns = kHead / 64, kBoxes = kColumns / (kShared ? kConsumers : 1);  // in all, and own
  static constexpr int kOt = kBoxes * 8;
  // A warpgroup's columns of dQ, and how many eights of them at once.
  static constexpr int kDqColumns = kHead / kConsumers, kDqNt = kDqColumns / 8 / (kGeneral && kHead > 64 ? 2 : 1);
  static constexpr int kKeyBytes = kKeys * kHead * 2, kTileBytes = kQueries * kHead * 2;
  static constexpr int kRowBytes = int(sizeof(RowBlock<float>)), kStageBytes = 2 * kTileBytes;
  static constexpr int kGradientBytes = kKeys * kQueries * 2;
  // K, V; the ring's tiles; dS^T, twice, so that one barrier per tile is enough, or (kShared) dS^T and P^T; the rows'
  // numbers. If K holds NaN or Inf, a copy without them takes the place of the ring's last stage.
  static constexpr int kRingAt = 2 * kKeyBytes, kCopyAt = kRingAt + (kStages - 1) * kStageBytes;
  static constexpr int kGradientAt = kRingAt + kStages * kStageBytes, kRowsAt = kGradientAt + 2 * kGradientBytes;
  static constexpr int kSharedBytes = 1024 + kRowsAt + kStages * kRowBytes;
  static_assert(kKeyBytes <= kStageBytes);
  static constexpr int kProducerRegisters = kGeneral ? 40 : 24, kConsumerRegisters = kGeneral ? 232 : 240;
};

struct AttentionBackwardMaps {
  CUtensorMap q, dout, k, v;  // boxes of 64 columns: kQueries rows of q and dout, kKeys of k and v
};

// What a block works on, in shared memory.
template <class C>
struct BlockSm90 {
  Sequence sequence;
  int first_key;
  unsigned hk, first_head, first_block;   // the group's first query head, and that head's first row block
  bool short_ring;                        // its last stage is in use otherwise
  volatile int added;                     // the row block whose turn the first consumer has to pass on, or -1
  int tiles[C::kStages];                  // the number of the tile in each stage; -1: no more
  uint64_t barriers[1 + 2 * C::kStages];  // keys and values are there; stages are full; stages are free
  uint16_t specials[2][C::kQueries * C::kHead / 8];  // of a tile of queries and one of dout

  __device__ uint32_t keys_full() { return shared_address(barriers); }
  __device__ uint32_t full(int stage) { return shared_address(barriers + 1 + stage); }
  __device__ uint32_t free(int stage) { return shared_address(barriers + 1 + C::kStages + stage); }
};

// One thread.
template <class C>
__device__ inline void start_block(BlockSm90<C>& block, const AttentionBackwardLaunch& p) {
  const unsigned key_tiles = (unsigned(p.Sk) + C::kKeys - 1) / C::kKeys;
  const unsigned place = p.deterministic ? atomicAdd(p.turns, 1u) : blockIdx.x;
  const unsigned bhk = place / key_tiles, key_tile = place % key_tiles;
  block.hk = bhk % unsigned(p.Hk);
  block.first_key = int(p.deterministic ? key_tiles - 1 - key_tile : key_tile) * C::kKeys;
  block.sequence = cuda::sequence(p, bhk / unsigned(p.Hk));
  block.added = -1;
  block.first_head = block.hk * (unsigned(p.H) / unsigned(p.Hk));
  block.first_block = row_block(block.sequence, block.first_head, 0);
  mbarrier_init(block.keys_full(), 1);
  for (int s = 0; s < C::kStages; ++s) {
    mbarrier_init(block.full(s), 1);
    mbarrier_init(block.free(s), C::kConsumers);
  }
  fence_mbarrier_init();
}

// The stage of a block's n-th tile, and the parity that its barriers then have.
template <int kStages>
struct Stage {
  int index;
  uint32_t parity;
  __device__ Stage(unsigned n, bool short_ring)
      : index(short_ring ? n % (kStages - 1) : n % kStages),
        parity((short_ring ? n / (kStages - 1) : n / kStages) & 1) {}
};

// The producer: one warp.
template <class T, class C>
__device__ inline void produce(BlockSm90<C>& block, const AttentionBackwardLaunch& p, const AttentionBackwardMaps& maps,
                               uint32_t base, unsigned lane) {
  const Sequence& sequence = block.sequence;
  const int batch = p.q_starts ? 0 : sequence.b, first_key = block.first_key;
  const int tile_count = int(unsigned(p.H) / unsigned(p.Hk) * sequence.row_blocks);
  if (lane == 0) {
    const int row = int(sequence.first_key) + first_key;
    mbarrier_arrive_expect(block.keys_full(), 2 * C::kKeyBytes);
    load_boxes<C::kKeys, C::kColumns>(base, &maps.k, block.keys_full(), row, block.hk, batch);
    load_boxes<C::kKeys, C::kColumns>(base + C::kKeyBytes, &maps.v, block.keys_full(), row, block.hk, batch);
  }
  auto head = [&](int tile) { return block.first_head + unsigned(tile) / sequence.row_blocks; };
  auto row = [&](int tile) { return int(unsigned(tile) % sequence.row_blocks) * C::kQueries; };
  // Where blocks take turns, none is left out.
  auto shows = [&](int tile) {
    return !C::kGeneral || p.deterministic ||
           mask_tile_code(p.tiles, sequence.b, head(tile), row(tile), C::kQueries, first_key, C::kKeys) & kShowsSome;
  };
  RowTileWalk walk = {.tile = -1, .next = 0, .nonfinite = false, .seen = 0};
  bool short_ring = false;
  for (unsigned n = 0;; ++n) {
    const Stage<C::kStages> at(n, short_ring);
    const int tile = walk.tile = next_row_tile<C::kQueries>(walk, p.spans + block.first_block, tile_count, first_key,
                                                            first_key + C::kKeys, lane, shows);
    if (lane == 0) {
      mbarrier_wait(block.free(at.index), at.parity ^ 1);
      block.tiles[at.index] = tile;
      if (tile < 0) {
        mbarrier_arrive(block.full(at.index));
      } else {
        const uint32_t stage = base + C::kRingAt + at.index * C::kStageBytes, full = block.full(at.index);
        const int from = int(sequence.first_query) + row(tile);
        mbarrier_arrive_expect(full, C::kStageBytes + C::kRowBytes);
        load_boxes<C::kQueries, C::kColumns>(stage, &maps.q, full, from, head(tile), batch);
        load_boxes<C::kQueries, C::kColumns>(stage + C::kTileBytes, &maps.dout, full, from, head(tile), batch);
        bulk_load(base + C::kRowsAt + at.index * C::kRowBytes,
                  static_cast<const RowBlock<float>*>(p.rows) + block.first_block + tile, C::kRowBytes, full);
      }
    }
    if (n == 0) {
      __syncwarp();
      named_barrier<128 * C::kConsumers + 32>(3);
      short_ring = block.short_ring;
    }
    if (tile < 0) return;
  }
}

// The consumers wait for keys and values, and see to it that K has a copy without NaN and Inf: a NaN in a key makes dS
// of those rows NaN that see it; the key itself need not, and must not, do so in dQ = dS K. Returns where it is.
template <class T, class C>
__device__ inline uint32_t await_keys(BlockSm90<C>& block, uint32_t base, unsigned consumer) {
  using Box = TileSm80<T, 64, 128 * C::kConsumers>;
  constexpr int kAll = 128 * C::kConsumers, kRows = C::kQueries * C::kColumns;
  mbarrier_wait(block.keys_full(), 0);
  const bool nonfinite = named_barrier_or<kAll>(1, Box::template any_nonfinite<C::kKeys * C::kColumns>(base, consumer));
  if (consumer == 0) block.short_ring = nonfinite;
  named_barrier<kAll + 32>(3);
  if (!nonfinite) return base;
  const uint32_t copy = base + C::kCopyAt;
  for (unsigned i = consumer * 16; i < C::kKeyBytes; i += kAll * 16)
    store_shared_16(copy + i, load_shared_16(base + i));
  named_barrier<kAll>(1);
  for (int first = 0; first < C::kKeys * C::kColumns; first += kRows)
    Box::template take_specials<kRows>(copy + first * 128, block.specials[0], consumer);
  fence_async_proxy();
  named_barrier<kAll>(1);
  return copy;
}

// Takes NaN and Inf out of a tile of queries and one of dout, if there are any: all consumers together.
template <class T, class C>
__device__ inline bool take_tile_specials(BlockSm90<C>& block, uint32_t tile, unsigned consumer) {
  using Box = TileSm80<T, 64, 128 * C::kConsumers>;
  constexpr int kAll = 128 * C::kConsumers, kRows = C::kQueries * C::kColumns;
  if (!named_barrier_or<kAll>(1, Box::template any_nonfinite<2 * kRows>(tile, consumer))) return false;
  Box::template take_specials<kRows>(tile, block.specials[0], consumer);
  Box::template take_specials<kRows>(tile + C::kTileBytes, block.specials[1], consumer);
  fence_async_proxy();
  named_barrier<kAll>(1);
  return true;
}

// A block's n-th tile, number `number` of the group's heads. key: the warp's first, of the block's.
template <class T, class C>
__device__ inline TileSm90 find_tile(const BlockSm90<C>& block, const AttentionBackwardLaunch& p, uint32_t base,
                                     uint32_t finite_keys, unsigned n, int number, unsigned half, unsigned key) {
  extern __shared__ unsigned char shared[];
  const Stage<C::kStages> at(n, finite_keys != base);
  const auto& rows = *reinterpret_cast<const RowBlock<float>*>(shared + (base - shared_address(shared)) + C::kRowsAt +
                                                               at.index * C::kRowBytes);
  const int first_key = static_cast<const volatile int&>(block.first_key);  // registers are short
  const int row = unsigned(number) % block.sequence.row_blocks * C::kQueries;
  TileSm90 tile;
  tile.keys = base + (C::kShared ? 0 : half * 64 * 128), tile.values = tile.keys + C::kKeyBytes;
  tile.finite_keys = finite_keys;
  // What is worked out from addresses must not be kept from turn to turn.
  asm volatile("" : "+r"(tile.keys), "+r"(tile.values), "+r"(tile.finite_keys));
  tile.queries = base + C::kRingAt + at.index * C::kStageBytes, tile.douts = tile.queries + C::kTileBytes;
  tile.gradients = base + C::kGradientAt + (C::kShared ? 0 : n % 2 * C::kGradientBytes);
  tile.weights = tile.gradients + C::kGradientBytes;
  tile.place = {&block.sequence,
                block.first_head + unsigned(number) / block.sequence.row_blocks,
                row,
                first_key + int(key),
                rows.negative_lse,
                rows.negative_rest,
                rows.negative_delta,
                rows.ranges};
  tile.elementwise =
      C::kGeneral &&
      mask_tile_code(p.tiles, block.sequence.b, tile.place.h, row, C::kQueries, first_key, C::kKeys) & kHidesSome;
  if (p.deterministic) tile.turn = (unsigned(rows.span.end) - 1) / C::kKeys - unsigned(first_key) / C::kKeys;
  // Rows of the next packed sequence are looked at, too, as they may hold NaN.
  tile.edge = tile.elementwise || rows.span.full_begin > first_key || rows.span.full_end < first_key + C::kKeys ||
              (p.q_starts && row + C::kQueries > block.sequence.Sq);
  return tile;
}

// Adds dQ = dS K of a tile, the warpgroup's columns. start_more may start one more product behind it; done_with_tile is
// called when dQ's is over.
template <class T, class C, class F, class G>
__device__ inline void add_query_gradients(BlockSm90<C>& block, const AttentionBackwardLaunch& p, const TileSm90& tile,
                                           int row_block, unsigned consumer, unsigned half, F start_more,
                                           G done_with_tile) {
  static_assert(!C::kOverlaps || C::kDqNt * 8 == C::kDqColumns);  // start_more is called once
#pragma unroll
  for (int first = 0; first < C::kDqColumns; first += C::kDqNt * 8) {
    float dq[C::kDqNt][4];
    start_dq<T, C>(dq, tile, half, first);
    start_more();
    if (first == 0 && p.deterministic) {
      if (consumer % 32 == 0)
        while (load_acquire(p.turns + 1 + row_block) != tile.turn) continue;
      __syncwarp();
      if (consumer == 0) block.added = row_block;
    }
    wgmma_wait<C::kOverlaps>();
    hold(dq);
    if (first + C::kDqNt * 8 == C::kDqColumns) done_with_tile();
    add_dq<C>(p.dq_sum, row_block, dq, half * C::kDqColumns + first, consumer % 128);
  }
}

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_bwd_sm90(const __grid_constant__ AttentionBackwardLaunch p,
                       const __grid_constant__ AttentionBackwardMaps maps) {
  using Tile = TileSm80<T, C::kOt * 8, 128 * C::kConsumers>;
  constexpr int kAll = 128 * C::kConsumers;
  extern __shared__ unsigned char shared[];
  __shared__ BlockSm90<C> block;
  const unsigned thread = threadIdx.x, lane = thread % 32, group = __shfl_sync(~0u, thread / 128, 0);
  const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  if (thread == 0) start_block<C>(block, p);
  __syncthreads();
  if (block.first_key >= block.sequence.Sk) return;
  if (group == 0) {
    give_registers<C::kProducerRegisters>();
    if (thread < 32) produce<T, C>(block, p, maps, base, lane);
    return;
  }

  take_registers<C::kConsumerRegisters>();
  const unsigned consumer = thread - 128, half = group - 1;
  const unsigned key = (C::kShared ? 0 : half * 64) + consumer / 32 % 4 * 16;  // the warp's first, of the block's
  const uint32_t finite_keys = await_keys<T, C>(block, base, consumer);
  // After a barrier that follows what was added: the release is of what all threads did before the barrier, too.
  auto pass_turn = [&] {
    if (p.deterministic && consumer == 0 && block.added >= 0) increment_release(p.turns + 1 + block.added);
  };
  HeldSm90<C> held;
  if constexpr (C::kHeld) {
    using Box = TileSm80<T, 64, kAll>;
    const uint32_t from = base + Box::offset(key + lane % 16, lane / 16);
    unroll<C::kHead / 16>([&](auto d) {
      ldmatrix_x4(held.k[d], Box::at_step(from, d));
      ldmatrix_x4(held.v[d], Box::at_step(from, d) + C::kKeyBytes);
    });
  }
  float dk[1][C::kOt][4] = {}, dv[1][C::kOt][4] = {};
  uint32_t in_use = 0;  // in the thread that releases stages: the barrier of one that dK's product still reads, or 0
  for (unsigned n = 0;; ++n) {
    const Stage<C::kStages> at(n, finite_keys != base);
    mbarrier_wait(block.full(at.index), at.parity);
    const int number = __shfl_sync(~0u, block.tiles[at.index], 0);  // the compiler is to know that all threads agree
    if (number < 0) break;
    const TileSm90 tile = find_tile<T, C>(block, p, base, finite_keys, n, number, half, key);
    const bool nonfinite = tile.edge && take_tile_specials<T, C>(block, tile.queries, consumer);
    uint32_t gradients[C::kNt / 2][4];
    add_key_gradients<T, C>(dv[0], dk[0], gradients, p, held, tile, half, key + lane % 16, lane, [&] {
      wgmma_wait<2>();  // for all but those two
      if (in_use) mbarrier_arrive(in_use);
    });
    pass_turn();
    auto finish_sums = [&] {
      await_sums<C>(dv[0], dk[0]);
      if (!nonfinite) return;
      add_tile_specials<C>(dv[0], dk[0], p.mask, tile, half, block.specials[0], block.specials[1], lane);
      named_barrier<kAll>(1);  // before the next tile's specials
    };
    auto release = [&] {
      if (consumer % 128 == 0) mbarrier_arrive(block.free(at.index));
    };
    const int row_block = block.first_block + number;
    if constexpr (C::kOverlaps) {
      auto start_keys = [&] {
        start_columns<T, C>(dk[0], gradients, tile.queries, 0);
        wgmma_commit();
      };
      add_query_gradients<T, C>(block, p, tile, row_block, consumer, half, start_keys, [] {});
      in_use = consumer % 128 == 0 ? block.free(at.index) : 0;
      if (nonfinite || finite_keys != base) {  // specials come after the product; the only stage is needed
        finish_sums();
        release();
        in_use = 0;
      }
    } else {
      finish_sums();
      add_query_gradients<T, C>(block, p, tile, row_block, consumer, half, [] {}, release);
    }
  }
  if constexpr (C::kOverlaps) await_sums<C>(dv[0], dk[0]);
  named_barrier<kAll>(1);  // the ring's place is used again, to stage the results
  pass_turn();
  const uint32_t staging = base + C::kRingAt + consumer / 32 * 16 * Tile::kRowBytes;
  const int first = block.first_key + int(key), column = C::kShared ? half * C::kOt * 8 : 0;
  store_rows<T, Tile>(dv, 1.0f, key_rows<T>(p.dv, block.sequence, block.hk, p.Dv), first, column, p.aligned_dv, staging,
                      lane);
  store_rows<T, Tile>(dk, float(p.scale), key_rows<T>(p.dk, block.sequence, block.hk, p.D), first, column, p.aligned_dk,
                      staging, lane);
}

template <class T, class C>
void launch_attention_bwd_sm90(const char* name, const AttentionBackwardLaunch& p, cudaStream_t stream) {
  auto kernel = attention_bwd_sm90<T, C>;
  const int64_t blocks = (p.Sk + C::kKeys - 1) / C::kKeys * p.B * p.Hk;
  if (blocks > 0) {
    AttentionBackwardMaps maps;
    maps.q = tensor_map<T>(p.q, query_sizes(p, p.D), C::kQueries);
    maps.dout = tensor_map<T>(p.dout, query_sizes(p, p.Dv), C::kQueries);
    maps.k = tensor_map<T>(p.k, key_sizes(p, p.D), C::kKeys);
    maps.v = tensor_map<T>(p.v, key_sizes(p, p.Dv), C::kKeys);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes), name);
    kernel<<<grid_size(blocks, name), C::kThreads, C::kSharedBytes, stream>>>(p, maps);
    check(cudaGetLastError(), name);
  }
  launch_attention_bwd_dq_round_sm90<T, C>("attention_bwd_dq_round_sm90", p, stream);
}

}  // namespace mha::cuda
