// How well the tasks of attention occupy many threads: their dealing, played through (simulate in threads/schedule.h)
// with the visible pairs of queries and keys as what they cost. Bands alone count, not what else a mask hides.
#pragma once

#include "../attention/bwd/space.h"
#include "../attention/fwd.h"
#include "../attention/mixed/bwd.h"
#include "../attention/mixed/fwd.h"

MHA_ISA_BEGIN

// Beyond so many passes over blocks nothing is predicted: it would take longer than a call is worth.
constexpr int64_t kMostSteps = int64_t(1) << 22;

inline int64_t visible_pairs(const AttentionProblem& p, int64_t first_query, int64_t rows, int64_t first_key,
                             int64_t last_key) {
  int64_t pairs = 0;
  for (int64_t i = first_query; i < min64(p.Sq, first_query + rows); ++i) {
    const Interval keys = row_interval(p.mask, 0, i, p.Sk);
    pairs += max64(0, min64(keys.end, last_key) - max64(keys.begin, first_key));
  }
  return pairs;
}

// Those of each block of queries and each chunk of keys; all heads have the same.
struct StepCosts {
  const int64_t blocks, chunks;
  Scratch<double> cost;  // [blocks][chunks]

  StepCosts(const AttentionProblem& p, int64_t rows, int64_t keys)
      : blocks(ceil_div(p.Sq, rows)), chunks(ceil_div(p.Sk, keys)), cost(blocks * chunks) {
    for (int64_t n = 0; n < blocks * chunks; ++n) {
      const int64_t key = n % chunks * keys;
      cost.get()[n] = double(visible_pairs(p, n / chunks * rows, rows, key, min64(p.Sk, key + keys)));
    }
  }
  double at(int64_t block, int64_t chunk) const { return cost.get()[block * chunks + chunk]; }
  double all() const {
    double sum = 0;
    for (int64_t n = 0; n < blocks * chunks; ++n) sum += cost.get()[n];
    return sum;
  }
};

inline double efficiency(double work, int threads, double end) { return end > 0 ? work / (threads * end) : 0; }

#ifdef MHA_HAS_AMX
// As run_on_tiles has them.
template <int N>
double tiles_efficiency(const AttentionForward& p, const ForwardPlan& plan, int threads) {
  const AmxForwardPlan<N> amx(p, plan, threads);
  double work = 0, end = 0;
  const int64_t heads = p.B * p.Hk, blocks = plan.tasks / heads;
  const int64_t run = !amx.shared && plan.lists >= 16 * threads ? plan.blocks_per_list : 1;
  for (int64_t first = 0; first < heads; first += amx.shared ? amx.heads_together : heads) {
    const int64_t count = amx.shared ? min64(amx.heads_together, heads - first) : heads;
    const Share share = amx.shared ? Share::dealt : Share::runs;
    end += simulate_tasks(threads, count * blocks / run, share, [&](int64_t task, double done) {
      for (int64_t n = first * blocks + task * run; n < first * blocks + (task + 1) * run; ++n) {
        const auto place = plan.place(n);
        const double own_cost = double(visible_pairs(p, place.first, place.rows, 0, p.Sk));
        work += own_cost, done += own_cost;
      }
      return done;
    });
  }
  return efficiency(work, threads, end);
}
#endif

template <class Unit>
double forward_efficiency(const AttentionForward& p, int threads) {
  const ForwardSpace<Unit> space(p);
  const ForwardPlan& plan = space.plan;
  if (plan.tasks == 0 || p.Sk == 0 || plan.tasks * plan.parts > kMostSteps) return 0;
  // Rows of several heads in a block: each sees what it would see in its own.
  const bool own = plan.heads_per_list == 1;
  auto cost = [&](int64_t block, int64_t first_key, int64_t last_key) {
    const auto place = plan.place(block);
    return double(own ? visible_pairs(p, place.first, place.rows, first_key, last_key)
                      : visible_pairs(p, 0, p.Sq, first_key, last_key) * place.rows / p.Sq);
  };
  double work = 0;
  if (plan.parts > 1) {
    const double end = simulate_tasks(threads, plan.tasks * plan.parts, Share::runs, [&](int64_t task, double start) {
      const int64_t first_key = task % plan.parts * plan.part_keys;
      const double own_cost = cost(task / plan.parts, first_key, min64(p.Sk, first_key + plan.part_keys));
      work += own_cost;
      return start + own_cost;
    });
    return efficiency(work, threads, end);
  }
#ifdef MHA_HAS_AMX
  if constexpr (kPairs<Unit>) {
    if (on_tiles(p, plan)) return tiles_efficiency<kPlanes<Unit>>(p, plan, threads);
  }
#endif
  const Scratch<double> costs(plan.blocks_per_list);  // of the blocks of a list
  for (int64_t n = 0; n < plan.blocks_per_list; ++n) costs.get()[n] = cost(n, 0, p.Sk);
  const ForwardTasks tasks(plan, space.scratch, threads);
  const double end = simulate_tasks(threads, tasks.count, tasks.share, [&](int64_t task, double start) {
    double own_cost = 0;
    for (int64_t n = tasks.first(task); n < tasks.last(task); ++n) own_cost += costs.get()[n % plan.blocks_per_list];
    work += own_cost;
    return start + own_cost;
  });
  return efficiency(work, threads, end);
}

inline double forward_efficiency(const AttentionForward& p, int threads) {
  return with_forward_unit(p, [&]<class Unit, int>() { return forward_efficiency<Unit>(p, threads); });
}

// Waiting for turns is part of it: for the place of the head before, and for each block's turn.
inline double backward_efficiency(const AttentionBackward& p, int threads) {
  const BackwardPlan plan(p, threads);
  const int64_t heads = p.B * p.H;
  if (heads == 0 || p.Sq == 0 || p.Sk == 0 || ceil_div(p.Sq, kMaxRows) * plan.chunks > kMostSteps) return 0;
  const StepCosts costs(p, kMaxRows, plan.chunk_keys);
  const double work = costs.all() * double(heads);
  if (!plan.by_turns) {
    const Scratch<double> chunks(plan.chunks);
    double* const chunk = chunks.get();
    std::fill_n(chunk, plan.chunks, 0.0);
    for (int64_t n = 0; n < costs.blocks * plan.chunks; ++n) chunk[n % plan.chunks] += costs.cost.get()[n];
    return efficiency(work, threads, simulate_tasks(threads, plan.units(), plan.share(), [&](int64_t n, double end) {
                        const BackwardUnit unit = plan.unit(n);
                        for (int64_t i = unit.first_shared; i < unit.last_shared; ++i) {
                          const BackwardTask t = plan.task(unit.owned, i);
                          end += chunk[t.chunk] * double(t.last_head - t.first_head);
                        }
                        return end;
                      }));
  }
  if (heads * costs.blocks * plan.chunks > kMostSteps) return 0;
  const Scratch<double> times(plan.slots * costs.blocks + plan.key_slots * plan.chunks);
  double *const turns = times.get(), *const keys = turns + plan.slots * costs.blocks;  // when one was last passed on
  std::fill_n(turns, plan.slots * costs.blocks + plan.key_slots * plan.chunks, 0.0);
  const double end = simulate_tasks(threads, plan.units(), plan.share(), [&](int64_t unit, double now) {
    const BackwardTask t = plan.task(plan.unit(unit).owned, 0);
    for (int64_t n = costs.blocks; n-- > 0;) {
      const BackwardPasses passes(p.mask, 0, n * kMaxRows, min64(kMaxRows, p.Sq - n * kMaxRows), p.Sk, plan.pass_keys);
      if (t.chunk < passes.first || t.chunk >= passes.last) continue;
      double& turn = turns[t.slot * costs.blocks + n];
      now = turn = std::max(now, turn) + costs.at(n, t.chunk);
    }
    if (plan.key_slots > 0) {
      const int64_t pair = t.b * p.Hk + t.hk;
      double& turn = keys[pair % plan.key_slots * plan.chunks + t.chunk];
      now = turn = std::max(now, turn);
    }
    return now;
  });
  return efficiency(work, threads, end);
}

// Talking heads: a task is a block of queries with all heads; backward, of every so many blocks one.
inline double mixed_forward_efficiency(const AttentionProblem& p, int threads) {
  const StepCosts costs(p, kMaxRows, max64(1, p.Sk));
  if (costs.chunks != 1 || costs.blocks == 0) return 0;
  const double end = simulate_tasks(threads, mixed_forward_tasks(p), Share::runs, [&](int64_t task, double start) {
    return start + costs.at(costs.blocks - 1 - task % costs.blocks, 0);
  });
  return efficiency(costs.all() * double(p.B), threads, end);
}

inline double mixed_backward_efficiency(const AttentionBackward& p, int threads) {
  const MixedBackwardPlan plan(p);
  const StepCosts costs(p, kMaxRows, max64(1, p.Sk));
  if (costs.chunks != 1 || costs.blocks == 0) return 0;
  const double end = simulate_tasks(threads, plan.runs, Share::runs, [&](int64_t run, double done) {
    for (int64_t task = plan.tasks * run / plan.runs; task < plan.tasks * (run + 1) / plan.runs; ++task) {
      for (int64_t n = task % plan.chunks; n < plan.blocks; n += plan.chunks) done += costs.at(n, 0);
    }
    return done;
  });
  return efficiency(costs.all() * double(p.B), threads, end);
}

MHA_ISA_END
