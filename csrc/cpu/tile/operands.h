// The operands of the products, tile by tile, in the layout that gemm wants for a compute unit: float, double, or pairs
// of bf16. What already lies right in memory is used in place.
//
// This room includes csrc/cpu, vector, product.
#pragma once

#include "../product/gemm.h"
#include "../product/pack.h"
#include "mask.h"

MHA_ISA_BEGIN

template <class Unit>
constexpr int kUnitK = kPairs<Unit> ? 2 : 1;  // elements of k per unit

template <class Unit>
MHA_INLINE int units(int k) {
  return (k + kUnitK<Unit> - 1) / kUnitK<Unit>;
}

// The first row of a block; x: of queries.
inline const void* first_row(const Tensor4& x, DType type, const RowBlock& block) {
  return element(x.data, type, block.b * x.stride[0] + block.offset(x.stride, 0));
}

// An A operand of gemm.
template <class Unit>
struct Broadcast {
  const Unit* a;
  int64_t am, ak;
  int64_t plane = 0;  // units from one plane to the next
};

enum class Side { a, b };  // of gemm's product

#ifdef MHA_HAS_AMX
template <class Unit>
constexpr bool kAmxUnit = kPairs<Unit>;
#else
template <class Unit>
constexpr bool kAmxUnit = false;
#endif

// Strips of a tile: 32 fill a row of AMX's tiles, as pairs.
template <class Unit>
using Strips = TileStrips<kAmxUnit<Unit> ? 32 : 16>;

// Units from one row of A to the next, as columns_operand lays it out for AMX: whole tiles, and not a power of two of
// them, so that the rows of a tile don't share a few sets of the first-level cache.
inline int64_t amx_columns_ld(int rows) {
  const int64_t n = (units<Pair>(rows) + 15) / 16 * 16;
  return n > 32 ? n | 16 : n;
}

// Units of a plane that columns_operand makes, and of scratch that it needs.
template <class Unit>
inline int64_t columns_plane(int64_t rows, int64_t cols) {
  return (kAmxUnit<Unit> ? amx_columns_ld(int(rows)) : units<Unit>(int(rows))) * cols;
}
template <class Unit>
inline int64_t columns_size(int64_t rows, int64_t cols) {
  return kPlanes<Unit> * columns_plane<Unit>(rows, cols);
}

#ifdef MHA_HAS_BF16_DOT
// Rows as pairs along the row, n of them, in planes. (bf16 holds what is quantised exactly.)
template <int N>
inline void pairs_of_rows(Pairs<N>* dst, int n, int64_t plane, const void* src, DType type, int64_t stride, int rows,
                          int cols) {
  with_stored<float>(type, [&](auto* s) {
    for (int r = 0; r < rows; ++r, dst += n) {
      const auto* row = static_cast<decltype(s)>(src) + r * stride;
      for (int i = 0; i < N; ++i) dst[i * plane + n - 1] = {};
      for_each_vector<float>(cols, [&](auto full, int64_t c, int lanes) MHA_INLINE_LAMBDA {
        VecF x[N];
        split<N>(load_lanes(full, row + c, lanes), x);
        for (int i = 0; i < N; ++i) store_lanes(full, &dst[i * plane].x[0] + c, x[i], lanes);
      });
    }
  });
}

// Two rows of a column operand of pairs; without `two`, the second is 0.
template <int N, class S>
MHA_INLINE void pairs_of_columns(Pairs<N>* dst, int64_t plane, const S* row, const S* next, bool two, int cols) {
  int first = 0;
  if constexpr (N == 1 && std::is_same_v<S, bf16>) {
    constexpr int L = VecF::lanes;
    for (; first + 2 * L <= cols; first += 2 * L) {
      VecPair pairs[2];
      interleave_rows(pairs, row + first, two ? next + first : nullptr);
      store(dst + first, pairs[0]), store(dst + first + L, pairs[1]);
    }
  }
  for_each_vector<float>(cols - first, [&](auto full, int64_t c, int lanes) MHA_INLINE_LAMBDA {
    c += first;
    VecPair pairs[N];
    const VecF odd = two ? load_lanes(full, next + c, lanes) : set1(0.0f);
    interleave_planes<N>(load_lanes(full, row + c, lanes), odd, pairs);
    for (int i = 0; i < N; ++i) store_lanes(full, dst + i * plane + c, pairs[i], lanes);
  });
}

// Up to 2 * L elements of a row, as planes of pairs.
template <int N>
MHA_INLINE void line_of_planes(Pairs<N> (*line)[VecF::lanes], const void* row, DType type, int width) {
  constexpr int L = VecF::lanes;
  if constexpr (N == 1) {
    std::memcpy(line[0], row, size_t(width) * sizeof(bf16));
  } else {
    with_storage<float>(type, [&](auto* s) {
      for (int c = 0; c < width; c += L) {
        VecF x[N];
        split<N>(load_n(static_cast<decltype(s)>(row) + c, width - c), x);
        for (int i = 0; i < N; ++i) store(&line[i][0].x[0] + c, x[i]);
      }
    });
  }
}

// dst[c][r / 2] = rows r and r + 1 of column c; whole tiles along r, 0 beyond the rows.
template <int N, class S>
inline void pairs_down_columns(Pairs<N>* dst, int64_t ld, int64_t plane, const S* src, int64_t stride, int rows,
                               int cols) {
  constexpr int L = VecF::lanes;
  for (int r = 0; r < rows; r += 2 * L) {
    for (int c = 0; c < cols; c += L) {
      const int width = std::min(L, cols - c);
      auto row = [&](int i) { return i < rows ? load_n(src + i * stride + c, width) : set1(0.0f); };
      VecF x[N][L];
      for (int i = 0; i < L; ++i) {
        VecPair pairs[N];
        interleave_planes<N>(row(r + 2 * i), row(r + 2 * i + 1), pairs);
        for (int p = 0; p < N; ++p) std::memcpy(&x[p][i], &pairs[p], sizeof(pairs[p]));
      }
      for (int p = 0; p < N; ++p) {
        transpose_block(x[p]);
        for (int i = 0; i < width; ++i) std::memcpy(dst + p * plane + (c + i) * ld + r / 2, &x[p][i], sizeof(x[p][i]));
      }
    }
  }
}
#endif

// Rows of a tensor (keys) as A(m = row, k = column); scratch holds rows * units(cols) for each plane.
template <class Unit>
inline Broadcast<Unit> rows_operand(const void* src, DType type, int64_t stride, int rows, int cols, Unit* scratch) {
#ifdef MHA_HAS_BF16_DOT
  if constexpr (kPairs<Unit>) {
    // Rows that lie apart ([B,S,H,D] in memory) are fetched slowly: they are copied, once per head where forward keeps
    // it.
    const bool is_pairs = kPlanes<Unit> == 1 && type == DType::bf16;
    if (is_pairs && cols % 2 == 0 && stride == cols) return {static_cast<const Unit*>(src), stride / 2, 1};
    const int n = units<Unit>(cols);
    const int64_t plane = int64_t(rows) * n;
    if (!is_pairs) {
      pairs_of_rows(scratch, n, plane, src, type, stride, rows, cols);
      return {scratch, n, 1, plane};
    }
    for (int r = 0; r < rows; ++r) {
      scratch[r * n + n - 1] = {};
      std::memcpy(scratch + r * n, static_cast<const bf16*>(src) + r * stride, size_t(cols) * sizeof(bf16));
    }
    return {scratch, n, 1};
  } else
#endif
  {
    if (sizeof(Unit) == size_of(type)) return {static_cast<const Unit*>(src), stride, 1};
    copy_rows(scratch, cols, src, type, stride, rows, cols);
    return {scratch, cols, 1};
  }
}

// Rows of a tensor (values) as A(m = column, k = row), or as B(k = row, n = column) with am = 1; scratch holds
// columns_size.
template <class Unit>
inline Broadcast<Unit> columns_operand(const void* src, DType type, int64_t stride, int rows, int cols, Unit* scratch,
                                       [[maybe_unused]] Side side = Side::a) {
#ifdef MHA_HAS_BF16_DOT
  if constexpr (kPairs<Unit>) {
    const int64_t ld = amx_columns_ld(rows), plane = columns_plane<Unit>(rows, cols);
    const bool down = kAmxUnit<Unit> && side == Side::a;
    with_stored<float>(type, [&](auto* s) {
      const auto* row = static_cast<decltype(s)>(src);
      if constexpr (kAmxUnit<Unit>) {
        if (down) return pairs_down_columns(scratch, ld, plane, row, stride, rows, cols);
      }
      for (int r = 0; r < rows; r += 2, row += 2 * stride) {
        pairs_of_columns(scratch + r / 2 * cols, plane, row, row + stride, r + 1 < rows, cols);
      }
    });
    if (down) return {scratch, ld, 1, plane};
    return {scratch, 1, cols, plane};
  } else
#endif
  {
    if (sizeof(Unit) == size_of(type)) return {static_cast<const Unit*>(src), 1, stride};
    copy_rows(scratch, cols, src, type, stride, rows, cols);
    return {scratch, 1, cols};
  }
}

// Rows of a tensor (queries) transposed into a B operand: dst[units(cols)][ld] for each plane, one row per lane.
template <class Unit>
inline void transposed_operand(Unit* dst, int64_t ld, const void* src, DType type, const int64_t* offset, int rows,
                               int cols) {
#ifdef MHA_HAS_BF16_DOT
  if constexpr (kPairs<Unit>) {
    // Two bf16 travel as one float, which no instruction here looks into.
    constexpr int L = VecF::lanes, N = kPlanes<Unit>;
    const int64_t plane = units<Unit>(cols) * ld;
    for (int r = 0; r < rows; r += L) {
      for (int c = 0; c < cols; c += 2 * L) {
        VecF x[N][L];
        const int width = std::min(2 * L, cols - c);
        for (int i = 0; i < L; ++i) {
          Unit line[N][L] = {};
          if (r + i < rows) line_of_planes(line, element(src, type, offset[r + i] + c), type, width);
          for (int p = 0; p < N; ++p) std::memcpy(&x[p][i], line[p], sizeof(line[p]));
        }
        for (int p = 0; p < N; ++p) {
          transpose_block(x[p]);
          for (int i = 0; i < units<Unit>(width); ++i)
            std::memcpy(dst + p * plane + (c / 2 + i) * ld + r, &x[p][i], sizeof(x[p][i]));
        }
      }
    }
  } else
#endif
  {
    transpose_rows(dst, ld, src, type, offset, rows, cols);
  }
}

// Units of a plane of weights that lanes_operand makes.
template <class Unit>
constexpr int64_t kLanesPlane = kMaxKeys / kUnitK<Unit> * kMaxRows;

#ifdef MHA_HAS_BF16_DOT
template <int N>
MHA_INLINE void store_lanes_pair(Pairs<N>* dst, VecF even, VecF odd) {
  VecPair pairs[N];
  interleave_planes<N>(even, odd, pairs);
  for (int p = 0; p < N; ++p) store(dst + p * kLanesPlane<Pairs<N>>, pairs[p]);
}
#endif

// Computed weights [k][kMaxRows] as a B operand of the same rows: in place, or in planes of pairs along k in scratch.
template <class Unit, class T>
inline const Unit* lanes_operand(const T* src, int k, int lanes, Unit* scratch) {
#ifdef MHA_HAS_BF16_DOT
  if constexpr (kPairs<Unit>) {
    for (int i = 0; i < k; i += 2, src += 2 * kMaxRows) {
      for (int n = 0; n < lanes; n += VecF::lanes) {
        const VecF odd = i + 1 < k ? load(src + kMaxRows + n) : set1(0.0f);
        store_lanes_pair(scratch + i / 2 * kMaxRows + n, load(src + n), odd);
      }
    }
    return scratch;
  } else
#endif
  {
    (void)k, (void)lanes, (void)scratch;
    return src;
  }
}

MHA_ISA_END
