// Vector exp2 and tanh. The coefficients are minimax fits (relative error on the interval given).
//
// This room includes csrc/cpu.
#pragma once

MHA_ISA_BEGIN

constexpr double kLog2e = 1.44269504088896340736, kLn2 = 0.69314718055994530942;

// 2^x for x <= 127; exactly 1 at 0, exactly 0 below -126 and so at -inf, NaN at NaN. Degree 5: about 1 ulp of float; 4:
// 3e-6 relative, ample where the result is rounded to a half type. No lane makes a denormal number, which takes
// processors hundreds of cycles, as does finding that a result rounds to 0.
template <int Degree>
MHA_INLINE VecF exp2(VecF x) {
  const VecMask<float> normal = not_less(x, set1(-126.0f));
  VecF n, f = split_round(x, &n), q;
  if constexpr (Degree >= 5) {
    q = fma(set1(0.00132647239f), f, set1(0.00967151287f));
    q = fma(q, f, set1(0.0555073375f));
    q = fma(q, f, set1(0.240222421f));
    q = fma(q, f, set1(0.693146978f));
  } else {
    q = fma(set1(0.00958285066f), f, set1(0.0559064282f));
    q = fma(q, f, set1(0.240240987f));
    q = fma(q, f, set1(0.693124193f));
  }
  return scale_pow2(fma(q, f, set1(1.0f)), n, normal);
}

template <int Degree>
MHA_INLINE VecD exp2(VecD x) {
  double lane[VecD::lanes];
  store(lane, x);
  for (double& y : lane) y = std::exp2(y);
  return load(lane);
}

// An odd polynomial near 0, where 1 - 2^(..) would cancel; (1 - e) / (1 + e) with e = exp(-2|x|) elsewhere.
MHA_INLINE VecF tanh(VecF x) {
  VecF a = abs(x), z = x * x;
  VecF q = fma(set1(-0.00570497836f), z, set1(0.0206390787f));
  q = fma(q, z, set1(-0.0537397122f));
  q = fma(q, z, set1(0.133314422f));
  q = fma(q, z, set1(-0.333332819f));
  VecF small = fma(x * z, q, x);
  VecF e = exp2<5>(a * set1(float(-2 * kLog2e)));
  VecF large = copysign((set1(1.0f) - e) / (set1(1.0f) + e), x);
  return select(less(a, set1(0.625f)), small, large);
}

MHA_INLINE VecD tanh(VecD x) {
  double lane[VecD::lanes];
  store(lane, x);
  for (double& y : lane) y = std::tanh(y);
  return load(lane);
}

MHA_ISA_END
