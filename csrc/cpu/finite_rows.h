// Rows of an operand that hold NaN or Inf, in a tile whose mask hides some pairs: a weight of 0 would not keep them out
// of a product, since 0 * NaN is NaN. The product is made as ever, but over a copy in which these rows are 0 and add
// nothing; so who does not see them gets, to the bit, what any finite value there gives. Then they are added to those
// who do see them, pair by pair.
#pragma once

#include "operands.h"
#include "tile_mask.h"

MHA_ISA_BEGIN

template <class Unit>
class FiniteRows {
  using T = typename Product<Unit>::Acc;
  static constexpr int L = Vec<T>::lanes;

 public:
  // What columns_operand gives, with zeros for rows that are not finite.
  Broadcast<Unit> take(const void* src, DType type, int64_t stride, int rows, int cols, Unit* scratch,
                       Side side = Side::a) {
    src_ = src, type_ = type, stride_ = stride, rows_ = rows, cols_ = cols;
    Broadcast<Unit> taken{scratch, 1, cols};
    if constexpr (std::is_same_v<Unit, Pair>) {
      taken = columns_operand(src, type, stride, rows, cols, scratch, side);
    } else {
      copy_rows(scratch, cols, src, type, stride, rows, cols);
    }
    for (int r = 0; r < rows; ++r) {
      left_out_[r] = !all_finite<T>(element(src, type, r * stride), type, stride, 1, cols);
      if (!left_out_[r]) continue;
      if constexpr (std::is_same_v<Unit, Pair>) {
        for (int c = 0; c < cols; ++c) scratch[r / 2 * taken.ak + c * taken.am].x[r % 2] = bf16{};
      } else {
        std::fill_n(scratch + r * cols, cols, Unit(0));
      }
    }
    return taken;
  }

  // The rows are keys: sum[column][query] += weight[key][query] * row[key][column]. Before take, nothing.
  void add_keys(T* sum, const T* weight, const TileMask<T>& mask, int lanes) const {
    for_each_left_out([&](int j, const T* row, int first, int cols) {
      for (int r = 0; r < lanes; r += L) {
        const VecMask<T> seen = mask.visible(j, r);
        for (int c = 0; c < cols; ++c) {
          T* to = sum + (first + c) * kMaxRows + r;
          const Vec<T> old = load(to);
          store(to, select(seen, fma(set1(row[c]), load(weight + j * kMaxRows + r), old), old));
        }
      }
    });
  }

  // The same for rows * cols sums[query][column].
  void add_keys_by_row(T* sum, const T* weight, const TileMask<T>& mask, int rows) const {
    for_each_left_out([&](int j, const T* row, int first, int cols) {
      for (int r = 0; r < rows; ++r) {
        if (!mask.visible_pair(j, r)) continue;
        T* to = sum + r * cols_ + first;
        for (int c = 0; c < cols; ++c) to[c] += weight[j * kMaxRows + r] * row[c];
      }
    });
  }

  // The rows are queries: sum[key][column] += weight[key][query] * row[query][column].
  void add_queries(T* sum, const T* weight, const TileMask<T>& mask, int keys) const {
    for_each_left_out([&](int r, const T* row, int first, int cols) {
      for (int j = 0; j < keys; ++j) {
        if (!mask.visible_pair(j, r)) continue;
        T* to = sum + j * cols_ + first;
        for (int c = 0; c < cols; ++c) to[c] += weight[j * kMaxRows + r] * row[c];
      }
    });
  }

 private:
  // Calls f(row, a run of its elements, their first column, their number).
  template <class F>
  void for_each_left_out(F f) const {
    for (int r = 0; r < rows_; ++r) {
      if (!left_out_[r]) continue;
      for (int c = 0; c < cols_; c += L) {
        T run[L];
        const int cols = std::min(L, cols_ - c);
        copy_rows(run, L, element(src_, type_, r * stride_ + c), type_, stride_, 1, cols);
        f(r, run, c, cols);
      }
    }
  }

  const void* src_ = nullptr;
  DType type_ = DType::f32;
  int64_t stride_ = 0;
  int rows_ = 0, cols_ = 0;
  bool left_out_[kMaxRows > kMaxKeys ? kMaxRows : kMaxKeys];
};

MHA_ISA_END
