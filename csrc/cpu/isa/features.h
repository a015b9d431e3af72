// What this processor and operating system can run, asked of the hardware (x86: CPUID for the instructions, XGETBV for
// whether the system saves their registers) or, on ARM64, of the system.
#pragma once

namespace mha::cpu {

struct CpuFeatures {
  bool avx2 = false;         // AVX2, FMA and F16C
  bool avx512 = false;       // avx2 and AVX512 F, BW, CD, DQ, VL
  bool avx512_bf16 = false;  // avx512 and its bf16 dot products
  bool amx = false;          // avx512_bf16 and AMX-BF16, which takes request_tiles() too
  bool neon_bf16 = false;    // dot products of bf16 (FEAT_BF16)
};

CpuFeatures detect_cpu_features();

// Whether the system lets this process use the tiles of AMX. Linux, once asked, saves their 8 KB for all threads and
// for processes that they fork, and from then on signal stacks must have room for them; it refuses where one has not.
// So it is asked when AMX is wanted, once, and answers for good.
bool request_tiles();

}  // namespace mha::cpu
