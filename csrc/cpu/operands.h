// The operands of the products, tile by tile, in the layout that gemm wants for a compute unit: float, double, or pairs
// of bf16. What already lies right in memory is used in place.
#pragma once

#include "gemm.h"
#include "pack.h"

MHA_ISA_BEGIN

template <class Unit>
constexpr int kUnitK = std::is_same_v<Unit, Pair> ? 2 : 1;  // elements of k per unit

template <class Unit>
MHA_INLINE int units(int k) {
  return (k + kUnitK<Unit> - 1) / kUnitK<Unit>;
}

// An A operand of gemm.
template <class Unit>
struct Broadcast {
  const Unit* a;
  int64_t am, ak;
};

// Rows of a tensor (keys) as A(m = row, k = column); scratch holds rows * units(cols).
template <class Unit>
inline Broadcast<Unit> rows_operand(const void* src, DType type, int64_t stride, int rows, int cols, Unit* scratch) {
  if constexpr (std::is_same_v<Unit, Pair>) {
    // Rows that lie apart ([B,S,H,D] in memory) are fetched slowly: they are copied, once per head where forward keeps
    // it.
    if (cols % 2 == 0 && stride == cols) return {static_cast<const Pair*>(src), stride / 2, 1};
    const int n = units<Pair>(cols);
    for (int r = 0; r < rows; ++r) {
      scratch[r * n + n - 1] = Pair{};
      std::memcpy(scratch + r * n, static_cast<const bf16*>(src) + r * stride, size_t(cols) * sizeof(bf16));
    }
    return {scratch, n, 1};
  } else {
    if (sizeof(Unit) == size_of(type)) return {static_cast<const Unit*>(src), stride, 1};
    copy_rows(scratch, cols, src, type, stride, rows, cols);
    return {scratch, cols, 1};
  }
}

// Rows of a tensor (values) as A(m = column, k = row); scratch holds units(rows) * cols.
template <class Unit>
inline Broadcast<Unit> columns_operand(const void* src, DType type, int64_t stride, int rows, int cols, Unit* scratch) {
  if constexpr (std::is_same_v<Unit, Pair>) {
    const bf16* row = static_cast<const bf16*>(src);
    for (int r = 0; r < rows; r += 2, row += 2 * stride) {
      Pair* dst = scratch + r / 2 * cols;
      const bool two = r + 1 < rows;
      int c = 0;
#ifdef MHA_HAS_BF16_DOT
      for (; c + VecF::lanes <= cols; c += VecF::lanes) {
        store(dst + c, interleave_bf16(load(row + c), two ? load(row + stride + c) : set1(0.0f)));
      }
#endif
      for (; c < cols; ++c) dst[c] = {{row[c], two ? row[stride + c] : bf16{}}};
    }
    return {scratch, 1, cols};
  } else {
    if (sizeof(Unit) == size_of(type)) return {static_cast<const Unit*>(src), 1, stride};
    copy_rows(scratch, cols, src, type, stride, rows, cols);
    return {scratch, 1, cols};
  }
}

// Rows of a tensor (queries) transposed into a B operand: dst[units(cols)][ld], one row per lane.
template <class Unit>
inline void transposed_operand(Unit* dst, int64_t ld, const void* src, DType type, const int64_t* offset, int rows,
                               int cols) {
  if constexpr (std::is_same_v<Unit, Pair>) {
    // Two bf16 travel as one float, which no instruction here looks into.
    constexpr int L = VecF::lanes;
    const bf16* base = static_cast<const bf16*>(src);
    for (int r = 0; r < rows; r += L) {
      for (int c = 0; c < cols; c += 2 * L) {
        VecF x[L];
        const int width = std::min(2 * L, cols - c);
        for (int i = 0; i < L; ++i) {
          Pair line[L] = {};
          if (r + i < rows) std::memcpy(line, base + offset[r + i] + c, size_t(width) * sizeof(bf16));
          std::memcpy(&x[i], line, sizeof(line));
        }
        transpose_block(x);
        for (int i = 0; i < units<Pair>(width); ++i) std::memcpy(dst + (c / 2 + i) * ld + r, &x[i], sizeof(x[i]));
      }
    }
  } else {
    transpose_rows(dst, ld, src, type, offset, rows, cols);
  }
}

// Computed weights [k][lanes] as a B operand of the same rows: in place, or rounded and paired along k into scratch.
template <class Unit, class T>
inline const Unit* lanes_operand(const T* src, int64_t ld, int k, int lanes, Unit* scratch) {
#ifdef MHA_HAS_BF16_DOT
  if constexpr (std::is_same_v<Unit, Pair>) {
    for (int i = 0; i < k; i += 2, src += 2 * ld) {
      for (int n = 0; n < lanes; n += 16) {
        VecF even = load(src + n), odd = i + 1 < k ? load(src + ld + n) : set1(0.0f);
        store(scratch + i / 2 * ld + n, interleave_bf16(even, odd));
      }
    }
    return scratch;
  } else
#endif
  {
    (void)ld, (void)k, (void)lanes, (void)scratch;
    return src;
  }
}

MHA_ISA_END
