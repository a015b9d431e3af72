// Who does which task when: the dealing of tasks to threads, and turns where tasks add to the same sums. No part of
// this knows what a task is, and the simulation of many threads (simulate) deals as they do.
// Nothing here is inline: it would be compiled for each instruction set, and shared by all.
#pragma once
#include <atomic>
#include <cstdint>

#include "../../mask.h"

namespace mha::cpu {

// What a thread begins with: the t-th of equal runs, so that neighbours stay together; or tasks dealt out in turn,
// which is fairer where few tasks get cheaper from first to last. in_order: whoever is free takes the first task that
// nobody has, so that a task may wait for those before it (see wait_for).
enum class Share { runs, dealt, in_order };

// Tasks [0, tasks) and who has which. Each thread begins with tasks of its own, the same for calls of one shape, so
// that it finds in its caches what it worked on before; who is done helps the others.
class Deal {
 public:
  Deal(int threads, int64_t tasks, Share share);

  // The thread's next task, or -1. `at` is kept by the thread from call to call, 0 at first.
  int64_t take(int thread, int& at);

 private:
  static constexpr int kMostRuns = 64;
  struct alignas(64) Run {  // a line of its own
    Run() : next(0), end(0) {}
    std::atomic<int64_t> next;
    int64_t end;
  };
  int runs_, step_;  // a run takes every step-th task
  Run run_[kMostRuns];
};

// Whose turn it is, on a line of its own: a number that only grows.
struct alignas(64) Turn {
  Turn() : now(0) {}
  std::atomic<int64_t> now;
};
static_assert(sizeof(Turn) == 64 && alignof(Turn) == 64);

// What a task is left with when another one has thrown: for it, too, there is nothing more to do.
struct Stopped {
  virtual ~Stopped();
};

// Returns when `turn` has come to `number`. A task may wait for what tasks with lower numbers do, where tasks are taken
// in order: the lowest of those that are under way waits for nobody, so one always goes on, however few threads there
// are. Who waits for long gives the processor away.
void wait_for(const Turn& turn, int64_t number, const std::atomic<bool>& stopped);

void pass_on(Turn& turn, int64_t number);

// Moves a turn on where it counts what several tasks have done in any order.
void count_on(Turn& turn, int64_t by = 1);

// When the last of `threads` equally fast threads is done. finish(context, task, thread, start) says when a task is
// that this thread starts then; of tasks that are taken in order, it is asked in that order.
double simulate(int threads, int64_t tasks, Share share,
                double (*finish)(void* context, int64_t task, int thread, double start), void* context);

}  // namespace mha::cpu
