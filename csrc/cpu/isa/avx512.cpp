// The kernels for AVX-512 (F, BW, DQ, VL).
#include "prelude.h"

#if defined(__x86_64__)
MHA_TARGET_BEGIN(MHA_AVX512)

#define MHA_ISA_NS avx512
#include "../vector/avx512.h"
//
#include "all_kernels.h"

namespace mha::cpu {
const Kernels& kernels_avx512() {
  static constexpr Kernels k = avx512::table("avx512");
  return k;
}
}  // namespace mha::cpu
MHA_TARGET_END
#endif
