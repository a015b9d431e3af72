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

enum class Side { a, b };  // of gemm's product

#ifdef MHA_HAS_AMX
template <class Unit>
constexpr bool kAmxUnit = std::is_same_v<Unit, Pair>;
#else
template <class Unit>
constexpr bool kAmxUnit = false;
#endif

// Units from one row of A to the next, as columns_operand lays it out for AMX: whole tiles, and not a power of two of
// them, so that the rows of a tile don't share a few sets of the first-level cache.
inline int64_t amx_columns_ld(int rows) {
  const int64_t n = (units<Pair>(rows) + 15) / 16 * 16;
  return n > 32 ? n | 16 : n;
}

// Units of scratch that columns_operand needs.
template <class Unit>
inline int64_t columns_size(int64_t rows, int64_t cols) {
  return (kAmxUnit<Unit> ? amx_columns_ld(int(rows)) : units<Unit>(int(rows))) * cols;
}

// Quantised rows as pairs along the row; bf16 holds their elements exactly.
inline void pairs_of_rows(Pair* dst, int n, const void* src, DType type, int64_t stride, int rows, int cols) {
  constexpr int L = VecF::lanes;
  with_quantised(type, [&](auto* s) {
    for (int r = 0; r < rows; ++r, dst += n) {
      const auto* row = static_cast<decltype(s)>(src) + r * stride;
      bf16* to = &dst->x[0];
      dst[n - 1] = Pair{};
      int c = 0;
      for (; c + L <= cols; c += L) store(to + c, load(row + c));
      if (c < cols) store_n(to + c, load_n(row + c, cols - c), cols - c);
    }
  });
}

// Two rows of a column operand of pairs; without `two`, the second is 0.
template <class S>
MHA_INLINE void pairs_of_columns(Pair* dst, const S* row, const S* next, bool two, int cols) {
  int c = 0;
#ifdef MHA_HAS_BF16_DOT
  constexpr int L = VecF::lanes;
  if constexpr (std::is_same_v<S, bf16>) {
    for (; c + 2 * L <= cols; c += 2 * L) interleave_rows(dst + c, row + c, two ? next + c : nullptr);
  }
  for (; c + L <= cols; c += L) {
    store(dst + c, interleave_bf16(load(row + c), two ? load(next + c) : set1(0.0f)));
  }
#endif
  for (; c < cols; ++c) {
    bf16 pair[2] = {};
    store_n(pair, load_n(row + c, 1), 1);
    if (two) store_n(pair + 1, load_n(next + c, 1), 1);
    dst[c] = {{pair[0], pair[1]}};
  }
}

#ifdef MHA_HAS_AMX
// dst[c][r / 2] = rows r and r + 1 of column c; whole tiles along r, 0 beyond the rows.
template <class S>
inline void pairs_down_columns(Pair* dst, int64_t ld, const S* src, int64_t stride, int rows, int cols) {
  constexpr int L = VecF::lanes;
  for (int r = 0; r < rows; r += 2 * L) {
    for (int c = 0; c < cols; c += L) {
      const int width = std::min(L, cols - c);
      auto row = [&](int i) { return i < rows ? load_n(src + i * stride + c, width) : set1(0.0f); };
      VecF x[L];
      for (int i = 0; i < L; ++i) {
        const VecPair pairs = interleave_bf16(row(r + 2 * i), row(r + 2 * i + 1));
        std::memcpy(&x[i], &pairs, sizeof(pairs));
      }
      transpose_block(x);
      for (int i = 0; i < width; ++i) std::memcpy(dst + (c + i) * ld + r / 2, &x[i], sizeof(x[i]));
    }
  }
}
#endif

// Rows of a tensor (keys) as A(m = row, k = column); scratch holds rows * units(cols).
template <class Unit>
inline Broadcast<Unit> rows_operand(const void* src, DType type, int64_t stride, int rows, int cols, Unit* scratch) {
  if constexpr (std::is_same_v<Unit, Pair>) {
    // Rows that lie apart ([B,S,H,D] in memory) are fetched slowly: they are copied, once per head where forward keeps
    // it.
    if (type == DType::bf16 && cols % 2 == 0 && stride == cols) return {static_cast<const Pair*>(src), stride / 2, 1};
    const int n = units<Pair>(cols);
    if (type != DType::bf16) {
      pairs_of_rows(scratch, n, src, type, stride, rows, cols);
      return {scratch, n, 1};
    }
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

// Rows of a tensor (values) as A(m = column, k = row), or as B(k = row, n = column) with am = 1; scratch holds
// columns_size.
template <class Unit>
inline Broadcast<Unit> columns_operand(const void* src, DType type, int64_t stride, int rows, int cols, Unit* scratch,
                                       [[maybe_unused]] Side side = Side::a) {
  if constexpr (std::is_same_v<Unit, Pair>) {
    const int64_t ld = amx_columns_ld(rows);
    const bool down = kAmxUnit<Unit> && side == Side::a;
    auto pack = [&](auto* s) {
      const auto* row = static_cast<decltype(s)>(src);
#ifdef MHA_HAS_AMX
      if (down) return pairs_down_columns(scratch, ld, row, stride, rows, cols);
#endif
      for (int r = 0; r < rows; r += 2, row += 2 * stride) {
        pairs_of_columns(scratch + r / 2 * cols, row, row + stride, r + 1 < rows, cols);
      }
    };
    if (type == DType::bf16)
      pack(static_cast<const bf16*>(nullptr));
    else
      with_quantised(type, pack);
    if (down) return {scratch, ld, 1};
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
