#include "schedule.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <queue>
#include <thread>
#include <utility>
#include <vector>

namespace mha::cpu {

namespace {

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Deal::Deal(int threads, int64_t tasks, Share share)
    : runs_(share == Share::in_order ? 1 : int(min64(min64(threads, tasks), kMostRuns))),
      step_(share == Share::dealt ? runs_ : 1) {
  const bool dealt = share == Share::dealt;
  for (int i = 0; i < runs_; ++i) {
    run_[i].next.store(dealt ? i : tasks * i / runs_, std::memory_order_relaxed);
    run_[i].end = dealt ? tasks : tasks * (i + 1) / runs_;
  }
}

int64_t Deal::take(int thread, int& at) {
  for (; at < runs_; ++at) {
    Run& run = run_[(thread + at) % runs_];
    const int64_t task = run.next.fetch_add(step_, std::memory_order_relaxed);
    if (task < run.end) return task;
  }
  return -1;
}

Stopped::~Stopped() = default;

void pass_on(Turn& turn, int64_t number) { turn.now.store(number, std::memory_order_release); }

void count_on(Turn& turn, int64_t by) { turn.now.fetch_add(by, std::memory_order_acq_rel); }

// The turn comes, as a rule, within the time of a tile, tens of microseconds. Whoever yields at once may be away for
// milliseconds, if other processes want the processor, too; so it looks for about as long as a tile takes, and only
// then gives the processor away: to whoever is ready, then for times that grow.
void wait_for(const Turn& turn, int64_t number, const std::atomic<bool>& stopped) {
  constexpr int kPauses = 1000, kYields = 64;
  std::chrono::microseconds sleep(20), longest(1000);
  for (int tries = 0; turn.now.load(std::memory_order_acquire) < number; ++tries) {
    if (stopped.load(std::memory_order_relaxed)) throw Stopped();
    if (tries < kPauses) {
      pause();
    } else if (tries < kPauses + kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(sleep);
      sleep = std::min(2 * sleep, longest);
    }
  }
}

double simulate(int threads, int64_t tasks, Share share,
                double (*finish)(void* context, int64_t task, int thread, double start), void* context) {
  Deal deal(threads, tasks, share);
  const int count = int(min64(threads, tasks));
  std::vector<int> at(size_t(count), 0);
  using Clock = std::pair<double, int>;  // of equal ones, the thread with the lowest number
  std::priority_queue<Clock, std::vector<Clock>, std::greater<Clock>> clocks;
  for (int thread = 0; thread < count; ++thread) clocks.push({0.0, thread});
  double last = 0;
  while (!clocks.empty()) {
    const auto [now, thread] = clocks.top();
    clocks.pop();
    const int64_t task = deal.take(thread, at[size_t(thread)]);
    if (task < 0) continue;
    const double end = finish(context, task, thread, now);
    last = end > last ? end : last;
    clocks.push({end, thread});
  }
  return last;
}

}  // namespace mha::cpu
