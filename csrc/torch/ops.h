// The ops, written once over a backend: a struct whose static functions launch the kernels of one device.
#pragma once
#include "problems.h"

namespace mha::torch_layer {

// The outputs of attention forward, and their places in the problem.
struct ForwardOutputs {
  Tensor out, lse, lse_rest, weights;

  ForwardOutputs(AttentionForward& p, const Tensor& q, bool return_weights)
      : out(empty_in_order_of(q, p.Dv)), lse(empty_lse(q)), lse_rest(empty_lse(q)) {
    MHA_CHECK(!return_weights || !p.q_starts, "return_weights is true for packed sequences; it must be false.");
    weights = empty(return_weights ? Sizes{p.B, p.H, p.Sq, p.Sk} : Sizes{0}, q.scalar_type(), q);
    p.out = view4(out);
    p.lse = lse.data_ptr(), p.lse_rest = lse_rest.data_ptr();
    if (return_weights) p.weights = view4(weights);
    if (p.q_starts) p.out.stride[0] = 0;
  }
};

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_fwd(Tensor q, Tensor k, Tensor v, BiasAndMask mask,
                                                         Sequences sequences, Scores scores, DropoutArguments dropout,
                                                         bool return_weights, bool /*deterministic: for backward*/) {
  AttentionForward p;
  AttentionInputs in = attention_inputs(q, k, v);
  fill_attention(p, in, mask, sequences, scores, dropout);
  ForwardOutputs to(p, q, return_weights);
  Backend::attention_fwd(p, q);
  return {to.out, to.lse, to.lse_rest, to.weights};
}

// The same of one tensor [B,S,H+2*Hk,D], whose slices are read in place.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> attention_packed_fwd(Tensor qkv, int64_t num_heads, BiasAndMask mask,
                                                        Sequences sequences, Scores scores, DropoutArguments dropout,
                                                        bool deterministic) {
  MHA_CHECK(qkv.dim() == 4 && num_heads >= 0 && qkv.size(2) >= num_heads && (qkv.size(2) - num_heads) % 2 == 0,
            "qkv has shape ", shape_text(qkv), " and num_heads is ", num_heads,
            "; the op accepts [B,S,num_heads+2*Hk,D].");
  const int64_t kv_heads = (qkv.size(2) - num_heads) / 2;
  auto heads = [&](int64_t first, int64_t count) {
    return torch::stable::transpose(torch::stable::narrow(qkv, 2, first, count), 1, 2);
  };
  auto [out, lse, lse_rest, weights] = attention_fwd<Backend>(
      heads(0, num_heads), heads(num_heads, kv_heads), heads(num_heads + kv_heads, kv_heads), std::move(mask),
      std::move(sequences), std::move(scores), std::move(dropout), false, deterministic);
  return {out, lse, lse_rest};
}

// dout, or out: a tensor of the shape of the output.
inline Tensor4 output_view(const Tensor& t, const char* name, const AttentionProblem& p, AttentionInputs& in) {
  check_shape(t, name, {in.q.size(0), p.H, in.q.size(2), p.Dv});
  check_device(t, name, in.q, "q");
  MHA_CHECK(t.scalar_type() == in.q.scalar_type(), name, " and q have different dtypes; the op accepts one.");
  in.keep.push_back(unit_last_stride(t));
  return view4(in.keep.back());
}

// What backward reads besides the problem itself and out.
inline void fill_backward(AttentionBackward& p, AttentionInputs& in, const Tensor& dout, const OptionalTensor& dlse,
                          const OptionalTensor& dweights, const Tensor& lse, const Tensor& lse_rest,
                          bool deterministic) {
  ScalarType accumulate = scalar_type_of(accumulate_type(p.dtype));
  auto row_statistic = [&](const Tensor& t, const char* name) {
    check_shape(t, name, {in.q.size(0), p.H, in.q.size(2)});
    check_device(t, name, in.q, "q");
    MHA_CHECK(t.scalar_type() == accumulate, name, " has dtype ", torch::headeronly::toString(t.scalar_type()),
              "; the op accepts ", torch::headeronly::toString(accumulate), ".");
    in.keep.push_back(torch::stable::contiguous(t));
    return in.keep.back().data_ptr();
  };
  p.dout = output_view(dout, "dout", p, in);
  p.lse = row_statistic(lse, "lse");
  p.lse_rest = row_statistic(lse_rest, "lse_rest");
  p.deterministic = deterministic;
  if (dlse) p.dlse = row_statistic(*dlse, "dlse");
  if (!dweights) return;
  check_shape(*dweights, "dweights", {p.B, p.H, p.Sq, p.Sk});
  check_device(*dweights, "dweights", in.q, "q");
  MHA_CHECK(dweights->scalar_type() == in.q.scalar_type(), "dweights and q have different dtypes; pass one.");
  p.dweights = view4(*dweights);
}

// The gradients of bias and sinks, and their places in the problem; they start out zeroed.
struct SummedGradients {
  Tensor dbias, dsinks;

  SummedGradients(AttentionBackward& p, const Tensor& q, const OptionalTensor& bias, bool need_dbias) {
    ScalarType accumulate = scalar_type_of(accumulate_type(p.dtype));
    MHA_CHECK(!need_dbias || bias, "need_dbias is true but there is no bias; pass one.");
    dbias = need_dbias ? zeros_dbias(*bias, accumulate_type(p.dtype), {p.B, p.H, p.Sq, p.Sk}, p.dbias)
                       : empty({0}, accumulate, q);
    dsinks = empty({p.sinks ? p.H : 0}, accumulate, q);
    if (p.sinks) p.dsinks = torch::stable::zero_(dsinks).data_ptr();
  }

  Tensor dbias_like(const OptionalTensor& bias, bool need_dbias) const {
    return need_dbias ? as_dtype_of(dbias, *bias) : dbias;
  }
};

// All outputs of attention backward.
struct Gradients : SummedGradients {
  Tensor dq, dk, dv;

  Gradients(AttentionBackward& p, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
            bool need_dbias)
      : SummedGradients(p, q, bias, need_dbias),
        dq(empty_in_order_of(q, p.D)),
        dk(empty_in_order_of(k, p.D)),
        dv(empty_in_order_of(v, p.Dv)) {
    p.dq = view4(dq), p.dk = view4(dk), p.dv = view4(dv);
    if (p.H == 0) torch::stable::zero_(dk), torch::stable::zero_(dv);  // no head adds to them
    if (p.q_starts)
      for (Tensor4* t : {&p.dout, &p.out, &p.dq, &p.dk, &p.dv}) t->stride[0] = 0;
  }
};

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_bwd(Tensor dout, OptionalTensor dlse,
                                                                 OptionalTensor dweights, Tensor q, Tensor k, Tensor v,
                                                                 Tensor out, Tensor lse, Tensor lse_rest,
                                                                 BiasAndMask mask, Sequences sequences, Scores scores,
                                                                 DropoutArguments dropout, bool need_dbias,
                                                                 bool deterministic) {
  AttentionBackward p;
  AttentionInputs in = attention_inputs(q, k, v);
  fill_attention(p, in, mask, sequences, scores, dropout);
  fill_backward(p, in, dout, dlse, dweights, lse, lse_rest, deterministic);
  p.out = output_view(out, "out", p, in);
  Gradients to(p, q, k, v, mask.bias, need_dbias);
  Backend::attention_bwd(p, q);
  return {to.dq, to.dk, to.dv, to.dbias_like(mask.bias, need_dbias), to.dsinks};
}

// The same for q, k, v of one length and head size; the gradients lie side by side in one tensor [B,S,H+2*Hk,D].
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> attention_packed_bwd(Tensor dout, OptionalTensor dlse, OptionalTensor dweights,
                                                        Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                                                        Tensor lse_rest, BiasAndMask mask, Sequences sequences,
                                                        Scores scores, DropoutArguments dropout, bool need_dbias,
                                                        bool deterministic) {
  AttentionBackward p;
  AttentionInputs in = attention_inputs(q, k, v);
  fill_attention(p, in, mask, sequences, scores, dropout);
  MHA_CHECK(!sequences.q_starts && p.Sq == p.Sk && p.D == p.Dv, "q, k, v have shapes ", shape_text(q), ", ",
            shape_text(k), ", ", shape_text(v), "; the op accepts one length and head size, and no packed sequences.");
  fill_backward(p, in, dout, dlse, dweights, lse, lse_rest, deterministic);
  p.out = output_view(out, "out", p, in);
  SummedGradients sums(p, q, mask.bias, need_dbias);
  const int64_t heads = p.H + 2 * p.Hk;
  Tensor dqkv = empty({p.B, p.Sq, heads, p.D}, q.scalar_type(), q);
  if (p.H == 0) torch::stable::zero_(dqkv);  // no head adds to dk and dv
  const size_t head_bytes = size_t(p.D) * size_of_element(q.scalar_type());
  auto slice = [&](int64_t first) {
    return Tensor4{static_cast<char*>(dqkv.data_ptr()) + size_t(first) * head_bytes,
                   {p.Sq * heads * p.D, p.D, heads * p.D, 1}};
  };
  p.dq = slice(0), p.dk = slice(p.H), p.dv = slice(p.H + p.Hk);
  Backend::attention_bwd(p, q);
  return {dqkv, sums.dbias_like(mask.bias, need_dbias), sums.dsinks};
}

template <class Backend>
std::tuple<Tensor, Tensor> masked_softmax_fwd(Tensor scores, BiasAndMask mask, double scale, DropoutArguments dropout) {
  MaskedSoftmaxForward p;
  std::vector<Tensor> keep;
  fill_softmax(p, scores, mask, scale, dropout, keep);
  Tensor out = empty({p.B, p.H, p.Sq, p.Sk}, scores.scalar_type(), scores), lse = empty_lse(scores);
  p.out = view4(out);
  p.lse = lse.data_ptr();
  Backend::masked_softmax_fwd(p, scores);
  return {out, lse};
}

template <class Backend>
std::tuple<Tensor, Tensor> masked_softmax_bwd(Tensor dout, Tensor scores, Tensor lse, BiasAndMask mask, double scale,
                                              DropoutArguments dropout, bool need_dbias) {
  MaskedSoftmaxBackward p;
  std::vector<Tensor> keep;
  fill_softmax(p, scores, mask, scale, dropout, keep);
  check_shape(dout, "dout", {p.B, p.H, p.Sq, p.Sk});
  check_device(dout, "dout", scores, "scores");
  check_shape(lse, "lse", {p.B, p.H, p.Sq});
  check_device(lse, "lse", scores, "scores");
  ScalarType accumulate = scalar_type_of(accumulate_type(p.dtype));
  MHA_CHECK(dout.scalar_type() == scores.scalar_type() && lse.scalar_type() == accumulate, "dout and lse have dtypes ",
            torch::headeronly::toString(dout.scalar_type()), " and ", torch::headeronly::toString(lse.scalar_type()),
            "; the op accepts those of forward: ", torch::headeronly::toString(scores.scalar_type()), " and ",
            torch::headeronly::toString(accumulate), ".");
  keep.push_back(torch::stable::contiguous(lse));
  p.lse = keep.back().data_ptr();
  p.dout = view4(dout);
  Tensor dscores = empty({p.B, p.H, p.Sq, p.Sk}, scores.scalar_type(), scores);
  p.dscores = view4(dscores);
  MHA_CHECK(!need_dbias || mask.bias, "need_dbias is true but there is no bias; pass one.");
  Tensor dbias = need_dbias ? zeros_dbias(*mask.bias, accumulate_type(p.dtype), {p.B, p.H, p.Sq, p.Sk}, p.dbias)
                            : empty({0}, accumulate, scores);
  Backend::masked_softmax_bwd(p, scores);
  return {dscores, need_dbias ? as_dtype_of(dbias, *mask.bias) : dbias};
}

template <class Backend>
Tensor split_heads(Tensor x, int64_t num_heads, OptionalTensor bias) {
  MHA_CHECK(x.dim() == 3 && num_heads > 0 && x.size(2) % num_heads == 0, "x has shape ", shape_text(x),
            " and num_heads is ", num_heads, "; the op accepts [B,S,num_heads*D].");
  SplitHeads p;
  p.B = x.size(0), p.S = x.size(1), p.H = num_heads, p.D = x.size(2) / num_heads;
  p.dtype = dtype_of(x, "x");
  p.in.data = x.data_ptr();
  p.in.stride[0] = x.stride(0), p.in.stride[2] = x.stride(1), p.in.stride[3] = x.stride(2);
  p.in.stride[1] = p.D * x.stride(2);
  Tensor bias_contiguous = bias ? torch::stable::contiguous(*bias) : Tensor();
  if (bias) {
    check_shape(*bias, "bias", {p.H * p.D});
    check_device(*bias, "bias", x, "x");
    MHA_CHECK(bias->scalar_type() == x.scalar_type(), "bias and x have different dtypes; the op accepts one.");
    p.bias = bias_contiguous.data_ptr();
  }
  Tensor out = empty({p.B, p.H, p.S, p.D}, x.scalar_type(), x);
  p.out = view4(out);
  Backend::split_heads(p, x);
  return out;
}

template <class Backend>
Tensor merge_heads(Tensor x, OptionalTensor mix) {
  MHA_CHECK(x.dim() == 4, "x has shape ", shape_text(x), "; the op accepts [B,H,S,D].");
  MergeHeads p;
  p.B = x.size(0), p.H = x.size(1), p.S = x.size(2), p.D = x.size(3);
  p.dtype = dtype_of(x, "x");
  p.in = view4(x);
  Tensor mix_contiguous = mix ? torch::stable::contiguous(*mix) : Tensor();
  if (mix) {
    check_shape(*mix, "mix", {p.H, p.H});
    check_device(*mix, "mix", x, "x");
    MHA_CHECK(mix->scalar_type() == x.scalar_type(), "mix and x have different dtypes; the op accepts one.");
    p.mix = mix_contiguous.data_ptr();
  }
  Tensor out = empty({p.B, p.S, p.H * p.D}, x.scalar_type(), x);
  p.out.data = out.data_ptr();
  p.out.stride[0] = p.S * p.H * p.D, p.out.stride[1] = p.D, p.out.stride[2] = p.H * p.D, p.out.stride[3] = 1;
  Backend::merge_heads(p, x);
  return out;
}

template <class Backend>
Tensor dropout_mask(Tensor rng_state, double p_drop, int64_t B, int64_t H, int64_t Sq, int64_t Sk) {
  MHA_CHECK(p_drop >= 0 && p_drop <= 1, "p is ", p_drop, "; it must lie in [0, 1].");
  MHA_CHECK(B >= 0 && H >= 0 && Sq >= 0 && Sk >= 0, "B, H, Sq, Sk are ", B, ", ", H, ", ", Sq, ", ", Sk,
            "; sizes must not be negative.");
  DropoutMask p{B, H, Sq, Sk, {p_drop}, nullptr};
  std::vector<Tensor> keep;
  fill_rng_state(p.dropout, rng_state, rng_state, keep);
  Tensor out = empty({B, H, Sq, Sk}, ScalarType::Bool, rng_state);
  p.out = static_cast<uint8_t*>(out.data_ptr());
  Backend::dropout_mask(p, rng_state);
  return out;
}

// Registers the ops for Backend; use inside STABLE_TORCH_LIBRARY_IMPL. attention_cached is in cached_ops.h.
#define MHA_REGISTER_OP(m, name, Backend) \
  m.impl(#name, TORCH_BOX(mha::torch_layer::ungrouped<&mha::torch_layer::name<Backend>>))
#define MHA_REGISTER_OPS(m, Backend)                 \
  MHA_REGISTER_OP(m, attention_fwd, Backend);        \
  MHA_REGISTER_OP(m, attention_packed_fwd, Backend); \
  MHA_REGISTER_OP(m, attention_cached, Backend);     \
  MHA_REGISTER_OP(m, attention_bwd, Backend);        \
  MHA_REGISTER_OP(m, attention_packed_bwd, Backend); \
  MHA_REGISTER_OP(m, masked_softmax_fwd, Backend);   \
  MHA_REGISTER_OP(m, masked_softmax_bwd, Backend);   \
  MHA_REGISTER_OP(m, split_heads, Backend);          \
  MHA_REGISTER_OP(m, merge_heads, Backend);          \
  MHA_REGISTER_OP(m, dropout_mask, Backend)

}  // namespace mha::torch_layer
