// Attention forward on tiles: who runs which task. A thread packs the heads that it works on by itself, or tasks that
// pack go before those that wait for them (fwd_plan.h); what a task does with a block of queries is in fwd_block.h.
#pragma once

#include "fwd_block.h"
#include "fwd_plan.h"

MHA_ISA_BEGIN

template <int N>
inline void run_on_tiles(const AttentionForward& p, const ForwardPlan& plan, const Threads& threads, void* workspace) {
  const AmxForwardPlan<N> amx(p, plan, threads.count);
  auto run_block = [&](AmxForwardBlock<N>& block, int64_t n, int64_t next_head) {
    block.run(plan.place(n), plan.place(std::min(n + 1, plan.tasks - 1)), next_head);
  };
  if (!amx.shared) {
    auto run_blocks = [&](int64_t task, int thread) {
      AmxForwardBlock<N> block(p, amx.scratch(workspace, thread), amx.head(workspace, thread));
      for (int64_t n = task * amx.run; n < (task + 1) * amx.run; ++n) {
        const int64_t head = n / amx.blocks;
        block.pack_head(head);
        run_block(block, n, head + 1);
      }
    };
    for_each_task(threads, amx.tasks(), run_blocks, Share::runs,
                  [&](int thread) { *amx.head(workspace, thread).held = -1; });
    return;
  }
  Turn* const turns = amx.turn(workspace);
  begin_turns(threads, turns, amx.turns());
  std::atomic<bool> stopped(false);
  for_each_task_by_turns(threads, amx.tasks(), stopped, [&](int64_t n, int thread) {
    const auto task = amx.task(n);
    Turn &packed = turns[2 * task.slot], &done = turns[2 * task.slot + 1];
    if (task.packs)
      wait_for(done, task.round * amx.blocks, stopped);
    else
      wait_for(packed, (task.round + 1) * amx.packs, stopped);
    const AmxHead<N> head = amx.head(workspace, task.slot);
    AmxForwardBlock<N> block(p, amx.scratch(workspace, thread), head);
    if (task.packs)
      block.pack_pieces(task.head, head.pieces * task.index / amx.packs, head.pieces * (task.index + 1) / amx.packs);
    else
      run_block(block, amx.block(task), task.head + amx.together);
    count_on(task.packs ? packed : done);
  });
}

MHA_ISA_END
