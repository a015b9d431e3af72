// How AMX forward shares out its work: who packs which keys and values when, and which block of queries waits for them.
#pragma once

#include "fwd_space.h"

MHA_ISA_BEGIN

// Where there are so many heads for each thread, and they are small, a thread packs those that it works on by itself.
// Else all threads pack them together, piece by piece. Tasks go in order then, with several heads together
// (lists_together), and before their blocks come the pieces of the heads that come next, so that nobody waits for long.
constexpr int64_t kOwnHeadsEach = 4;

// Heads that come together are packed, worked on or about to be done: places for so many times as many.
constexpr int64_t kRounds = 3;

template <int N>
struct AmxForwardPlan {
  const AttentionForward& p;
  const ForwardPlan& plan;
  const int threads;
  const std::size_t scratch_bytes, head_bytes;
  const int64_t heads, blocks;  // key/value heads; blocks of queries that share one
  const bool shared;
  int64_t packs = 1;                // tasks that pack a head
  int64_t together = 1, slots = 0;  // heads whose blocks come together; places of packed heads
  int64_t run = 1;                  // not shared: blocks of a task

  AmxForwardPlan(const AttentionForward& problem, const ForwardPlan& forward, int thread_count)
      : p(problem),
        plan(forward),
        threads(thread_count),
        scratch_bytes(AmxForwardScratch<N>(p, nullptr).bytes),
        head_bytes(AmxHead<N>(p, nullptr).bytes),
        heads(p.B * p.Hk),
        blocks(heads > 0 ? plan.tasks / heads : 0),
        shared(int64_t(head_bytes) > N * kPackedHeadBytes || heads < kOwnHeadsEach * threads) {
    if (shared && heads > 0) {
      if (intervals_only_grow(p.mask)) packs = AmxHead<N>(p, nullptr).pieces;  // else each looks at all queries
      together = lists_together(heads, blocks, threads);
      slots = min64(heads, kRounds * together);
    } else if (plan.lists >= 16 * threads) {
      run = plan.blocks_per_list;  // lists enough to go round evenly: a thread takes whole ones, and packs heads alone
    }
  }

  // Shared: a task packs some pieces of a head's keys and values, or computes a block of queries.
  struct Task {
    bool packs;
    int64_t head, index;  // of the pieces or the block
    int64_t slot, round;  // where the head's packed keys and values lie; how many heads have had that place before
  };
  int64_t tasks() const { return shared ? heads * (packs + blocks) : plan.tasks / run; }
  Task task(int64_t n) const {
    if (n < together * packs) return at(true, n / packs, n % packs);
    n -= together * packs;
    // Of the heads first .. first + now the blocks, after the pieces of the `later` heads that come next: for the last
    // ones, none.
    const int64_t each = together * (packs + blocks), last_first = (heads - 1) / together * together;
    const int64_t last_begin = tasks() - together * packs - (heads - last_first) * blocks;
    const int64_t first = n < last_begin ? n / each * together : last_first;
    const int64_t now = min64(together, heads - first), later = min64(together, heads - first - now);
    n -= n < last_begin ? n / each * each : last_begin;
    if (n < later * packs) return at(true, first + now + n / packs, n % packs);
    n -= later * packs;
    return at(false, first + n % now, n / now);
  }

  // The block's number in the plan: of the query heads of a key/value head, too, the first blocks come first.
  int64_t block(const Task& task) const {
    const int64_t group = blocks / plan.blocks_per_list;
    return task.head * blocks + task.index % group * plan.blocks_per_list + task.index / group;
  }

  std::size_t bytes() const {
    return std::size_t(threads) * scratch_bytes + std::size_t(shared ? slots : threads) * head_bytes +
           std::size_t(turns()) * sizeof(Turn);
  }
  void* scratch(void* workspace, int thread) const {
    return static_cast<char*>(workspace) + std::size_t(thread) * scratch_bytes;
  }
  AmxHead<N> head(void* workspace, int64_t index) const {
    return AmxHead<N>(p, static_cast<char*>(scratch(workspace, threads)) + std::size_t(index) * head_bytes);
  }
  // Of a slot: pieces that are packed, and blocks that are done, of all heads that it has had.
  int64_t turns() const { return 2 * slots; }
  Turn* turn(void* workspace) const {
    return reinterpret_cast<Turn*>(static_cast<char*>(scratch(workspace, threads)) +
                                   std::size_t(shared ? slots : threads) * head_bytes);
  }

 private:
  Task at(bool piece, int64_t head, int64_t index) const { return {piece, head, index, head % slots, head / slots}; }
};

template <int N>
inline std::size_t workspace_on_tiles(const AttentionForward& p, const ForwardPlan& plan, int threads) {
  return AmxForwardPlan<N>(p, plan, threads).bytes();
}

MHA_ISA_END
