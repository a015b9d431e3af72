// The kernels for NEON, as every ARM64 processor has it.
#include "prelude.h"

#if defined(__aarch64__)
#define MHA_ISA_NS neon
#include "../vector/neon.h"
//
#include "all_kernels.h"

namespace mha::cpu {
const Kernels& kernels_neon() {
  static constexpr Kernels k = neon::table("neon");
  return k;
}
}  // namespace mha::cpu
#endif
