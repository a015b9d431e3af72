// The kernels for AVX2, FMA and F16C.
#include "prelude.h"

#if defined(__x86_64__)
MHA_TARGET_BEGIN(MHA_AVX2)

#define MHA_ISA_NS avx2
#include "../vector/avx2.h"
//
#include "all_kernels.h"

namespace mha::cpu {
const Kernels& kernels_avx2() {
  static constexpr Kernels k = avx2::table("avx2");
  return k;
}
}  // namespace mha::cpu
MHA_TARGET_END
#endif
