// Copies of tiles between tensors (any storage type, any row positions) and scratch in the layout that gemm wants.
#pragma once

#include "quantised.h"

MHA_ISA_BEGIN

// Calls f(full, j, lanes) for each vector of a row of n; full is a true type when all lanes are in the row.
template <class A, class F>
MHA_INLINE void for_each_vector(int64_t n, F f) {
  constexpr int L = Vec<A>::lanes;
  int64_t j = 0;
  for (; j + L <= n; j += L) f(std::true_type(), j, L);
  if (j < n) f(std::false_type(), j, int(n - j));
}

template <class Full, class T>
MHA_INLINE auto load_lanes(Full, const T* p, int lanes) {
  if constexpr (Full::value)
    return load(p);
  else
    return load_n(p, lanes);
}

template <class Full, class T, class V>
MHA_INLINE void store_lanes(Full, T* p, V x, int lanes) {
  if constexpr (Full::value)
    store(p, x);
  else
    store_n(p, x, lanes);
}

// Calls f with a null pointer of the storage type: fp64 computes in double, every other type in float.
template <class T, class F>
MHA_INLINE void with_storage(DType type, F f) {
  if constexpr (std::is_same_v<T, double>) {
    f(static_cast<const double*>(nullptr));
  } else if (type == DType::bf16) {
    f(static_cast<const bf16*>(nullptr));
  } else if (type == DType::f16) {
    f(static_cast<const f16*>(nullptr));
  } else {
    f(static_cast<const float*>(nullptr));
  }
}

// Likewise, for the types of quantised caches.
template <class F>
MHA_INLINE void with_quantised(DType type, F f) {
  if (type == DType::e4m3) return f(static_cast<const e4m3*>(nullptr));
  f(static_cast<const int8_t*>(nullptr));
}

// Likewise for keys and values, which caches may hold quantised.
template <class T, class F>
MHA_INLINE void with_stored(DType type, F f) {
  if constexpr (std::is_same_v<T, float>) {
    if (size_of(type) == 1) return with_quantised(type, f);
  }
  with_storage<T>(type, f);
}

inline void* element(void* data, DType type, int64_t offset) {
  return static_cast<char*>(data) + offset * int64_t(size_of(type));
}
inline const void* element(const void* data, DType type, int64_t offset) {
  return static_cast<const char*>(data) + offset * int64_t(size_of(type));
}

// dst[r][c] = src[r * stride + c]
template <class T, class S>
inline void copy_rows(T* dst, int64_t ld, const S* src, int64_t stride, int rows, int cols) {
  constexpr int L = Vec<T>::lanes;
  for (int r = 0; r < rows; ++r, dst += ld, src += stride) {
    int c = 0;
    for (; c + L <= cols; c += L) store(dst + c, load(src + c));
    if (c < cols) store_n(dst + c, load_n(src + c, cols - c), cols - c);
  }
}
template <class T>
inline void copy_rows(T* dst, int64_t ld, const void* src, DType type, int64_t stride, int rows, int cols) {
  with_stored<T>(type, [&](auto* s) { copy_rows(dst, ld, static_cast<decltype(s)>(src), stride, rows, cols); });
}

// One L x L block, through memory; an ISA may overload this with something better.
template <class T>
MHA_INLINE void transpose_block(Vec<T>* x) {
  constexpr int L = Vec<T>::lanes;
  T in[L * L], out[L * L];
  for (int r = 0; r < L; ++r) store(in + r * L, x[r]);
  for (int r = 0; r < L; ++r) {
    for (int c = 0; c < L; ++c) out[c * L + r] = in[r * L + c];
  }
  for (int r = 0; r < L; ++r) x[r] = load(out + r * L);
}

// dst[c][r] = src[offset[r] + c]; lanes r up to the next multiple of the vector length become 0.
template <class T, class S>
inline void transpose_rows(T* dst, int64_t ld, const S* src, const int64_t* offset, int rows, int cols) {
  constexpr int L = Vec<T>::lanes;
  for (int r = 0; r < rows; r += L) {
    for (int c = 0; c < cols; c += L) {
      Vec<T> x[L];
      int width = std::min(L, cols - c);
      for (int i = 0; i < L; ++i) {
        if (r + i >= rows) {
          x[i] = set1(T(0));
        } else {
          const S* p = src + offset[r + i] + c;
          x[i] = width == L ? load(p) : load_n(p, width);
        }
      }
      transpose_block(x);
      for (int i = 0; i < width; ++i) store(dst + (c + i) * ld + r, x[i]);
    }
  }
}
template <class T>
inline void transpose_rows(T* dst, int64_t ld, const void* src, DType type, const int64_t* offset, int rows, int cols) {
  with_storage<T>(type, [&](auto* s) { transpose_rows(dst, ld, static_cast<decltype(s)>(src), offset, rows, cols); });
}

// dst[offset[r] + c] = src[c][r], for whole vectors of lanes in src.
template <class T, class S>
inline void untranspose_rows(S* dst, const int64_t* offset, const T* src, int64_t ld, int rows, int cols) {
  constexpr int L = Vec<T>::lanes;
  for (int r = 0; r < rows; r += L) {
    int height = std::min(L, rows - r);
    for (int c = 0; c < cols; c += L) {
      Vec<T> x[L];
      int width = std::min(L, cols - c);
      for (int i = 0; i < L; ++i) x[i] = i < width ? load(src + (c + i) * ld + r) : set1(T(0));
      transpose_block(x);
      for (int i = 0; i < height; ++i) {
        S* p = dst + offset[r + i] + c;
        if (width == L) {
          store(p, x[i]);
        } else {
          store_n(p, x[i], width);
        }
      }
    }
  }
}
template <class T>
inline void untranspose_rows(void* dst, DType type, const int64_t* offset, const T* src, int64_t ld, int rows,
                             int cols) {
  with_storage<T>(type, [&](auto* s) {
    using S = std::remove_const_t<std::remove_pointer_t<decltype(s)>>;
    untranspose_rows(static_cast<S*>(dst), offset, src, ld, rows, cols);
  });
}

// Whether all elements are finite: x * 0 is 0 exactly for finite x.
template <class T, class S>
inline bool all_finite(const S* src, int64_t stride, int rows, int cols) {
  constexpr int L = Vec<T>::lanes;
  Vec<T> sum = set1(T(0)), other = set1(T(0)), zero = set1(T(0));
  for (int r = 0; r < rows; ++r, src += stride) {
    int c = 0;
    for (; c + 2 * L <= cols; c += 2 * L) {
      sum = fma(load(src + c), zero, sum);
      other = fma(load(src + c + L), zero, other);
    }
    if (c + L <= cols) sum = fma(load(src + c), zero, sum), c += L;
    if (c < cols) other = fma(load_n(src + c, cols - c), zero, other);
  }
  return all(equal(sum + other, zero));
}
template <class T>
inline bool all_finite(const void* src, DType type, int64_t stride, int rows, int cols) {
  bool finite = true;
  with_stored<T>(type, [&](auto* s) { finite = all_finite<T>(static_cast<decltype(s)>(src), stride, rows, cols); });
  return finite;
}

MHA_ISA_END
