// Dropout decisions along rows of keys (philox.h): for masked_softmax, and as a tensor.
#pragma once

#include "../threads/parallel.h"
#include "../vector/philox.h"

MHA_ISA_BEGIN

// out[j] = kept where dropout keeps key first + j of row (batch, head, query), else 0, for j in [0, n).
template <class Out>
void dropout_row(Out* out, const Dropout& dropout, int64_t batch, int64_t head, int64_t query, int64_t first, int64_t n,
                 Out kept) {
  if (dropout.p >= 1) kept = Out(0);
  constexpr int L = VecU::lanes;
  const DropoutKey key = dropout_key(dropout);
  const uint32_t threshold = dropout_threshold(dropout.p);
  const VecU b = set1(key.batch + uint32_t(batch)), h = set1(key.head + uint32_t(head)),
             q = set1(key.query + uint32_t(query));
  for (int64_t quad = first / 4; quad * 4 < first + n; quad += L) {
    uint32_t quads[L], words[4][L];
    for (int l = 0; l < L; ++l) quads[l] = key.quad + uint32_t(quad + l);
    const PhiloxWords w = philox(load(quads), q, h, b, key.k0, key.k1);
    for (int k = 0; k < 4; ++k) store(words[k], w.word[k]);
    const int64_t j = quad * 4 - first;
    if (j >= 0 && j + 4 * L <= n) {
      for (int l = 0; l < 4 * L; ++l) out[j + l] = words[l % 4][l / 4] >= threshold ? kept : Out(0);
    } else {
      for (int l = 0; l < 4 * L; ++l)
        if (j + l >= 0 && j + l < n) out[j + l] = words[l % 4][l / 4] >= threshold ? kept : Out(0);
    }
  }
}

inline void dropout_mask(const DropoutMask& p, const Threads& threads) {
  const int64_t rows = p.B * p.H * p.Sq, run = max64(1, 16384 / max64(1, p.Sk));
  for_each_task(threads, (rows + run - 1) / run, [&](int64_t task, int) {
    for (int64_t r = task * run; r < min64(rows, (task + 1) * run); ++r)
      dropout_row(p.out + r * p.Sk, p.dropout, r / p.Sq / p.H, r / p.Sq % p.H, r % p.Sq, 0, p.Sk, uint8_t(1));
  });
}

MHA_ISA_END
