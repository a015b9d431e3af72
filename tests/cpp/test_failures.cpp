// A task of attention that throws while others wait for its turn: nobody waits for ever, what it threw reaches the
// caller, threads have their floating-point settings again, and the next call gives the bits that it always gives.
// This program has a schedule.cpp of its own, before the library's: it can be told which turn fails to be passed on.
#include <cstdio>
#include <exception>
#include <new>

#define pass_on pass_on_for_sure
#define count_on count_on_for_sure
#include "../../csrc/cpu/threads/schedule.cpp"
#undef pass_on
#undef count_on
#include "attention_bwd_cases.h"
#include "harness.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

std::atomic<int64_t> calls{0}, failing{0};  // turns passed on so far; which one fails, 0: none

void count_call() {
  if (++calls == failing) throw std::bad_alloc();
}

}  // namespace

namespace mha::cpu {

void pass_on(Turn& turn, int64_t number) {
  count_call();
  pass_on_for_sure(turn, number);
}

void count_on(Turn& turn, int64_t by) {
  count_call();
  count_on_for_sure(turn, by);
}

}  // namespace mha::cpu

namespace {

using namespace attention_bwd_cases;
using harness::check;
using mha::cpu::Kernels;

unsigned settings() {
#if defined(__x86_64__)
  return _mm_getcsr() & ~0x3Fu;  // without the flags that arithmetic raises
#else
  return 0;
#endif
}

std::atomic<bool> settings_kept{true};

// `live` threads for all, one body after the other on each; what is thrown reaches the caller, as from torch's pool.
template <int live>
void run_catching(int count, void (*body)(void*, int), void* context) {
  std::vector<std::exception_ptr> thrown(size_t(count), nullptr);
  auto some = [&](int first) {
    for (int thread = first; thread < count; thread += live) try {
        const unsigned before = settings();
        struct Check {
          const unsigned before;
          ~Check() { settings_kept = settings_kept && settings() == before; }
        } kept{before};
        body(context, thread);
      } catch (...) {
        thrown[size_t(thread)] = std::current_exception();
      }
  };
  std::vector<std::thread> others;
  for (int first = 1; first < live; ++first) others.emplace_back(some, first);
  some(0);
  for (std::thread& t : others) t.join();
  for (const std::exception_ptr& exception : thrown)
    if (exception) std::rethrow_exception(exception);
}

// run(threads) calls a kernel, bytes() says what it wrote.
template <class Run, class Bytes>
void test(const std::string& name, const mha::cpu::Threads& threads, Run run, Bytes bytes) {
  calls = failing = 0;
  run(threads);
  const std::vector<unsigned char> right = bytes();
  const int64_t all = calls;
  check(all > 4, name + ": tasks go by turns");
  for (int64_t at : {int64_t(1), int64_t(2), all / 3, all / 2, all - 1, all}) {
    const std::string failure = name + ", turn " + std::to_string(at) + " of " + std::to_string(all);
    const unsigned before = settings();
    bool reached = false;
    calls = 0, failing = at;
    try {
      run(threads);
    } catch (const std::bad_alloc&) {
      reached = true;
    }
    failing = 0;
    check(reached, failure + ": what a task threw reaches the caller");
    check(settings() == before && settings_kept, failure + ": threads have their settings again");
    run(threads);
    check(bytes() == right, failure + ": the next call is right");
  }
}

const mha::cpu::Threads kPools[] = {{4, run_catching<4>}, {64, run_catching<2>}, {16, run_catching<1>}};

void test_backward(const Kernels& kernels, const Case& c) {
  Inputs in;
  make_inputs(c, in);
  Outputs o = make_outputs(c, c.dtype, in.p);  // what is asked for, too, decides on the workspace
  for (const mha::cpu::Threads& threads : kPools) {
    Workspace workspace(kernels.attention_bwd_workspace(in.p, threads.count));
    auto run = [&](const mha::cpu::Threads& t) {
      o = make_outputs(c, c.dtype, in.p);
      kernels.attention_bwd(in.p, t, workspace.data.get());
    };
    auto bytes = [&] {
      std::vector<unsigned char> all;
      for (const Strided* x : {&o.dq, &o.dk, &o.dv, &o.dbias})
        all.insert(all.end(), x->bytes().begin(), x->bytes().end());
      return all;
    };
    test(std::string(kernels.isa) + " backward on " + std::to_string(threads.count) + " threads, " + c.text(), threads,
         run, bytes);
  }
}

// On AMX, where keys and values are packed by tasks that others wait for.
void test_forward(const Kernels& kernels, const Case& c) {
  Inputs in;
  make_inputs(c, in);
  const mha::AttentionForward f = forward_of(in);
  for (const mha::cpu::Threads& threads : kPools) {
    Workspace workspace(kernels.attention_fwd_workspace(f, threads.count));
    test(
        std::string(kernels.isa) + " forward on " + std::to_string(threads.count) + " threads, " + c.text(), threads,
        [&](const mha::cpu::Threads& t) {
          in.out.fill([] { return std::nan(""); });
          kernels.attention_fwd(f, t, workspace.data.get());
        },
        [&] { return in.out.bytes(); });
  }
}

}  // namespace

int main() {
  Case c;
  c.B = 1, c.H = 4, c.Hk = 2, c.Sq = c.Sk = 280, c.D = 24, c.Dv = 16, c.band_hi = 0;
  for (const Kernels* kernels : every_isa()) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      c.dtype = dtype;
      test_backward(*kernels, c);
      const bool tiles = kernels->isa == std::string("amx") && dtype == DType::bf16;
      Case shared = c;
      shared.B = 2, shared.bias = 0b0001, shared.dbias = true;
      if (!tiles) test_backward(*kernels, shared);  // there its tasks are cut by shapes, and wait for nobody
      if (tiles) test_forward(*kernels, c);
    }
  }
  return harness::finish();
}
