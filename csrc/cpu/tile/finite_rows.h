// Rows of an operand that hold NaN or Inf, in a tile whose mask hides some pairs: a weight of 0 would not keep them out
// of a product, since 0 * NaN is NaN. The product is made as ever, but over a copy in which these rows are 0 and add
// nothing; so who does not see them gets, to the bit, what any finite value there gives. Then they are added to those
// who do see them, pair by pair.
#pragma once

#include "mask.h"
#include "operands.h"

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
    if constexpr (kPairs<Unit>) {
      taken = columns_operand(src, type, stride, rows, cols, scratch, side);
    } else {
      copy_rows(scratch, cols, src, type, stride, rows, cols);
    }
    for (int r = 0; r < rows; ++r) {
      left_out_[r] = !all_finite<T>(element(src, type, r * stride), type, stride, 1, cols);
      if (!left_out_[r]) continue;
      if constexpr (kPairs<Unit>) {
        for (int c = 0; c < cols * kPlanes<Unit>; ++c)
          scratch[c / cols * taken.plane + r / 2 * taken.ak + c % cols * taken.am].x[r % 2] = bf16{};
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

// The products of planes make NaN of an infinite number, times what it meets in a plane that is 0. So those of rows
// that are not finite are made once more, one by one: product[key][query] = row of key * row of query.
template <class Keys, class Queries>
inline void repair_products(float* product, Keys key, int keys, Queries query, int queries, DType key_type,
                            DType query_type, int cols) {
  constexpr int L = VecF::lanes;
  bool finite_query[kMaxRows];
  for (int r = 0; r < queries; ++r) finite_query[r] = all_finite<float>(query(r), query_type, 0, 1, cols);
  for (int j = 0; j < keys; ++j) {
    const bool finite_key = all_finite<float>(key(j), key_type, 0, 1, cols);
    for (int r = 0; r < queries; ++r) {
      if (finite_key && finite_query[r]) continue;
      VecF sum = set1(0.0f);
      for (int c = 0; c < cols; c += L) {
        float a[L] = {}, b[L] = {};
        copy_rows(a, L, element(key(j), key_type, c), key_type, 0, 1, std::min(L, cols - c));
        copy_rows(b, L, element(query(r), query_type, c), query_type, 0, 1, std::min(L, cols - c));
        sum = fma(load(a), load(b), sum);
      }
      product[j * kMaxRows + r] = reduce_add(sum);
    }
  }
}

MHA_ISA_END
