// The kernels for NEON with products of bf16 (BFDOT, BFMMLA: ARMv8.6, and many of ARMv8.2 on).
#include "prelude.h"

#if defined(__aarch64__)
MHA_TARGET_BEGIN(MHA_NEON_BF16)
#define MHA_HAS_BF16_DOT 1
#define MHA_HAS_BFMMLA 1

#define MHA_ISA_NS neon_bf16
#include "../vector/neon.h"
//
#include "all_kernels.h"

namespace mha::cpu {
const Kernels& kernels_neon_bf16() {
  static constexpr Kernels k = neon_bf16::table("neon_bf16");
  return k;
}
}  // namespace mha::cpu
MHA_TARGET_END
#endif
