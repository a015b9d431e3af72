// How attention forward cuts its work, and the memory that it works in.
#pragma once

#include "../../threads/parallel.h"
#include "../../tile/few_rows.h"
#include "../../tile/mask.h"
#include "../../tile/operands.h"

MHA_ISA_BEGIN

// How the queries are cut into blocks. Where a head has less than a block of queries, a block takes rows of all query
// heads of a key/value head, so that its keys and values are read once.
struct ForwardPlan {
  int64_t lists, heads_per_list, rows_per_list, block_rows, blocks_per_list, tasks;
  int64_t lists_per_batch;
  int64_t part_keys, parts;  // of each block; a task is a part of a block where parts > 1

  explicit ForwardPlan(const AttentionProblem& p) {
    const int64_t group = p.Hk > 0 ? p.H / p.Hk : 1;
    heads_per_list = p.Sq < kMaxRows ? group : 1;
    lists_per_batch = p.H / max64(1, heads_per_list);
    lists = p.B * lists_per_batch;
    rows_per_list = heads_per_list * p.Sq;
    block_rows = kMaxRows;
    blocks_per_list = (rows_per_list + block_rows - 1) / block_rows;
    tasks = lists * blocks_per_list;
    // Nothing here depends on B and H: a sequence gives the same bits alone and in a batch.
    const int64_t least = max64(kPartKeys * blocks_per_list, (p.Sk + kMaxParts - 1) / kMaxParts);
    part_keys = (least + kMaxKeys - 1) / kMaxKeys * kMaxKeys;
    parts = part_keys > 0 ? max64(1, (p.Sk + part_keys - 1) / part_keys) : 1;
  }

  // The rows of a block: first .. first + rows of the flat list (head, query) that starts at first_head.
  struct Place {
    int64_t b, first_head, first;
    int rows;
  };
  // The last queries come first: under a causal mask they see the most keys.
  Place place(int64_t task) const {
    const int64_t list = task / blocks_per_list;
    const int64_t first = (blocks_per_list - 1 - task % blocks_per_list) * block_rows;
    return {list / lists_per_batch, list % lists_per_batch * heads_per_list, first,
            int(min64(block_rows, rows_per_list - first))};
  }
};

// The packed keys and values of a whole head, which serve all its blocks.
template <class Unit>
struct PackedHead {
  int64_t head;  // b * Hk + key/value head; -1: none yet
  Broadcast<Unit> k, v;
  bool finite_k, finite_v;  // known of more planes than one
};

// What a block, or a part of its keys, has come to. out is [Dv][kMaxRows], or [rows][Dv] for few rows.
template <class T>
struct Partial {
  T *row_max, *row_sum;  // [kMaxRows]
  T* out;
  uint8_t* any;  // whether some row saw something; else nothing else is written

  Partial(const AttentionForward& p, int64_t rows, Arena& arena) {
    row_max = arena.take<T>(kMaxRows);
    row_sum = arena.take<T>(kMaxRows);
    out = arena.take<T>(p.Dv * (rows <= kFewRows ? rows : kMaxRows));
    any = arena.take<uint8_t>(1);
  }
};

// Blocks of a list that visit each tile of keys together, so that it is copied from memory once for all of them: rows
// that lie apart ([B,S,H,D] in memory) meet in few sets of the caches and each in a page of its own. Bits are the same.
constexpr int kGroup = 16;

// Queries and outputs of a group, in bytes: part of a second-level cache.
constexpr int64_t kGroupBytes = 1 << 19;

#ifdef MHA_HAS_AMX
// Whether the blocks are of few rows whose products are made on tiles (attention/amx/few.h), and the bytes that these
// and copies of keys and values take.
inline bool few_on_tiles(const AttentionForward& p, const ForwardPlan& plan) {
  return p.dtype == DType::bf16 && plan.rows_per_list <= kFewRows;
}
inline int64_t few_tiles_bytes(const AttentionForward& p) {
  const int64_t d = (p.D + 63) / 64, dv = (p.Dv + 63) / 64;
  return (7 * d + 8 * dv) * 1024 + std::max(d, dv) * 128;
}
#endif

// What one thread works in, for one of the blocks of a group. Unit is what the products multiply, T what they sum.
template <class Unit>
struct ForwardScratch {
  using T = typename Product<Unit>::Acc;
  RowBlock* block;
  TileMask<T>* mask;
  Partial<T> whole;            // of a block that is not cut into parts
  T *row_max, *row_sum, *out;  // the Partial in use
  T* rescale;                  // [kMaxRows]
  uint32_t *head, *query;      // [kMaxRows]
  Unit* q;                     // [units(D)][kMaxRows]
  bool whole_head;             // k and v hold a packed head, not a tile
  int group;                   // blocks that may share tiles
  bool grouped;                // k and v may hold a tile of a group's
  PackedHead<Unit>* packed;
  Unit *k, *v;           // keys and values, packed
  Unit* finite_v;        // values of a tile for FiniteRows
  T* score;              // [kMaxKeys][kMaxRows]
  T *bias, *multiplier;  // [kMaxKeys][kMaxRows]
  Unit* weight;          // [units(kMaxKeys)][kMaxRows]
#ifdef MHA_HAS_AMX
  char* few_tiles;  // of few_on_tiles
#endif
  std::size_t bytes;

  ForwardScratch(const AttentionForward& p, const ForwardPlan& plan, void* base)
      : ForwardScratch(p, plan, Arena(base)) {}

  // Blocks of a group have what a tile needs in common.
  void share(const ForwardScratch& first) {
    mask = first.mask, packed = first.packed, k = first.k, v = first.v, finite_v = first.finite_v;
    score = first.score, bias = first.bias, multiplier = first.multiplier, weight = first.weight;
  }
  void use(const Partial<T>& sums) { row_max = sums.row_max, row_sum = sums.row_sum, out = sums.out; }

 private:
  ForwardScratch(const AttentionForward& p, const ForwardPlan& plan, Arena arena) : whole(p, kMaxRows, arena) {
    use(whole);
    const int64_t D = p.D, Dv = p.Dv, tile = kMaxKeys * kMaxRows;
    block = arena.take<RowBlock>(1);
    mask = arena.take<TileMask<T>>(1);
    rescale = arena.take<T>(kMaxRows);
    head = arena.take<uint32_t>(kMaxRows);
    query = arena.take<uint32_t>(kMaxRows);
    q = arena.take<Unit>(kPlanes<Unit> * max64(units<Unit>(int(D)) * kMaxRows, kFewRows * few_ld<Unit>(int(D))));
    const bool packs = sizeof(Unit) != size_of(p.kv_type()) && plan.parts == 1 && !p.store.table;
    const int64_t head_bytes = p.Sk * (D + Dv) * int64_t(sizeof(Unit)) / kUnitK<Unit> * kPlanes<Unit>;
    whole_head = packs && p.Sq > kMaxRows && head_bytes <= kPackedHeadBytes;
    const int packed_keys = whole_head ? int(p.Sk) : kMaxKeys;
    packed = arena.take<PackedHead<Unit>>(1);
    k = arena.take<Unit>(kPlanes<Unit> * packed_keys * units<Unit>(int(D)));
    v = arena.take<Unit>(columns_size<Unit>(packed_keys, Dv));
    const int64_t most = kGroupBytes / (kMaxRows * max64(1, D + Dv) * int64_t(sizeof(T)));
    group = int(max64(1, min64(kGroup, min64(most, plan.blocks_per_list))));
    grouped = group > 1 && !kPairs<Unit> && !whole_head && plan.parts == 1 && !p.store.table && p.Sk >= kCopiedRows &&
              plan.rows_per_list >= kCopiedRows;
    finite_v = whole_head || grouped ? arena.take<Unit>(columns_size<Unit>(kMaxKeys, Dv)) : v;
    score = arena.take<T>(tile);
    bias = arena.take<T>(p.bias.data ? tile : 0);
    multiplier = arena.take<T>(p.dropout.rng_state ? tile : 0);
    weight = arena.take<Unit>(kPairs<Unit> ? kPlanes<Unit> * kLanesPlane<Unit> : 0);
#ifdef MHA_HAS_AMX
    few_tiles = arena.take<char>(few_on_tiles(p, plan) ? few_tiles_bytes(p) : 0);
#endif
    bytes = arena.used();
  }
};

// Threads that share lists take tasks in order: so many lists at a time, and of these the first tasks, which under a
// causal mask have most to do, then the second ones, and so on. As many as keep all busy; all, where a thread has few
// tasks, so that the last ones are short.
inline int64_t lists_together(int64_t lists, int64_t tasks_each, int threads) {
  if (lists * tasks_each <= 4 * threads) return max64(1, lists);
  return min64(lists, (threads + tasks_each - 1) / tasks_each);
}

// The tasks of blocks that are not cut into parts: each has `size` of a list's blocks, or what is left of them.
struct ForwardTasks {
  int64_t lists, blocks, size, per_list, count;
  bool grouped = false;  // the blocks of a task visit each tile of keys together
  Share share;

  template <class Unit>
  ForwardTasks(const ForwardPlan& plan, const ForwardScratch<Unit>& scratch, int threads)
      : lists(plan.lists), blocks(plan.blocks_per_list), size(!kPairs<Unit> && scratch.grouped ? scratch.group : 0) {
    auto tasks_of_list = [&] { return (blocks + size - 1) / size; };
    while (size > 1 && lists * tasks_of_list() < (size > 4 ? 16 : 8) * threads) size /= 2;
    grouped = size > 1;
    // Where there are lists enough to go round evenly, a thread takes whole ones, so that it alone packs their heads.
    if (grouped)
      size = (blocks + tasks_of_list() - 1) / tasks_of_list();
    else
      size = scratch.whole_head && lists >= 16 * threads ? max64(1, blocks) : 1;
    per_list = tasks_of_list();
    count = lists * per_list;
    // Where there are fewer lists than threads, these share them.
    share = lists < threads ? Share::in_order : Share::runs;
    together = share == Share::in_order ? lists_together(lists, per_list, threads) : 1;
  }
  int64_t first(int64_t task) const { return list(task) * blocks + index(task) * size; }
  int64_t last(int64_t task) const { return min64(first(task) + size, (list(task) + 1) * blocks); }

 private:
  int64_t together;  // lists
  int64_t before(int64_t task) const { return task / (together * per_list) * together; }
  int64_t now(int64_t task) const { return min64(together, lists - before(task)); }
  int64_t list(int64_t task) const { return before(task) + task % (together * per_list) % now(task); }
  int64_t index(int64_t task) const { return task % (together * per_list) / now(task); }
};

// The workspace: scratch of the threads, then, where blocks are cut, a Partial of each part of each block.
template <class Unit>
struct ForwardSpace {
  using T = typename Product<Unit>::Acc;
  const AttentionForward& p;
  const ForwardPlan plan;
  const ForwardScratch<Unit> scratch;
  std::size_t partial_bytes;

  explicit ForwardSpace(const AttentionForward& problem) : p(problem), plan(p), scratch(p, plan, nullptr) {
    Arena arena(nullptr);
    partial(arena);
    partial_bytes = arena.used();
  }
  std::size_t bytes(int threads) const {
    const int64_t partials = plan.parts > 1 ? plan.tasks * plan.parts : 0;
    return std::size_t(threads) * thread_bytes() + std::size_t(partials) * partial_bytes;
  }
  std::size_t thread_bytes() const { return scratch.bytes * std::size_t(scratch.grouped ? scratch.group : 1); }
  void* of_thread(void* workspace, int thread, int member = 0) const {
    return static_cast<char*>(workspace) + std::size_t(thread) * thread_bytes() + std::size_t(member) * scratch.bytes;
  }
  Partial<T> of_part(void* workspace, int threads, int64_t index) const {
    Arena arena(static_cast<char*>(of_thread(workspace, threads)) + std::size_t(index) * partial_bytes);
    return partial(arena);
  }

 private:
  Partial<T> partial(Arena& arena) const { return Partial<T>(p, min64(plan.rows_per_list, kMaxRows), arena); }
};

MHA_ISA_END
