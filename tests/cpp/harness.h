// Checks, rounding bounds and comparisons, on top of case_tools.h. A test is a program: main runs its cases and returns
// finish().
#pragma once
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "case_tools.h"
#include "isas.h"

namespace harness {

using mha::DType;
using mha::cpu::Kernels;
using namespace tools;

// ---- checks --------------------------------------------------------------------------------------------------------

inline int checks = 0, failures = 0;

inline bool check(bool ok, const std::string& what) {
  ++checks;
  if (!ok && ++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
  return ok;
}

inline int finish() {
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 && checks > 0 ? 0 : 1;
}

constexpr DType kDtypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

inline const char* name_of(DType t) {
  return t == DType::f64 ? "f64" : t == DType::f32 ? "f32" : t == DType::bf16 ? "bf16" : "f16";
}

// Half the distance between 1 and the next number: the relative error of one rounding.
inline double rounding(DType t) {
  return std::ldexp(1.0, t == DType::f64 ? -53 : t == DType::f32 ? -24 : t == DType::bf16 ? -8 : -11);
}

// The smallest step between numbers near 0.
inline double least_step(DType t) {
  return std::ldexp(1.0, t == DType::f64 ? -1022 : t == DType::f32 ? -126 : t == DType::bf16 ? -126 : -24);
}

// ---- tensors -------------------------------------------------------------------------------------------------------

const Layout kContiguous{}, kHeadsInside{{0, 2, 1, 3}, 3, 1}, kTransposed{{0, 1, 3, 2}, 1, 1},
    kEverySecond{{0, 1, 2, 3}, 1, 2};

inline Strided random_tensor(DType t, int64_t n0, int64_t n1, int64_t n2, int64_t n3, Random& random,
                             const Layout& layout = {}, int broadcast = 0) {
  Strided x(t, n0, n1, n2, n3, layout, broadcast);
  x.fill([&] { return random.uniform(); });
  return x;
}

// Checks |got - want| <= bound(|want|) everywhere, NaN only where wanted, and that nothing else was written.
template <class Bound>
void compare(const Strided& got, const Strided& want, Bound bound, const std::string& what) {
  const naive::Array4 x = got.read(), y = want.read();
  double worst = 0;
  size_t at = 0;
  for (size_t n = 0; n < x.values.size(); ++n) {
    const double a = x.values[n], b = y.values[n];
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    const double share = std::fabs(a - b) / bound(std::fabs(b));
    if (share <= worst) continue;
    worst = std::isnan(share) ? std::numeric_limits<double>::infinity() : share, at = n;
  }
  char text[200] = "";
  if (worst > 1)
    std::snprintf(text, sizeof text, ": element %zu is %.9g, expected %.9g, error / bound %.3g", at, x.values[at],
                  y.values[at], worst);
  check(worst <= 1, what + text);
  check(got.surroundings_untouched(), what + ": wrote outside of the tensor");
}

}  // namespace harness
