// Where the work of attention_fwd.cuh is and how it reaches a block's consumers: the order of the work items, one
// warp that looks ahead (which keys do an item's rows see?), and one that loads.
#pragma once
#include "../prim/cluster.cuh"
#include "../prim/mbarrier.cuh"
#include "attention_fwd_tile.cuh"
#include "tensor_map.h"

namespace mha::cuda {

struct AttentionForwardMaps {
  CUtensorMap q, out;  // boxes of 64 columns and kBlockM rows of q, kRows of out, as grouped_tensor_map has them
  CUtensorMap k, v;    // likewise, kBlockN / cluster rows
  int cluster;         // blocks, 1 or 2
  bool stores;         // out is written by TMA where whole tiles are
  int group_bits;      // a query tile has the rows of 2^bits heads side by side
  // The order of the work: sections of so many columns, each the query tiles of a head or group of heads (or of one of
  // its splits).
  unsigned columns, section, sections;

  template <class C>
  __device__ int bits() const {
    return C::kGeneral ? 0 : group_bits;
  }
};

// Stages and parities of a ring, walked by both sides alike.
template <int kStages>
struct RingPlace {
  static_assert((kStages & (kStages - 1)) == 0);
  unsigned turn = 0;
  __device__ unsigned stage() const { return turn % kStages; }
  __device__ unsigned parity() const { return turn / kStages % 2; }
  __device__ void next() { ++turn; }
};

constexpr int kItems = 2;  // work items that are known at a time

// A query tile of a head, and the part of its key tiles that one split takes.
template <class C>
struct WorkItem {
  bool last;  // there is none any more
  RingPlace<kItems> at;
  Sequence sequence;
  unsigned h, hk, split;    // h: the first head
  int row, tile, tile_end;  // the first query row, the range of key tiles
  int first_turn;           // the first of so many key tiles for which the consumers take turns: those that both see
  unsigned turns;
  Span own[C::kConsumers], all;  // of each warpgroup's rows, and of all
  RowRange ranges[C::kBlockM];
};

// The mbarriers: what is full for those who read it, and empty for those who write it.
template <class C>
struct ForwardBarriers {
  static constexpr int kCount = 2 + 2 * kItems + 4 * C::kStages;
  uint32_t first;

  __device__ uint32_t query_full() const { return first; }
  __device__ uint32_t query_empty() const { return first + 8; }
  __device__ uint32_t item_full(int i) const { return first + 8 * (2 + i); }
  __device__ uint32_t item_empty(int i) const { return first + 8 * (2 + kItems + i); }
  __device__ uint32_t keys_full(int s) const { return ring(0, s); }
  __device__ uint32_t values_full(int s) const { return ring(1, s); }
  __device__ uint32_t keys_empty(int s) const { return ring(2, s); }
  __device__ uint32_t values_empty(int s) const { return ring(3, s); }

  __device__ void init(int cluster) const {
    constexpr int kWarps = 4 * C::kConsumers;
    mbarrier_init(query_full(), 1), mbarrier_init(query_empty(), kWarps);
    for (int i = 0; i < kItems; ++i) mbarrier_init(item_full(i), 1), mbarrier_init(item_empty(i), kWarps + 1);
    for (int s = 0; s < C::kStages; ++s) {
      mbarrier_init(keys_full(s), 1), mbarrier_init(values_full(s), 1);
      mbarrier_init(keys_empty(s), C::kConsumers * cluster), mbarrier_init(values_empty(s), C::kConsumers * cluster);
    }
    fence_mbarrier_init();
  }

 private:
  __device__ uint32_t ring(int which, int s) const { return first + 8 * (2 + 2 * kItems + which * C::kStages + s); }
};

// The block's next item. Of all items, the columns of a section lie side by side, late query tiles first or, in every
// other section, last: so items that follow each other are about as long. Blocks take them in rounds, every other round
// in reverse, and have about as much to do under a causal mask, which ends with its shortest items. A section's keys
// and values fit into the cache, where blocks share them.
template <class C>
__device__ inline void set_place(const AttentionForwardLaunch& p, const AttentionForwardMaps& maps, WorkItem<C>& item,
                                 RingPlace<kItems> at) {
  const unsigned query_tiles = unsigned(p.query_tiles) / maps.cluster, blocks = gridDim.x / maps.cluster,
                 block = blockIdx.x / maps.cluster;
  unsigned n = at.turn * blocks + (at.turn % 2 ? blocks - 1 - block : block);
  item.at = at;
  item.last = n >= maps.columns * query_tiles;
  if (item.last) return;
  const unsigned section = n / (maps.section * query_tiles), first = section * maps.section;
  n -= first * query_tiles;
  const unsigned columns = min(maps.section, maps.columns - first), line = n / columns,
                 tile = (maps.sections - section) % 2 ? query_tiles - 1 - line : line;
  item.row = int(tile * maps.cluster + blockIdx.x % maps.cluster) * C::kBlockM;
  const unsigned column = first + n - line * columns, bh = column / unsigned(p.splits), bits = maps.bits<C>(),
                 heads = unsigned(p.H) >> bits, b = bh / heads;
  item.split = column - bh * unsigned(p.splits);
  item.h = (bh - b * heads) << bits, item.hk = item.h / unsigned(p.H / p.Hk);
  item.sequence = sequence(p, b);
  // Beyond the end of a packed sequence; then the block has no other item.
  item.last = maps.cluster == 1 && item.row >> bits >= item.sequence.Sq;
}

// The first key tile from `tile` on that blocks, documents or a dense mask show something of, or the item's end.
template <class C>
__device__ inline int shown_tile(const AttentionForwardLaunch& p, const WorkItem<C>& item, int tile) {
  if constexpr (C::kGeneral)
#pragma unroll 1
    while (tile < item.tile_end &&
           !(mask_tile_code(p.tiles, item.sequence.b, item.h, item.row, C::kBlockM, tile * C::kBlockN, C::kBlockN) &
             kShowsSome))
      ++tile;
  return tile;
}

// The intervals of an item's rows, and the spans of each warpgroup's, by one warp.
template <class C>
__device__ inline void look_at_rows(const Mask& mask, WorkItem<C>& item, int bits, unsigned lane) {
#pragma unroll 1
  for (int group = 0; group < C::kConsumers; ++group) {
    Span own = {kKeyMax, 0, 0, kKeyMax};
#pragma unroll 1
    for (int r = lane; r < 64; r += 32) {
      RowRange range = {0, 0};
      const int i = (item.row + group * 64 + r) >> bits;
      if (i < item.sequence.Sq) {  // rows from there on see nothing and don't count
        const Interval x = row_interval(mask, item.sequence.b, i, item.sequence.Sk, item.sequence.shift);
        if (x.begin < x.end) range = {int(x.begin), int(x.end)};
        own = merge(own, {range.begin < range.end ? range.begin : kKeyMax, range.end, range.begin, range.end});
      }
      item.ranges[group * 64 + r] = range;
    }
    own = {__reduce_min_sync(~0u, own.begin), __reduce_max_sync(~0u, own.end), __reduce_max_sync(~0u, own.full_begin),
           __reduce_min_sync(~0u, own.full_end)};
    if (lane == 0) item.own[group] = own;
  }
  __syncwarp();
}

// The key tiles of an item. alike: all rows of the sequence see the same keys, and other blocks go along with this one,
// which may have no rows.
template <class C>
__device__ inline void set_tiles(const AttentionForwardLaunch& p, WorkItem<C>& item, bool alike) {
  item.all = merge(item.own[0], item.own[1]);
  int begin = item.all.begin, end = item.all.end;
  if (alike) {
    const Interval x = row_interval(p.mask, item.sequence.b, 0, p.Sk);
    begin = int(x.begin), end = int(x.end);
  }
  const int tile = begin / C::kBlockN, tile_end = (end + C::kBlockN - 1) / C::kBlockN,
            share = (max(0, tile_end - tile) + p.splits - 1) / p.splits;  // key tiles of one split
  const int first = tile + int(item.split) * share;
  item.tile_end = min(tile_end, first + share);
  item.tile = shown_tile(p, item, first);
  // Warpgroup 1 has the first turn. Where it passes over a tile that 2 sees, it may wait there for 2 (finish_values),
  // which must not wait for its turn meanwhile.
  const int first_tiles[2] = {item.own[0].begin / C::kBlockN, item.own[1].begin / C::kBlockN};
  item.first_turn = max(first_tiles[0], first_tiles[1]);
  item.turns = first_tiles[0] > first_tiles[1]
                   ? 0
                   : max(0, (min(item.own[0].end, item.own[1].end) + C::kBlockN - 1) / C::kBlockN - item.first_turn);
}

// One warp works out the block's items, up to kItems ahead of the others. It has few registers.
template <class C>
__device__ inline void look_ahead(const AttentionForwardLaunch& p, const AttentionForwardMaps& maps,
                                  const ForwardBarriers<C>& barriers, WorkItem<C>* items) {
  const auto lane = [] { return thread_index() % 32; };
  for (RingPlace<kItems> at;; at.next()) {
    WorkItem<C>& item = items[at.stage()];
    mbarrier_wait(barriers.item_empty(at.stage()), at.parity() ^ 1);
    if (lane() == 0) set_place(p, maps, item, at);
    __syncwarp();
    const bool last = item.last;
    if (!last) look_at_rows(p.mask, item, maps.bits<C>(), lane());
    if (lane() == 0) {
      if (!last) set_tiles(p, item, maps.cluster == 2);
      mbarrier_arrive(barriers.item_full(at.stage()));
    }
    if (last) return;
  }
}

// load_boxes by a block of a cluster of two, to both: it loads half of the rows of each box.
template <int kRows, int kColumns>
__device__ inline void load_boxes_for_two(uint32_t to, const CUtensorMap* map, uint32_t barrier, int row, int head,
                                          int batch) {
  const int half = int(cluster_rank()) * kRows / 2;
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    tma_load_4d_multicast(to + c * kRows * 128 + half * 128, map, barrier, 3, c * 64, row + half, head, batch);
}

// One thread loads what the consumers need, item by item.
template <class C>
__device__ inline void load_items(const AttentionForwardLaunch& p, const AttentionForwardMaps& maps,
                                  const ForwardBarriers<C>& barriers, WorkItem<C>* items, uint32_t query_at) {
  const uint32_t keys_at = query_at + C::kQueryBytes, values_at = keys_at + C::kStages * C::kKeyBytes;
  const bool two = maps.cluster == 2;
  RingPlace<C::kStages> at;
  for (RingPlace<kItems> item_at;; item_at.next()) {
    const WorkItem<C>& item = items[item_at.stage()];
    mbarrier_wait(barriers.item_full(item_at.stage()), item_at.parity());
    if (item.last) return;
    const int bits = maps.bits<C>(), query = int(item.sequence.first_query) + (item.row >> bits),
              group = item.h >> bits, first_key = int(item.sequence.first_key), hk = item.hk,
              batch = p.q_starts ? 0 : item.sequence.b, tile_end = item.tile_end;
    int tile = item.tile;
    auto release = [&] { mbarrier_arrive(barriers.item_empty(item_at.stage())); };
    auto next_tile = [&] { at.next(), tile = shown_tile(p, item, tile + 1); };
    if (!C::kGeneral) release();
    auto load_keys = [&] {
      const uint32_t to = keys_at + at.stage() * C::kKeyBytes, full = barriers.keys_full(at.stage());
      const int row = first_key + tile * C::kBlockN;
      mbarrier_wait(barriers.keys_empty(at.stage()), at.parity() ^ 1);
      mbarrier_arrive_expect(full, C::kKeyBytes);
      if (two)
        load_boxes_for_two<C::kBlockN, C::kColumns>(to, &maps.k, full, row, hk, batch);
      else
        load_boxes<C::kBlockN, C::kColumns>(to, &maps.k, full, row, hk, batch);
    };
    auto load_values = [&] {
      const uint32_t to = values_at + at.stage() * C::kValueBytes, full = barriers.values_full(at.stage());
      const int row = first_key + tile * C::kBlockN;
      mbarrier_wait(barriers.values_empty(at.stage()), at.parity() ^ 1);
      mbarrier_arrive_expect(full, C::kValueBytes);
      if (two)
        load_boxes_for_two<C::kBlockN, C::kValueColumns>(to, &maps.v, full, row, hk, batch);
      else
        load_boxes<C::kBlockN, C::kValueColumns>(to, &maps.v, full, row, hk, batch);
    };
    // The place of the queries is the last one that the item before gives back.
    const bool any = tile < tile_end;
    if (any) load_keys(), load_values();
    mbarrier_wait(barriers.query_empty(), (item_at.turn + 1) % 2);
    mbarrier_arrive_expect(barriers.query_full(), C::kQueryBytes);
#pragma unroll
    for (int c = 0; c < C::kColumns; ++c)
      tma_load_5d(query_at + c * C::kBlockM * 128, &maps.q, barriers.query_full(), c * 64, 0, query, group, batch);
    if (any) next_tile();
    for (; tile < tile_end; next_tile()) load_keys(), load_values();
    if (C::kGeneral) release();  // next_tile() reads it
  }
}

}  // namespace mha::cuda
