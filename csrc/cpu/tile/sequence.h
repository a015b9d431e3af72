// Packed sequences, one at a time: each is a problem of its own, so what it gives, to the bit, is what it gives alone.
#pragma once

#include "../product/pack.h"

MHA_ISA_BEGIN

inline void shift_rows(Tensor4& t, DType type, int64_t first) {
  if (t.data) t.data = element(t.data, type, first * t.stride[2]);
}

inline void shift_outputs(AttentionForward& p, DType accumulate, int64_t first_query, int64_t) {
  shift_rows(p.out, p.dtype, first_query);
  for (void** rows : {&p.lse, &p.lse_rest})
    if (*rows) *rows = element(*rows, accumulate, first_query);
}

inline void shift_outputs(AttentionBackward& p, DType accumulate, int64_t first_query, int64_t first_key) {
  for (Tensor4* t : {&p.dout, &p.out, &p.dq}) shift_rows(*t, p.dtype, first_query);
  for (Tensor4* t : {&p.dk, &p.dv}) shift_rows(*t, p.dtype, first_key);
  for (const void** rows : {&p.lse, &p.lse_rest, &p.dlse})
    if (*rows) *rows = element(*rows, accumulate, first_query);
}

inline void shift_bias(Tensor4& bias, DType type, bool relative, int64_t b, int64_t shift) {
  if (bias.data) bias.data = element(bias.data, type, b * bias.stride[0] - (relative ? shift : 0));
}

// Sequence b of p.
template <class Problem>
Problem sequence(const Problem& p, int64_t b) {
  Problem s = p;
  s.q_starts = s.k_starts = nullptr;
  s.B = 1;
  s.Sq = p.q_starts[b + 1] - p.q_starts[b], s.Sk = p.k_starts[b + 1] - p.k_starts[b];
  shift_rows(s.q, p.dtype, p.q_starts[b]);
  shift_rows(s.k, p.dtype, p.k_starts[b]);
  shift_rows(s.v, p.dtype, p.k_starts[b]);
  shift_outputs(s, accumulate_type(p.dtype), p.q_starts[b], p.k_starts[b]);
  const int64_t shift = sequence_shift(p, s.Sq, s.Sk);
  shift_bias(s.bias, p.bias_dtype, p.bias_relative, b, shift);
  if constexpr (std::is_base_of_v<AttentionBackward, Problem>)
    shift_bias(s.dbias, accumulate_type(p.dtype), p.bias_relative, b, shift);
  s.dropout.first_batch += b;
  Mask& m = s.mask;
  m.band_lo += shift, m.band_hi += shift;
  if (m.begin) m.begin += b * m.begin_stride_b;
  if (m.end) m.end += b * m.end_stride_b;
  if (m.query_ids) m.query_ids += b * m.query_ids_stride_b, m.key_ids += b * m.key_ids_stride_b;
  if (m.dense) m.dense += b * m.dense_stride_b;
  if (m.blocks) m.blocks += b * m.blocks_stride_b;
  return s;
}

// Calls f(problem) for each sequence, or once for a problem that isn't packed.
template <class Problem, class F>
void for_each_sequence(const Problem& p, F f) {
  if (!p.q_starts) return f(p);
  for (int64_t b = 0; b < p.B; ++b) f(sequence(p, b));
}

MHA_ISA_END
