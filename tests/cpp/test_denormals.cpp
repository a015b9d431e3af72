// No kernel makes denormal numbers of ordinary inputs, hidden pairs among them: each would cost hundreds of cycles. The
// processor remembers: flags of the thread's control register stay set.
#include "attention_bwd_cases.h"
#include "harness.h"

#ifdef __x86_64__
#include <immintrin.h>

namespace {

using attention_bwd_cases::Case;

constexpr unsigned kDenormal = 0x02, kUnderflow = 0x10;

template <class F>
void quiet(F f, const std::string& what) {
  _mm_setcsr(_mm_getcsr() & ~(kDenormal | kUnderflow));
  f();
  const unsigned flags = _mm_getcsr();
  harness::check(!(flags & kDenormal), what + " reads denormal numbers");
  harness::check(!(flags & kUnderflow), what + " makes denormal numbers");
}

void attention(const Case& c, const mha::cpu::Kernels& kernels) {
  using namespace attention_bwd_cases;
  const std::string what = std::string(kernels.isa) + " " + harness::name_of(c.dtype) + " " + c.text() + ":";
  Inputs in;
  make_inputs(c, in);
  mha::AttentionForward f;
  static_cast<mha::AttentionProblem&>(f) = in.p;
  f.out = in.out.t, f.lse = const_cast<void*>(in.p.lse), f.lse_rest = const_cast<void*>(in.p.lse_rest);
  Workspace forward(kernels.attention_fwd_workspace(f, 1));
  quiet([&] { kernels.attention_fwd(f, threads(1), forward.data.get()); }, what + " forward");
  Outputs o = make_outputs(c, c.dtype, in.p);
  Workspace backward(kernels.attention_bwd_workspace(in.p, 1));
  quiet([&] { kernels.attention_bwd(in.p, threads(1), backward.data.get()); }, what + " backward");
}

void softmax(mha::DType t, const mha::cpu::Kernels& kernels) {
  harness::Random random{3};
  constexpr int64_t kRows = 20, kKeys = 70;
  harness::Strided scores = harness::random_tensor(t, 1, 2, kRows, kKeys, random), out(t, 1, 2, kRows, kKeys),
                   dout = harness::random_tensor(t, 1, 2, kRows, kKeys, random), dscores(t, 1, 2, kRows, kKeys);
  std::vector<float> lse(2 * kRows);
  mha::MaskedSoftmaxForward f;
  f.B = 1, f.H = 2, f.Sq = kRows, f.Sk = kKeys, f.dtype = t, f.scores = scores.t, f.mask.band_hi = kKeys - kRows;
  f.out = out.t, f.lse = lse.data();
  mha::MaskedSoftmaxBackward b;
  static_cast<mha::MaskedSoftmaxProblem&>(b) = f;
  b.dout = dout.t, b.lse = lse.data(), b.dscores = dscores.t;
  const std::string what = std::string(kernels.isa) + " " + harness::name_of(t) + " softmax ";
  quiet([&] { kernels.masked_softmax_fwd(f, harness::threads(1)); }, what + "forward");
  quiet([&] { kernels.masked_softmax_bwd(b, harness::threads(1)); }, what + "backward");
}

}  // namespace

int main() {
  for (const mha::cpu::Kernels* kernels : every_isa()) {
    for (const mha::DType t : {mha::DType::f32, mha::DType::bf16}) {
      for (const bool causal : {true, false}) {
        for (const int64_t queries : {1, 20, 130}) {
          Case c;
          c.dtype = t, c.H = 2, c.Sq = queries, c.Sk = 130, c.D = c.Dv = 32, c.scale = 0.2;
          c.band_hi = causal ? c.Sk - c.Sq - 3 : mha::kNoLimit;
          c.documents = !causal;
          attention(c, *kernels);
        }
      }
      softmax(t, *kernels);
    }
  }
  return harness::finish();
}
#else
int main() { return 0; }
#endif
