// The product on tiles, compiled as isa/amx.cpp compiles it.
#include "amx_probe.h"

#include "../../csrc/cpu/isa/prelude.h"

MHA_TARGET_BEGIN(MHA_AMX)
#define MHA_HAS_BF16_DOT 1
#define MHA_HAS_AMX 1
#define MHA_ISA_NS amx_probe
#include "../../csrc/cpu/vector/avx512.h"
//
#include "../../csrc/cpu/product/gemm.h"

namespace {

template <class Unit>
void multiply(const AmxGemm& g) {
  using namespace mha::cpu::amx_probe;
  const AmxTiles tiles;
  const Start start = g.scale ? Start::scale : g.add ? Start::add : Start::zero;
  gemm<Unit>(g.M, g.N, g.K, static_cast<const Unit*>(g.a), g.am, 1, static_cast<const Unit*>(g.b), g.ldb, g.c, g.ldc,
             start, g.scale, {g.M * g.am, g.K * g.ldb, g.all});
}

}  // namespace

void amx_gemm(const AmxGemm& g) {
  using namespace mha::cpu::amx_probe;
  g.planes == 2 ? multiply<Pairs<2>>(g) : multiply<Pair>(g);
}

MHA_TARGET_END
