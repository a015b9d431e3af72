// The kernels for the compiler's base target.
#include "prelude.h"

#define MHA_ISA_NS scalar
#include "../vector/scalar.h"
//
#include "all_kernels.h"

namespace mha::cpu {
const Kernels& kernels_scalar() {
  static constexpr Kernels k = scalar::table("scalar");
  return k;
}
}  // namespace mha::cpu
