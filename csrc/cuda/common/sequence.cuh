// Where a sample's rows are: one of several packed sequences, with its own lengths, or a sample of a problem that isn't
// packed.
#pragma once
#include "../../attention.h"

namespace mha::cuda {

constexpr int kRowBlock = 64;  // query rows whose numbers lie together in backward's workspace

struct Sequence {
  unsigned b;
  int Sq, Sk;  // its own lengths
  int shift;   // of the band; a relative bias is read as far to the left
  int64_t first_query, first_key;
  // In backward's workspace: row blocks of a head (even, so that a tile may have 128 rows), the first one of head 0.
  unsigned row_blocks, first_row_block;
};

MHA_HD inline unsigned row_blocks_of(int64_t Sq) { return unsigned((Sq + 2 * kRowBlock - 1) / (2 * kRowBlock) * 2); }

template <class Problem>
__device__ inline Sequence sequence(const Problem& p, unsigned b) {
  Sequence s = {};
  s.b = b, s.Sq = int(p.Sq), s.Sk = int(p.Sk);
  s.first_row_block = b * unsigned(p.H) * row_blocks_of(p.Sq);
  if (p.q_starts) {
    s.first_query = p.q_starts[b], s.first_key = p.k_starts[b];
    s.Sq = int(min64(max64(p.q_starts[b + 1] - s.first_query, 0), p.Sq));
    s.Sk = int(min64(max64(p.k_starts[b + 1] - s.first_key, 0), p.Sk));
    s.shift = int(sequence_shift(p, s.Sq, s.Sk));
    // Enough room for the sequences before, without knowing each one's length.
    s.first_row_block = unsigned(p.H) * unsigned(s.first_query / (2 * kRowBlock) + b) * 2;
  }
  s.row_blocks = row_blocks_of(s.Sq);
  return s;
}

// The row blocks of all heads and sequences.
inline int64_t row_blocks_in_all(const AttentionProblem& p) {
  return p.q_starts ? p.H * (p.rows_stride_h / (2 * kRowBlock) + p.B) * 2 : p.B * p.H * row_blocks_of(p.Sq);
}

// Where the bias of a pair (i, j) is, in elements from its start.
template <class Problem>
__device__ inline int64_t bias_offset(const Problem& p, const Tensor4& bias, const Sequence& s, unsigned h, int64_t i,
                                      int64_t j) {
  return s.b * bias.stride[0] + h * bias.stride[1] + i * bias.stride[2] + j * bias.stride[3] -
         (p.bias_relative ? s.shift : 0);
}

// Where row 0 of a head is in lse, lse_rest and dlse.
template <class Problem>
__device__ inline int64_t first_row(const Problem& p, const Sequence& s, unsigned h) {
  return s.b * p.rows_stride_b + h * p.rows_stride_h + s.first_query;
}

}  // namespace mha::cuda
