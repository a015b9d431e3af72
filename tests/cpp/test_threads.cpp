// Many callers at once, each with threads of its own: the first call chooses the instruction set, and each gets the
// bits that it gets alone. ThreadSanitizer looks at this program (MHA_EXT_SANITIZE=thread).
#include <cstring>
#include <thread>

#include "attention_bwd_cases.h"
#include "harness.h"

namespace {

using namespace attention_bwd_cases;
using mha::cpu::Kernels;

Case example(int i) {
  Case c;
  c.dtype = harness::kDtypes[i % 4], c.B = 2, c.H = 4, c.Hk = 2, c.Sq = i % 3 ? 130 : 3, c.Sk = 140, c.D = 24,
  c.Dv = 16;
  c.heads_inside = i % 2, c.band_hi = c.Sk - c.Sq, c.bias = i % 2 ? kNone : 0b0011, c.dbias = c.bias != kNone;
  c.dropout = i % 3 == 2 ? 0.25 : -1, c.seed = uint64_t(i + 1);
  return c;
}

// Every byte that forward and backward write.
std::vector<unsigned char> results(const Case& c, const Kernels& kernels) {
  Inputs in;
  make_inputs(c, in);
  const mha::AttentionForward f = forward_of(in);
  Workspace forward(kernels.attention_fwd_workspace(f, 3));
  kernels.attention_fwd(f, threads(3), forward.data.get());
  Outputs o = make_outputs(c, c.dtype, in.p);
  Workspace backward(kernels.attention_bwd_workspace(in.p, 2));
  kernels.attention_bwd(in.p, threads(2), backward.data.get());
  std::vector<unsigned char> all;
  for (const Strided* x : {&in.out, &o.dq, &o.dk, &o.dv, &o.dbias})
    all.insert(all.end(), x->bytes().begin(), x->bytes().end());
  return all;
}

}  // namespace

int main() {
  constexpr int kCallers = 6;
  std::vector<unsigned char> together[kCallers];
  const Kernels* chosen[kCallers];
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) {
    callers.emplace_back([&, i] {
      chosen[i] = &mha::cpu::kernels();
      for (int again = 0; again < 2; ++again) together[i] = results(example(i), *chosen[i]);
    });
  }
  for (std::thread& t : callers) t.join();
  for (int i = 0; i < kCallers; ++i) {
    harness::check(chosen[i] == &mha::cpu::kernels(), "all callers choose the same instruction set");
    harness::check(together[i] == results(example(i), *chosen[i]),
                   "other callers change no bit of " + example(i).text());
  }
  return harness::finish();
}
