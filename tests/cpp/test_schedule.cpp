// The dealing of tasks to threads, turns, and what the simulation of many threads says of attention's tasks.
#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <thread>

#include "../../csrc/cpu/threads/schedule.h"
#include "harness.h"

namespace {

using harness::check;
using namespace mha::cpu;

void test_every_task_once() {
  for (Share share : {Share::runs, Share::dealt, Share::in_order}) {
    for (int threads : {1, 2, 3, 64, 100}) {
      for (int64_t tasks : {0, 1, 2, 5, 64, 1000}) {
        Deal deal(threads, tasks, share);
        std::vector<int> taken(size_t(tasks), 0), at(size_t(threads), 0);
        int64_t last = -1;
        bool ordered = true;
        for (int turn = 0, idle = 0; idle < threads; ++turn) {
          const int64_t task = deal.take(turn % threads, at[size_t(turn % threads)]);
          idle = task < 0 ? idle + 1 : 0;
          if (task < 0) continue;
          ++taken[size_t(task)];
          ordered &= task > last;
          last = task;
        }
        bool once = true;
        for (int n : taken) once &= n == 1;
        check(once, "each of " + std::to_string(tasks) + " tasks is taken once");
        if (share == Share::in_order) check(ordered, "tasks that may wait are taken in order");
      }
    }
  }
}

double simulated(int threads, const std::vector<double>& costs, Share share) {
  auto finish = [](void* context, int64_t task, int, double start) {
    return start + (*static_cast<const std::vector<double>*>(context))[size_t(task)];
  };
  return simulate(threads, int64_t(costs.size()), share, finish, const_cast<std::vector<double>*>(&costs));
}

void test_simulation() {
  check(simulated(1, {1, 2, 3}, Share::runs) == 6, "one thread does all");
  check(simulated(2, {1, 1, 1}, Share::in_order) == 2, "three equal tasks take two threads two times");
  check(simulated(2, {3, 1, 1, 1}, Share::in_order) == 3, "the long one first");
  check(simulated(2, {1, 1, 1, 3}, Share::in_order) == 4, "the long one last");
  check(simulated(2, {1, 1, 4, 4}, Share::runs) == 6, "runs: one is done early and helps");
  check(simulated(2, {1, 1, 4, 4}, Share::dealt) == 5, "dealt in turn");
  check(simulated(8, {}, Share::runs) == 0, "nothing takes no time");
}

// Tasks of which each adds to a sum after the one before. `live` threads do the work of `asked`, one body after the
// other, as a pool does that has fewer threads than it was asked for.
struct Chain {
  static constexpr int64_t kTasks = 300;
  Deal deal;
  Turn turn;
  std::atomic<bool> stopped{false};
  std::vector<int64_t> order;
  int64_t throws_at;
  std::atomic<int> left_off{0};

  Chain(int asked, int64_t throws) : deal(asked, kTasks, Share::in_order), throws_at(throws) {}

  void body(int thread) {
    int at = 0;
    for (int64_t task; (task = deal.take(thread, at)) >= 0;) try {
        if (task == throws_at) throw std::runtime_error("task");
        wait_for(turn, task, stopped);
        order.push_back(task);  // the turn is the lock
        pass_on(turn, task + 1);
      } catch (const Stopped&) {
        ++left_off;
      } catch (const std::runtime_error&) {
        stopped = true;
      }
  }
  void run(int asked, int live) {
    std::vector<std::thread> threads;
    for (int first = 0; first < live; ++first)
      threads.emplace_back([=, this] {
        for (int thread = first; thread < asked; thread += live) body(thread);
      });
    for (std::thread& t : threads) t.join();
  }
};

void test_turns() {
  for (auto [asked, live] : {std::pair(1, 1), {2, 2}, {8, 8}, {64, 64}, {64, 1}, {64, 3}, {200, 2}}) {
    Chain chain(asked, -1);
    chain.run(asked, live);
    bool ordered = chain.order.size() == Chain::kTasks;
    for (size_t n = 0; n < chain.order.size(); ++n) ordered &= chain.order[n] == int64_t(n);
    check(ordered, std::to_string(live) + " threads that do the work of " + std::to_string(asked) + " go by turns");
    Chain failing(asked, 40);
    failing.run(asked, live);
    // It throws before its turn: of those before it, too, some may still be waiting.
    const int64_t done = int64_t(failing.order.size());
    check(done <= 40 && done + failing.left_off == Chain::kTasks - 1, "nobody waits for a task that threw");
  }
}

struct Shape {
  int64_t B, H, Hk, S, D;
  bool causal;
};

// Four shapes of the benchmark, and one of few heads.
constexpr Shape kShapes[] = {{8, 12, 12, 512, 64, false},
                             {4, 12, 12, 1024, 64, true},
                             {1, 32, 8, 2048, 128, true},
                             {1, 8, 8, 8192, 64, true},
                             {1, 8, 8, 4096, 128, true}};

mha::AttentionProblem problem_of(const Shape& s, mha::DType dtype) {
  mha::AttentionProblem p;
  p.dtype = dtype, p.B = s.B, p.H = s.H, p.Hk = s.Hk, p.Sq = p.Sk = s.S, p.D = p.Dv = s.D;
  if (s.causal) p.mask.band_hi = 0;
  return p;
}

AttentionPlan plan_of(const Kernels& kernels, const Shape& s, mha::DType dtype, int threads) {
  return kernels.attention_plan(problem_of(s, dtype), threads);
}

void test_efficiency() {
  for (const Kernels* kernels : every_isa()) {
    for (mha::DType dtype : {mha::DType::f32, mha::DType::bf16}) {
      for (const Shape& s : kShapes) {
        char name[100];
        std::snprintf(name, sizeof name, "%s %s B%d H%d/%d S%d D%d", kernels->isa, harness::name_of(dtype), int(s.B),
                      int(s.H), int(s.Hk), int(s.S), int(s.D));
        for (int threads : {1, 2, 64, 128, 256}) {
          const AttentionPlan plan = plan_of(*kernels, s, dtype, threads);
          const double least = threads <= 64 ? 0.9 : 0.8;
          const std::string on = std::string(name) + " on " + std::to_string(threads) + " threads";
          check(plan.fwd_efficiency >= (threads <= 128 ? 0.9 : 0.8) && plan.fwd_efficiency <= 1 + 1e-9,
                on + ": forward " + std::to_string(plan.fwd_efficiency));
          check(plan.bwd_efficiency >= least && plan.bwd_efficiency <= 1 + 1e-9,
                on + ": backward " + std::to_string(plan.bwd_efficiency));
          // At least four each, or one for each tile of the keys of a head, which is as many as there can be.
          check(plan.bwd_tasks >= std::min(4 * int64_t(threads), s.B * s.H * s.S / 64),
                on + ": backward has " + std::to_string(plan.bwd_tasks) + " tasks");
        }
      }
    }
  }
}

// A bias [1,H,S,S] of several sequences, or [1,1,S,S] of one.
AttentionPlan plan_with_bias(const Kernels& kernels, const Shape& s, mha::DType dtype, int threads) {
  const float x = 0;
  mha::AttentionProblem p = problem_of(s, dtype);
  p.bias.data = const_cast<float*>(&x);
  p.bias.stride[3] = 1, p.bias.stride[2] = s.S, p.bias.stride[1] = s.B > 1 ? s.S * s.S : 0;
  return kernels.attention_plan(p, threads);
}

constexpr Shape kBiasShapes[] = {kShapes[0], kShapes[1], {1, 8, 8, 4096, 64, true}};

// A gradient of the bias that heads share; talking heads, whose tasks are blocks of 64 queries.
void test_shared_sums() {
  for (const Kernels* kernels : every_isa()) {
    for (mha::DType dtype : {mha::DType::f32, mha::DType::bf16, mha::DType::f16}) {
      for (const Shape& s : kBiasShapes) {
        for (int threads : {2, 64, 128, 256}) {
          const AttentionPlan plan = plan_with_bias(*kernels, s, dtype, threads);
          const std::string on = std::string(kernels->isa) + " " + harness::name_of(dtype) + " S" +
                                 std::to_string(s.S) + ", on " + std::to_string(threads);
          // Adding up, a tenth of the work, counts as none; tiles of AMX hand dQ on span by span.
          const bool tiles = std::string(kernels->isa) == "amx" && dtype != mha::DType::f32;
          const double least = tiles ? (threads <= 128 ? 0.8 : 0.7) : (threads <= 128 ? 0.85 : 0.8);
          check(plan.bwd_efficiency >= least && plan.bwd_efficiency <= 1 + 1e-9,
                on + " a shared bias: backward " + std::to_string(plan.bwd_efficiency));
          check(plan.bwd_tasks >= std::min(4 * int64_t(threads), s.B * s.H * s.S / 64) || threads == 2,
                on + " a shared bias: backward has " + std::to_string(plan.bwd_tasks) + " tasks");
        }
      }
    }
    for (int threads : {2, 16, 32}) {
      const AttentionPlan plan = kernels->attention_mixed_plan(problem_of(kShapes[1], mha::DType::f32), threads);
      const std::string on = std::string(kernels->isa) + " talking heads on " + std::to_string(threads);
      check(plan.fwd_efficiency >= 0.95 && plan.fwd_efficiency <= 1 + 1e-9, on + ": forward");
      check(plan.bwd_efficiency >= 0.8 && plan.bwd_efficiency <= 1 + 1e-9,
            on + ": backward " + std::to_string(plan.bwd_efficiency));
      check(plan.bwd_tasks == 64, on + ": a task for each block of queries");
    }
  }
}

void test_memory_is_that_of_the_heads_under_way() {
  for (mha::DType dtype : {mha::DType::f32, mha::DType::bf16}) {
    for (const Shape& s : kShapes) {
      const Kernels& kernels = mha::cpu::kernels_for("scalar");
      const size_t some = plan_of(kernels, s, dtype, 128).bwd_workspace;
      const size_t more = plan_of(kernels, s, dtype, 256).bwd_workspace;
      // A thread has tiles and the keys of a pass for itself, whatever the length.
      check(more - some <= 128 * size_t(18 * 64 * (s.D + 64) * 4), "a thread has no buffer of all queries");
    }
  }
}

// What test_efficiency and test_shared_sums look at, for docs/performance.md.
void print_table() {
  for (const Kernels* kernels : every_isa()) {
    for (mha::DType dtype : {mha::DType::f32, mha::DType::bf16}) {
      auto print = [&](const Shape& s, const char* bias, auto plan_on) {
        std::printf("%s %s B%d H%d/%d S%d D%d%s:", kernels->isa, harness::name_of(dtype), int(s.B), int(s.H), int(s.Hk),
                    int(s.S), int(s.D), bias);
        for (int threads : {64, 128, 256}) {
          const AttentionPlan plan = plan_on(*kernels, s, dtype, threads);
          std::printf("  on %d forward %.2f, backward %.2f", threads, plan.fwd_efficiency, plan.bwd_efficiency);
        }
        std::printf("\n");
      };
      for (const Shape& s : kShapes) print(s, "", plan_of);
      for (const Shape& s : kBiasShapes) print(s, " shared bias", plan_with_bias);
    }
  }
}

}  // namespace

// With an argument: prints the table.
int main(int arguments, char**) {
  if (arguments > 1) print_table();
  test_every_task_once();
  test_simulation();
  test_turns();
  test_efficiency();
  test_shared_sums();
  test_memory_is_that_of_the_heads_under_way();
  return harness::finish();
}
