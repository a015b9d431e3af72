// The ops of attention with talking heads, written once over a backend as those of ops.h.
#pragma once
#include "ops.h"

namespace mha::torch_layer {

// pre_mix or post_mix: its data, or null.
inline const void* mix_data(const OptionalTensor& mix, const char* name, const AttentionProblem& p,
                            AttentionInputs& in) {
  if (!mix) return nullptr;
  check_shape(*mix, name, {p.H, p.H});
  check_device(*mix, name, in.q, "q");
  ScalarType accumulate = scalar_type_of(accumulate_type(p.dtype));
  MHA_CHECK(mix->scalar_type() == accumulate, name, " has dtype ", torch::headeronly::toString(mix->scalar_type()),
            "; the op accepts ", torch::headeronly::toString(accumulate), ".");
  in.keep.push_back(torch::stable::contiguous(*mix));
  return in.keep.back().data_ptr();
}

// The zeroed gradient of a mix, and its data.
inline Tensor zeros_dmix(const OptionalTensor& mix, const AttentionProblem& p, const Tensor& q, void*& data) {
  Tensor sum = empty(mix ? Sizes{p.H, p.H} : Sizes{0}, scalar_type_of(accumulate_type(p.dtype)), q);
  data = mix ? torch::stable::zero_(sum).data_ptr() : nullptr;
  return sum;
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_mixed_fwd(Tensor q, Tensor k, Tensor v, OptionalTensor pre_mix,
                                                               OptionalTensor post_mix, BiasAndMask mask,
                                                               Sequences sequences, Scores scores,
                                                               DropoutArguments dropout, bool return_weights,
                                                               bool /*deterministic: for backward*/) {
  AttentionMixedForward p;
  AttentionInputs in = attention_inputs(q, k, v);
  fill_attention(p, in, mask, sequences, scores, dropout);
  p.pre_mix = mix_data(pre_mix, "pre_mix", p, in);
  p.post_mix = mix_data(post_mix, "post_mix", p, in);
  ForwardOutputs to(p, q, return_weights);
  Backend::attention_mixed_fwd(p, q);
  return {to.out, to.lse, to.lse_rest, to.weights};
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_mixed_bwd(
    Tensor dout, OptionalTensor dlse, OptionalTensor dweights, Tensor q, Tensor k, Tensor v, Tensor lse,
    Tensor lse_rest, OptionalTensor pre_mix, OptionalTensor post_mix, BiasAndMask mask, Sequences sequences,
    Scores scores, DropoutArguments dropout, bool need_dbias, bool deterministic) {
  AttentionMixedBackward p;
  AttentionInputs in = attention_inputs(q, k, v);
  fill_attention(p, in, mask, sequences, scores, dropout);
  p.pre_mix = mix_data(pre_mix, "pre_mix", p, in);
  p.post_mix = mix_data(post_mix, "post_mix", p, in);
  fill_backward(p, in, dout, dlse, dweights, lse, lse_rest, deterministic);
  Gradients to(p, q, k, v, mask.bias, need_dbias);
  Tensor dpre_mix = zeros_dmix(pre_mix, p, q, p.dpre_mix), dpost_mix = zeros_dmix(post_mix, p, q, p.dpost_mix);
  Backend::attention_mixed_bwd(p, q);
  return {to.dq, to.dk, to.dv, to.dbias_like(mask.bias, need_dbias), to.dsinks, dpre_mix, dpost_mix};
}

// Registers them for Backend; use inside STABLE_TORCH_LIBRARY_IMPL.
#define MHA_REGISTER_MIXED_OPS(m, Backend)          \
  MHA_REGISTER_OP(m, attention_mixed_fwd, Backend); \
  MHA_REGISTER_OP(m, attention_mixed_bwd, Backend)

}  // namespace mha::torch_layer
