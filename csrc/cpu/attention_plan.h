// What attention_fwd and attention_bwd will do for a problem, as numbers for `explain`.
#pragma once

#include "attention_bwd.h"
#include "attention_fwd.h"

MHA_ISA_BEGIN

inline AttentionPlan attention_plan(const AttentionProblem& p, int threads) {
  AttentionForward forward;
  static_cast<AttentionProblem&>(forward) = p;
  AttentionBackward backward;
  static_cast<AttentionProblem&>(backward) = p;
  AttentionPlan plan;
  plan.arithmetic = p.dtype == DType::f64 ? "double" : "float";
#ifdef MHA_HAS_BF16_DOT
  if (p.dtype == DType::bf16) plan.arithmetic = "bf16 pairs, summed in float";
#endif
  plan.block_rows = kMaxRows, plan.tile_keys = kMaxKeys;
  plan.fwd_tasks = ForwardPlan(p).tasks, plan.bwd_tasks = BackwardPlan(backward).units();
  plan.fwd_workspace = attention_fwd_workspace(forward, threads);
  plan.bwd_workspace = attention_bwd_workspace(backward, threads);
  return plan;
}

MHA_ISA_END
