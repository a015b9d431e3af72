// What AMX forward multiplies, as whole tiles one after the other: 32 queries or keys at a time, 32 elements of a head
// to a tile, zeros beyond them. Queries and weights are A, keys and values B of
//   S[query][key] = Q[query][d] K^T[d][key]      O[query][dv] += P[query][key] V[key][dv]
// The keys n and n + 16 of a step of 32 make the n-th pair of P and V, so that two vectors of weights join by a shift
// and a blend.
#pragma once

#include "operands.h"

MHA_ISA_BEGIN

constexpr int kTileBytes = 1024, kStep = 32;  // of a tile; keys, rows, or elements of a pair of tiles

MHA_INLINE int64_t steps_of(int64_t n) { return (n + kStep - 1) / kStep; }

// Bytes of one plane of 32 rows with D elements, or of 32 keys' values: pairs of tiles.
MHA_INLINE int64_t step_bytes(int64_t elements) { return steps_of(elements) * 2 * kTileBytes; }

// 32 elements of a row, of which there are n, in planes.
template <int N>
MHA_INLINE void load_line(const void* row, DType type, int n, __m512i* plane) {
  const __mmask32 there = n >= kStep ? ~0u : (1u << n) - 1;
  const __m512i bits = _mm512_maskz_loadu_epi16(there, row);
  if constexpr (N == 1) {
    plane[0] = bits;
  } else {
    (void)type;
    VecF low[N], high[N];
    split<N>({_mm512_cvtph_ps(_mm512_castsi512_si256(bits))}, low);
    split<N>({_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))}, high);
    for (int i = 0; i < N; ++i)
      plane[i] = _mm512_inserti64x4(_mm512_castsi256_si512(narrow_bf16(low[i])), narrow_bf16(high[i]), 1);
  }
}

// The greatest |x| of halves, as bits; infinite and NaN are at least kInfinite<N>.
template <int N>
constexpr uint16_t kInfinite = N == 1 ? 0x7F80 : 0x7C00;

class Greatest {
 public:
  MHA_INLINE Greatest() : top_(_mm512_setzero_si512()) {}
  MHA_INLINE void see(__m512i halves) {
    top_ = _mm512_max_epu16(top_, _mm512_and_si512(halves, _mm512_set1_epi16(0x7FFF)));
  }
  uint16_t bits() const {
    alignas(64) uint16_t lane[32];
    _mm512_store_si512(lane, top_);
    return *std::max_element(lane, lane + 32);
  }

 private:
  __m512i top_;
};

// Rows as A: [steps of elements][plane][two tiles of 16 rows]. Returns the Greatest of them.
template <int N>
inline uint16_t pack_queries(char* dst, const void* src, DType type, const int64_t* offset, int rows, int D) {
  Greatest top;
  for (int r = 0; r < kStep; ++r) {
    for (int d = 0; d < D; d += kStep) {
      __m512i plane[N] = {};
      if (r < rows) {
        const void* line = element(src, type, offset[r] + d);
        top.see(_mm512_maskz_loadu_epi16(D - d >= kStep ? ~0u : (1u << (D - d)) - 1, line));
        load_line<N>(line, type, D - d, plane);
      }
      for (int i = 0; i < N; ++i)
        _mm512_store_si512(dst + ((d / kStep * N + i) * 2 + r / kAmx) * kTileBytes + r % kAmx * kAmxRowBytes, plane[i]);
    }
  }
  return top.bits();
}

// Keys as B: [32 keys][steps of elements][plane][two tiles of 16 keys], pairs of elements down a tile.
template <int N>
inline uint16_t pack_keys(char* dst, const void* src, DType type, int64_t stride, int64_t keys, int D) {
  Greatest top;
  for (int64_t first = 0; first < steps_of(keys) * kStep; first += kAmx) {
    char* const to = dst + first / kStep * N * step_bytes(D) + first % kStep / kAmx * kTileBytes;
    for (int d = 0; d < D; d += kStep) {
      VecF x[N][kAmx];
      for (int j = 0; j < kAmx; ++j) {
        __m512i plane[N] = {};
        if (first + j < keys) {
          const void* line = element(src, type, (first + j) * stride + d);
          top.see(_mm512_maskz_loadu_epi16(D - d >= kStep ? ~0u : (1u << (D - d)) - 1, line));
          load_line<N>(line, type, D - d, plane);
        }
        for (int i = 0; i < N; ++i) x[i][j].v = _mm512_castsi512_ps(plane[i]);
      }
      for (int i = 0; i < N; ++i) {
        transpose_block(x[i]);
        char* tile = to + (d / kStep * N + i) * 2 * kTileBytes;
        for (int c = 0; c < kAmx; ++c) _mm512_store_ps(tile + c * kAmxRowBytes, x[i][c].v);
      }
    }
  }
  return top.bits();
}

// The values of 32 keys, of which there are n, but for those with bits in left_out. Returns the bits of those that are
// not finite.
template <int N>
inline uint32_t pack_values_step(char* dst, uint32_t left_out, const void* rows, DType type, int64_t stride, int n,
                                 int Dv) {
  const __m512i sign = _mm512_set1_epi16(0x7FFF), infinite = _mm512_set1_epi16(kInfinite<N>);
  const uint32_t there = (n >= kStep ? ~0u : (1u << n) - 1) & ~left_out;
  uint32_t bad = 0;
  for (int d = 0; d < Dv; d += kStep) {
    const __mmask32 columns = Dv - d >= kStep ? ~0u : (1u << (Dv - d)) - 1;
    char* tile = dst + d / kStep * 2 * kTileBytes;
    for (int j = 0; j < kAmx; ++j, tile += kAmxRowBytes) {
      __m512i plane[2][N];
      for (int half = 0; half < 2; ++half) {
        const int row = j + half * kAmx;
        const void* line = element(rows, type, row * stride + d);
        const __mmask32 lanes = there >> row & 1 ? columns : 0;
        const __m512i bits = _mm512_maskz_loadu_epi16(lanes, line);
        bad |= uint32_t(_mm512_cmpge_epu16_mask(_mm512_and_si512(bits, sign), infinite) != 0) << row;
        load_line<N>(line, type, lanes ? Dv - d : 0, plane[half]);
      }
      for (int i = 0; i < N; ++i) {
        VecPair pairs[2];
        interleave_rows(pairs, plane[0][i], plane[1][i]);
        store(tile + i * step_bytes(Dv), pairs[0]), store(tile + i * step_bytes(Dv) + kTileBytes, pairs[1]);
      }
    }
  }
  return bad;
}

// Values as B: [32 keys][plane][tiles of 16 columns, an even number]. Rows that are not finite become zeros, and their
// bits in left_out[32 keys] 1. Returns whether there are any.
template <int N>
inline bool pack_values(char* dst, uint32_t* left_out, const void* src, DType type, int64_t stride, int64_t keys,
                        int Dv) {
  uint32_t any = 0;
  for (int64_t step = 0; step < steps_of(keys); ++step, dst += N * step_bytes(Dv)) {
    const int n = int(min64(kStep, keys - step * kStep));
    const void* rows = element(src, type, step * kStep * stride);
    left_out[step] = pack_values_step<N>(dst, 0, rows, type, stride, n, Dv);
    if (left_out[step]) pack_values_step<N>(dst, left_out[step], rows, type, stride, n, Dv);
    any |= left_out[step];
  }
  return any != 0;
}

MHA_ISA_END
