// Which weights dropout keeps (philox.h), where keys lie in lanes: as masks for 32 keys of a row, two rows at a time.
#pragma once

#include "../../vector/philox.h"

MHA_ISA_BEGIN

// What kept weights are multiplied by.
inline float kept_factor(const Dropout& dropout) { return dropout.p >= 1 ? 0.0f : float(1 / (1 - dropout.p)); }

// Of the rows of one head.
class KeptKeys {
 public:
  KeptKeys() = default;
  KeptKeys(const Dropout& dropout, int64_t b, int64_t head, int64_t first_query)
      : key_(dropout_key(dropout, uint32_t(b), uint32_t(head))),
        threshold_(dropout_threshold(dropout.p)),
        query_(key_.query + uint32_t(first_query)) {}

  // Bits of the keys first_key .. first_key + 32, a multiple of 32, for the rows `row` and row + 1: where it is set,
  // the key is kept.
  MHA_INLINE void take(__mmask16 (*kept)[2], int64_t first_key, int row) const {
    // A lane of 64 bits is a call, for four keys: those of the even lanes belong to one row, of the odd ones to the
    // next.
    const __m512i quads = _mm512_add_epi64(_mm512_set1_epi64(int64_t(key_.quad + uint32_t(first_key / 4))),
                                           _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0));
    const VecU query{_mm512_set1_epi64(query_ + uint32_t(row)), _mm512_set1_epi64(query_ + uint32_t(row) + 1)};
    const PhiloxWords w = philox({quads, quads}, query, set1(key_.head), set1(key_.batch), key_.k0, key_.k1);
    const __m512i threshold = _mm512_set1_epi32(int(threshold_));
    auto rows = [&](__mmask16* to, __m512i low, __m512i high) MHA_INLINE_LAMBDA {
      to[0] = _mm512_cmpge_epu32_mask(_mm512_unpacklo_epi64(low, high), threshold);
      to[1] = _mm512_cmpge_epu32_mask(_mm512_unpackhi_epi64(low, high), threshold);
    };
    rows(kept[0], both(w.word[0].even, w.word[1].even), both(w.word[2].even, w.word[3].even));
    rows(kept[1], both(w.word[0].odd, w.word[1].odd), both(w.word[2].odd, w.word[3].odd));
  }

 private:
  // The lower halves of lanes of 64 bits, side by side.
  static MHA_INLINE __m512i both(__m512i even, __m512i odd) {
    return _mm512_mask_shuffle_epi32(even, 0xAAAA, odd, _MM_PERM_CCAA);
  }

  DropoutKey key_{};
  uint32_t threshold_ = 0, query_ = 0;
};

MHA_ISA_END
