// How attention_bwd is cut into tasks, and where its memory lies. Everything here follows from the shapes alone, never
// from the number of threads, so that the order of every sum, and with it every bit of the result, is fixed.
#pragma once

#include "tiles.h"

MHA_ISA_BEGIN

// With fewer (batch, key/value head) pairs than this, the query heads of a group and then the keys are split too.
constexpr int64_t kBackwardTasks = 8;

// Chunks of keys may be twice as many, so that threads finish together though a causal mask makes chunks unequal, while
// their partial sums of dQ stay below this: memory that malloc recycles. Fresh memory costs more than it brings: with
// 32 tasks and 67 MB of partial sums, backward was 15 % slower on two threads.
constexpr int64_t kPartialBytes = int64_t(32) << 20;

// Key tiles worked on together: each query block that comes from memory meets this many.
constexpr int kPassTiles = 4;

// Rows that are fetched before one is written.
constexpr int64_t kWriteAhead = 8;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A run of tasks that one thread does one after the other, since they add to the same elements of dbias.
struct BackwardUnit {
  int64_t owned, first_shared, last_shared;
  int64_t bias_part;  // 0: dbias itself; n: partial sum n - 1
};

struct BackwardPlan {
  // A task is (batch, key/value head, split of the heads of its group, chunk of the keys).
  int64_t group, splits, heads;  // query heads of a key/value head; splits of them; heads in a split
  int64_t chunks, chunk_keys;
  // Tasks in a grid of (batch, key/value head and split, chunk); an axis along which tasks meet in dbias is shared.
  int64_t axis[3];
  bool shared[3];
  int64_t owned, shared_tasks, parts;  // units = owned * parts, each of about shared_tasks / parts tasks
  int64_t bias_elements, bias_origin;  // of dbias in memory; which of them is that of query 0 and key 0

  explicit BackwardPlan(const AttentionBackward& p) {
    const int64_t pairs = max64(1, p.B * p.Hk), tiles = ceil_div(p.Sk, kMaxKeys);
    group = p.Hk ? p.H / p.Hk : 0;
    heads = ceil_div(group, max64(1, min64(group, ceil_div(kBackwardTasks, pairs))));
    splits = max64(1, group ? ceil_div(group, heads) : 1);
    chunks = max64(1, min64(tiles, ceil_div(kBackwardTasks, pairs * splits)));
    const int64_t chunk_bytes = p.B * p.H * p.Sq * p.D * (p.dtype == DType::f64 ? 8 : 4);
    if (chunks > 1 && 2 * chunks * kPassTiles <= tiles && 2 * chunks * chunk_bytes <= kPartialBytes) chunks *= 2;
    chunk_keys = ceil_div(tiles, chunks) * kMaxKeys;
    chunks = max64(1, ceil_div(p.Sk, max64(1, chunk_keys)));

    axis[0] = p.B, axis[1] = p.Hk * splits, axis[2] = chunks;
    const int64_t bias_stride[3] = {p.dbias.stride[0], p.dbias.stride[1], p.dbias.stride[3]};
    owned = shared_tasks = 1;
    for (int a = 0; a < 3; ++a) {
      shared[a] = p.dbias.data && (bias_stride[a] == 0 || (p.bias_relative && a == 2));
      (shared[a] ? shared_tasks : owned) *= axis[a];
    }
    parts = max64(1, min64(shared_tasks, ceil_div(kBackwardTasks, max64(1, owned))));
    const bool empty = !p.dbias.data || p.B == 0 || p.H == 0 || p.Sq == 0 || p.Sk == 0;
    bias_origin = p.bias_relative && !empty ? p.Sq - 1 : 0;
    bias_elements = empty ? 0 : 1 + bias_origin;
    const int64_t size[4] = {p.B, p.H, p.Sq, p.Sk};
    for (int a = 0; a < 4 && !empty; ++a) bias_elements += max64(0, p.dbias.stride[a]) * (size[a] - 1);
  }

  int64_t units() const { return shared_tasks > 0 ? owned * parts : 0; }

  BackwardUnit unit(int64_t n) const {
    const int64_t part = n % parts;
    return {n / parts, shared_tasks * part / parts, shared_tasks * (part + 1) / parts, part};
  }

  // The place on the grid of one task of a unit.
  void place(int64_t owned_index, int64_t shared_index, int64_t* at) const {
    for (int a = 2; a >= 0; --a) {
      int64_t& index = shared[a] ? shared_index : owned_index;
      at[a] = index % axis[a];
      index /= axis[a];
    }
  }
};

MHA_ISA_END
