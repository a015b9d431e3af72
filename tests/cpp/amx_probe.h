// product/gemm.h's product of Pairs of bf16 on AMX tiles, for test_amx.
#pragma once
#include <cstdint>

struct AmxGemm {
  int M, N, K;    // K in pairs
  const void* a;  // [M][am] pairs
  const void* b;  // [K][ldb] pairs
  float* c;       // [M][ldc]
  int64_t am, ldb, ldc;
  int planes;  // of a and b: 1 or 2, one after the other
  bool all;    // products of planes
  bool add;
  const float* scale;  // [N], or null
};

void amx_gemm(const AmxGemm& g);
