// Powers of two beside tiles. While these are at work, and for some hundred cycles after, only one of two ports
// multiplies vectors: each of these takes fewer multiplications than exp2 of vector/math.h. Where results would be
// denormal they are 0, as kernels flush them.
#pragma once

#include "../../vector/math.h"

MHA_ISA_BEGIN

// 2^(score * exponent - base), by a table of sixteenths, which may be scaled; 4e-7 relative. Its constants stay in
// registers: the compiler would load each anew, as tile instructions seem to change memory.
struct Weigher {
  __m512 exponent, table, magic, square, linear;

  MHA_INLINE Weigher(float score_exponent, const float* sixteenths) {
    exponent = _mm512_set1_ps(score_exponent), table = _mm512_load_ps(sixteenths);
    magic = _mm512_set1_ps(786432.0f);  // 1.5 * 2^19: the last bit of a sum is a sixteenth
    square = _mm512_set1_ps(0.240226507f), linear = _mm512_set1_ps(0.693187833f);
    asm("" : "+v"(exponent), "+v"(table), "+v"(magic), "+v"(square), "+v"(linear));
  }
  // The score is not infinite.
  MHA_INLINE __m512 operator()(__m512 score, __m512 base) const {
    const __m512 x = _mm512_fmsub_ps(score, exponent, base);
    const __m512 shifted = _mm512_add_ps(x, magic), rounded = _mm512_sub_ps(shifted, magic);
    const __m512 rest = _mm512_sub_ps(x, rounded);
    const __m512 sixteenth = _mm512_permutexvar_ps(_mm512_castps_si512(shifted), table);
    const __m512 slope = _mm512_fmadd_ps(square, rest, linear);
    return _mm512_scalef_ps(_mm512_fmadd_ps(_mm512_mul_ps(rest, sixteenth), slope, sixteenth), rounded);
  }
};

// 2^x for what is rounded to Planes numbers of bf16: 8e-5 relative for one, 3e-6 for two; 0 at -inf, NaN at NaN. (In
// forward, whose weights are relative to a base, a polynomial of degree 4 took 10 to 20 % longer than the table.)
template <int Planes>
MHA_INLINE VecF exp2_for_planes(VecF x) {
  const VecF f{_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};  // x less floor(x), 0 at infinity
  VecF q;
  if constexpr (Planes > 1) {
    q = fma(set1(0.013534168f), f, set1(0.05201146f));
    q = fma(q, f, set1(0.24144275f));
    q = fma(q, f, set1(0.69300383f));
    q = fma(q, f, set1(1.0000026f));
  } else {
    q = fma(set1(0.07802452f), f, set1(0.22606716f));
    q = fma(q, f, set1(0.69583356f));
    q = fma(q, f, set1(0.9999252f));
  }
  return {_mm512_scalef_ps(q.v, x.v)};  // times 2^floor(x)
}

MHA_ISA_END
