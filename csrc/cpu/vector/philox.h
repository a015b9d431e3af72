// Philox (philox.h) for one query per lane, and the tile of dropout multipliers that it decides.
#pragma once

#include "../tiles.h"

MHA_ISA_BEGIN

struct PhiloxWords {
  VecU word[4];
};

MHA_INLINE PhiloxWords philox(VecU c0, VecU c1, VecU c2, VecU c3, uint32_t k0, uint32_t k1) {
  const VecU mul0 = set1(kPhiloxMul0), mul1 = set1(kPhiloxMul1);
  for (int round = 0; round < 10; ++round) {
    const VecU p0 = product(c0, mul0), p1 = product(c2, mul1);
    c0 = xor3(high(p1), c1, set1(k0));
    c1 = p1;
    c2 = xor3(high(p0), c3, set1(k1));
    c3 = p0;
    k0 += kPhiloxAdd0;
    k1 += kPhiloxAdd1;
  }
  return {{c0, c1, c2, c3}};
}

// multiplier[j][r] = 1 / (1 - p) where dropout keeps the weight of key first_key + j for row r, else 0. Row r stands
// for query[r] of head[r]. Whole vectors of rows are written (kMaxRows of each input are readable).
template <class T>
inline void dropout_multipliers(T* multiplier, int64_t ld, const Dropout& dropout, int64_t batch, const uint32_t* head,
                                const uint32_t* query, int rows, int64_t first_key, int keys) {
  constexpr int L = Vec<T>::lanes, U = VecU::lanes;
  const bool none_kept = dropout.p >= 1;
  const Vec<T> zero = set1(T(0)), scale = set1(none_kept ? T(0) : T(1 / (1 - dropout.p)));
  const DropoutKey key = dropout_key(dropout);
  const uint32_t threshold = dropout_threshold(dropout.p);
  const VecU b = set1(key.batch + uint32_t(batch));
  for (int r = 0; r < rows; r += U) {
    uint32_t queries[U], heads[U];
    for (int l = 0; l < U; ++l) queries[l] = key.query + query[r + l], heads[l] = key.head + head[r + l];
    const VecU h = load(heads), q = load(queries);
    for (int64_t quad = first_key / 4; quad * 4 < first_key + keys; ++quad) {
      PhiloxWords words = philox(set1(key.quad + uint32_t(quad)), q, h, b, key.k0, key.k1);
      for (int w = 0; w < 4; ++w) {
        int64_t j = quad * 4 + w - first_key;
        if (j < 0 || j >= keys) continue;
        uint32_t word[U];
        store(word, words.word[w]);
        for (int l = 0; l < U && r + l < rows; l += L) {
          VecMask<T> kept;
          at_least(word + l, threshold, &kept);
          store(multiplier + j * ld + r + l, select(kept, scale, zero));
        }
      }
    }
  }
}

MHA_ISA_END
