// The vector functions of every instruction set: error bounds, special values, and the half types exhaustively.
#include "harness.h"
#include "math_probe.h"

using namespace harness;

namespace {

const double kInf = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();

template <class T>
std::vector<T> mapped(void (*f)(const T*, T*, int64_t), const std::vector<T>& x) {
  std::vector<T> y(x.size());
  f(x.data(), y.data(), int64_t(x.size()));
  return y;
}

// The largest error of f over x, in units of the distance between floats near the right value.
template <class T>
double worst_ulps(const std::vector<T>& x, const std::vector<T>& y, double (*exact)(double)) {
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = exact(double(x[i]));
    const double ulp = std::ldexp(sizeof(T) == 4 ? 0x1p-23 : 0x1p-52, std::max(std::ilogb(want), -125));
    const double error = std::fabs(double(y[i]) - want) / ulp;
    worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
  }
  return worst;
}

void bounded(double worst, double bound, const std::string& what) {
  char text[100];
  std::snprintf(text, sizeof text, " is off by %.3g ulps, more than %.3g", worst, bound);
  check(worst <= bound, what + text);
}

template <class T>
void special(void (*f)(const T*, T*, int64_t), double x, double want, const std::string& what) {
  T in = T(x), out = 7;
  f(&in, &out, 1);
  const double got = double(out);
  check(std::isnan(want) ? std::isnan(got) : got == want,
        what + " of " + std::to_string(x) + " is " + std::to_string(got));
}

void functions(const MathProbe& f, const std::string& isa) {
  std::vector<float> wide, near;
  for (int i = 0; i <= 400000; ++i) wide.push_back(float(-125.5 + i * 251.5 / 400000));
  for (int e = -60; e < 5; ++e)
    for (int i = 0; i < 500; ++i)
      for (const int sign : {-1, 1}) near.push_back(float(std::ldexp(sign * (1 + i / 500.0), e)));
  double (*const two_to)(double) = [](double x) { return std::exp2(x); };
  double (*const hyperbolic)(double) = [](double x) { return std::tanh(x); };
  bounded(worst_ulps(wide, mapped(f.exp2, wide), two_to), 2.5, isa + " exp2");
  bounded(worst_ulps(near, mapped(f.exp2, near), two_to), 2.5, isa + " exp2 near 0");
  bounded(worst_ulps(wide, mapped(f.exp2_for_half, wide), two_to), 6e-6 * 0x1p23, isa + " exp2 for half types");
  bounded(worst_ulps(near, mapped(f.tanh, near), hyperbolic), 3, isa + " tanh");
  const std::vector<double> wide64(wide.begin(), wide.end()), near64(near.begin(), near.end());
  bounded(worst_ulps(wide64, mapped(f.exp2_f64, wide64), two_to), 1, isa + " exp2 in fp64");
  bounded(worst_ulps(near64, mapped(f.tanh_f64, near64), hyperbolic), 2, isa + " tanh in fp64");
  for (auto* exp2 : {f.exp2, f.exp2_for_half}) {
    for (const double x : {-kInf, -1e30, -200.0}) special(exp2, x, 0, isa + " exp2");
    for (const double x : {0.0, -0.0}) special(exp2, x, 1, isa + " exp2");
    special(exp2, kNaN, kNaN, isa + " exp2");
    special(exp2, 10, 1024, isa + " exp2");
  }
  special(f.exp2_f64, -kInf, 0, isa + " exp2 in fp64");
  special(f.exp2_f64, kNaN, kNaN, isa + " exp2 in fp64");
  for (const double x : {0.0, -0.0}) special(f.tanh, x, x, isa + " tanh");
  for (const double x : {1e30, kInf}) special(f.tanh, x, 1, isa + " tanh"), special(f.tanh, -x, -1, isa + " tanh");
  special(f.tanh, kNaN, kNaN, isa + " tanh");
}

void half_type(void (*widen)(const uint16_t*, float*, int64_t), void (*narrow)(const float*, uint16_t*, int64_t),
               DType t, const std::string& isa) {
  const naive::FloatFormat format = t == DType::bf16 ? naive::kBf16 : naive::kF16;
  std::vector<uint16_t> bits(65536), back(65536);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = uint16_t(i);
  std::vector<float> values(65536);
  widen(bits.data(), values.data(), 65536);
  narrow(values.data(), back.data(), 65536);
  int wrong = 0, changed = 0;
  for (size_t i = 0; i < bits.size(); ++i) {
    const double want = naive::decode(bits[i], format);
    wrong += std::isnan(want) ? !std::isnan(values[i]) : double(values[i]) != want;
    if (t == DType::bf16 && std::fabs(want) < 0x1p-126) continue;  // bf16 instructions flush subnormal numbers to 0
    changed += std::isnan(want) ? !std::isnan(naive::decode(back[i], format)) : back[i] != bits[i];
  }
  check(wrong == 0, isa + " widens " + name_of(t));
  check(changed == 0, isa + " narrows what it widened to the same " + name_of(t));
  // Between each number and the next: just below, at and just above the middle.
  std::vector<float> x;
  for (uint32_t i = t == DType::bf16 ? 0x80 : 0; i < 0x7fffu; i += 3) {
    const double low = naive::decode(uint16_t(i), format), high = naive::decode(uint16_t(i + 1), format);
    if (std::isnan(low) || !std::isfinite(high)) continue;
    const float middle = float((low + high) / 2);
    for (const float y : {std::nextafter(middle, -1e38f), middle, std::nextafter(middle, 3e38f)})
      x.push_back(y), x.push_back(-y);
  }
  for (const float y : {65504.0f, 65519.0f, 65520.0f, 70000.0f, 3.39e38f}) x.push_back(y), x.push_back(-y);
  std::vector<uint16_t> y(x.size());
  narrow(x.data(), y.data(), int64_t(x.size()));
  int unlike = 0;
  for (size_t i = 0; i < x.size(); ++i) unlike += y[i] != naive::encode(double(x[i]), format);
  check(unlike == 0, isa + " rounds to the nearest " + name_of(t) + ": " + std::to_string(unlike) + " are wrong");
}

}  // namespace

int main() {
  const std::pair<const char*, MathProbe (*)()> probes[] = {
      {"scalar", math_probe_scalar},
#ifdef __x86_64__
      {"avx2", math_probe_avx2},
      {"avx512", math_probe_avx512},
      {"avx512_bf16", math_probe_avx512_bf16},
#elif defined(__aarch64__)
      {"neon", math_probe_neon},
      {"neon_bf16", math_probe_neon_bf16},
#endif
  };
  for (const std::string& isa : mha::cpu::available_isas()) {
    if (isa == "amx") continue;  // its vectors are those of avx512_bf16
    bool found = false;
    for (const auto& [name, probe] : probes) {
      if (name != isa) continue;
      found = true;
      functions(probe(), isa);
      half_type(probe().from_bf16, probe().to_bf16, DType::bf16, isa);
      half_type(probe().from_f16, probe().to_f16, DType::f16, isa);
    }
    check(found, "test_math knows " + isa);
  }
  return finish();
}
