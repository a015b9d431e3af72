// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed so that the dropout
// decision of one attention weight depends only on (seed, offset, batch, head, query, key).
#pragma once
#include <cstdint>

#include "host_device.h"

namespace mha {

struct Philox4 {
  uint32_t word[4];
};

constexpr uint32_t kPhiloxMul0 = 0xD2511F53u, kPhiloxMul1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxAdd0 = 0x9E3779B9u, kPhiloxAdd1 = 0xBB67AE85u;

MHA_HD inline Philox4 philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    uint64_t p0 = uint64_t(kPhiloxMul0) * c0, p1 = uint64_t(kPhiloxMul1) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
    k0 += kPhiloxAdd0;
    k1 += kPhiloxAdd1;
  }
  return {{c0, c1, c2, c3}};
}

struct Dropout {
  double p = 0;                        // probability of dropping a weight
  const int64_t* rng_state = nullptr;  // seed, offset; with `placed` also the place below; null: no dropout
  bool placed = false;      // the problem is a part of a larger one: where in it batch, head, query, key 0 are
  int64_t first_batch = 0;  // besides, added to b
};

// The key of Philox, and what is added to the numbers of a weight.
struct DropoutKey {
  uint32_t k0, k1, batch, head, query, quad;
};

// The finalizer of SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014): a bijection that
// makes of neighbouring offsets keys that have nothing in common.
MHA_HD static inline uint64_t mix_bits(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

MHA_HD static inline DropoutKey dropout_key(const Dropout& dropout) {
  const int64_t* state = dropout.rng_state;
  const uint64_t key = uint64_t(state[0]) ^ mix_bits(uint64_t(state[1]));
  DropoutKey k{uint32_t(key), uint32_t(key >> 32), uint32_t(dropout.first_batch), 0, 0, 0};
  if (dropout.placed) {
    k.batch += uint32_t(state[2]), k.head = uint32_t(state[3]);
    k.query = uint32_t(state[4]), k.quad = uint32_t(state[5] / 4);  // state[5] is a multiple of 4
  }
  return k;
}

// The same for one head of one batch element, whose numbers are 0 then.
MHA_HD static inline DropoutKey dropout_key(const Dropout& dropout, uint32_t batch, uint32_t head) {
  DropoutKey k = dropout_key(dropout);
  k.batch += batch, k.head += head;
  return k;
}

// The four keys 4*key_quad .. 4*key_quad+3 share one Philox call: word[j % 4] decides key j.
MHA_HD inline Philox4 dropout_words(const DropoutKey& key, uint32_t batch, uint32_t head, uint32_t query,
                                    uint32_t key_quad) {
  return philox4x32_10(key.quad + key_quad, key.query + query, key.head + head, key.batch + batch, key.k0, key.k1);
}

// A weight is kept when its word >= this threshold. Only p == 1 drops everything (the threshold would be 2^32): callers
// treat p >= 1 on its own.
inline uint32_t dropout_threshold(double p) {
  double t = p * 4294967296.0;
  return t >= 4294967295.0 ? 4294967295u : uint32_t(t);
}

}  // namespace mha
