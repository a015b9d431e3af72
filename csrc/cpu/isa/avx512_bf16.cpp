// The kernels for AVX-512 with bf16 dot products (avx512_bf16).
#include "prelude.h"

#if defined(__x86_64__)
MHA_TARGET_BEGIN(MHA_AVX512_BF16)
#define MHA_HAS_BF16_DOT 1

#define MHA_ISA_NS avx512_bf16
#include "../vector/avx512.h"
//
#include "all_kernels.h"

namespace mha::cpu {
const Kernels& kernels_avx512_bf16() {
  static constexpr Kernels k = avx512_bf16::table("avx512_bf16");
  return k;
}
}  // namespace mha::cpu
MHA_TARGET_END
#endif
