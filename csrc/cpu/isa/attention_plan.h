// What attention_fwd and attention_bwd will do for a problem, as numbers for `explain`.
#pragma once

#include "attention_schedule.h"

MHA_ISA_BEGIN

inline AttentionPlan attention_plan(const AttentionProblem& p, int threads) {
  AttentionForward forward;
  static_cast<AttentionProblem&>(forward) = p;
  AttentionBackward backward;
  static_cast<AttentionProblem&>(backward) = p;
  backward.dbias = p.bias;  // only asked whether it is there, and what shares it
  AttentionPlan plan;
  plan.arithmetic = p.dtype == DType::f64 ? "double" : "float";
  [[maybe_unused]] const bool few = ForwardPlan(p).rows_per_list <= kFewRows;
#ifdef MHA_HAS_BF16_DOT
  if (p.dtype == DType::bf16)
    plan.arithmetic = kAmxUnit<Pair> ? "bf16 tiles, summed in float" : "bf16 pairs, summed in float";
#endif
#ifdef MHA_HAS_AMX
  if (p.dtype == DType::f16 && !few) plan.arithmetic = "tiles of two bf16 pieces, summed in float";
#endif
  plan.block_rows = kMaxRows, plan.tile_keys = kMaxKeys;
  plan.fwd_tasks = ForwardPlan(p).tasks * ForwardPlan(p).parts, plan.bwd_tasks = backward_tasks(backward, threads);
  plan.fwd_efficiency = forward_efficiency(forward, threads);
  plan.bwd_efficiency = backward_efficiency(backward, threads);
  plan.fwd_workspace = attention_fwd_workspace(forward, threads);
  plan.bwd_workspace = attention_bwd_workspace(backward, threads);
  return plan;
}

// The same of attention_mixed_fwd and attention_mixed_bwd, with both mixes.
inline AttentionPlan attention_mixed_plan(const AttentionProblem& p, int threads) {
  const float mixed = 0;  // only asked whether it is there
  AttentionMixedForward forward;
  static_cast<AttentionProblem&>(forward) = p;
  forward.pre_mix = forward.post_mix = &mixed;
  AttentionMixedBackward backward;
  static_cast<AttentionProblem&>(backward) = p;
  backward.pre_mix = backward.post_mix = &mixed;
  AttentionPlan plan;
  plan.arithmetic = p.dtype == DType::f64 ? "double" : "float";
  plan.block_rows = kMaxRows, plan.tile_keys = kMixKeys;
  plan.fwd_tasks = mixed_forward_tasks(p), plan.bwd_tasks = MixedBackwardPlan(backward).tasks;
  plan.fwd_efficiency = mixed_forward_efficiency(p, threads);
  plan.bwd_efficiency = mixed_backward_efficiency(backward, threads);
  plan.fwd_workspace = attention_mixed_fwd_workspace(forward, threads);
  plan.bwd_workspace = attention_mixed_bwd_workspace(backward, threads);
  return plan;
}

MHA_ISA_END
