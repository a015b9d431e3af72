// No kernel makes denormal numbers of ordinary inputs, hidden pairs among them, though nothing flushes them: each would
// cost hundreds of cycles on some processors, and the flags of the thread's control register tell on any. Where weights
// are peaked they can't be avoided: kernels flush them, whatever the thread's settings are, and leave these as they
// were.
#include "attention_bwd_cases.h"
#include "harness.h"

#ifdef __x86_64__
#include <immintrin.h>

#include <stdexcept>

#include "../../csrc/cpu/isa/prelude.h"
#define MHA_ISA_NS scalar
#include "../../csrc/cpu/vector/scalar.h"
//
#include "../../csrc/cpu/tiles.h"
//
#include "../../csrc/cpu/threads/parallel.h"

namespace {

using attention_bwd_cases::Case;
using attention_bwd_cases::Inputs;
using mha::DType;
using mha::cpu::Threads;
using namespace tools;
using harness::check;

constexpr unsigned kDenormal = 0x02, kUnderflow = 0x10, kFlags = 0x3F;
constexpr unsigned kOperandsAreZero = 0x40, kFlushResults = 0x8000;

// The flags that f raises.
template <class F>
unsigned flags_of(F f) {
  _mm_setcsr(_mm_getcsr() & ~kFlags);
  f();
  return _mm_getcsr() & kFlags;
}

// Whether kernels flush by themselves, or what they are given is to do without.
enum class Flush { no, yes };

Threads one_thread(Flush flush) { return {1, run_on_threads, flush == Flush::yes}; }

// f(threads) without denormal numbers. Flushed, results that would be denormal count as made, but none is read.
// Conversion to fp16 makes denormal numbers of that type, at full speed.
template <class F>
void quiet(F f, Flush flush, DType dtype, const std::string& what) {
  const unsigned flags = flags_of([&] { f(one_thread(flush)); });
  check(!(flags & kDenormal), what + " reads denormal numbers");
  if (flush == Flush::no && dtype != DType::f16) check(!(flags & kUnderflow), what + " makes denormal numbers");
}

struct Attention {
  Inputs in;
  mha::AttentionForward forward;
  attention_bwd_cases::Outputs gradients;

  Attention(const Case& c, double queries = 1) {
    make_inputs(c, in);
    naive::Array4 q = in.q.read();
    for (double& x : q.values) x *= queries;
    in.q.write(q);
    if (queries != 1) run_forward(in);
    forward = forward_of(in);
    gradients = make_outputs(c, c.dtype, in.p);
  }
  void run_forward_on(const mha::cpu::Kernels& kernels, const Threads& threads) const {
    Workspace space(kernels.attention_fwd_workspace(forward, threads.count));
    kernels.attention_fwd(forward, threads, space.data.get());
  }
  void run_backward_on(const mha::cpu::Kernels& kernels, const Threads& threads) const {
    Workspace space(kernels.attention_bwd_workspace(in.p, threads.count));
    kernels.attention_bwd(in.p, threads, space.data.get());
  }
};

std::string name_of(const mha::cpu::Kernels& kernels, DType t) {
  return std::string(kernels.isa) + " " + harness::name_of(t) + " ";
}

// Tiles make no difference between a hidden score and one that is far below all others: they count on being flushed.
Flush without_help(const mha::cpu::Kernels& kernels, DType t) {
  return std::string(kernels.isa) == "amx" && t != DType::f32 ? Flush::yes : Flush::no;
}

void attention(const Case& c, const mha::cpu::Kernels& kernels) {
  const Attention problem(c);
  const Flush flush = without_help(kernels, c.dtype);
  const std::string what = name_of(kernels, c.dtype) + c.text() + ":";
  quiet([&](const Threads& t) { problem.run_forward_on(kernels, t); }, flush, c.dtype, what + " forward");
  quiet([&](const Threads& t) { problem.run_backward_on(kernels, t); }, flush, c.dtype, what + " backward");
}

std::vector<Case> cases(DType dtype) {
  std::vector<Case> all;
  Case c;
  c.dtype = dtype, c.H = 2, c.Hk = 1, c.Sk = 130, c.D = c.Dv = 32, c.scale = 0.2;
  for (const int64_t queries : {1, 20, 130}) {
    c.Sq = queries;
    auto add = [&](auto change) {
      Case changed = c;
      change(changed);
      all.push_back(changed);
    };
    add([](Case&) {});
    add([](Case& x) { x.band_hi = x.Sk - x.Sq - 3; });                         // some rows see nothing
    add([](Case& x) { x.band_hi = x.Sk - x.Sq, x.band_lo = x.band_hi - 9; });  // a window
    add([](Case& x) { x.intervals = true, x.B = 2, x.Hk = 2; });               // padded
    add([](Case& x) { x.documents = true, x.dense = 1; });                     // by pairs
    add([](Case& x) { x.bias = 1, x.minus_inf_bias = true, x.softcap = 3, x.dbias = true; });
    add([](Case& x) { x.dropout = 0.2, x.band_hi = 0, x.poison_hidden = true; });
  }
  return all;
}

void peaked(DType t, const mha::cpu::Kernels& kernels) {
  Case c;
  c.dtype = t, c.H = 2, c.Hk = 1, c.Sq = 130, c.Sk = 130, c.D = c.Dv = 32, c.scale = 0.2, c.band_hi = 0;
  const Attention problem(c, 30);
  const std::string what = name_of(kernels, t) + "peaked ";
  quiet([&](const Threads& x) { problem.run_forward_on(kernels, x); }, Flush::yes, t, what + "forward");
  quiet([&](const Threads& x) { problem.run_backward_on(kernels, x); }, Flush::yes, t, what + "backward");
  if (t != DType::f32) return;
  const Threads keeping = one_thread(Flush::no);
  check(flags_of([&] { problem.run_forward_on(kernels, keeping); }) & kUnderflow, what + "forward, not flushed: quiet");
  check(flags_of([&] { problem.run_backward_on(kernels, keeping); }) & kDenormal,
        what + "backward, not flushed: quiet");
}

void softmax(DType t, const mha::cpu::Kernels& kernels, double scale) {
  harness::Random random{3};
  constexpr int64_t kRows = 20, kKeys = 70;
  harness::Strided scores = harness::random_tensor(t, 1, 2, kRows, kKeys, random), out(t, 1, 2, kRows, kKeys),
                   dout = harness::random_tensor(t, 1, 2, kRows, kKeys, random), dscores(t, 1, 2, kRows, kKeys);
  std::vector<float> lse(2 * kRows);
  std::vector<uint8_t> dense(kRows * kKeys);
  for (uint8_t& x : dense) x = random.chance(60);
  mha::MaskedSoftmaxForward f;
  f.B = 1, f.H = 2, f.Sq = kRows, f.Sk = kKeys, f.dtype = t, f.scores = scores.t, f.mask.band_hi = kKeys - kRows;
  f.mask.dense = dense.data(), f.mask.dense_stride_q = kKeys, f.mask.dense_stride_k = 1;
  f.out = out.t, f.lse = lse.data(), f.scale = scale;
  mha::MaskedSoftmaxBackward b;
  static_cast<mha::MaskedSoftmaxProblem&>(b) = f;
  b.dout = dout.t, b.lse = lse.data(), b.dscores = dscores.t;
  const Flush flush = scale > 1 ? Flush::yes : Flush::no;
  const std::string what = name_of(kernels, t) + "softmax of " + std::to_string(scale);
  quiet([&](const Threads& x) { kernels.masked_softmax_fwd(f, x); }, flush, t, what + ", forward");
  quiet([&](const Threads& x) { kernels.masked_softmax_bwd(b, x); }, flush, t, what + ", backward");
}

// Talking heads, and heads that are mixed as they are merged.
void mixed(DType t, const mha::cpu::Kernels& kernels) {
  Case c;
  c.dtype = t, c.H = c.Hk = 3, c.Sq = 20, c.Sk = 70, c.D = c.Dv = 32, c.scale = 0.2, c.band_hi = 50;
  const Attention problem(c);
  const std::vector<float> mix{1, 0.5f, -0.3f, 0.2f, 1, 0.7f, -0.1f, 0.4f, 1};
  std::vector<float> dpre(9), dpost(9);
  mha::AttentionMixedForward f;
  static_cast<mha::AttentionForward&>(f) = problem.forward;
  f.pre_mix = f.post_mix = mix.data();
  mha::AttentionMixedBackward b;
  static_cast<mha::AttentionBackward&>(b) = problem.in.p;
  b.pre_mix = b.post_mix = mix.data(), b.dpre_mix = dpre.data(), b.dpost_mix = dpost.data();
  const std::string what = name_of(kernels, t) + "talking heads, ";
  auto forward = [&](const Threads& x) {
    Workspace space(kernels.attention_mixed_fwd_workspace(f, 1));
    kernels.attention_mixed_fwd(f, x, space.data.get());
  };
  auto backward = [&](const Threads& x) {
    Workspace space(kernels.attention_mixed_bwd_workspace(b, 1));
    kernels.attention_mixed_bwd(b, x, space.data.get());
  };
  quiet(forward, Flush::no, t, what + "forward");
  quiet(backward, Flush::no, t, what + "backward");
  harness::Random random{4};
  harness::Strided in = harness::random_tensor(t, 1, 3, 5, 17, random),
                   weights = harness::random_tensor(t, 1, 1, 3, 3, random);
  harness::Strided out(t, 1, 5, 3, 17);
  mha::MergeHeads m;
  m.B = 1, m.H = 3, m.S = 5, m.D = 17, m.dtype = t, m.in = in.t, m.mix = weights.t.data;
  m.out = {out.t.data, {0, 17, 51, 1}};
  quiet([&](const Threads& x) { kernels.merge_heads(m, x); }, Flush::no, t, what + "merge");
}

// One and many new queries against a cache: of the queries' type or quantised, in one piece or in pages.
void caches(DType t, const mha::cpu::Kernels& kernels) {
  constexpr int64_t kKeys = 96, kPage = 16, kD = 64;
  harness::Random random{6};
  const std::vector<float> scales(2, 0.02f);
  std::vector<int64_t> table;
  for (int64_t n = 0; n < kKeys / kPage; ++n) table.push_back(kKeys / kPage - 1 - n);
  for (const int64_t queries : {1, 5, 70}) {
    for (const int kind : {0, 1, 2}) {
      for (const bool paged : {false, true}) {
        harness::Strided q = harness::random_tensor(t, 1, 4, queries, kD, random), out(t, 1, 4, queries, kD);
        harness::Strided halves = harness::random_tensor(t, 1, 2, kKeys, kD, random);
        std::vector<uint8_t> bytes(size_t(2 * kKeys * kD));
        for (uint8_t& x : bytes) x = uint8_t(random.below(0x70) | (random.chance(50) ? 0x80 : 0));
        std::vector<float> lse(size_t(4 * queries));
        mha::AttentionForward f;
        f.B = 1, f.H = 4, f.Hk = 2, f.Sq = queries, f.Sk = kKeys, f.D = f.Dv = kD, f.dtype = t, f.scale = 0.1;
        f.rows_stride_b = 4 * queries, f.rows_stride_h = queries, f.mask.band_hi = kKeys - queries - 11;
        f.q = q.t, f.out = out.t, f.lse = lse.data();
        const int64_t head = kD * (paged ? kPage : kKeys);
        f.k = f.v = {kind == 0 ? halves.t.data : bytes.data(), {2 * head, head, kD, 1}};
        f.store.quantised = kind > 0, f.store.type = kind == 1 ? DType::i8 : DType::e4m3;
        f.store.k_scale = f.store.v_scale = scales.data(), f.store.scale_stride_h = 1;
        if (paged) f.store.table = table.data(), f.store.page_size = kPage, f.store.pages = kKeys / kPage;
        auto run = [&](const Threads& threads) {
          Workspace space(kernels.attention_fwd_workspace(f, 1));
          kernels.attention_fwd(f, threads, space.data.get());
        };
        quiet(run, without_help(kernels, t), t,
              name_of(kernels, t) + "cache " + std::to_string(kind) + (paged ? " in pages, " : ", ") +
                  std::to_string(queries) + " queries");
      }
    }
  }
}

// Values that are denormal are 0, as is what would become denormal; fp64 keeps both, and what is denormal in fp16 is
// not in fp32.
void small_numbers(const mha::cpu::Kernels& kernels) {
  struct {
    DType dtype;
    double value, factor, want;
  } const table[] = {{DType::f32, 1e-39, 1, 0},           {DType::f32, 2e-38, 1, 2e-38},
                     {DType::f32, 1e-36, 0.01, 0},        {DType::f64, 1e-310, 1, 1e-310},
                     {DType::f64, 1e-307, 1e-3, 1e-310},  {DType::f16, 0x1p-20, 1, 0x1p-20},
                     {DType::bf16, 0x1p-120, 1, 0x1p-120}};
  for (const auto& row : table) {
    Case c;
    c.dtype = row.dtype, c.D = 4, c.Dv = 8, c.Sk = 2;
    Attention problem(c);
    // The second key has a weight of 1 - factor, and values of 0.
    problem.in.q.fill([] { return 1; });
    int n = 0;
    problem.in.k.fill([&] {
      return n++ < 4 ? 0 : row.factor == 1 ? -1e4 : std::log(1 / row.factor - 1) / (4 * c.scale);
    });
    n = 0;
    problem.in.v.fill([&] { return n++ < 8 ? row.value : 0; });
    problem.run_forward_on(kernels, one_thread(Flush::yes));
    const double got = problem.in.out.read()(0, 0, 0, 3);
    check(std::fabs(got - row.want) <= 1e-5 * row.want,
          name_of(kernels, row.dtype) + std::to_string(row.value * 1e300) + "e-300: " + std::to_string(got * 1e300));
  }
}

// Settings of the calling thread and of those that help, whatever they are before.
unsigned settings_in_helpers[2];
void run_and_look(int count, void (*body)(void*, int), void* context) {
  std::thread helper([&] {
    _mm_setcsr((_mm_getcsr() & ~kFlags) | kFlushResults);
    settings_in_helpers[0] = _mm_getcsr();
    for (int i = 1; i < count; ++i) body(context, i);
    settings_in_helpers[1] = _mm_getcsr() & ~kFlags;
  });
  helper.join();
  body(context, 0);
}
void run_and_throw(int, void (*body)(void*, int), void* context) {
  body(context, 0);
  throw std::runtime_error("a thread");
}

void settings(const mha::cpu::Kernels& kernels) {
  Case c;
  c.Sq = c.Sk = 200, c.H = c.Hk = 4, c.D = c.Dv = 16;
  const unsigned before = _mm_getcsr();
  for (const DType t : {DType::f32, DType::bf16, DType::f64}) {
    c.dtype = t;
    const Attention problem(c);
    for (const unsigned own : {0u, kFlushResults, kOperandsAreZero, kFlushResults | kOperandsAreZero}) {
      const unsigned set = (before & ~(kFlags | kFlushResults | kOperandsAreZero)) | own;
      auto same = [&](auto f, const char* what) {
        _mm_setcsr(set);
        f();
        const unsigned after = _mm_getcsr() & ~kFlags;
        _mm_setcsr(before);
        check(after == set, name_of(kernels, t) + what + " leaves a thread's settings");
      };
      same([&] { problem.run_forward_on(kernels, {2, run_and_look}); }, "forward");
      check(settings_in_helpers[0] == settings_in_helpers[1], name_of(kernels, t) + "helpers keep their settings");
      same([&] { problem.run_backward_on(kernels, {2, run_and_look}); }, "backward");
      auto fail = [&] {
        bool caught = false;
        try {
          problem.run_forward_on(kernels, {2, run_and_throw});
        } catch (const std::runtime_error&) {
          caught = true;
        }
        check(caught, "the exception arrives");
      };
      same(fail, "a kernel that throws");
    }
  }
}

// A task sees flushed numbers, and its thread is as before although it throws.
void tasks() {
  const unsigned before = _mm_getcsr();
  for (const bool flush : {true, false}) {
    unsigned inside = 0;
    try {
      mha::cpu::scalar::for_each_task(Threads{1, run_on_threads, flush}, 3, [&](int64_t, int) {
        inside = _mm_getcsr();
        throw std::runtime_error("a task");
      });
    } catch (const std::runtime_error&) {
    }
    const unsigned both = kFlushResults | kOperandsAreZero;
    check((inside & both) == (flush ? both : before & both), "a task's settings");
    check(((_mm_getcsr() ^ before) & ~kFlags) == 0, "settings after a task has thrown");
  }
}

}  // namespace

int main() {
  tasks();
  for (const mha::cpu::Kernels* kernels : every_isa()) {
    for (const DType t : {DType::f32, DType::bf16, DType::f16}) {
      for (const Case& c : cases(t)) attention(c, *kernels);
      peaked(t, *kernels);
      for (const double scale : {1.0, 100.0}) softmax(t, *kernels, scale);
      mixed(t, *kernels);
      caches(t, *kernels);
    }
    small_numbers(*kernels);
    settings(*kernels);
  }
  return harness::finish();
}
#else
int main() { return 0; }
#endif
