// The kernels for AMX tiles of bf16, on top of avx512_bf16.
#include "isa_prelude.h"

#if defined(__x86_64__)
// The target region lasts to the end of the file, where templates are instantiated.
#pragma GCC target(                                                                             \
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,amx-tile,amx-bf16," \
    "prefer-vector-width=512")
#define MHA_HAS_BF16_DOT 1
#define MHA_HAS_AMX 1
#define MHA_HAS_VBMI 1

#define MHA_ISA_NS amx
#include "vec_avx512.h"
//
#include "isa_kernels.h"

namespace mha::cpu {
const Kernels& kernels_amx() {
  static constexpr Kernels k = amx::table("amx");
  return k;
}
}  // namespace mha::cpu
#endif
