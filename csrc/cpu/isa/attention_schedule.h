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
// What packing a key and its value costs, in visible pairs: by the instructions of both, as many for D64 as for D128.
constexpr double kPackedKey = 32;

// As run_on_tiles has them. Packing is work if it is done once for each head; what is done again by other threads is
// not.
template <int N>
double tiles_efficiency(const AttentionForward& p, const ForwardPlan& plan, int threads) {
  const AmxForwardPlan<N> amx(p, plan, threads);
  const Interval seen = keys_of_rows(p.mask, 0, 0, p.Sq, p.Sk);
  const double pack = kPackedKey * double(max64(0, seen.end - seen.begin));
  const Scratch<double> costs(plan.blocks_per_list);
  double work = double(amx.heads) * pack;
  for (int64_t n = 0; n < plan.blocks_per_list; ++n) {
    const auto place = plan.place(n);
    costs.get()[n] = double(visible_pairs(p, place.first, place.rows, 0, p.Sk));
    work += double(plan.lists) * costs.get()[n];
  }
  auto cost = [&](int64_t block) { return costs.get()[block % plan.blocks_per_list]; };
  if (!amx.shared) {
    const Scratch<int64_t> held(threads);
    std::fill_n(held.get(), threads, int64_t(-1));
    return efficiency(work, threads,
                      simulate_tasks(threads, amx.tasks(), Share::runs, [&](int64_t task, int thread, double now) {
                        for (int64_t n = task * amx.run; n < (task + 1) * amx.run; ++n) {
                          if (held.get()[thread] != n / amx.blocks) now += pack;
                          held.get()[thread] = n / amx.blocks;
                          now += cost(n);
                        }
                        return now;
                      }));
  }
  const Scratch<double> times(2 * amx.heads);  // when a head is packed, and when its blocks are done
  double *const packed = times.get(), *const done = packed + amx.heads;
  std::fill_n(packed, 2 * amx.heads, 0.0);
  return efficiency(work, threads,
                    simulate_tasks(threads, amx.tasks(), Share::in_order, [&](int64_t n, int, double now) {
                      const auto task = amx.task(n);
                      if (task.packs) {
                        if (task.round > 0) now = std::max(now, done[task.head - amx.slots]);
                        now += pack / double(amx.packs);
                        packed[task.head] = std::max(packed[task.head], now);
                      } else {
                        now = std::max(now, packed[task.head]) + cost(amx.block(task));
                        done[task.head] = std::max(done[task.head], now);
                      }
                      return now;
                    }));
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
    const double end =
        simulate_tasks(threads, plan.tasks * plan.parts, Share::runs, [&](int64_t task, int, double start) {
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
  const double end = simulate_tasks(threads, tasks.count, tasks.share, [&](int64_t task, int, double start) {
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

// Tasks by turns. Waiting is part of it: for the place of the head before, until the first pass is there, for dQ's turn
// at each block, and for the heads of a group before.
template <class Worker>
double turns_end(const AttentionBackward& p, const BackwardPlan& plan, const StepCosts& costs, int threads) {
  const int64_t blocks = costs.blocks, places = plan.slots * blocks, key_places = plan.key_slots * plan.chunks;
  const int64_t visits = plan.bias_turns ? Worker::visits(plan.pass_keys) : 1;
  const int64_t bias_places = plan.bias_turns ? plan.bias_owners(p) * plan.chunks * visits * blocks : 0;
  const Scratch<double> times(3 * places + key_places + bias_places);
  // When the first pass of the head has come to a block; when dQ was passed on; when all passes had left.
  double *const packed = times.get(), *const turns = packed + places, *const done = turns + places;
  double* const keys = done + places;  // when sums of dK and dV were passed on
  double* const bias = keys + key_places;
  std::fill_n(packed, 3 * places + key_places + bias_places, 0.0);
  const Scratch<BackwardPasses> all_passes(blocks);
  BackwardPasses* const passes = all_passes.get();
  for (int64_t n = 0; n < blocks; ++n)
    passes[n] = BackwardPasses(p.mask, 0, n * kMaxRows, min64(kMaxRows, p.Sq - n * kMaxRows), p.Sk, plan.pass_keys);
  const DqTurn turn = Worker::dq_turn(double(plan.pass_keys) / kMaxKeys);
  return simulate_tasks(threads, plan.units(), plan.share(), [&](int64_t unit, int, double now) {
    const BackwardTask t = plan.task(plan.unit(unit).owned, 0);
    const int64_t at = t.slot * blocks;
    for (int64_t span = ceil_div(blocks, Worker::kBlocksAtOnce); span-- > 0;) {
      const int64_t first = span * Worker::kBlocksAtOnce, last = min64(blocks, first + Worker::kBlocksAtOnce);
      auto for_each_block = [&](auto f) {
        for (int64_t n = last; n-- > first;) {
          if (t.chunk >= passes[n].first && t.chunk < passes[n].last) f(n, costs.at(n, t.chunk));
        }
      };
      for_each_block([&](int64_t n, double) {
        const bool packs = t.chunk == passes[n].first;
        now = std::max(now, packs ? done[at + n] : packed[at + n]);
        if (packs) packed[at + n] = now;
      });
      for (int64_t visit = 0; visit < visits; ++visit) {
        const int64_t owned = plan.bias_owner(p, t.b, t.first_head) * plan.chunks + t.chunk;
        for_each_block([&](int64_t n, double all_visits) {
          const double cost = all_visits / double(visits);
          now += turn.before * cost;
          if (bias_places == 0) return;  // a tile is passed on as soon as it is added
          double& added = bias[(owned * visits + visit) * blocks + n];
          now = added = std::max(now, added) + 0.1 * cost;
        });
      }
      double after = 0;
      for_each_block([&](int64_t n, double cost) {
        now = turns[at + n] = std::max(now, turns[at + n]) + turn.held * cost;
        after += (1 - turn.before - turn.held) * cost;
      });
      now += after;
      for_each_block([&](int64_t n, double) { done[at + n] = std::max(done[at + n], now); });
    }
    if (plan.key_slots > 0) {
      double& key = keys[(t.b * p.Hk + t.hk) % plan.key_slots * plan.chunks + t.chunk];
      now = key = std::max(now, key);
    }
    return now;
  });
}

template <class Worker>
double backward_efficiency(const AttentionBackward& p, int threads) {
  const BackwardPlan plan(p, threads, Worker::kBiasTile);
  const int64_t heads = p.B * p.H;
  if (heads == 0 || p.Sq == 0 || p.Sk == 0 || ceil_div(p.Sq, kMaxRows) * plan.chunks > kMostSteps) return 0;
  const StepCosts costs(p, kMaxRows, plan.chunk_keys);
  const double work = costs.all() * double(heads);
  if (!plan.by_turns) {
    const Scratch<double> chunks(plan.chunks);
    double* const chunk = chunks.get();
    std::fill_n(chunk, plan.chunks, 0.0);
    for (int64_t n = 0; n < costs.blocks * plan.chunks; ++n) chunk[n % plan.chunks] += costs.cost.get()[n];
    const double end = simulate_tasks(threads, plan.units(), plan.share(), [&](int64_t n, int, double now) {
      const BackwardUnit unit = plan.unit(n);
      for (int64_t i = unit.first_shared; i < unit.last_shared; ++i) {
        const BackwardTask t = plan.task(unit.owned, i);
        now += chunk[t.chunk] * double(t.last_head - t.first_head);
      }
      return now;
    });
    return efficiency(work, threads, end);
  }
  if (heads * costs.blocks * plan.chunks > kMostSteps) return 0;
  return efficiency(work, threads, turns_end<Worker>(p, plan, costs, threads));
}

// f.operator()<Worker>() of the one that does the tasks.
template <class F>
auto with_backward_worker(const AttentionBackward& p, F f) {
  decltype(f.template operator()<BackwardWorker<float, 5>>()) result {};
  with_backward_unit(p, [&]<class Unit, int Degree>() {
    with_worker<Unit, Degree>(p, [&]<class Worker, class>() { result = f.template operator()<Worker>(); });
  });
  return result;
}

inline double backward_efficiency(const AttentionBackward& p, int threads) {
  return with_backward_worker(p, [&]<class Worker>() { return backward_efficiency<Worker>(p, threads); });
}

inline int64_t backward_tasks(const AttentionBackward& p, int threads) {
  return with_backward_worker(p, [&]<class Worker>() { return BackwardPlan(p, threads, Worker::kBiasTile).units(); });
}

// Talking heads: a task is a block of queries with all heads.
inline double mixed_forward_efficiency(const AttentionProblem& p, int threads) {
  const StepCosts costs(p, kMaxRows, max64(1, p.Sk));
  if (costs.chunks != 1 || costs.blocks == 0) return 0;
  const double end = simulate_tasks(
      threads, mixed_forward_tasks(p), Share::in_order,
      [&](int64_t task, int, double start) { return start + costs.at(costs.blocks - 1 - task / p.B, 0); });
  return efficiency(costs.all() * double(p.B), threads, end);
}

// Backward: first a visit for delta, 0.4 of the products, then one for the gradients, in which dV and dK, 0.1 each,
// wait for the block before.
inline double mixed_backward_efficiency(const AttentionBackward& p, int threads) {
  const MixedBackwardPlan plan(p);
  const StepCosts costs(p, kMaxRows, kMixKeys);
  if (costs.chunks == 0 || plan.tasks * costs.chunks > kMostSteps) return 0;
  const Scratch<double> times(2 * p.B * costs.chunks);
  double *const dv = times.get(), *const dk = dv + p.B * costs.chunks;  // when a turn was last passed on
  std::fill_n(dv, 2 * p.B * costs.chunks, 0.0);
  const double end = simulate_tasks(threads, plan.tasks, Share::in_order, [&](int64_t task, int, double now) {
    const int64_t block = plan.blocks - 1 - task / p.B, at = task % p.B * costs.chunks;
    auto for_each_tile = [&](auto f) {
      for (int64_t n = 0; n < costs.chunks; ++n) {
        if (costs.at(block, n) > 0) f(n, costs.at(block, n));
      }
    };
    for_each_tile([&](int64_t, double cost) { now += 0.4 * cost; });
    for_each_tile([&](int64_t n, double cost) {
      now += 0.1 * cost;
      now = dv[at + n] = std::max(now, dv[at + n]) + 0.1 * cost;
      now += 0.3 * cost;
      now = dk[at + n] = std::max(now, dk[at + n]) + 0.1 * cost;
    });
    return now;
  });
  return efficiency(costs.all() * double(p.B), threads, end);
}

MHA_ISA_END
