// Operands of products on AMX tiles, packed as whole tiles one after the other, zeros beyond their ends: loads of tiles
// then touch 16 neighbouring lines, and nobody asks where an operand ends.
//
// Rows (keys or queries) come in runs of 32, features in runs of 32; a pair of tiles is two tiles wide or high, so that
// a step of a product (products.h) loads one pair of each operand.
//
// This room includes vector, product, tile, attention/fwd, attention/bwd.
#pragma once

#include "../../tile/operands.h"

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

// An operand of a product: pairs of tiles along k, in planes. A pair makes up 32 rows of A or columns of B.
struct TilePairs {
  HalfTile* tiles = nullptr;
  int64_t step = 2, plane = 0;  // tiles from one pair to the next, to the next plane
  TilePairs from(int64_t tile) const { return {tiles + tile, step, plane}; }
};

// 32 bf16 of a row, in registers.
struct Line {
  __m512i v;
};

MHA_INLINE Line load_bits(const void* row, int width) {
  return {_mm512_maskz_loadu_epi16(width >= 32 ? ~__mmask32(0) : (__mmask32(1) << width) - 1, row)};
}

// 32 numbers as they are stored (one plane: bf16, two: fp16) to planes.
template <int N>
MHA_INLINE void to_planes(Line* plane, Line bits) {
  if constexpr (N == 1) {
    plane[0] = bits;
  } else {
    VecF low[N], high[N];
    split<N>({_mm512_cvtph_ps(_mm512_castsi512_si256(bits.v))}, low);
    split<N>({_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits.v, 1))}, high);
    for (int i = 0; i < N; ++i) plane[i].v = __m512i(_mm512_cvtne2ps_pbh(high[i].v, low[i].v));
  }
}

MHA_INLINE void transpose_pairs(Line* x) {
  VecF y[16];
  for (int i = 0; i < 16; ++i) y[i].v = _mm512_castsi512_ps(x[i].v);
  transpose_block(y);
  for (int i = 0; i < 16; ++i) x[i].v = _mm512_castps_si512(y[i].v);
}

// The bits of |x| from which on a number is infinite or NaN, as it is stored.
template <int N>
constexpr uint16_t kInfinite = N == 1 ? 0x7F80 : 0x7C00;

// What packing finds.
struct Seen {
  uint32_t not_finite = 0;  // a bit for each row
  uint16_t greatest = 0;    // |x|, as bits
};

// Where packed rows go, for one run of them, and null where they are not wanted. In rows and lanes a step goes on along
// features, in features and down from one run of features to the next. So those that a product takes one after the
// other can be neighbours, as the fetching of lines ahead of time works best.
struct PackedRun {
  TilePairs rows;      // A(m = row, k = feature)
  TilePairs lanes;     // B(k = feature, n = row)
  TilePairs features;  // B(k = row, n = feature); rows that are not finite are 0
  TilePairs down;      // A(m = feature, k = row); likewise
};

// Which rows of a run make a pair along k: neighbours, or those that lie in the two halves of the run.
enum class PairsOf { neighbours, halves };

// Rows with bits in left_out are 0.
template <int N, PairsOf kPairsOf>
MHA_INLINE Seen pack_all_but(uint32_t left_out, const PackedRun& to, const void* src, int64_t stride, int rows,
                             int cols) {
  Seen seen;
  auto put = [](HalfTile* tile, int r, Line line) { _mm512_store_si512(tile->x[r], line.v); };
  const __m512i infinite = _mm512_set1_epi16(kInfinite<N>), magnitude = _mm512_set1_epi16(0x7FFF);
  __m512i top = _mm512_setzero_si512();
  for (int64_t c = 0, run = 0; c < cols; c += kRun, ++run) {
    auto at = [&](const TilePairs& pairs, int plane) { return pairs.tiles + plane * pairs.plane + run * pairs.step; };
    Line x[N][kRun];
    for (int r = 0; r < kRun; ++r) {
      const bool there = r < rows && !(left_out >> r & 1);
      const Line bits = load_bits(static_cast<const uint16_t*>(src) + r * stride + c, there ? int(cols - c) : 0);
      const __m512i size = _mm512_and_si512(bits.v, magnitude);
      seen.not_finite |= uint32_t(_mm512_cmpge_epu16_mask(size, infinite) != 0) << r;
      top = _mm512_max_epu16(top, size);
      Line line[N];
      to_planes<N>(line, bits);
      for (int i = 0; i < N; ++i) {
        if (to.rows.tiles) put(at(to.rows, i) + r / 16, r % 16, line[i]);
        x[i][r] = line[i];
      }
    }
    for (int i = 0; i < N; ++i) {
      if (to.features.tiles || to.down.tiles) {
        constexpr int kFirst = kPairsOf == PairsOf::halves ? 1 : 2, kSecond = kPairsOf == PairsOf::halves ? 16 : 1;
        Line paired[2][16];
        for (int r = 0; r < 16; ++r) {
          VecPair pairs[2];
          interleave_rows(pairs, x[i][r * kFirst].v, x[i][r * kFirst + kSecond].v);
          for (int half = 0; half < 2; ++half) paired[half][r].v = pairs[half].v;
        }
        for (int half = 0; half < 2; ++half) {
          if (to.features.tiles) {
            for (int r = 0; r < 16; ++r) put(at(to.features, i) + half, r, paired[half][r]);
          }
          if (to.down.tiles) {
            transpose_pairs(paired[half]);
            for (int r = 0; r < 16; ++r) put(at(to.down, i) + half, r, paired[half][r]);
          }
        }
      }
      if (to.lanes.tiles) {
        for (int half = 0; half < 2; ++half) {
          transpose_pairs(x[i] + 16 * half);
          for (int r = 0; r < 16; ++r) put(at(to.lanes, i) + half, r, x[i][16 * half + r]);
        }
      }
    }
  }
  alignas(64) uint16_t lane[32];
  _mm512_store_si512(lane, top);
  seen.greatest = *std::max_element(lane, lane + 32);
  return seen;
}

// Packs up to 32 rows of a tensor. Rows that are not finite are found on the way: then it is done once more.
template <int N, PairsOf kPairsOf = PairsOf::neighbours>
MHA_INLINE Seen pack_run(const PackedRun& to, const void* src, int64_t stride, int rows, int cols) {
  const Seen seen = pack_all_but<N, kPairsOf>(0, to, src, stride, rows, cols);
  if (seen.not_finite && (to.features.tiles || to.down.tiles)) {
    PackedRun again;
    again.features = to.features, again.down = to.down;
    pack_all_but<N, kPairsOf>(seen.not_finite, again, src, stride, rows, cols);
  }
  return seen;
}

MHA_ISA_END
