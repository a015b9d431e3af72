// The vector functions of one instruction set, as functions over arrays.
#pragma once
#include <cstdint>

struct MathProbe {
  void (*exp2)(const float* x, float* y, int64_t n);           // the accurate one
  void (*exp2_for_half)(const float* x, float* y, int64_t n);  // the one for half outputs
  void (*tanh)(const float* x, float* y, int64_t n);
  void (*exp2_f64)(const double* x, double* y, int64_t n);
  void (*tanh_f64)(const double* x, double* y, int64_t n);
  void (*from_bf16)(const uint16_t* x, float* y, int64_t n);
  void (*from_f16)(const uint16_t* x, float* y, int64_t n);
  void (*to_bf16)(const float* x, uint16_t* y, int64_t n);
  void (*to_f16)(const float* x, uint16_t* y, int64_t n);
};

MathProbe math_probe_scalar();
MathProbe math_probe_avx2();
MathProbe math_probe_avx512();
MathProbe math_probe_avx512_bf16();
MathProbe math_probe_neon();
MathProbe math_probe_neon_bf16();
