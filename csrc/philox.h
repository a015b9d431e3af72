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
  const int64_t* rng_state = nullptr;  // [2] seed, offset; null: no dropout
  int64_t first_head = 0;              // added to b * H + h
};

// The four keys 4*key_quad .. 4*key_quad+3 share one Philox call: word[j % 4] decides key j.
struct DropoutKey {
  uint32_t k0, k1, offset;
};

MHA_HD inline DropoutKey dropout_key(const int64_t* rng_state) {
  uint64_t seed = uint64_t(rng_state[0]), offset = uint64_t(rng_state[1]);
  return {uint32_t(seed), uint32_t(seed >> 32) ^ uint32_t(offset >> 32), uint32_t(offset)};
}

// batch_head = b * H + h
MHA_HD inline Philox4 dropout_words(DropoutKey key, uint32_t batch_head, uint32_t query, uint32_t key_quad) {
  return philox4x32_10(key_quad, query, batch_head, key.offset, key.k0, key.k1);
}

// A weight is kept when its word >= this threshold. Only p == 1 drops everything (the threshold would be 2^32): callers
// treat p >= 1 on its own.
inline uint32_t dropout_threshold(double p) {
  double t = p * 4294967296.0;
  return t >= 4294967295.0 ? 4294967295u : uint32_t(t);
}

}  // namespace mha
