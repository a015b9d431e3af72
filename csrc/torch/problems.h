// Builds the problem structs of the contract from op arguments, with every check. Shared by the CPU and the CUDA ops.
#pragma once
#include "arguments.h"

namespace mha::torch_layer {

struct ScoreShape {
  int64_t B, H, Sq, Sk;
};

inline const int64_t* int64_data(const Tensor& t, const char* name, const Tensor& like) {
  MHA_CHECK(t.scalar_type() == ScalarType::Long, name, " has dtype ", torch::headeronly::toString(t.scalar_type()),
            "; the op accepts int64.");
  check_device(t, name, like, "the scores' tensors");
  return static_cast<const int64_t*>(t.const_data_ptr());
}

inline void fill_interval(const OptionalTensor& t, const char* name, ScoreShape n, const Tensor& like,
                          const int64_t*& data, int64_t& stride_b, int64_t& stride_q) {
  if (!t) return;
  check_shape(*t, name, {kOneOr + n.B, kOneOr + n.Sq});
  data = int64_data(*t, name, like);
  stride_b = t->size(0) == 1 ? 0 : t->stride(0);
  stride_q = t->size(1) == 1 ? 0 : t->stride(1);
}

// Ids keep unit stride along the sequence; copies them where they have another. The copies live in `keep`.
inline void fill_ids(const OptionalTensor& t, const char* name, int64_t B, int64_t S, const Tensor& like,
                     std::vector<Tensor>& keep, const int64_t*& data, int64_t& stride_b) {
  check_shape(*t, name, {kOneOr + B, S});
  keep.push_back(unit_last_stride(*t));
  data = int64_data(keep.back(), name, like);
  stride_b = keep.back().size(0) == 1 ? 0 : keep.back().stride(0);
}

inline Mask build_mask(const BiasAndMask& m, ScoreShape n, const Tensor& like, std::vector<Tensor>& keep) {
  Mask mask;
  int64_t diagonal = n.Sk - n.Sq;
  // Limits beyond any length act as none; clamping keeps the sums below from overflowing. The blocks of a ring have
  // negative ones.
  auto clamp = [](int64_t x) { return std::clamp<int64_t>(x, -kNoLimit, kNoLimit); };
  if (m.left) mask.band_lo = diagonal - clamp(*m.left);
  if (m.right) mask.band_hi = diagonal + clamp(*m.right);
  mask.top_left = m.top_left;
  fill_interval(m.begin, "begin", n, like, mask.begin, mask.begin_stride_b, mask.begin_stride_q);
  fill_interval(m.end, "end", n, like, mask.end, mask.end_stride_b, mask.end_stride_q);
  MHA_CHECK(m.query_ids.has_value() == m.key_ids.has_value(),
            "one of query_ids and key_ids is missing; the op accepts both or neither.");
  if (m.query_ids) {
    fill_ids(m.query_ids, "query_ids", n.B, n.Sq, like, keep, mask.query_ids, mask.query_ids_stride_b);
    fill_ids(m.key_ids, "key_ids", n.B, n.Sk, like, keep, mask.key_ids, mask.key_ids_stride_b);
  }
  if (m.mask) {
    check_shape(*m.mask, "mask", {kOneOr + n.B, kOneOr + n.H, kOneOr + n.Sq, kOneOr + n.Sk});
    MHA_CHECK(m.mask->scalar_type() == ScalarType::Bool, "mask has dtype ",
              torch::headeronly::toString(m.mask->scalar_type()), "; the op accepts bool, True = attend.");
    check_device(*m.mask, "mask", like, "the scores' tensors");
    Tensor4 v = view4(*m.mask, true);
    mask.dense = static_cast<const uint8_t*>(v.data);
    mask.dense_stride_b = v.stride[0], mask.dense_stride_h = v.stride[1];
    mask.dense_stride_q = v.stride[2], mask.dense_stride_k = v.stride[3];
  }
  if (m.blocks) {
    MHA_CHECK(m.block_size > 0, "block_size is ", m.block_size, "; it must be positive.");
    MHA_CHECK(m.blocks->scalar_type() == ScalarType::Bool, "blocks has dtype ",
              torch::headeronly::toString(m.blocks->scalar_type()), "; the op accepts bool, True = attend.");
    auto count = [&](int64_t length) { return (length + m.block_size - 1) / m.block_size; };
    check_shape(*m.blocks, "blocks", {kOneOr + n.B, kOneOr + n.H, count(n.Sq), count(n.Sk)});
    check_device(*m.blocks, "blocks", like, "the scores' tensors");
    Tensor4 v = view4(*m.blocks, true);
    mask.blocks = static_cast<const uint8_t*>(v.data), mask.block_size = m.block_size;
    mask.blocks_stride_b = v.stride[0], mask.blocks_stride_h = v.stride[1];
    mask.blocks_stride_q = v.stride[2], mask.blocks_stride_k = v.stride[3];
  }
  return mask;
}

// A relative bias has 3 dimensions, the last for the keys less the queries' positions (bottom-right), from far left.
inline bool is_relative(const Tensor& bias) { return bias.dim() == 3; }

inline Tensor4 view_bias(const Tensor& bias, ScoreShape n) {
  if (!is_relative(bias)) return view4(bias, true);
  Tensor4 v{bias.data_ptr(), {bias.size(0) == 1 ? 0 : bias.stride(0), bias.size(1) == 1 ? 0 : bias.stride(1), -1, 1}};
  // Key 0 is seen from query 0 at distance Sq - Sk, whose place is Sq - 1.
  v.data = static_cast<char*>(v.data) + (n.Sq - 1) * int64_t(size_of_element(bias.scalar_type()));
  return v;
}

// [2], [6], or [B,H,6] of which the first is this problem's: so shardings of batch and heads share it out rightly.
inline void fill_rng_state(Dropout& dropout, const Tensor& rng_state, const Tensor& like, std::vector<Tensor>& keep) {
  dropout.placed = rng_state.dim() > 0 && rng_state.size(rng_state.dim() - 1) == 6;
  if (rng_state.dim() != 3)
    check_shape(rng_state, "rng_state", {dropout.placed ? 6 : 2});
  else
    check_shape(rng_state, "rng_state", {-1, -1, 6});
  if (rng_state.numel() == 0) return;  // nothing of the batch or the heads is here
  keep.push_back(torch::stable::contiguous(rng_state));
  dropout.rng_state = int64_data(keep.back(), "rng_state", like);
  if (dropout.placed && like.is_cpu())
    MHA_CHECK(dropout.rng_state[5] % 4 == 0, "rng_state places the first key at ", dropout.rng_state[5],
              "; the op accepts multiples of 4.");
}

// Here and below, Problem is AttentionProblem or MaskedSoftmaxProblem.
template <class Problem>
void fill_bias_and_mask(Problem& p, const BiasAndMask& m, ScoreShape n, const Tensor& like, std::vector<Tensor>& keep) {
  p.mask = build_mask(m, n, like, keep);
  if (m.bias) {
    if (is_relative(*m.bias))
      check_shape(*m.bias, "bias", {kOneOr + n.B, kOneOr + n.H, std::max<int64_t>(n.Sq + n.Sk - 1, 0)});
    else
      check_shape(*m.bias, "bias", {kOneOr + n.B, kOneOr + n.H, kOneOr + n.Sq, kOneOr + n.Sk});
    check_device(*m.bias, "bias", like, "the scores' tensors");
    p.bias_dtype = dtype_of(*m.bias, "bias");
    MHA_CHECK(p.bias_dtype == p.dtype || p.bias_dtype == accumulate_type(p.dtype), "bias has dtype ",
              torch::headeronly::toString(m.bias->scalar_type()), "; the op accepts ",
              torch::headeronly::toString(scalar_type_of(p.dtype)), " or ",
              torch::headeronly::toString(scalar_type_of(accumulate_type(p.dtype))), ".");
    keep.push_back(is_relative(*m.bias) ? unit_last_stride(*m.bias) : *m.bias);
    p.bias = view_bias(keep.back(), n);
  }
}

template <class Problem>
void fill_dropout(Problem& p, const DropoutArguments& d, const Tensor& like, std::vector<Tensor>& keep) {
  MHA_CHECK(d.dropout_p >= 0 && d.dropout_p <= 1, "dropout_p is ", d.dropout_p, "; it must lie in [0, 1].");
  p.dropout.p = d.dropout_p;
  if (d.dropout_p > 0) {
    MHA_CHECK(d.rng_state.has_value(), "dropout_p is ", d.dropout_p, " but rng_state is missing; pass int64[2].");
    fill_rng_state(p.dropout, *d.rng_state, like, keep);
  }
}

// Inputs with unit stride in the last dimension; `keep` holds copies alive until the kernel has run.
struct AttentionInputs {
  Tensor q, k, v;
  std::vector<Tensor> keep;
};

inline AttentionInputs attention_inputs(const Tensor& q, const Tensor& k, const Tensor& v) {
  MHA_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k, v have shapes ", shape_text(q), ", ", shape_text(k),
            ", ", shape_text(v), "; the op accepts [B,H,S,D] tensors.");
  MHA_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "q, k, v have dtypes ",
            torch::headeronly::toString(q.scalar_type()), ", ", torch::headeronly::toString(k.scalar_type()), ", ",
            torch::headeronly::toString(v.scalar_type()), "; the op accepts one dtype for all three.");
  check_device(k, "k", q, "q");
  check_device(v, "v", q, "q");
  int64_t B = q.size(0), H = q.size(1), Hk = k.size(1);
  MHA_CHECK(Hk > 0 ? H % Hk == 0 : H == 0, "q has ", H, " heads and k has ", Hk,
            "; the number of query heads must be a multiple of the number of key/value heads.");
  check_shape(k, "k", {B, Hk, -1, q.size(3)});
  check_shape(v, "v", {B, Hk, k.size(2), -1});
  return {unit_last_stride(q), unit_last_stride(k), unit_last_stride(v), {}};
}

inline const int64_t* fill_starts(const Tensor& t, const char* name, const Tensor& packed, int64_t longest,
                                  std::vector<Tensor>& keep) {
  MHA_CHECK(t.dim() == 1 && t.size(0) > 0, name, " has shape ", shape_text(t), "; the op accepts [sequences + 1].");
  keep.push_back(torch::stable::contiguous(t));
  const int64_t* starts = int64_data(keep.back(), name, packed);
  if (!packed.is_cpu()) return starts;  // looking would wait for the GPU
  const int64_t count = t.size(0) - 1;
  MHA_CHECK(starts[0] == 0 && starts[count] == packed.size(2), name, " goes from ", starts[0], " to ", starts[count],
            "; it must go from 0 to the number of packed rows, ", packed.size(2), ".");
  for (int64_t b = 0; b < count; ++b)
    MHA_CHECK(starts[b] <= starts[b + 1] && starts[b + 1] - starts[b] <= longest, name, " gives sequence ", b,
              " the length ", starts[b + 1] - starts[b], "; accepted: lengths from 0 to the longest, ", longest, ".");
  return starts;
}

inline void fill_sequences(AttentionProblem& p, AttentionInputs& in, const Sequences& s) {
  p.rows_stride_b = p.H * p.Sq, p.rows_stride_h = p.Sq;
  MHA_CHECK(s.q_starts.has_value() == s.k_starts.has_value(),
            "one of q_starts and k_starts is missing; the op accepts both or neither.");
  if (!s.q_starts) return;
  MHA_CHECK(p.B == 1, "q has batch size ", p.B, "; packed sequences take [1,H,T,D].");
  MHA_CHECK(s.max_q >= 0 && s.max_k >= 0, "the longest lengths are ", s.max_q, " and ", s.max_k,
            "; they must not be negative.");
  p.q_starts = fill_starts(*s.q_starts, "q_starts", in.q, s.max_q, in.keep);
  p.k_starts = fill_starts(*s.k_starts, "k_starts", in.k, s.max_k, in.keep);
  check_shape(*s.k_starts, "k_starts", {s.q_starts->size(0)});
  p.B = s.q_starts->size(0) - 1;
  p.rows_stride_b = 0, p.packed_keys = p.Sk;
  p.Sq = s.max_q, p.Sk = s.max_k;
  p.q.stride[0] = p.k.stride[0] = p.v.stride[0] = 0;
}

inline void fill_scores(AttentionProblem& p, AttentionInputs& in, const Scores& s) {
  p.scale = s.scale;
  MHA_CHECK(s.softcap >= 0, "softcap is ", s.softcap, "; it must be positive, or 0 for none.");
  p.softcap = s.softcap;
  const OptionalTensor& sinks = s.sinks;
  if (!sinks) return;
  check_shape(*sinks, "sinks", {p.H});
  check_device(*sinks, "sinks", in.q, "q");
  ScalarType accumulate = scalar_type_of(accumulate_type(p.dtype));
  MHA_CHECK(sinks->scalar_type() == accumulate, "sinks has dtype ", torch::headeronly::toString(sinks->scalar_type()),
            "; the op accepts ", torch::headeronly::toString(accumulate), ".");
  in.keep.push_back(torch::stable::contiguous(*sinks));
  p.sinks = in.keep.back().data_ptr();
}

inline void fill_attention(AttentionProblem& p, AttentionInputs& in, const BiasAndMask& m, const Sequences& sequences,
                           const Scores& scores, const DropoutArguments& dropout) {
  p.B = in.q.size(0), p.H = in.q.size(1), p.Hk = in.k.size(1);
  p.Sq = in.q.size(2), p.Sk = in.k.size(2), p.D = in.q.size(3), p.Dv = in.v.size(3);
  p.dtype = dtype_of(in.q, "q");
  p.q = view4(in.q), p.k = view4(in.k), p.v = view4(in.v);
  fill_sequences(p, in, sequences);
  fill_scores(p, in, scores);
  p.bias_relative = m.bias && is_relative(*m.bias);
  fill_bias_and_mask(p, m, {p.B, p.H, p.Sq, p.Sk}, in.q, in.keep);
  fill_dropout(p, dropout, in.q, in.keep);
}

inline void fill_softmax(MaskedSoftmaxProblem& p, const Tensor& scores, const BiasAndMask& m, double scale,
                         const DropoutArguments& dropout, std::vector<Tensor>& keep) {
  check_shape(scores, "scores", {-1, -1, -1, -1});
  p.B = scores.size(0), p.H = scores.size(1), p.Sq = scores.size(2), p.Sk = scores.size(3);
  p.dtype = dtype_of(scores, "scores");
  p.scores = view4(scores);
  p.scale = scale;
  MHA_CHECK(!m.bias || !is_relative(*m.bias), "bias has shape ", shape_text(*m.bias),
            "; this op accepts four dimensions.");
  fill_bias_and_mask(p, m, {p.B, p.H, p.Sq, p.Sk}, scores, keep);
  fill_dropout(p, dropout, scores, keep);
}

inline Tensor empty_lse(const Tensor& q) {
  return empty({q.size(0), q.size(1), q.size(2)}, scalar_type_of(accumulate_type(dtype_of(q, "q"))), q);
}

// The zeroed sum of the bias gradient in the accumulate type, and its view.
inline Tensor zeros_dbias(const Tensor& bias, DType accumulate, ScoreShape n, Tensor4& view) {
  Sizes sizes(bias.sizes().begin(), bias.sizes().end());
  Tensor sum = empty(sizes, scalar_type_of(accumulate), bias);
  torch::stable::zero_(sum);
  view = view_bias(sum, n);
  return sum;
}

inline Tensor as_dtype_of(const Tensor& t, const Tensor& like) {
  return t.scalar_type() == like.scalar_type() ? t : torch::stable::to(t, like.scalar_type());
}

}  // namespace mha::torch_layer
