// Operands of products on AMX tiles, packed as whole tiles one after the other, zeros beyond their ends: loads of tiles
// then touch 16 neighbouring lines, and nobody asks where an operand ends.
//
// Rows (keys or queries) come in runs of 32, features in runs of 32; a pair of tiles is two tiles wide or high, so that
// a step of a product (amx_products.h) loads one pair of each operand. Each operand has Planes planes.
#pragma once

#include "operands.h"

MHA_ISA_BEGIN

constexpr int kRun = 32;  // rows, keys or features of a pair of tiles

// 16 rows of 32 bf16: of A as they are, of B as 16 pairs along k.
struct alignas(64) HalfTile {
  bf16 x[16][32];
};
// 16 x 16 sums.
struct alignas(64) SumTile {
  float x[16][16];
};

inline int64_t runs(int64_t n) { return (n + kRun - 1) / kRun; }

// 32 bf16 of a row, in registers.
struct Line {
  __m512i v;
};

// What planes of so many hold as it is stored: one bf16, two fp16.
template <int N>
using StoredAs = std::conditional_t<N == 1, bf16, f16>;

MHA_INLINE Line load_bits(const void* row, int width) {
  return {_mm512_maskz_loadu_epi16(width >= 32 ? ~__mmask32(0) : (__mmask32(1) << width) - 1, row)};
}

template <int N>
MHA_INLINE void load_line(Line* plane, const StoredAs<N>* from, int width) {
  if constexpr (N == 1) {
    plane[0] = load_bits(from, width);
  } else {
    const __m512i bits = load_bits(from, width).v;
    VecF low[N], high[N];
    split<N>({_mm512_cvtph_ps(_mm512_castsi512_si256(bits))}, low);
    split<N>({_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))}, high);
    for (int i = 0; i < N; ++i) plane[i].v = __m512i(_mm512_cvtne2ps_pbh(high[i].v, low[i].v));
  }
}

// Whether 32 numbers are finite, from their bits.
template <int N>
MHA_INLINE bool finite(Line x) {
  const __m512i exponent = _mm512_set1_epi16(N == 1 ? 0x7F80 : 0x7C00);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(x.v, exponent), exponent) == 0;
}

MHA_INLINE void transpose_pairs(Line* x) {
  VecF y[16];
  for (int i = 0; i < 16; ++i) y[i].v = _mm512_castsi512_ps(x[i].v);
  transpose_block(y);
  for (int i = 0; i < 16; ++i) x[i].v = _mm512_castps_si512(y[i].v);
}

// Where packed rows go, for one run of them, and null where they are not wanted: runs(cols) pairs of tiles, in rows and
// lanes one after the other, in features and down `step` tiles apart. So those that a product takes one after the other
// are neighbours, as the fetching of lines ahead of time works best.
struct PackedRun {
  HalfTile* rows = nullptr;      // A(m = row, k = feature)
  HalfTile* lanes = nullptr;     // B(k = feature, n = row)
  HalfTile* features = nullptr;  // B(k = row, n = feature); rows that are not finite are 0
  HalfTile* down = nullptr;      // A(m = feature, k = row); likewise
  int64_t step = 2;
};

// Packs up to 32 rows of a tensor. A plane lies `plane` tiles after the one before it. Returns a bit for each row that
// is not finite.
template <int N>
inline uint32_t pack_run(const PackedRun& to, int64_t plane, const void* src, int64_t stride, int rows, int cols) {
  uint32_t not_finite = 0;
  const Line zero{_mm512_setzero_si512()};
  auto at = [&](int r, int64_t c) { return static_cast<const StoredAs<N>*>(src) + r * stride + c; };
  for (int r = 0; r < rows; ++r) {
    bool all = true;
    for (int c = 0; c < cols; c += kRun) all &= finite<N>(load_bits(at(r, c), cols - c));
    if (!all) not_finite |= uint32_t(1) << r;
  }
  for (int64_t c = 0, pair = 0, apart = 0; c < cols; c += kRun, pair += 2, apart += to.step) {
    Line x[N][kRun];
    for (int r = 0; r < kRun; ++r) {
      Line line[N];
      for (int i = 0; i < N; ++i) line[i] = zero;
      if (r < rows) load_line<N>(line, at(r, c), int(cols - c));
      for (int i = 0; i < N; ++i) x[i][r] = line[i];
    }
    for (int i = 0; i < N; ++i) {
      const int64_t near = i * plane + pair, far = i * plane + apart;
      auto put = [](HalfTile* tile, int r, Line line) { _mm512_store_si512(tile->x[r], line.v); };
      if (to.rows)
        for (int r = 0; r < kRun; ++r) put(to.rows + near + r / 16, r % 16, x[i][r]);
      if (to.features || to.down) {
        Line paired[2][16];
        for (int r = 0; r < kRun; r += 2) {
          const Line even = not_finite >> r & 1 ? zero : x[i][r], odd = not_finite >> (r + 1) & 1 ? zero : x[i][r + 1];
          VecPair pairs[2];
          interleave_rows(pairs, even.v, odd.v);
          for (int half = 0; half < 2; ++half) paired[half][r / 2].v = pairs[half].v;
        }
        for (int half = 0; half < 2; ++half) {
          if (to.features)
            for (int r = 0; r < 16; ++r) put(to.features + far + half, r, paired[half][r]);
          if (to.down) {
            transpose_pairs(paired[half]);
            for (int r = 0; r < 16; ++r) put(to.down + far + half, r, paired[half][r]);
          }
        }
      }
      if (to.lanes) {
        for (int half = 0; half < 2; ++half) {
          transpose_pairs(x[i] + 16 * half);
          for (int r = 0; r < 16; ++r) put(to.lanes + near + half, r, x[i][16 * half + r]);
        }
      }
    }
  }
  return not_finite;
}

MHA_ISA_END
