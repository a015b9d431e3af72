// What this processor and operating system can run, asked of the hardware (CPUID for the instructions, XGETBV for
// whether the system saves their registers). The system lets a process use AMX once it asks (isa.cpp).
#pragma once

namespace mha::cpu {

struct CpuFeatures {
  bool avx2 = false;         // AVX2, FMA and F16C
  bool avx512 = false;       // avx2 and AVX512 F, BW, CD, DQ, VL
  bool avx512_bf16 = false;  // avx512 and its bf16 dot products
  bool amx = false;          // avx512_bf16 and AMX-BF16
};

CpuFeatures detect_cpu_features();

}  // namespace mha::cpu
