// Attention forward: the blocks of queries (attention_fwd_block.h), shared out among threads. Where queries are few,
// the keys of a block are split, too: each part keeps its own maximum, sum and output, and they are merged in the order
// of the keys. What is split depends on shapes alone, so results don't depend on the threads.
#pragma once

#include "attention_fwd_block.h"
#include "sequence.h"

MHA_ISA_BEGIN

// Blocks whose keys are cut into parts: first all parts of all blocks, then block after block is put together.
template <class Unit, int Degree>
inline void run_parts(const ForwardSpace<Unit>& space, const Threads& threads, void* workspace) {
  const AttentionForward& p = space.p;
  const ForwardPlan& plan = space.plan;
  for_each_task(threads, plan.tasks * plan.parts, [&](int64_t task, int thread) {
    ForwardBlock<Unit, Degree> block(p, plan, space.of_thread(workspace, thread));
    const auto sums = space.of_part(workspace, threads.count, task);
    const int64_t first_key = task % plan.parts * plan.part_keys, last_key = min64(p.Sk, first_key + plan.part_keys);
    block.s.use(sums);
    *sums.any =
        block.set_block(plan.place(task / plan.parts), first_key, last_key) && block.visit_keys(first_key, last_key);
  });
  for_each_task(threads, plan.tasks, [&](int64_t n, int thread) {
    ForwardBlock<Unit, Degree> block(p, plan, space.of_thread(workspace, thread));
    block.set_block(plan.place(n), 0, p.Sk);
    block.load_rows();
    bool any = false;
    for (int64_t part = 0; part < plan.parts; ++part) {
      const auto sums = space.of_part(workspace, threads.count, n * plan.parts + part);
      if (*sums.any) block.add(sums, !any);
      any |= *sums.any != 0;
    }
    block.finish(any);
  });
}

template <class Unit, int Degree>
inline void run_forward(const AttentionForward& p, const Threads& threads, void* workspace) {
  const ForwardSpace<Unit> space(p);
  const ForwardPlan& plan = space.plan;
  const ForwardScratch<Unit>& sizes = space.scratch;
  if (plan.parts > 1) return run_parts<Unit, Degree>(space, threads, workspace);
  for (int thread = 0; thread < threads.count; ++thread) {
    ForwardScratch<Unit>(p, plan, space.of_thread(workspace, thread)).packed->head = -1;
  }
  // Where there are lists enough to go round evenly, a thread takes whole ones, so that it alone packs their heads.
  // Where there are fewer than threads, these share lists, whose blocks a causal mask makes unequal.
  const int64_t run = sizes.whole_head && plan.lists >= 16 * threads.count ? plan.blocks_per_list : 1;
  const Share share = plan.lists < threads.count ? Share::dealt : Share::runs;
  auto visit_blocks = [&](int64_t task, int thread) {
    ForwardBlock<Unit, Degree> block(p, plan, space.of_thread(workspace, thread));
    for (int64_t n = task * run; n < (task + 1) * run; ++n) {
      block.set_block(plan.place(n), 0, p.Sk);
      if (plan.heads_per_list == 1) block.look_ahead(plan.place(std::min(n + 1, plan.tasks - 1)));
      block.finish(block.visit_keys(0, p.Sk));
    }
  };
  for_each_task(threads, plan.tasks / run, visit_blocks, share);
}

// Calls f.operator()<Unit, Degree>(). Half types compute in float; their results are rounded so coarsely that a shorter
// polynomial does.
template <class F>
auto with_forward_unit(const AttentionForward& p, F f) {
  if (p.dtype == DType::f64) return f.template operator()<double, 5>();
  if (p.dtype == DType::f32) return f.template operator()<float, 5>();
#ifdef MHA_HAS_BF16_DOT
  if (p.dtype == DType::bf16) return f.template operator()<Pair, 4>();
#endif
#ifdef MHA_HAS_AMX
  if (ForwardPlan(p).rows_per_list > kFewRows) return f.template operator()<Pairs<2>, 4>();
#endif
  return f.template operator()<float, 4>();
}

inline void attention_fwd(const AttentionForward& p, const Threads& threads, void* workspace) {
  for_each_sequence(p, [&](const AttentionForward& s) {
    with_forward_unit(s, [&]<class Unit, int Degree>() { run_forward<Unit, Degree>(s, threads, workspace); });
  });
}

inline std::size_t sequence_fwd_workspace(const AttentionForward& p, int threads) {
  return with_forward_unit(p, [&]<class Unit, int>() { return ForwardSpace<Unit>(p).bytes(threads); });
}

inline std::size_t attention_fwd_workspace(const AttentionForward& p, int threads) {
  std::size_t bytes = 0;
  for_each_sequence(p, [&](const AttentionForward& s) { bytes = std::max(bytes, sequence_fwd_workspace(s, threads)); });
  return bytes;
}

MHA_ISA_END
