// Sharing out tasks among threads, and scratch memory.
//
// This room includes none of the other rooms.
#pragma once

#include "denormals.h"

MHA_ISA_BEGIN

// Calls f(task, thread) once for each task in [0, tasks), on any thread; in which order, says schedule.h. Before its
// first task a thread calls begin(thread), so that what it works in is first touched by itself: there its memory will
// lie.
template <class F, class Begin>
void for_each_task(const Threads& threads, int64_t tasks, F f, Share share, Begin begin) {
  struct Shared {
    F& f;
    Begin& begin;
    bool flush_denormals;
    Deal deal;
  } shared{f, begin, threads.flush_denormals, Deal(threads.count, tasks, share)};
  auto body = [](void* context, int thread) {
    Shared& s = *static_cast<Shared*>(context);
    const FlushDenormals flush(s.flush_denormals);
    int at = 0;
    int64_t task = s.deal.take(thread, at);
    if (task < 0) return;
    s.begin(thread);
    for (; task >= 0; task = s.deal.take(thread, at)) s.f(task, thread);
  };
  const int count = int(min64(threads.count, tasks));
  if (count > 1)
    threads.run(count, body, &shared);
  else if (count == 1)
    body(&shared, 0);
}

template <class F>
void for_each_task(const Threads& threads, int64_t tasks, F f, Share share = Share::runs) {
  for_each_task(threads, tasks, f, share, [](int) {});
}

// The same in order, for tasks that wait for what those before them do (wait_for): if one throws, those that wait for
// it leave off, and what it threw reaches the caller.
template <class F>
void for_each_task_by_turns(const Threads& threads, int64_t tasks, std::atomic<bool>& stopped, F f) {
  auto run = [&](int64_t task, int thread) {
    try {
      f(task, thread);
    } catch (const Stopped&) {  // the task that threw tells why
    } catch (...) {
      stopped.store(true, std::memory_order_relaxed);
      throw;
    }
  };
  for_each_task(threads, tasks, run, Share::in_order);
}

// Turns as they begin. Where they take several pages, each is touched by another thread, so that they don't all lie
// where the caller's memory is.
inline void begin_turns(const Threads& threads, Turn* turns, int64_t count) {
  constexpr int64_t kPage = 4096 / sizeof(Turn);
  for_each_task(threads, (count + kPage - 1) / kPage, [&](int64_t page, int) {
    for (int64_t n = page * kPage; n < min64(count, (page + 1) * kPage); ++n) new (turns + n) Turn;
  });
}

// How long for_each_task would take, where finish(task, thread, start) says when a task is done that starts then.
template <class F>
double simulate_tasks(int threads, int64_t tasks, Share share, F finish) {
  auto call = [](void* context, int64_t task, int thread, double start) {
    return (*static_cast<F*>(context))(task, thread, start);
  };
  return simulate(threads, tasks, share, call, &finish);
}

// Uninitialised memory on a 64-byte boundary.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t n) : base_(::operator new(size_t(n) * sizeof(T) + 64)) {}
  ~Scratch() { ::operator delete(base_); }
  Scratch(const Scratch&) = delete;
  T* get() const { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(base_) + 63) / 64 * 64); }

 private:
  void* base_;
};

// Hands out consecutive pieces of a block of memory. Without a base it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    char* p = base_ ? base_ + used_ : nullptr;
    used_ += (std::size_t(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(p);
  }
  std::size_t used() const { return used_; }

 private:
  char* base_;
  std::size_t used_ = 0;
};

// The type that a tensor of T is computed in.
template <class T>
struct AccumulateType {
  using type = float;
};
template <>
struct AccumulateType<double> {
  using type = double;
};
template <class T>
using Acc = typename AccumulateType<T>::type;

MHA_INLINE float widen(float x) { return x; }
MHA_INLINE double widen(double x) { return x; }
template <class Half>
MHA_INLINE float widen(Half x) {
  float wide[1];
  store_n(wide, load_n(&x, 1), 1);
  return wide[0];
}

// Calls f(T*) with a null pointer of the element type.
template <class F>
void with_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::f64:
      return f(static_cast<double*>(nullptr));
    case DType::f32:
      return f(static_cast<float*>(nullptr));
    case DType::bf16:
      return f(static_cast<bf16*>(nullptr));
    case DType::f16:
      return f(static_cast<f16*>(nullptr));
    case DType::e4m3:
    case DType::i8:
      return;  // no kernel that asks here is given these
  }
}

MHA_ISA_END
