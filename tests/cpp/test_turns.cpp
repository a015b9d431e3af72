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
  Case& dense = add(DType::bf16, 260, 330);
  dense.dense = 0b0001, dense.poison_seen = true;
  Case& many = add(DType::f16, 190, 190);
  many.B = 2, many.H = 6, many.Hk = 1, many.band_hi = 0, many.poison_seen = true;
  return all;
}

}  // namespace

int main() {
  for (const Case& c : cases()) test(c);
  return harness::finish();
}
