// Compiled once per instruction set, with PROBE_<isa> defined.
#include "math_probe.h"

#include "../../csrc/cpu/isa/prelude.h"

#if defined(PROBE_avx2)
MHA_TARGET_BEGIN(MHA_AVX2)
#define MHA_ISA_NS avx2
#define PROBE math_probe_avx2
#include "../../csrc/cpu/vector/avx2.h"
#elif defined(PROBE_avx512)
MHA_TARGET_BEGIN(MHA_AVX512)
#define MHA_ISA_NS avx512
#define PROBE math_probe_avx512
#include "../../csrc/cpu/vector/avx512.h"
#elif defined(PROBE_avx512_bf16)
MHA_TARGET_BEGIN(MHA_AVX512_BF16)
#define MHA_ISA_NS avx512_bf16
#define MHA_HAS_BF16_DOT 1
#define PROBE math_probe_avx512_bf16
#include "../../csrc/cpu/vector/avx512.h"
#elif defined(PROBE_neon)
#define MHA_ISA_NS neon
#define PROBE math_probe_neon
#include "../../csrc/cpu/vector/neon.h"
#elif defined(PROBE_neon_bf16)
MHA_TARGET_BEGIN(MHA_NEON_BF16)
#define MHA_ISA_NS neon_bf16
#define MHA_HAS_BF16_DOT 1
#define PROBE math_probe_neon_bf16
#include "../../csrc/cpu/vector/neon.h"
#else
#define MHA_ISA_NS scalar
#define PROBE math_probe_scalar
#include "../../csrc/cpu/vector/scalar.h"
#endif
#include "../../csrc/cpu/vector/math.h"

MHA_ISA_BEGIN

template <class T, auto function>
void map(const T* x, T* y, int64_t n) {
  constexpr int L = Vec<T>::lanes;
  for (int64_t i = 0; i < n; i += L) {
    const int lanes = int(min64(L, n - i));
    store_n(y + i, function(lanes == L ? load(x + i) : load_n(x + i, lanes)), lanes);
  }
}

// Whole vectors and, in every second step, the first lanes of one: both ways to load and store.
template <class To, class From>
void convert(const From* x, To* y, int64_t n) {
  constexpr int L = VecF::lanes;
  for (int64_t i = 0, step = 0; i < n; ++step) {
    const int lanes = int(min64(step % 2 ? L - 1 : L, n - i));
    if (lanes == L)
      store(y + i, load(x + i));
    else
      store_n(y + i, load_n(x + i, lanes), lanes);
    i += lanes;
  }
}

template <class Half>
void widen_row(const uint16_t* x, float* y, int64_t n) {
  convert(reinterpret_cast<const Half*>(x), y, n);
}
template <class Half>
void narrow_row(const float* x, uint16_t* y, int64_t n) {
  convert(x, reinterpret_cast<Half*>(y), n);
}

VecF exp2_5(VecF x) { return exp2<5>(x); }
VecF exp2_4(VecF x) { return exp2<4>(x); }
VecD exp2_d(VecD x) { return exp2<5>(x); }
VecF tanh_f(VecF x) { return tanh(x); }
VecD tanh_d(VecD x) { return tanh(x); }

MHA_ISA_END

MathProbe PROBE() {
  using namespace mha::cpu;
  using namespace mha::cpu::MHA_ISA_NS;
  return {map<float, exp2_5>, map<float, exp2_4>, map<float, tanh_f>, map<double, exp2_d>, map<double, tanh_d>,
          widen_row<bf16>,    widen_row<f16>,     narrow_row<bf16>,   narrow_row<f16>};
}

#if !defined(PROBE_scalar) && !defined(PROBE_neon)
MHA_TARGET_END
#endif
