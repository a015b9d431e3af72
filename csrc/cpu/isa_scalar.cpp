// The kernels for the compiler's base target.
#include "isa_prelude.h"

#define MHA_ISA_NS scalar
#include "vec_scalar.h"
//
#include "isa_kernels.h"

namespace mha::cpu {
const Kernels& kernels_scalar() {
  static constexpr Kernels k = scalar::table("scalar");
  return k;
}
}  // namespace mha::cpu
