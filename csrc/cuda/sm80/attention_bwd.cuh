// Gradients of keys and values and, if C::kQueryGradient, of queries, on tensor cores (mma.sync m16n8k16; compute
// capability 8.0 and later), fp16 and bf16, head sizes up to kHead (smaller ones are filled up with zeros).
//
// A block takes kKeys keys of one key/value head and walks over the tiles of query rows that see any of them, of all
// query heads of the group, one after the other. A warp owns 16 * kMt keys and works in steps of 16 queries: S^T = K
// Q^T and dP^T = V dO^T in registers become P^T and dS^T, which are, as they lie, operand A of dV += P^T dO and dK +=
// dS^T Q: nothing is exchanged between warps, and sums run in a fixed order. Beyond head size 128, registers have room
// for half of that, and two warps share their keys (kApart): one makes S^T and dV, the other dP^T and, from the weights
// that the first leaves in shared memory, dK.
//
// For dQ = dS K the warps put dS^T of a tile of queries into shared memory, share out the product's tile, and add it to
// p.dq_sum in global memory, where blocks meet in any order. Its elements lie as the accumulators do, so that each
// instruction adds to 128 bytes in a row; attention_bwd_dq_round puts them in order.
//
// For head size 128 with dQ, warps work in pairs (kPairs): the two share 32 keys, each works out P^T and dS^T for half
// of a tile's queries, gets the rest through shared memory, and keeps half of the columns of dK and dV. So what is
// loaded of queries and dout serves 32 keys instead of 16.
#pragma once
#include "../common/error.h"
#include "attention_bwd_tile.cuh"

namespace mha::cuda {

// kQueries_: of a tile. kWarps_: with more, a block has more keys and is the only one on its multiprocessor; dq_sum's
// order stays the same.
template <int kHead_, bool kGeneral_, bool kQueryGradient_, int kQueries_ = (kHead_ > 128 ? 32 : 64), int kWarps_ = 0>
struct BackwardSm80 {
  static constexpr int kHead = kHead_;
  static constexpr bool kGeneral = kGeneral_, kQueryGradient = kQueryGradient_;
  static constexpr int kQueries = kQueries_;
  static constexpr bool kPairs = kHead == 128 && kQueryGradient, kApart = kHead > 128;
  static constexpr int kMt = kPairs || kHead <= (kGeneral ? 32 : 64) ? 2 : 1;
  static constexpr int kWarps = kWarps_ ? kWarps_ : kMt == 2 && !kPairs ? 4 : 8, kThreads = 32 * kWarps;
  static constexpr int kSharing = kPairs || kApart ? 2 : 1;  // warps with the same keys
  static constexpr int kWarpKeys = 16 * kMt, kKeys = kWarpKeys * kWarps / kSharing;
  static constexpr int kOt = kHead / (kPairs ? 2 : 1) / 8;
  // Keys and values are held in registers, where they fit; they come in through the stages of the query tiles.
  static constexpr bool kHeld = !kPairs;
  static constexpr int kBlocksPerSm = kWarps == 4 ? 2 : 1;
  static constexpr int kTileBytes = kQueries * kHead * 2, kKeyBytes = kKeys * kHead * 2;
  static constexpr int kStageBytes = 2 * kTileBytes + int(sizeof(RowBlock<float>));
  static constexpr int kGradientBytes = kQueryGradient ? kKeys * kQueries * 2 : 0;  // dS^T; likewise P^T
  static constexpr int kHandedBytes = kApart ? kKeys * kQueries * 4 : 0;            // from one warp to the other
  static constexpr int kSpecials = kQueries * kHead / 8;                            // of a tile of queries
  static constexpr int kKeysAt = kHeld && !kQueryGradient ? 0 : 2 * kStageBytes;    // behind two stages
  static constexpr int kValuesAt = kHeld && kQueryGradient ? 0 : kKeysAt + kKeyBytes;
  static constexpr int kGradientAt = kKeysAt + kKeyBytes * (kHeld ? 1 : 2), kHandedAt = 2 * kStageBytes;
  static constexpr int kSharedBytes =
      2 * kStageBytes + kKeyBytes * (kHeld ? kQueryGradient : 2) + kGradientBytes * (kPairs ? 2 : 1) + kHandedBytes;
  static_assert(kHeld || kValuesAt == kKeysAt + kKeyBytes);
  static_assert(!kHeld || (kQueryGradient ? 1 : 2) * kKeyBytes <= 2 * kStageBytes);
  static_assert(!kApart || (kMt == 1 && !kQueryGradient));
  // A warp's part of a tile of dQ: 16 * kDqMt queries, 32 columns.
  static constexpr int kDqMt = kHead / 8 / kWarps, kDqRowWarps = 4 / (kDqMt ? kDqMt : 1);
  static_assert(!kQueryGradient || (kDqMt * 8 * kWarps == kHead && kQueries == kRowBlock));

  // Where a stage's NaN and Inf are kept: in the next stage, which is then filled later. Both are relative to the start
  // of shared memory.
  __device__ static uint32_t specials_at(uint32_t stage) { return kStageBytes - stage; }

  // The first of a thread's warp's keys, and of the columns that it sums.
  __device__ static unsigned own_keys(unsigned thread) { return thread / 32 / kSharing * kWarpKeys; }
  __device__ static unsigned column(unsigned thread) { return kPairs ? thread / 32 % 2 * (kHead / 2) : 0; }
  // With kApart, whether a thread's warp is the one with the values.
  __device__ static bool of_values(unsigned thread) { return kApart && thread / 32 % 2; }
};

// A warp's walk over those tiles of queries that see any of the block's keys; every warp's is the same.
struct RowTileWalk {
  int tile, next;  // -1 at the end
  bool nonfinite;  // whether the tile had NaN or Inf
  uint32_t seen;   // which of the 32 tiles around it are still to be visited
};

// The tile after walk.tile, for `count` tiles of kQueries rows and keys [key_begin, key_end), or -1. shows: whether the
// mask's blocks and the like show something of a tile.
template <int kQueries, class Walk, class F>
__device__ inline int next_row_tile(Walk& walk, const Span* spans, int count, int key_begin, int key_end, unsigned lane,
                                    F shows) {
  constexpr int kPerBlock = kRowBlock / kQueries;
  uint32_t seen = walk.seen;
  int base = walk.tile & ~31;
  while (!seen) {
    base += 32;
    if (base >= count) {
      __syncwarp();
      return -1;
    }
    const int n = base + int(lane);
    seen = __ballot_sync(
        ~0u, n < count && spans[n / kPerBlock].begin < key_end && spans[n / kPerBlock].end > key_begin && shows(n));
  }
  __syncwarp();  // a walk in shared memory is the whole warp's: other lanes may still have to read it
  walk.seen = seen & (seen - 1);
  return base + __ffs(seen) - 1;
}

// What a block works on.
struct BackwardPlace {
  int first_key;
  int tiles;  // of queries, of all the group's heads
  unsigned hk;
  unsigned first_head, first_block;  // the group's first query head, and that head's first row block
  const void *queries, *douts;       // of the sequence, head 0
  int Sq, tiles_per_head;
  bool nonfinite_keys;
};

// Brings the block's keys and values to shared memory and, if C::kHeld, on to registers.
template <class T, class C>
__device__ inline BackwardPlace load_keys(WarpKeys<C>& own, const AttentionBackwardLaunch& p, const Sequence& sequence,
                                          uint32_t k_tile, uint32_t v_tile) {
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  const unsigned thread = threadIdx.x, lane = thread % 32, group = unsigned(p.H) / unsigned(p.Hk);
  const unsigned key_tiles = (unsigned(p.Sk) + C::kKeys - 1) / C::kKeys;
  const unsigned hk = blockIdx.x / key_tiles % unsigned(p.Hk);
  const int first_key = blockIdx.x % key_tiles * C::kKeys;
  const bool aligned = !C::kGeneral || p.aligned;

  load_tile<Tile, C::kKeys>(key_rows<T>(p.k, sequence, hk, p.D), first_key, aligned, k_tile, thread);
  load_tile<Tile, C::kKeys>(key_rows<T>(p.v, sequence, hk, p.Dv), first_key, aligned, v_tile, thread);
  cp_async_commit();
  cp_async_wait<0>();
  const bool nonfinite = C::kQueryGradient && Tile::template any_nonfinite<C::kKeys>(k_tile, thread);
  const BackwardPlace place = {first_key,
                               int(group * sequence.row_blocks * (kRowBlock / C::kQueries)),
                               hk,
                               hk * group,
                               row_block(sequence, hk * group, 0),
                               query_rows<T>(p.q, sequence, 0, p.D).data,
                               query_rows<T>(p.dout, sequence, 0, p.Dv).data,
                               sequence.Sq,
                               int(sequence.row_blocks) * (kRowBlock / C::kQueries),
                               bool(__syncthreads_or(nonfinite))};
  if constexpr (C::kHeld) {
    const uint32_t a_lane = C::own_keys(thread) * Tile::kRowBytes + Tile::lane_b(lane);
    unroll<C::kMt>([&](auto m) {
      unroll<C::kHead / 16>([&](auto d) {
        load_operand_a<Tile, d, 16 * m>(own.k[m][d], (C::of_values(thread) ? v_tile : k_tile) + a_lane);
        if constexpr (!C::kApart) load_operand_a<Tile, d, 16 * m>(own.v[m][d], v_tile + a_lane);
      });
    });
    __syncthreads();
  }
  return place;
}

// Starts to bring a tile of queries, of dout, and of numbers of their rows to a stage.
template <class T, class C, class Place>
__device__ inline void load_queries(const AttentionBackwardLaunch& p, const Place& place, int tile, uint32_t stage) {
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  constexpr int kPerBlock = kRowBlock / C::kQueries;
  const unsigned thread = thread_index(), tiles_per_head = unsigned(place.tiles_per_head);
  const unsigned h = place.first_head + unsigned(tile) / tiles_per_head;
  const int row = unsigned(tile) % tiles_per_head * C::kQueries;
  const bool aligned = !C::kGeneral || p.aligned;
  const Matrix<T> q = {static_cast<const T*>(place.queries) + h * p.q.stride[1], p.q.stride[2], place.Sq, int(p.D)};
  load_tile<Tile, C::kQueries>(q, row, aligned, stage, thread);
  const Matrix<T> dout = {static_cast<const T*>(place.douts) + h * p.dout.stride[1], p.dout.stride[2], place.Sq,
                          int(p.Dv)};
  load_tile<Tile, C::kQueries>(dout, row, aligned, stage + C::kTileBytes, thread);
  const auto* rows = static_cast<const RowBlock<float>*>(p.rows) + place.first_block + tile / kPerBlock;
  if (thread < sizeof(*rows) / 16)
    cp_async_16(stage + 2 * C::kTileBytes + thread * 16, reinterpret_cast<const char*>(rows) + thread * 16, 16);
  cp_async_commit();
}

// Takes NaN and Inf out of a tile of queries and one of dout, which a block has brought in; tells whether there are.
template <class T, class C>
__device__ inline bool take_tile_specials(uint32_t stage, uint16_t* specials) {
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  const unsigned thread = thread_index();
  const bool nonfinite = Tile::template any_nonfinite<C::kQueries>(stage, thread) ||
                         Tile::template any_nonfinite<C::kQueries>(stage + C::kTileBytes, thread);
  if (!__syncthreads_or(nonfinite)) return false;
  Tile::template take_specials<C::kQueries>(stage, specials, thread);
  Tile::template take_specials<C::kQueries>(stage + C::kTileBytes, specials + C::kSpecials, thread);
  __syncthreads();
  return true;
}

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    attention_bwd_sm80(const __grid_constant__ AttentionBackwardLaunch p) {
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ RowTileWalk shared_walks[C::kPairs ? 1 : C::kWarps];
  __shared__ BackwardPlace shared_place;
  __shared__ Sequence sequence;
  // Where such tiles do not fit, two passes run (`fits` in the dispatch).
  static_assert(fits(C::kPairs ? kSharedSm80 : kSharedEverywhere, C::kSharedBytes,
                     sizeof(shared_walks) + sizeof(shared_place) + sizeof(sequence)));
  const unsigned key_tiles = (unsigned(p.Sk) + C::kKeys - 1) / C::kKeys;
  if (threadIdx.x == 0) sequence = cuda::sequence(p, blockIdx.x / key_tiles / unsigned(p.Hk));
  __syncthreads();
  if (int(blockIdx.x % key_tiles * C::kKeys) >= sequence.Sk) return;
  const uint32_t base = shared_address(shared), k_tile = base + C::kKeysAt, v_tile = base + C::kValuesAt;
  WarpKeys<C> own;
  const BackwardPlace found = load_keys<T, C>(own, p, sequence, k_tile, v_tile);
  // Registers are short, except where warps work in pairs: what is needed once a tile is kept in shared memory, and
  // read anew at each use (volatile).
  if (!C::kPairs && threadIdx.x == 0) shared_place = found;
  if (!C::kPairs) __syncthreads();
  RowTileWalk own_walk;
  auto place = [&]() -> auto& {
    if constexpr (C::kPairs)
      return found;
    else
      return static_cast<const volatile BackwardPlace&>(shared_place);
  };
  auto walk = [&]() -> auto& {
    if constexpr (C::kPairs)
      return own_walk;
    else
      return static_cast<volatile RowTileWalk&>(shared_walks[thread_index() / 32]);
  };
  auto query_tile = [&](int number, QueryTile& tile) {
    const unsigned tiles_per_head = unsigned(place().tiles_per_head);
    tile.sequence = &sequence;
    tile.h = place().first_head + unsigned(number) / tiles_per_head;
    tile.row = unsigned(number) % tiles_per_head * C::kQueries;
    const uint32_t code =
        mask_tile_code(p.tiles, sequence.b, tile.h, tile.row, C::kQueries, place().first_key, C::kKeys);
    tile.elementwise = code & kHidesSome;
    return code;
  };
  auto shows = [&](int number) -> bool {
    if constexpr (!C::kGeneral) {
      return true;
    } else {
      QueryTile tile = {};
      return query_tile(number, tile) & kShowsSome;
    }
  };
  auto next_tile = [&] {
    const int first_key = place().first_key;
    const int next = next_row_tile<C::kQueries>(walk(), p.spans + place().first_block, place().tiles, first_key,
                                                first_key + C::kKeys, thread_index() % 32, shows);
    walk().next = next;
    return next;
  };
  walk().tile = -1;
  walk().seen = 0;
  uint32_t stage = base;
  auto next_stage = [&] { return base + (base + C::kStageBytes - stage); };
  if (const int tile = next_tile(); tile >= 0) load_queries<T, C>(p, place(), tile, stage);

  for (int number; (number = walk().next) >= 0;) {
    cp_async_wait<0>();
    __syncthreads();
    walk().tile = number;
    QueryTile tile = {stage, reinterpret_cast<const RowBlock<float>*>(shared + (stage - base) + 2 * C::kTileBytes)};
    if constexpr (C::kGeneral || C::kQueries < kRowBlock) query_tile(number, tile);
    const Span& span = tile.rows->span;
    const int first_key = place().first_key;
    const bool edge = tile.elementwise || span.full_begin > first_key || span.full_end < first_key + C::kKeys;
    const bool nonfinite =
        edge && take_tile_specials<T, C>(stage, reinterpret_cast<uint16_t*>(shared + C::specials_at(stage - base)));
    walk().nonfinite = nonfinite;
    if (const int next = next_tile(); next >= 0 && !nonfinite) load_queries<T, C>(p, place(), next, next_stage());
    if (!C::kGeneral && !edge)  // most tiles need no look at what their rows see
      add_tile<T, C>(own, p, tile, false, place(), walk(), k_tile, base);
    else
      add_tile<T, C>(own, p, tile, edge, place(), walk(), k_tile, base);
    if constexpr (C::kQueryGradient) {
      float* to = p.dq_sum + int64_t(place().first_block + walk().tile) * (C::kQueries * C::kHead);
      if (place().nonfinite_keys)
        add_query_gradient<T, C, true>(base + C::kGradientAt, k_tile, to, thread_index());
      else
        add_query_gradient<T, C, false>(base + C::kGradientAt, k_tile, to, thread_index());
    }
    if (walk().nonfinite) {  // the next stage was still in use
      __syncthreads();
      if (const int next = walk().next; next >= 0) load_queries<T, C>(p, place(), next, next_stage());
    }
    stage = next_stage();
  }

  cp_async_wait<0>();
  __syncthreads();
  const unsigned thread = thread_index(), column = C::column(thread), hk = place().hk;
  const uint32_t staging = base + thread / 32 * C::kWarpKeys * Tile::kRowBytes;
  const int first = place().first_key + C::own_keys(thread);
  if (!C::kApart || C::of_values(thread))
    store_rows<T, Tile>(own.dk, float(p.scale), key_rows<T>(p.dk, sequence, hk, p.D), first, column, p.aligned_dk,
                        staging, thread % 32);
  if (C::of_values(thread)) return;
  const auto& dv = [&]() -> auto& {
    if constexpr (C::kApart)
      return own.dk;
    else
      return own.dv;
  }();
  store_rows<T, Tile>(dv, 1.0f, key_rows<T>(p.dv, sequence, hk, p.Dv), first, column, p.aligned_dv, staging,
                      thread % 32);
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
