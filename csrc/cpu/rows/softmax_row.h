// The steps of a softmax over one row of n elements, each a pass over memory that lies in the near caches.
//
// This room includes vector, threads, product.
#pragma once

#include "../product/pack.h"
#include "../threads/parallel.h"
#include "../vector/math.h"

MHA_ISA_BEGIN

// to[j] = from[j * stride] * scale
template <class T>
void load_row(Acc<T>* to, const T* from, int64_t stride, Acc<T> scale, int64_t n) {
  using A = Acc<T>;
  constexpr int L = Vec<A>::lanes;
  const Vec<A> factor = set1(scale);
  for_each_vector<A>(n, [&](auto full, int64_t j, int lanes) {
    T gathered[L];
    const T* x = from + j;
    if (stride != 1) {
      for (int l = 0; l < lanes; ++l) gathered[l] = from[(j + l) * stride];
      x = gathered;
    }
    store_lanes(full, to + j, load_lanes(full, x, lanes) * factor, lanes);
  });
}

// to[j] += bias[j * stride]
template <class T>
void add_bias(Acc<T>* to, const T* bias, int64_t stride, int64_t n) {
  using A = Acc<T>;
  constexpr int L = Vec<A>::lanes;
  for_each_vector<A>(n, [&](auto full, int64_t j, int lanes) {
    T gathered[L];
    const T* x = bias + j;
    if (stride != 1) {
      for (int l = 0; l < lanes; ++l) gathered[l] = bias[(j + l) * stride];
      x = gathered;
    }
    store_lanes(full, to + j, load_lanes(full, to + j, lanes) + load_lanes(full, x, lanes), lanes);
  });
}

// Which keys of an interval documents, blocks and the dense mask leave visible: null when there are none, else
// bytes[0..n), with room for a whole vector behind them.
inline const uint8_t* visible_bytes(const Mask& m, int64_t b, int64_t h, int64_t i, Interval keys, uint8_t* bytes) {
  const int64_t n = keys.end - keys.begin;
  if (!m.elementwise()) return nullptr;
  if (m.blocks) {
    for (int64_t j = 0; j < n; ++j) bytes[j] = visible_in_interval(m, b, h, i, keys.begin + j);
    return bytes;
  }
  if (m.dense) {
    const uint8_t* dense = m.dense + b * m.dense_stride_b + h * m.dense_stride_h + i * m.dense_stride_q;
    if (m.dense_stride_k == 1)
      std::memcpy(bytes, dense + keys.begin, size_t(n));
    else
      for (int64_t j = 0; j < n; ++j) bytes[j] = dense[(keys.begin + j) * m.dense_stride_k] != 0;
  }
  if (m.query_ids) {
    const int64_t id = m.query_ids[b * m.query_ids_stride_b + i];
    const int64_t* ids = m.key_ids + b * m.key_ids_stride_b + keys.begin;
    for (int64_t j = 0; j < n; ++j) bytes[j] = uint8_t((!m.dense || bytes[j]) && ids[j] == id);
  }
  return bytes;
}

// x[j] = value where key j is hidden.
template <class A>
void hide(A* x, const uint8_t* visible, A value, int64_t n) {
  for_each_vector<A>(n, [&](auto full, int64_t j, int lanes) {
    VecMask<A> seen;
    nonzero_bytes(visible + j, &seen);
    store_lanes(full, x + j, select(seen, load_lanes(full, x + j, lanes), set1(value)), lanes);
  });
}

template <class A>
void multiply_row(A* x, const A* factor, int64_t n) {
  for_each_vector<A>(n, [&](auto full, int64_t j, int lanes) {
    store_lanes(full, x + j, load_lanes(full, x + j, lanes) * load_lanes(full, factor + j, lanes), lanes);
  });
}

// The largest element; NaN is passed over.
template <class A>
A row_max(const A* x, int64_t n) {
  A top = -std::numeric_limits<A>::infinity();
  Vec<A> most = set1(top);
  for_each_vector<A>(n, [&](auto full, int64_t j, int lanes) {
    if constexpr (full.value)
      most = max(load(x + j), most);
    else
      for (int l = 0; l < lanes; ++l) top = x[j + l] > top ? x[j + l] : top;
  });
  return std::max(top, reduce_max(most));
}

// Adds up the vectors f(full, j, lanes), 0 in lanes outside of the row: over pieces of this many elements in A, and
// over pieces in fp64, so that long rows lose nothing.
constexpr int64_t kSumPiece = 1024;

template <class A, class F>
MHA_INLINE double sum_vectors(int64_t n, F f) {
  double total = 0;
  for (int64_t first = 0; first < n; first += kSumPiece) {
    Vec<A> sum = set1(A(0));
    for_each_vector<A>(min64(kSumPiece, n - first),
                       [&](auto full, int64_t j, int lanes) { sum = sum + f(full, first + j, lanes); });
    total += reduce_add(sum);
  }
  return total;
}

// x[j] = exp(x[j] - shift); returns the sum.
template <class A>
double exp_row(A* x, A shift, int64_t n) {
  return sum_vectors<A>(n, [&](auto full, int64_t j, int lanes) {
    const Vec<A> e = exp2<5>((load_lanes(full, x + j, lanes) - set1(shift)) * set1(A(kLog2e)));
    store_lanes(full, x + j, e, lanes);
    return full.value ? e : load_lanes(full, x + j, lanes);
  });
}

template <class A>
double sum_row(const A* x, int64_t n) {
  return sum_vectors<A>(n, [&](auto full, int64_t j, int lanes) { return load_lanes(full, x + j, lanes); });
}

template <class A>
double dot_row(const A* x, const A* y, int64_t n) {
  return sum_vectors<A>(n, [&](auto full, int64_t j, int lanes) {
    return load_lanes(full, x + j, lanes) * load_lanes(full, y + j, lanes);
  });
}

// x[j] = x[j] * factor * (y[j] - shift)
template <class A>
void softmax_gradient(A* x, const A* y, A factor, A shift, int64_t n) {
  for_each_vector<A>(n, [&](auto full, int64_t j, int lanes) {
    const Vec<A> weight = load_lanes(full, x + j, lanes) * set1(factor);
    store_lanes(full, x + j, weight * (load_lanes(full, y + j, lanes) - set1(shift)), lanes);
  });
}

// sum[j] += x[j]
template <class A>
void accumulate_row(A* sum, const A* x, int64_t n) {
  for_each_vector<A>(n, [&](auto full, int64_t j, int lanes) {
    store_lanes(full, sum + j, load_lanes(full, sum + j, lanes) + load_lanes(full, x + j, lanes), lanes);
  });
}

// out[j] = x[j] * factor, rounded to T
template <class T>
void store_row(T* out, const Acc<T>* x, Acc<T> factor, int64_t n) {
  for_each_vector<Acc<T>>(n, [&](auto full, int64_t j, int lanes) {
    store_lanes(full, out + j, load_lanes(full, x + j, lanes) * set1(factor), lanes);
  });
}

MHA_ISA_END
