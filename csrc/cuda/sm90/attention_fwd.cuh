// Attention forward on Hopper (compute capability 9.0: TMA, mbarriers, wgmma), fp16 and bf16, head sizes up to kHead
// for queries and keys and kValueHead for values (smaller ones are filled up with zeros by TMA).
//
// A block stays on its multiprocessor and takes one work item (a query tile of a head) after the other. Of the first
// warpgroup, one warp, the producer, brings the query tile and, through a ring of kStages stages, the key and value
// tiles to shared memory, and another one looks ahead to the next items, so that an item's first tiles are there when
// the one before ends. Two more warpgroups, the consumers, take 64 query rows each: S = Q K^T from shared memory, the
// online softmax in registers, O += P V with P from registers. The products of the next tile's scores run while this
// tile's softmax is worked out, and one warpgroup computes while the other waits for its products. The output leaves by
// TMA, beside the next item.
//
// Two blocks with neighbouring query tiles of a head may form a cluster: each loads half of every key and value tile,
// and TMA writes it to both.
//
// The rules of softmax (kSlack) and of hidden values (specials) are those of sm80/attention_fwd.cuh.
#pragma once
#include <algorithm>

#include "../common/attention_fwd_plan.h"
#include "../prim/stmatrix.cuh"
#include "../prim/warpgroup.cuh"
#include "attention_fwd_work.cuh"

namespace mha::cuda {

// Where the tiles begin: at the next multiple of 1024 bytes.
__device__ inline uint32_t tiles_at(uint32_t shared) { return (shared + 1023) & ~1023u; }

// What was taken out of the tile of values that all consumers look at.
template <class C>
struct TileSpecials {
  int tile;
  uint16_t elements[C::kBlockN * C::kValueHead / 8];
};

// A thread of the consumers.
template <class T, class C>
struct Consumer {
  static constexpr int kThreads = 128 * C::kConsumers;
  // Named barriers: of all consumers, and of warpgroups 1 and 2.
  static constexpr int kAll = 1, kOwn = 1, kTurn = 3;
  // Where TMA writes and wgmma reads, a box of 64 columns is a tile of 128-byte rows.
  using Box = TileSm80<T, 64, 128 * C::kConsumers>;
  struct OutputTile {  // as copy_rows takes it
    static constexpr int kLanes = 8, kChunksPerLane = C::kValueColumns;
    __device__ static uint32_t offset(uint32_t row, uint32_t chunk) {
      return chunk / 8 * C::kBlockM * 128 + Box::offset(row, chunk % 8);
    }
  };

  // A stage is written again when both blocks are done with it: one thread arrives here, another one there.
  struct Releasing {
    bool any;
    uint32_t distance;  // to the barrier of the thread's block
  };

  const AttentionForwardLaunch& p;
  const AttentionForwardMaps& maps;
  const ForwardBarriers<C> barriers;
  const uint32_t shared;
  TileSpecials<C>* const specials;
  const unsigned group;
  const bool elementwise;
  const Releasing kept;
  const WorkItem<C>* item;
  int tile, first_turn;
  unsigned turns;
  RingPlace<C::kStages> at;
  typename C::State state;
  float s[1][C::kNt][4], factor[2] = {1, 1};
  uint32_t weights[C::kNt / 2][4];
  bool rescale = false;

  __device__ Consumer(const AttentionForwardLaunch& p, const AttentionForwardMaps& maps,
                      const ForwardBarriers<C>& barriers, uint32_t shared, TileSpecials<C>* specials, unsigned group)
      : p(p),
        maps(maps),
        barriers(barriers),
        shared(shared),
        specials(specials),
        group(group),
        elementwise(C::kGeneral && p.mask.elementwise()),
        kept(releasing()) {}

  // Where registers are short, these are worked out anew.
  __device__ static unsigned thread() { return C::kGeneral ? thread_index() : threadIdx.x; }
  __device__ static unsigned consumer() { return thread() - 128; }
  __device__ static unsigned warp() { return consumer() / 32; }  // of all consumers' warps
  __device__ static unsigned lane() { return thread() % 32; }

  __device__ uint32_t query_at() const {
    uint32_t at = shared;
    if (C::kGeneral) asm volatile("" : "+r"(at));
    return tiles_at(at);
  }
  __device__ uint32_t keys() const { return query_at() + C::kQueryBytes + at.stage() * C::kKeyBytes; }
  __device__ uint32_t values(int stage) const {
    return query_at() + C::kQueryBytes + C::kStages * C::kKeyBytes + stage * C::kValueBytes;
  }
  __device__ uint32_t output() const {  // where the warp stages its rows
    return query_at() + (C::kOutputApart ? C::kInputBytes - 1024 : 0) + warp() * C::kRows * 128;
  }
  __device__ const Span& own() const { return item->own[group - 1]; }
  __device__ int first_row() const { return item->row + warp() * C::kRows; }
  __device__ FragmentPlace place(int t) const {
    return {&item->sequence, item->h, first_row(), t * C::kBlockN, item->ranges + warp() * C::kRows};
  }

  __device__ Releasing releasing() const {
    const bool there = maps.cluster == 2 && thread() % 128 == 32;
    return {there || thread() % 128 == 0,
            address_in(barriers.first, cluster_rank() ^ unsigned(there)) - barriers.first};
  }
  __device__ void release(uint32_t barrier) const {
    const Releasing r = C::kGeneral ? releasing() : kept;
    if (r.any) mbarrier_arrive_there(barrier + r.distance);
  }
  __device__ void release_by_warp(uint32_t barrier) const {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(barrier);
  }

  // A value tile that some rows of the block don't see whole: NaN and Inf must not reach them through products with 0.
  // All consumers look at it together.
  __device__ bool await_values(int t) {
    mbarrier_wait(barriers.values_full(at.stage()), at.parity());
    if (!elementwise && t * C::kBlockN >= item->all.full_begin && (t + 1) * C::kBlockN <= item->all.full_end)
      return false;
    const uint32_t v = values(at.stage());
    const bool found = Box::template any_nonfinite<C::kBlockN * C::kValueColumns>(v, consumer());
    if (!named_barrier_or<kThreads>(kAll, found)) return false;
    Box::template take_specials<C::kBlockN * C::kValueColumns>(v, specials->elements, consumer());
    if (consumer() == 0) specials->tile = t;
    fence_async_proxy();
    named_barrier<kThreads>(kAll);
    return true;
  }
  __device__ void finish_values(int stage, bool nonfinite, bool sees) {
    if (nonfinite) {
      if (sees) add_tile_specials<C>(state.o[0], p.mask, place(specials->tile), specials->elements, lane());
      named_barrier<kThreads>(kAll);  // before the next tile's specials
    }
    release(barriers.values_empty(stage));
  }

  __device__ void next_tile() {
    at.next();
    tile = shown_tile(p, *item, tile + 1);
  }

  __device__ void pass() {  // a tile that only other warpgroups see
    mbarrier_wait(barriers.keys_full(at.stage()), at.parity());
    release(barriers.keys_empty(at.stage()));
    finish_values(at.stage(), await_values(tile), false);
    next_tile();
  }

  // The products of tile t's scores and, by `more`, others beside them.
  template <class F>
  __device__ void start_next_scores(int t, F more) {
    mbarrier_wait(barriers.keys_full(at.stage()), at.parity());
    const bool in_turn = C::kTakesTurns && unsigned(t - first_turn) < turns;
    if (in_turn) named_barrier<kThreads>(kTurn + group);
    start_scores<T, C>(s[0], query_at() + (group - 1) * 64 * 128, keys());
    more();
    if (in_turn) named_barrier_arrive<kThreads>(kTurn + (group ^ 3));
  }
  // Of scores whose products are done.
  __device__ void softmax(int t) {
    hold(s[0]);
    release(barriers.keys_empty(at.stage()));
    const int key = t * C::kBlockN;
    if constexpr (C::kGeneral)
      for_each<C::kCount>(s[0], place(t), [&](const FragmentPlace& at, auto& scores) {
        to_scores<T>(scores, p, at, lane());
        hide(scores, visible_bits<1, C::kCount, false>(p.mask, at, lane()), -INFINITY);
      });
    else if (key < own().full_begin || key + C::kBlockN > own().full_end)
      hide_outside(s, place(t), lane());
    rescale = raise_maximum<C>(s[0], state, p.scale_log2, factor);
    exponentials<C>(s[0], state, p.scale_log2);
    if (C::kGeneral && p.dropout.rng_state)
      for_each<C::kCount>(s[0], place(t), [&](const FragmentPlace& at, auto& weights) {
        hide(weights,
             kept_bits<1, C::kCount>(dropout_key(p.dropout, item->sequence.b, item->h), p.threshold, at, lane()), 0.0f);
      });
  }

  __device__ void reset() {
#pragma unroll
    for (int n = 0; n < C::kOt; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) state.o[0][n][e] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      state.negative_max[0][half] = ForwardSm80<C::kHead, C::kGeneral>::kUnset, state.sum[0][half] = 0;
  }

  // Whether an item's tile, from the first that the warpgroup sees on, is one that it sees.
  __device__ bool sees(int t) const { return t < item->tile_end && t * C::kBlockN < own().end; }

  // The tiles from `tile` on that the warpgroup sees.
  __device__ void take_tiles() {
    start_next_scores(tile, [] {});
    wgmma_wait<0>();
    softmax(tile);  // there is nothing to rescale yet
#pragma unroll 1
    for (int next; sees(next = shown_tile(p, *item, tile + 1));) {
      const bool nonfinite = await_values(tile);
      const int stage = at.stage();
      pack_weights<T>(weights, s[0]);
      at.next();
      tile = next;
      start_next_scores(tile, [&] { start_values<T, C>(state.o[0], weights, values(stage)); });
      wgmma_wait<1>();
      softmax(tile);
      finish(state.sum[0][0] + state.sum[0][1]);
      wgmma_wait<0>();
      hold(state.o[0]);
      finish_values(stage, nonfinite, true);
      if (rescale)
#pragma unroll
        for (int n = 0; n < C::kOt; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) state.o[0][n][e] *= factor[e / 2];
    }
    if (C::kOutputApart) release_by_warp(barriers.query_empty());
    const bool nonfinite = await_values(tile);
    pack_weights<T>(weights, s[0]);
    start_values<T, C>(state.o[0], weights, values(at.stage()));
    wgmma_wait<0>();
    hold(state.o[0]);
    finish_values(at.stage(), nonfinite, true);
    next_tile();
  }

  __device__ void take(uint32_t query_parity) {
    tile = item->tile, first_turn = item->first_turn, turns = item->turns;
    const int own_tile = min(item->tile_end, own().begin / C::kBlockN);
    reset();
    mbarrier_wait(barriers.query_full(), query_parity);
    while (tile < own_tile) pass();
    if (sees(tile))
      take_tiles();
    else if (C::kOutputApart)
      release_by_warp(barriers.query_empty());
    while (tile < item->tile_end) pass();
    write();
    if (!C::kOutputApart) release_by_warp(barriers.query_empty());
  }

  // The item's rows to out and lse, or to the split's partial results. Each warp by itself.
  __device__ void write() {
    const Sequence& sequence = item->sequence;
    const RowsOfTile rows = {item->h, first_row(), maps.template bits<C>()};
    finish_rows<typename C::Output>(p, state, sequence, rows, item->split, lane());
    if (p.splits > 1) return;
    const uint32_t to = output(), lane_at = to + Box::lane_a(lane());
    if (C::kOutputApart) {
      if (lane() == 0) bulk_wait_read();
      __syncwarp();
    } else {
      named_barrier<128>(kOwn + group);  // until the warpgroup is done with the queries
    }
    unroll<C::kOt / 2>([&](auto n) {
      float (&left)[4] = state.o[0][2 * n], (&right)[4] = state.o[0][2 * n + 1];
      stmatrix_x4(Box::at_step(lane_at, n % 4) + n / 4 * C::kBlockM * 128, pack2<T>(left[0], left[1]),
                  pack2<T>(left[2], left[3]), pack2<T>(right[0], right[1]), pack2<T>(right[2], right[3]));
    });
    fence_async_proxy();  // before TMA reads it, or writes the next queries there
    // Rows beyond a packed sequence are another one's; those beyond the tensor TMA leaves out.
    if (maps.stores && (!p.q_starts || first_row() + C::kRows <= sequence.Sq)) {
      __syncwarp();
      if (lane() == 0) {
        const int query = int(sequence.first_query) + rows.query(0), batch = p.q_starts ? 0 : sequence.b;
#pragma unroll
        for (int c = 0; c < C::kValueColumns; ++c)
          tma_store_5d(&maps.out, to + c * C::kBlockM * 128, c * 64, rows.head(0), query, item->h >> rows.bits, batch);
        bulk_commit();
        if (!C::kOutputApart) bulk_wait_read();
      }
    } else {
      __syncwarp();
      copy_rows<T, OutputTile, C::kRows>(p, sequence, rows, to, lane());
    }
  }

  // All of the block's items.
  __device__ void run(const WorkItem<C>* items) {
    if (C::kTakesTurns && group == 2) named_barrier_arrive<kThreads>(kTurn + 1);  // the first turn is warpgroup 1's
    for (RingPlace<kItems> item_at;; item_at.next()) {
      item = items + item_at.stage();
      mbarrier_wait(barriers.item_full(item_at.stage()), item_at.parity());
      if (item->last) break;
      take(item_at.turn % 2);
      item_at = item->at;  // read anew: meanwhile it need not stay in a register
      release_by_warp(barriers.item_empty(item_at.stage()));
    }
    if (lane() == 0) bulk_wait_read();
    __syncwarp();
  }
};

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_fwd_sm90(const __grid_constant__ AttentionForwardLaunch p,
                       const __grid_constant__ AttentionForwardMaps maps) {
  extern __shared__ unsigned char shared[];
  __shared__ WorkItem<C> items[kItems];
  __shared__ uint64_t barrier_words[ForwardBarriers<C>::kCount];
  __shared__ TileSpecials<C> specials;
  // The shuffle tells the compiler that a warpgroup's threads agree.
  const unsigned thread = threadIdx.x, group = __shfl_sync(~0u, thread / 128, 0);
  const ForwardBarriers<C> barriers = {shared_address(barrier_words)};
  if (thread == 0) barriers.init(maps.cluster);
  __syncthreads();
  const bool two = maps.cluster == 2;
  if (two) cluster_arrive(), cluster_wait();
  if (group == 0) {
    give_registers<40>();
    if (thread == 0) load_items<C>(p, maps, barriers, items, tiles_at(shared_address(shared)));
    if (thread / 32 == 1) look_ahead<C>(p, maps, barriers, items);
    __syncwarp();
    if (two) cluster_arrive(), cluster_wait();  // until nothing more goes from one's shared memory to the other's
    return;
  }
  take_registers<232>();
  Consumer<T, C>(p, maps, barriers, shared_address(shared), &specials, group).run(items);
  if (two) cluster_arrive(), cluster_wait();
}

// Two query tiles of a head share loads where all rows see the same keys: elsewhere one would wait for the other.
inline bool shares_loads(const AttentionForwardLaunch& p) {
  const Mask& m = p.mask;
  const bool alike = m.band_lo <= -p.Sq && m.band_hi >= p.Sk && !m.top_left && (!m.begin || m.begin_stride_q == 0) &&
                     (!m.end || m.end_stride_q == 0);
  return alike && !m.elementwise() && !p.q_starts && p.splits == 1 && p.query_tiles > 1;
}

// The order of the work, and how many blocks take it. A fixed schedule needs no counter in global memory that somebody
// has to set back. Where only the device knows how long an item takes (lengths of packed sequences, intervals), each
// gets a block of its own, which the GPU starts when another one ends.
inline int64_t plan_work(const AttentionForwardLaunch& p, AttentionForwardMaps& maps) {
  constexpr int64_t kCached = 24 << 20;  // bytes of keys and values: half of the GPU's L2 cache
  const int64_t columns = p.B * (p.H >> maps.group_bits) * p.splits,
                bytes = std::max<int64_t>(1, p.Sk * (p.D + p.Dv) * 2), sharing = (p.H / p.Hk) >> maps.group_bits,
                most = std::clamp<int64_t>(kCached / bytes * sharing, 1, columns),
                sections = (columns + most - 1) / most, blocks = columns * p.query_tiles;
  maps.columns = unsigned(columns), maps.sections = unsigned(sections);
  maps.section = unsigned((columns + sections - 1) / sections);
  if (p.q_starts || p.mask.begin || p.mask.end) return blocks;
  return std::min<int64_t>(blocks, std::max(1, multiprocessors() / maps.cluster) * maps.cluster);
}

template <class T, class C>
void launch_attention_fwd_sm90(const char* name, AttentionForwardLaunch p, cudaStream_t stream) {
  static_assert(C::kBlockM == kGroupedRows);
  auto kernel = attention_fwd_sm90<T, C>;
  AttentionForwardMaps maps;
  maps.group_bits = C::kGeneral ? 0 : group_bits(p);
  p.query_tiles = int(((p.Sq << maps.group_bits) + C::kBlockM - 1) / C::kBlockM);
  maps.cluster = shares_loads(p) ? 2 : 1;
  p.query_tiles += p.query_tiles % maps.cluster;
  const unsigned blocks = grid_size(plan_work(p, maps), name);
  maps.q = grouped_tensor_map<T>(p.q, query_sizes(p, p.D), 1 << maps.group_bits, C::kBlockM);
  maps.k = tensor_map<T>(p.k, key_sizes(p, p.D), C::kBlockN / maps.cluster);
  maps.v = tensor_map<T>(p.v, key_sizes(p, p.Dv), C::kBlockN / maps.cluster);
  maps.stores = p.splits == 1 && tma_reads(p.out, query_sizes(p, p.Dv));
  if (maps.stores) maps.out = grouped_tensor_map<T>(p.out, query_sizes(p, p.Dv), 1 << maps.group_bits, C::kRows);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes), name);
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {unsigned(maps.cluster), 1, 1};
  cudaLaunchConfig_t config = {blocks, C::kThreads, C::kSharedBytes, stream, &cluster, 1};
  check(cudaLaunchKernelEx(&config, kernel, p, maps), name);
}

}  // namespace mha::cuda
