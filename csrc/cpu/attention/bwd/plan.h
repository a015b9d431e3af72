// How attention_bwd is cut into tasks, and where its memory lies. How it is cut may follow the number of threads, but
// the order of every sum, and with it every bit of the result, is that of the shapes alone:
//
//   dQ of a block of queries: tile of keys by tile of keys, from the first to the last
//   dK, dV of a tile of keys: for each head of its group block by block, from the last to the first; then head by head
#pragma once

#include "../../tile/mask.h"
#include "../../tiles.h"

MHA_ISA_BEGIN

// Where tasks meet in a gradient of the bias, and not by turns, they are cut by shapes alone, into about so many.
constexpr int64_t kBackwardTasks = 8;

// Chunks of keys may be twice as many then, so that threads finish together though a causal mask makes chunks unequal,
// while their partial sums of dQ stay below this: memory that malloc recycles. Fresh memory costs more than it brings:
// with 32 tasks and 67 MB of partial sums, backward was 15 % slower on two threads.
constexpr int64_t kPartialBytes = int64_t(32) << 20;

// Key tiles worked on together: each query block that comes from memory meets this many.
constexpr int kPassTiles = 4;

// Whole heads are tasks where every thread gets so many, or some number of them evenly; else passes of a head are, so
// small that each thread gets kTasksEach if there are tiles enough.
constexpr int64_t kWholeHeadsEach = 8, kEvenHeadsEach = 4, kTasksEach = 6;

// Shared queries and sums of the heads that are under way, in bytes. What a head has grows with its length and so do
// its tasks: this much serves hundreds of threads.
constexpr int64_t kSlotBytes = int64_t(128) << 20;

// Rows that are fetched before one is written.
constexpr int64_t kWriteAhead = 8;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A run of tasks that one thread does one after the other, since they add to the same elements of dbias.
struct BackwardUnit {
  int64_t owned, first_shared, last_shared;
  int64_t bias_part;  // 0: dbias itself; n: partial sum n - 1
};

// A task: heads first_head .. last_head, of one key/value head, with one of the chunks of the keys.
struct BackwardTask {
  int64_t b, hk, first_head, last_head, split, chunk;
  int64_t slot, round;  // by turns: where its head's queries and sums lie; how many heads have had that place before
};

// The passes of keys that see something of a block of queries; of one that sees nothing, the first.
struct BackwardPasses {
  int64_t first, last;

  BackwardPasses(const Mask& mask, int64_t b, int64_t first_query, int64_t rows, int64_t Sk, int64_t pass_keys) {
    const Interval keys = keys_of_rows(mask, b, first_query, rows, Sk);
    const bool any = keys.begin < keys.end;
    first = any ? keys.begin / pass_keys : 0, last = any ? ceil_div(keys.end, pass_keys) : 1;
  }
};

struct BackwardPlan {
  // by_turns: a task is a head and a pass over some of its keys, and tasks share the head's queries and its dQ, to
  // which they add in turn, and the dK and dV of its group. Else a task has heads for itself, and all of dQ or a copy
  // of it.
  bool by_turns = false;
  int64_t group, splits, heads;  // query heads of a key/value head; splits of them; heads in a split
  int64_t chunks, chunk_keys;    // a task's keys
  int64_t pass_keys;
  int64_t slots = 0, key_slots = 0;  // by turns: heads, and key/value heads that several of them share, under way
  // Heads meet in dbias, of which each adds to a tile of queries and keys after the one before it. A tile has
  // bias_tile of both, as many as the worker adds at a time.
  bool bias_turns = false;
  int64_t bias_tile;
  bool bias_of_batch, bias_of_head;  // each sequence, each head, has a dbias of its own
  // Tasks in a grid of (batch, key/value head and split, chunk); an axis along which tasks meet in dbias is shared.
  int64_t axis[3];
  bool shared[3];
  int64_t owned, shared_tasks, parts;  // units = owned * parts, each of about shared_tasks / parts tasks
  int64_t bias_elements, bias_origin;  // of dbias in memory; which of them is that of query 0 and key 0

  BackwardPlan(const AttentionBackward& p, int threads, int64_t tile_of_bias) : bias_tile(tile_of_bias) {
    const int64_t pairs = max64(1, p.B * p.Hk), tiles = ceil_div(p.Sk, kMaxKeys), all_heads = p.B * p.H;
    group = p.Hk ? p.H / p.Hk : 0;
    const int64_t size[3] = {p.B, p.H, p.Sk};
    const int64_t bias_stride[3] = {p.dbias.stride[0], p.dbias.stride[1], p.bias_relative ? 0 : p.dbias.stride[3]};
    bool met = false;
    for (int a = 0; a < 3; ++a) met |= p.dbias.data && bias_stride[a] == 0 && size[a] > 1;
    bias_of_batch = p.dbias.stride[0] != 0, bias_of_head = p.dbias.stride[1] != 0;
    // By turns, or where there are enough of them, all heads with one dbias are one thread's: the same order of sums.
    const bool by_shapes = met && (bias_stride[2] == 0 || p.dbias.stride[2] <= 0);
    const int64_t biases = (bias_of_batch ? p.B : 1) * (bias_of_head ? p.Hk : 1);
    const bool by_bias = met && !by_shapes && whole_heads(biases, threads);
    bias_turns = met && !by_shapes && !by_bias;

    heads = group, chunks = 1, pass_keys = kPassTiles * kMaxKeys;
    if (by_shapes) {
      heads = ceil_div(group, max64(1, min64(group, ceil_div(kBackwardTasks, pairs))));
      splits = max64(1, group ? ceil_div(group, heads) : 1);
      chunks = max64(1, min64(tiles, ceil_div(kBackwardTasks, pairs * splits)));
      const int64_t chunk_bytes = p.B * p.H * p.Sq * p.D * (p.dtype == DType::f64 ? 8 : 4);
      if (chunks > 1 && 2 * chunks * kPassTiles <= tiles && 2 * chunks * chunk_bytes <= kPartialBytes) chunks *= 2;
    } else if (!by_bias && tiles > 0 && p.Sq > 0 && all_heads > 0 && !whole_heads(pairs, threads)) {
      by_turns = true, heads = 1;
      while (pass_keys > kMaxKeys && all_heads * ceil_div(p.Sk, pass_keys) < kTasksEach * threads) pass_keys /= 2;
      chunks = ceil_div(p.Sk, pass_keys);
      const int64_t head_bytes = p.Sq * (2 * p.D + p.Dv) * (p.dtype == DType::f64 ? 8 : 4);
      slots = max64(1, min64(min64(all_heads, threads), kSlotBytes / max64(1, head_bytes)));
    }
    splits = max64(1, group ? ceil_div(group, heads) : 1);
    key_slots = by_turns && group > 1 ? ceil_div(slots, group) : 0;
    chunk_keys = by_turns ? pass_keys : ceil_div(tiles, chunks) * kMaxKeys;
    chunks = max64(1, ceil_div(p.Sk, max64(1, chunk_keys)));

    axis[0] = p.B, axis[1] = p.Hk * splits, axis[2] = chunks;
    owned = shared_tasks = 1;
    for (int a = 0; a < 3; ++a) {
      shared[a] = (by_shapes || by_bias) && bias_stride[a] == 0;
      (shared[a] ? shared_tasks : owned) *= axis[a];
    }
    parts = by_shapes ? max64(1, min64(shared_tasks, ceil_div(kBackwardTasks, max64(1, owned)))) : 1;
    set_bias(p);
  }

  int64_t units() const { return shared_tasks > 0 ? owned * parts : 0; }
  // Of dQ, of which tasks write one part each.
  int64_t copies() const { return by_turns ? 1 : chunks; }
  int64_t partial_keys() const { return by_turns ? 1 : splits; }

  BackwardUnit unit(int64_t n) const {
    const int64_t part = n % parts;
    return {n / parts, shared_tasks * part / parts, shared_tasks * (part + 1) / parts, part};
  }

  BackwardTask task(int64_t owned_index, int64_t shared_index) const {
    int64_t at[3], round = 0, slot = 0;
    if (by_turns) {  // as many heads as there are slots; of these the first passes, which under a causal mask have most
                     // to do, then the second ones, and so on
      const int64_t all = axis[0] * axis[1], per_round = slots * chunks;
      round = owned_index / per_round;
      const int64_t n = owned_index % per_round, heads_now = min64(slots, all - round * slots);
      slot = n % heads_now;
      const int64_t head = round * slots + slot;
      at[0] = head / axis[1], at[1] = head % axis[1], at[2] = n / heads_now;
    } else {
      for (int a = 2; a >= 0; --a) {
        int64_t& index = shared[a] ? shared_index : owned_index;
        at[a] = index % axis[a];
        index /= axis[a];
      }
    }
    const int64_t hk = at[1] / splits, split = at[1] % splits, first = hk * group;
    return {at[0], hk, first + split * heads, first + min64(group, (split + 1) * heads), split, at[2], slot, round};
  }

  bool waits() const { return by_turns || bias_turns; }
  Share share() const { return waits() ? Share::in_order : chunks > 1 ? Share::dealt : Share::runs; }

  // Heads that have a dbias in common, and which of them a head is.
  int64_t bias_owners(const AttentionProblem& p) const { return (bias_of_batch ? p.B : 1) * (bias_of_head ? p.H : 1); }
  int64_t bias_owner(const AttentionProblem& p, int64_t b, int64_t h) const {
    return (bias_of_batch ? b : 0) * (bias_of_head ? p.H : 1) + (bias_of_head ? h : 0);
  }
  int64_t bias_number(const AttentionProblem& p, int64_t b, int64_t h) const {
    return (bias_of_batch ? 0 : b) * (bias_of_head ? 1 : p.H) + (bias_of_head ? 0 : h);
  }

 private:
  static bool whole_heads(int64_t pairs, int threads) {
    return threads == 1 || pairs >= kWholeHeadsEach * threads ||
           (pairs >= kEvenHeadsEach * threads && pairs % threads == 0);
  }

  void set_bias(const AttentionBackward& p) {
    const bool empty = !p.dbias.data || p.B == 0 || p.H == 0 || p.Sq == 0 || p.Sk == 0;
    bias_origin = p.bias_relative && !empty ? p.Sq - 1 : 0;
    bias_elements = empty ? 0 : 1 + bias_origin;
    const int64_t size[4] = {p.B, p.H, p.Sq, p.Sk};
    for (int a = 0; a < 4 && !empty; ++a) bias_elements += max64(0, p.dbias.stride[a]) * (size[a] - 1);
  }
};

MHA_ISA_END
