// All kernels, compiled once per ISA: the body of every isa/*.cpp, inside its target region.
#include "../tiles.h"
//
#include "../vector/math.h"
//
#include "../attention/bwd.h"
#include "../attention/fwd.h"
#include "../attention/mixed/bwd.h"
#include "../attention/mixed/fwd.h"
#include "../product/gemm.h"
#include "../product/pack.h"
#include "../rows/dropout_mask.h"
#include "../rows/heads.h"
#include "../rows/masked_softmax.h"
#include "../tile/mask.h"
#include "../vector/philox.h"
#include "attention_plan.h"

MHA_ISA_BEGIN

constexpr Kernels table(const char* isa) {
  Kernels k{};
  k.isa = isa;
  k.attention_fwd = flushing<attention_fwd>;
  k.attention_fwd_workspace = attention_fwd_workspace;
  k.attention_bwd = flushing<attention_bwd>;
  k.attention_bwd_workspace = attention_bwd_workspace;
  k.attention_mixed_fwd = flushing<attention_mixed_fwd>;
  k.attention_mixed_fwd_workspace = attention_mixed_fwd_workspace;
  k.attention_mixed_bwd = flushing<attention_mixed_bwd>;
  k.attention_mixed_bwd_workspace = attention_mixed_bwd_workspace;
  k.attention_plan = attention_plan;
  k.attention_mixed_plan = attention_mixed_plan;
  k.masked_softmax_fwd = flushing<masked_softmax_fwd>;
  k.masked_softmax_bwd = flushing<masked_softmax_bwd>;
  k.split_heads = flushing<split_heads>;
  k.merge_heads = flushing<merge_heads>;
  k.dropout_mask = dropout_mask;
  return k;
}

MHA_ISA_END
