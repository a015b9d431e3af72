// The kernels for AMX tiles of bf16 and bytes, on top of avx512_bf16.
#include "prelude.h"

#if defined(__x86_64__)
MHA_TARGET_BEGIN(MHA_AMX)
#define MHA_HAS_BF16_DOT 1
#define MHA_HAS_AMX 1
#define MHA_HAS_VBMI 1

#define MHA_ISA_NS amx
#include "../vector/avx512.h"
//
#include "all_kernels.h"

namespace mha::cpu {
const Kernels& kernels_amx() {
  static constexpr Kernels k = amx::table("amx");
  return k;
}
}  // namespace mha::cpu
MHA_TARGET_END
#endif
