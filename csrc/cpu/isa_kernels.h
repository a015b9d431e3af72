// All kernels, compiled once per ISA: the body of every isa_*.cpp, inside its target region.
#include "tiles.h"
//
#include "math.h"
//
#include "gemm.h"
#include "pack.h"
#include "philox_vec.h"
#include "tile_mask.h"

MHA_ISA_BEGIN

constexpr Kernels table(const char* isa) {
  Kernels k{};
  k.isa = isa;
  return k;
}

MHA_ISA_END
