// Products for a block of few queries, as in decoding. Head elements lie in lanes instead of queries: keys and values
// go through the registers once, in the order of memory, for all rows together.
#pragma once

#include "operands.h"

MHA_ISA_BEGIN

constexpr int kFewRows = 8;

// The queries of a block, [rows rounded up to 4][few_ld]: rows and elements beyond theirs are 0.
template <class Unit>
inline int64_t few_ld(int D) {
  constexpr int L = Vec<typename Product<Unit>::Acc>::lanes;
  return (units<Unit>(D) + L - 1) / L * L;
}
template <class Unit>
inline void few_queries(Unit* dst, const void* src, DType type, const int64_t* offset, int rows, int D) {
  const int64_t ld = few_ld<Unit>(D);
  std::fill_n(dst, ld * ((rows + 3) / 4 * 4), Unit{});
  for (int r = 0; r < rows; ++r) {
    if constexpr (std::is_same_v<Unit, Pair>) {
      std::memcpy(dst + r * ld, element(src, type, offset[r]), std::size_t(D) * sizeof(bf16));
    } else {
      copy_rows(dst + r * ld, ld, element(src, type, offset[r]), type, 0, 1, D);
    }
  }
}

// Lane l: the sum of x[l] over its lanes. An ISA may overload this with something better.
template <class T>
MHA_INLINE Vec<T> reduce_block(Vec<T>* x) {
  transpose_block(x);
  Vec<T> even = x[0], odd = x[1];
  for (int l = 2; l < Vec<T>::lanes; l += 2) even = even + x[l], odd = odd + x[l + 1];
  return even + odd;
}

// Four queries against kKeys keys: sum[4 * key + query], to be added up over the lanes.
template <class Unit, int kKeys, class Key>
MHA_INLINE void dot_step(const Key* const* key, const Unit* q, int64_t ld, int n,
                         Vec<typename Product<Unit>::Acc>* sum) {
  using P = Product<Unit>;
  constexpr int L = Vec<typename P::Acc>::lanes;
  for (int i = 0; i < 4 * kKeys; ++i) sum[i] = set1(typename P::Acc(0));
  int c = 0;
  for (; c + L <= n; c += L) {
    typename P::Operand query[4];
    for (int r = 0; r < 4; ++r) query[r] = P::load_b(q + r * ld + c);
    for (int i = 0; i < kKeys; ++i) {
      const typename P::Operand k = P::load_b(key[i] + c);
      for (int r = 0; r < 4; ++r) sum[4 * i + r] = P::step(k, query[r], sum[4 * i + r]);
    }
  }
  if (c < n) {
    for (int i = 0; i < kKeys; ++i) {
      const typename P::Operand k = P::load_b(key[i] + c, n - c);
      for (int r = 0; r < 4; ++r) sum[4 * i + r] = P::step(k, P::load_b(q + r * ld + c), sum[4 * i + r]);
    }
  }
}

// Rows that will be read soon, fetched while others are worked on.
struct Ahead {
  const void* first;
  int64_t stride, bytes;
  template <bool kToWrite = false>
  MHA_INLINE void fetch(int row) const {
    const char* p = static_cast<const char*>(first) + row * stride;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, kToWrite, 2);
  }
};

// score[j][r] = sum_d key[j][d] * q[r][d], n units long. Keys are units, or what loads as a vector of them.
template <class Unit, class Key, class T>
inline void few_scores(const Key* key, int64_t stride, int keys, int n, const Unit* q, int64_t ld, int rows, T* score,
                       const Ahead (&ahead)[2]) {
  constexpr int L = Vec<T>::lanes, kKeys = L > 4 ? L / 4 : 1;
  for (int j = 0; j < keys; j += kKeys) {
    const Key* row[kKeys];
    for (int i = 0; i < kKeys && j + i < keys; ++i)
      for (const Ahead& a : ahead) a.fetch(j + i);
    for (int i = 0; i < kKeys; ++i) row[i] = key + std::min(j + i, keys - 1) * stride;
    for (int r = 0; r < rows; r += 4) {
      Vec<T> sum[4 * kKeys];
      dot_step<Unit, kKeys>(row, q + r * ld, ld, n, sum);
      T total[4 * kKeys];
      for (int i = 0; i < 4 * kKeys; i += L) store(total + i, reduce_block(sum + i));
      for (int i = 0; i < kKeys && j + i < keys; ++i) {
        std::memcpy(score + (j + i) * kMaxRows + r, total + 4 * i, std::size_t(std::min(4, rows - r)) * sizeof(T));
      }
    }
  }
}

// out[r][c] *= factor[r]
template <class T>
inline void few_rescale(T* out, int cols, const T* factor, int rows) {
  constexpr int L = Vec<T>::lanes;
  for (int r = 0; r < rows; ++r, out += cols) {
    if (factor[r] == T(1)) continue;
    const Vec<T> f = set1(factor[r]);
    int c = 0;
    for (; c + L <= cols; c += L) store(out + c, load(out + c) * f);
    if (c < cols) store_n(out + c, load_n(out + c, cols - c) * f, cols - c);
  }
}

// out[r][c] = out[r][c] * factor[r] + other[r][c] * other_factor[r]
template <class T>
inline void few_add(T* out, const T* other, int cols, const T* factor, const T* other_factor, int rows) {
  constexpr int L = Vec<T>::lanes;
  for (int r = 0; r < rows; ++r, out += cols, other += cols) {
    const Vec<T> f = set1(factor[r]), g = set1(other_factor[r]);
    int c = 0;
    for (; c + L <= cols; c += L) store(out + c, fma(load(out + c), f, load(other + c) * g));
    if (c < cols) store_n(out + c, fma(load_n(out + c, cols - c), f, load_n(other + c, cols - c) * g), cols - c);
  }
}

// dst[offset[r] + c] = src[r][c]
template <class T>
inline void few_store(void* dst, DType type, const int64_t* offset, const T* src, int rows, int cols) {
  constexpr int L = Vec<T>::lanes;
  with_storage<T>(type, [&](auto* s) {
    using S = std::remove_const_t<std::remove_pointer_t<decltype(s)>>;
    for (int r = 0; r < rows; ++r, src += cols) {
      S* to = static_cast<S*>(dst) + offset[r];
      int c = 0;
      for (; c + L <= cols; c += L) store(to + c, load(src + c));
      if (c < cols) store_n(to + c, load_n(src + c, cols - c), cols - c);
    }
  });
}

MHA_ISA_END
