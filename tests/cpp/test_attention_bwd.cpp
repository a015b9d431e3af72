// attention_bwd of every instruction set of this machine against the fp64 oracle.
#include <cstdio>
#include <string>

#include "attention_bwd_cases.h"
#include "isas.h"

namespace {

using namespace attention_bwd_cases;

int failures = 0;

void fail(const Case& c, const std::string& isa, const std::string& what) {
  std::printf("FAILED %s: %s\n  %s\n", isa.c_str(), what.c_str(), c.text().c_str());
  ++failures;
}

Outputs run(const Case& c, Inputs& in, const mha::cpu::Kernels& kernels, int count) {
  Outputs o = make_outputs(c, c.dtype, in.p);
  Workspace workspace(kernels.attention_bwd_workspace(in.p, count));
  kernels.attention_bwd(in.p, threads(count), workspace.data.get());
  return o;
}

void check(const Case& c, Inputs& in, const Expected& expected, const mha::cpu::Kernels& kernels) {
  const std::string isa = kernels.isa;
  Outputs o = run(c, in, kernels, 1);
  const std::string what = mistake(o, expected);
  if (!what.empty()) return fail(c, isa, what);
  for (int count : {2, 3}) {
    const std::string which = difference(o, run(c, in, kernels, count));
    if (!which.empty()) return fail(c, isa, which + " depends on the number of threads");
  }
}

void test(const Case& c) {
  if (left_out()) return;
  Inputs in;
  make_inputs(c, in);
  Expected expected(c, in);
  static const std::vector<const mha::cpu::Kernels*> isas = every_isa();
  for (const mha::cpu::Kernels* kernels : isas) check(c, in, expected, *kernels);
}

void test_sizes() {
  for (DType dtype : kTypes) {
    for (int64_t length : {1, 31, 33, 63, 65, 127, 1000}) {
      Case c;
      c.dtype = dtype, c.Sq = length, c.Sk = length, c.D = c.Dv = length == 1000 ? 8 : 64, c.scale = 0.125;
      test(c);
      c.band_hi = 0, c.H = 2, c.Sk = length == 1000 ? 257 : 1000, c.D = 8;
      test(c);
    }
    for (int64_t size : {1, 3, 8, 17, 59, 64, 111, 257}) {
      Case c;
      c.dtype = dtype, c.Sq = 70, c.Sk = 45, c.D = size, c.Dv = size, c.H = 2, c.scale = 0.2, c.band_hi = 3,
      c.dropout = 0.1;
      test(c);
      c.D = 20;
      test(c);
    }
    for (int empty = 0; empty < 6; ++empty) {
      Case c;
      c.dtype = dtype, c.B = 2, c.H = 2, c.Hk = 2, c.Sq = 5, c.Sk = 6, c.D = 7, c.Dv = 8, c.bias = 4, c.dbias = true;
      int64_t* sizes[] = {&c.B, &c.H, &c.Sq, &c.Sk, &c.D, &c.Dv};
      *sizes[empty] = 0;
      if (empty == 1) c.Hk = 0;
      test(c);
    }
  }
}

// Every broadcast of the bias, with enough tasks to be shared out in every way.
void test_bias_broadcasts() {
  for (int broadcast = 0; broadcast < 16; ++broadcast) {
    Case c;
    c.bias = broadcast, c.dbias = true, c.Sq = 40, c.Sk = 300, c.D = c.Dv = 5;
    for (int shape = 0; shape < 4; ++shape) {
      c.B = shape == 1 ? 5 : 1 + shape / 2, c.Hk = shape == 3 ? 1 : 2, c.H = c.Hk * (shape == 3 ? 9 : 2);
      c.dtype = kTypes[shape % 2];
      c.seed = uint64_t(broadcast);
      test(c);
    }
  }
}

// No queries or no keys, but a gradient of a relative bias in more than one part: nothing is written beside the
// workspace. (What is added would be 0, which shows in -0.)
void test_relative_bias_of_nothing() {
  for (auto [Sq, Sk] : {std::pair<int64_t, int64_t>(100, 0), {0, 100}, {0, 0}}) {
    mha::AttentionBackward p;
    p.B = 4, p.H = p.Hk = 2, p.Sq = Sq, p.Sk = Sk, p.D = p.Dv = 8, p.rows_stride_b = 2 * Sq, p.rows_stride_h = Sq;
    std::vector<float> rows(size_t(p.B * p.H * (Sq + Sk) * 8)), lse(size_t(p.B * p.H * Sq)), bias(size_t(Sq + Sk));
    for (mha::Tensor4* x : {&p.q, &p.k, &p.v, &p.out, &p.dout, &p.dq, &p.dk, &p.dv}) {
      const int64_t length = x == &p.k || x == &p.v || x == &p.dk || x == &p.dv ? Sk : Sq;
      *x = {rows.data(), {2 * length * 8, length * 8, 8, 1}};
    }
    p.lse = lse.data();
    p.bias = p.dbias = {bias.data() + std::max<int64_t>(0, Sq - 1), {0, 0, -1, 1}};
    p.bias_relative = true;
    for (const mha::cpu::Kernels* kernels : every_isa()) {
      constexpr size_t kBefore = 256;
      std::vector<float> memory(2 * kBefore + kernels->attention_bwd_workspace(p, 1) / sizeof(float) + 16, -0.0f);
      char* workspace = reinterpret_cast<char*>(memory.data() + kBefore);
      workspace += (64 - reinterpret_cast<uintptr_t>(workspace) % 64) % 64;
      kernels->attention_bwd(p, threads(1), workspace);
      const bool untouched =
          std::all_of(memory.begin(), memory.begin() + kBefore, [](float x) { return std::signbit(x); });
      if (!untouched) fail(Case{}, kernels->isa, "a relative bias of nothing writes in front of its workspace");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int random_cases = argc > 1 ? std::atoi(argv[1]) : 200;
  test_sizes();
  test_bias_broadcasts();
  test_relative_bias_of_nothing();
  Random r{argc > 2 ? uint64_t(std::atoll(argv[2])) : 7};
  for (int n = 0; n < random_cases; ++n) test(random_case(r));
  std::printf(failures ? "%d cases failed\n" : "attention_bwd: all cases passed\n", failures);
  return failures != 0;
}
