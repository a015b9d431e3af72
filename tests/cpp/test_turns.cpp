// Attention backward where tasks share the sums of a head: right, and the same bits for any number of threads, also
// when there are far more of them than processors, or fewer than were asked for. ThreadSanitizer looks at this program
// (MHA_EXT_SANITIZE=thread).
#include <thread>

#include "attention_bwd_cases.h"
#include "harness.h"

namespace {

using namespace attention_bwd_cases;
using harness::check;
using mha::cpu::Kernels;

// Two threads do the work of all, one body after the other.
void run_on_two(int count, void (*body)(void*, int), void* context) {
  auto half = [=](int first) {
    for (int thread = first; thread < count; thread += 2) body(context, thread);
  };
  std::thread other(half, 1);
  half(0);
  other.join();
}

void run_on_one(int count, void (*body)(void*, int), void* context) {
  for (int thread = count; thread-- > 0;) body(context, thread);
}

Outputs run(const Case& c, Inputs& in, const Kernels& kernels, const mha::cpu::Threads& threads) {
  Outputs o = make_outputs(c, c.dtype, in.p);
  Workspace workspace(kernels.attention_bwd_workspace(in.p, threads.count));
  kernels.attention_bwd(in.p, threads, workspace.data.get());
  return o;
}

void test(const Case& c) {
  if (left_out()) return;
  Inputs in;
  make_inputs(c, in);
  Expected expected(c, in);
  for (const Kernels* kernels : every_isa()) {
    const std::string name = std::string(kernels->isa) + " " + c.text();
    Outputs one = run(c, in, *kernels, threads(1));
    check(mistake(one, expected).empty(), name + ": " + mistake(one, expected));
    auto same = [&](const mha::cpu::Threads& threads, const std::string& how) {
      const std::string which = difference(one, run(c, in, *kernels, threads));
      check(which.empty(), name + ": " + which + " has other bits on " + how);
    };
    for (int count : {2, 3, 8, 64}) same(threads(count), std::to_string(count) + " threads");
    same({64, run_on_two}, "two threads for 64");
    same({64, run_on_one}, "one thread for 64");
  }
}

// Forward, whose tasks pack keys and values for others on AMX: more heads than there are places for packed ones.
void test_forward(const Case& c) {
  Inputs in;
  make_inputs(c, in);
  const mha::AttentionForward f = forward_of(in);
  for (const Kernels* kernels : every_isa()) {
    auto bytes = [&](const mha::cpu::Threads& threads) {
      in.out.fill([] { return std::nan(""); });
      Workspace workspace(kernels->attention_fwd_workspace(f, threads.count));
      kernels->attention_fwd(f, threads, workspace.data.get());
      return in.out.bytes();
    };
    const std::string name = std::string(kernels->isa) + " forward " + c.text();
    const std::vector<unsigned char> one = bytes(threads(1));
    bool written = true;
    for (double x : in.out.read().values) written &= !std::isnan(x);
    check(written, name + " leaves something out");
    for (int count : {2, 3, 8, 64})
      check(bytes(threads(count)) == one, name + " has other bits on " + std::to_string(count) + " threads");
    check(bytes({64, run_on_two}) == one && bytes({64, run_on_one}) == one, name + " has other bits on few for 64");
  }
}

// What the caller has written of a workspace when the first thread begins: 0xFF is nothing, as Workspace fills it.
struct Touched {
  const unsigned char* data;
  size_t size;
  int64_t lines = -1;
} touched;

void run_and_look(int count, void (*body)(void*, int), void* context) {
  if (touched.lines < 0) {
    touched.lines = 0;
    for (size_t at = 0; at + 64 <= touched.size; at += 64) {
      bool blank = true;
      for (size_t n = 0; n < 64; ++n) blank &= touched.data[at + n] == 0xFF;
      touched.lines += !blank;
    }
  }
  run_on_threads(count, body, context);
}

// Memory lies where it is first touched: the caller writes no more than a few pages of turns itself.
void test_first_touch(DType dtype, int64_t heads, int64_t length, int threads) {
  constexpr int64_t kMost = 4 * 64;  // pages of turns, lines
  Case c;
  c.dtype = dtype, c.B = 1, c.H = c.Hk = heads, c.Sq = c.Sk = length, c.D = c.Dv = 16;
  Inputs in;
  make_inputs(c, in);
  const mha::AttentionForward f = forward_of(in);
  for (const Kernels* kernels : every_isa()) {
    const mha::cpu::Threads looking{threads, run_and_look};
    const std::string name = std::string(kernels->isa) + " " + c.text() + " on " + std::to_string(threads) + " threads";
    auto look = [&](const char* what, size_t bytes, auto call) {
      Workspace workspace(bytes);
      touched = {static_cast<const unsigned char*>(workspace.data.get()), bytes};
      call(workspace.data.get());
      const int64_t allowed = std::string(what) == "forward" ? 64 : kMost;
      check(touched.lines >= 0 && touched.lines <= allowed,
            name + ": the caller touched " + std::to_string(touched.lines) + " lines of " + what);
    };
    look("forward", kernels->attention_fwd_workspace(f, threads),
         [&](void* workspace) { kernels->attention_fwd(f, looking, workspace); });
    Outputs o = make_outputs(c, c.dtype, in.p);
    look("backward", kernels->attention_bwd_workspace(in.p, threads),
         [&](void* workspace) { kernels->attention_bwd(in.p, looking, workspace); });
  }
}

// Talking heads, whose tasks add to dK, dV and dbias by turns.
struct MixedOutputs {
  Outputs o;
  std::vector<double> mixes;
};

MixedOutputs run_mixed(const Case& c, Inputs& in, const Kernels& kernels, const mha::cpu::Threads& threads) {
  MixedOutputs result{make_outputs(c, c.dtype, in.p), std::vector<double>(size_t(2 * c.H * c.H))};
  mha::AttentionMixedBackward p;
  static_cast<mha::AttentionBackward&>(p) = in.p;
  std::vector<double> mix(result.mixes.size());
  Random random{7};
  for (size_t n = 0; n < mix.size(); ++n) {  // in the type that the kernel sums in
    if (c.dtype == DType::f64)
      mix[n] = random.uniform();
    else
      reinterpret_cast<float*>(mix.data())[n] = float(random.uniform());
  }
  const size_t size = size_t(c.H * c.H) * mha::size_of(mha::accumulate_type(c.dtype));
  p.pre_mix = mix.data(), p.post_mix = reinterpret_cast<char*>(mix.data()) + size;
  p.dpre_mix = result.mixes.data(), p.dpost_mix = reinterpret_cast<char*>(result.mixes.data()) + size;
  Workspace workspace(kernels.attention_mixed_bwd_workspace(p, threads.count));
  kernels.attention_mixed_bwd(p, threads, workspace.data.get());
  return result;
}

void test_mixed(const Case& c) {
  Inputs in;
  make_inputs(c, in);
  for (const Kernels* kernels : every_isa()) {
    const MixedOutputs one = run_mixed(c, in, *kernels, threads(1));
    auto same = [&](const mha::cpu::Threads& threads, const std::string& how) {
      const MixedOutputs other = run_mixed(c, in, *kernels, threads);
      std::string which = difference(one.o, other.o);
      if (std::memcmp(one.mixes.data(), other.mixes.data(), one.mixes.size() * sizeof(double)) != 0) which += " mixes";
      check(which.empty(),
            std::string(kernels->isa) + " talking heads, " + c.text() + ": " + which + " has other bits on " + how);
    };
    for (int count : {2, 3, 64}) same(threads(count), std::to_string(count) + " threads");
    same({64, run_on_two}, "two threads for 64");
    same({64, run_on_one}, "one thread for 64");
  }
}

std::vector<Case> mixed_cases() {
  std::vector<Case> all;
  for (int bias : {kNone, 0b0000, 0b0001, 0b0100, 0b0101, 0b1001, 0b1111}) {
    Case c;
    c.dtype = bias % 2 ? DType::bf16 : DType::f32, c.B = 3, c.H = 4, c.Hk = 2, c.Sq = 220, c.Sk = 250, c.D = 24,
    c.Dv = 16;
    c.bias = bias, c.dbias = bias != kNone, c.seed = uint64_t(all.size() + 1);
    all.push_back(c);
    all.back().band_hi = 30;
    if (bias == 0b0001) all.back().band_lo = -40, all.back().Sq = 400;  // the last queries see nothing
    if (bias == 0b0101) all.back().intervals = true;
  }
  return all;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  auto add = [&](DType dtype, int64_t Sq, int64_t Sk) -> Case& {
    Case c;
    c.dtype = dtype, c.B = 1, c.H = 4, c.Hk = 2, c.Sq = Sq, c.Sk = Sk, c.D = 24, c.Dv = 16, c.scale = 0.2;
    c.seed = uint64_t(all.size() + 1);
    all.push_back(c);
    return all.back();
  };
  for (DType dtype : kTypes) {
    add(dtype, 330, 330).band_hi = 0;
    add(dtype, 200, 450).heads_inside = true;
    Case& window = add(dtype, 400, 400);
    window.band_lo = -70, window.band_hi = 5, window.poison_hidden = true;
  }
  add(DType::f32, 600, 260).intervals = true;
  Case& general = add(DType::f32, 300, 300);  // the bias is nobody else's
  general.bias = 0, general.dbias = true, general.softcap = 1.5, general.dropout = 0.3, general.documents = true;
  for (int bias : {0b0001, 0b0010, 0b0011, 0b0101}) {  // heads share its gradient
    Case& shared = add(bias == 0b0010 ? DType::bf16 : DType::f32, 200, 200);
    shared.B = 3, shared.bias = bias, shared.dbias = true, shared.band_hi = 0;
    if (bias == 0b0001) shared.intervals = true;
    if (bias == 0b0011) shared.dense = 0b0010, shared.minus_inf_bias = true;
  }
  for (DType dtype : {DType::bf16, DType::f16}) {  // on AMX by tiles of 32 queries and keys
    for (int bias : {0b0001, 0b0010, 0b0011}) {
      Case& shared = add(dtype, bias == 0b0001 ? 560 : 210, 230);  // more than one span of queries
      shared.B = bias == 0b0001 ? 2 : 3, shared.bias = bias, shared.dbias = true;
      if (bias == 0b0001) shared.band_lo = -300, shared.band_hi = 10, shared.intervals = true;
      if (bias == 0b0010) shared.documents = shared.poison_hidden = true, shared.dropout = 0.3;
      if (bias == 0b0011) shared.dense = 0b0110, shared.poison_seen = true, shared.softcap = 1.5;
    }
  }
  Case& dense = add(DType::bf16, 260, 330);
  dense.dense = 0b0001, dense.poison_seen = true;
  Case& many = add(DType::f16, 190, 190);
  many.B = 2, many.H = 6, many.Hk = 1, many.band_hi = 0, many.poison_seen = true;
  return all;
}

}  // namespace

int main() {
  for (const Case& c : cases()) test(c);
  for (const Case& c : mixed_cases()) test_mixed(c);
  for (DType dtype : kTypes) {
    Case c;
    c.dtype = dtype, c.B = 2, c.H = 14, c.Hk = 7, c.Sq = 200, c.Sk = 330, c.D = 40, c.Dv = 24, c.band_hi = 130;
    test_forward(c);
    c.Hk = 14, c.intervals = true, c.seed = 3;
    test_forward(c);
  }
  for (DType dtype : {DType::f32, DType::bf16}) {
    test_first_touch(dtype, 96, 80, 90);  // whole heads, or passes, and more threads than could be touched
    test_first_touch(dtype, 200, 80, 2);
    test_first_touch(dtype, 2, 600, 8);
  }
  return harness::finish();
}
