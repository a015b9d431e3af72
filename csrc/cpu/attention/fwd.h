// Attention forward: the blocks of queries (attention/fwd/block.h; few rows: attention/fwd/few.h), shared out among
// threads. Where queries are few, the keys of a block are split, too: each part keeps its own maximum, sum and output,
// and they are merged in the order of the keys. What is split depends on shapes alone, so results don't depend on the
// threads.
//
// This room includes threads, product, tile, attention/fwd, attention/bwd, attention/amx.
#pragma once

#include "../tile/sequence.h"
#include "fwd/block.h"
#include "fwd/few.h"
#ifdef MHA_HAS_AMX
#include "amx/few.h"
#include "amx/fwd.h"
#endif

MHA_ISA_BEGIN

// Calls f.operator()<Block>() with what computes a block, by its type and its rows alone. With AMX, few rows by
// themselves are floats, or bf16 on tiles; few of pairs are the last of many, and go with them.
template <class Unit, int Degree, class F>
void with_block([[maybe_unused]] const ForwardSpace<Unit>& space, const ForwardPlan::Place& at, F f) {
#ifdef MHA_HAS_AMX
  if constexpr (std::is_same_v<Unit, float> && Degree == 4) {
    if (few_on_tiles(space.p, space.plan)) return f.template operator()<FewRowsOnTiles<Degree>>();
  }
#endif
  if constexpr (!kAmxUnit<Unit>) {
    if (at.rows <= kFewRows) return f.template operator()<FewRowsBlock<Unit, Degree>>();
  }
  f.template operator()<ForwardBlock<Unit, Degree>>();
}

// Blocks whose keys are cut into parts: first all parts of all blocks, then block after block is put together.
template <class Unit, int Degree>
inline void run_parts(const ForwardSpace<Unit>& space, const Threads& threads, void* workspace) {
  const AttentionForward& p = space.p;
  const ForwardPlan& plan = space.plan;
  for_each_task(threads, plan.tasks * plan.parts, [&](int64_t task, int thread) {
    const ForwardPlan::Place at = plan.place(task / plan.parts);
    const int64_t first_key = task % plan.parts * plan.part_keys, last_key = min64(p.Sk, first_key + plan.part_keys);
    const auto sums = space.of_part(workspace, threads.count, task);
    with_block<Unit, Degree>(space, at, [&]<class Block>() {
      Block block(p, plan, space.of_thread(workspace, thread));
      block.s.use(sums);
      *sums.any = block.set_block(at, first_key, last_key) && block.visit_keys(first_key, last_key);
    });
  });
  for_each_task(threads, plan.tasks, [&](int64_t n, int thread) {
    const ForwardPlan::Place at = plan.place(n);
    with_block<Unit, Degree>(space, at, [&]<class Block>() {
      Block block(p, plan, space.of_thread(workspace, thread));
      block.set_block(at, 0, p.Sk);
      block.load_rows();
      bool any = false;
      for (int64_t part = 0; part < plan.parts; ++part) {
        const auto sums = space.of_part(workspace, threads.count, n * plan.parts + part);
        if (*sums.any) block.add(sums, !any);
        any |= *sums.any != 0;
      }
      block.finish(any);
    });
  });
}

template <class Unit, int Degree>
inline void run_block(const ForwardSpace<Unit>& space, void* workspace, int thread, int64_t n) {
  const ForwardPlan& plan = space.plan;
  const ForwardPlan::Place at = plan.place(n);
  with_block<Unit, Degree>(space, at, [&]<class Block>() {
    Block block(space.p, plan, space.of_thread(workspace, thread));
    block.set_block(at, 0, space.p.Sk);
    if (plan.heads_per_list == 1) block.look_ahead(plan.place(std::min(n + 1, plan.tasks - 1)));
    block.finish(block.visit_keys(0, space.p.Sk));
  });
}

// Blocks first .. first + count of a list, none of few rows, tile by tile. Each block visits the tiles that it would
// visit alone, in the same order. Where their tiles begin at different keys, as in a window, one block comes after the
// other.
template <class Unit, int Degree>
inline void run_group(const ForwardSpace<Unit>& space, void* workspace, int thread, int64_t first, int count) {
  using Block = ForwardBlock<Unit, Degree>;
  const AttentionForward& p = space.p;
  alignas(Block) unsigned char memory[kGroup][sizeof(Block)];
  Block* block[kGroup];
  int64_t begin = p.Sk, end = 0;
  bool any[kGroup] = {}, together = true;
  for (int i = 0; i < count; ++i) {
    block[i] = new (memory[i]) Block(p, space.plan, space.of_thread(workspace, thread, i));
    Block& b = *block[i];
    if (i > 0) b.s.share(block[0]->s);
    if (!b.set_block(space.plan.place(first + i), 0, p.Sk)) continue;
    together &= end == 0 || b.s.block->any_begin == begin;
    begin = min64(begin, b.s.block->any_begin), end = max64(end, b.s.block->any_end);
  }
  for (int i = 0; i < count; ++i) {
    if (together)
      block[i]->load_rows();
    else
      block[i]->finish(block[i]->visit_keys(0, p.Sk));
  }
  if (!together) return;
  for (int64_t j = begin; j < end; j += kMaxKeys) {
    const int keys = int(min64(kMaxKeys, end - j));
    const bool packed = block[0]->pack_tile(j, keys);
    for (int i = 0; i < count; ++i) {
      Block& b = *block[i];
      const int64_t own_end = b.s.block->any_end;
      if (j >= own_end || b.s.block->any_begin >= own_end) continue;
      b.tile_packed = packed;
      any[i] = b.visit(j, int(min64(kMaxKeys, own_end - j)), !any[i]) || any[i];
    }
  }
  for (int i = 0; i < count; ++i) {
    block[i]->tile_packed = false;
    block[i]->in_group = space.plan.heads_per_list == 1;
    block[i]->finish(any[i]);
  }
}

template <class Unit, int Degree>
inline void run_forward(const AttentionForward& p, const Threads& threads, void* workspace) {
  const ForwardSpace<Unit> space(p);
  const ForwardPlan& plan = space.plan;
#ifdef MHA_HAS_AMX
  if constexpr (kPairs<Unit>) {
    if (on_tiles(p, plan)) return run_on_tiles<kPlanes<Unit>>(p, plan, threads, workspace);
  }
#endif
  if (plan.parts > 1) return run_parts<Unit, Degree>(space, threads, workspace);
  const ForwardTasks tasks(plan, space.scratch, threads.count);
  auto visit_blocks = [&](int64_t task, int thread) {
    int64_t first = tasks.first(task);
    const int64_t last = tasks.last(task);
    if constexpr (!kPairs<Unit>) {
      if (tasks.grouped) {
        if (plan.place(first).rows <= kFewRows) run_block<Unit, Degree>(space, workspace, thread, first++);
        return run_group<Unit, Degree>(space, workspace, thread, first, int(last - first));
      }
    }
    for (; first < last; ++first) run_block<Unit, Degree>(space, workspace, thread, first);
  };
  auto hold_nothing = [&](int thread) {
    ForwardScratch<Unit>(p, plan, space.of_thread(workspace, thread)).packed->head = -1;
  };
  for_each_task(threads, tasks.count, visit_blocks, tasks.share, hold_nothing);
}

// Calls f.operator()<Unit, Degree>(). Half types compute in float; their results are rounded so coarsely that a shorter
// polynomial does. So do few rows: what is widened on the way is not copied. (And where there is AMX, those of bf16 are
// multiplied on tiles.)
template <class F>
auto with_forward_unit(const AttentionForward& p, F f) {
  if (p.dtype == DType::f64) return f.template operator()<double, 5>();
  if (p.dtype == DType::f32) return f.template operator()<float, 5>();
  [[maybe_unused]] const bool few = ForwardPlan(p).rows_per_list <= kFewRows;
#ifdef MHA_HAS_BF16_DOT
  if (p.dtype == DType::bf16 && !(few && (kAmxUnit<Pair> || p.store.quantised)))
    return f.template operator()<Pair, 4>();
#endif
#ifdef MHA_HAS_AMX
  if (!few) return f.template operator()<Pairs<2>, 4>();
#endif
  return f.template operator()<float, 4>();
}

inline void attention_fwd(const AttentionForward& p, const Threads& threads, void* workspace) {
  for_each_sequence(p, [&](const AttentionForward& s) {
    with_forward_unit(s, [&]<class Unit, int Degree>() { run_forward<Unit, Degree>(s, threads, workspace); });
  });
}

inline std::size_t sequence_fwd_workspace(const AttentionForward& p, int threads) {
  return with_forward_unit(p, [&]<class Unit, int>() {
#ifdef MHA_HAS_AMX
    if constexpr (kPairs<Unit>) {
      const ForwardPlan plan(p);
      if (on_tiles(p, plan)) return workspace_on_tiles<kPlanes<Unit>>(p, plan, threads);
    }
#endif
    return ForwardSpace<Unit>(p).bytes(threads);
  });
}

inline std::size_t attention_fwd_workspace(const AttentionForward& p, int threads) {
  std::size_t bytes = 0;
  for_each_sequence(p, [&](const AttentionForward& s) { bytes = std::max(bytes, sequence_fwd_workspace(s, threads)); });
  return bytes;
}

MHA_ISA_END
