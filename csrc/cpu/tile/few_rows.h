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

// The rows of a tile, and those that are read after them, fetched while others are worked on. Each line is
// asked for twice, and lines one by one between products: of lines asked for in a row, 14 of 100 had not come long
// after where memory is the limit (the queue of misses is full, probably), and a product that waits for one stops all.
class ReadAhead {
 public:
  ReadAhead(const Ahead& now, int keys, const void* next, int64_t next_stride)
      : now_(now), keys_(keys), next_(static_cast<const char*>(next)), next_stride_(next_stride) {
    auto rows = [&](int64_t bytes) { return int(max64(1, min64(keys, bytes / max64(1, now.bytes)))); };
    first_time_ = rows(16384), second_time_ = rows(4096);
  }
  int64_t bytes() const { return now_.bytes; }
  // What to fetch while the product reads a row: lines of these rows.
  struct Lines {
    const char *first, *second;
    MHA_INLINE void fetch(int64_t at) const {
      __builtin_prefetch(first + at, 0, 2);
      __builtin_prefetch(second + at, 0, 3);
    }
  };
  MHA_INLINE Lines beside(int row) const { return {ahead(row + first_time_), ahead(row + second_time_)}; }

 private:
  MHA_INLINE const char* ahead(int row) const {
    return row < keys_ ? static_cast<const char*>(now_.first) + row * now_.stride
                       : next_ + (row - keys_) * next_stride_;
  }
  Ahead now_;
  int keys_, first_time_, second_time_;
  const char* next_;
  int64_t next_stride_;
};

// kLoad vectors of a row, or as many of its elements as there are.
template <class Unit, bool Whole, class Key, class Operand>
MHA_INLINE void load_operands(const Key* row, [[maybe_unused]] int n, Operand* x) {
  if constexpr (kTogether<Unit, Key> > 1)
    Whole ? load_together(row, x) : load_together_n(row, n, x);
  else
    x[0] = Whole ? Product<Unit>::load_b(row) : Product<Unit>::load_b(row, n);
}

// kRows queries against kKeys keys: sum[kRows * key + query], to be added up over the lanes. Beside the products it
// fetches fetch_bytes of the lines of each key: no more than a line with a vector.
template <class Unit, int kRows, int kKeys, class Key>
MHA_INLINE void dot_step(const Key* const* key, const Unit* q, int64_t ld, int n, Vec<typename Product<Unit>::Acc>* to,
                         const ReadAhead::Lines* lines, int64_t fetch_bytes) {
  using P = Product<Unit>;
  constexpr int L = Vec<typename P::Acc>::lanes, kLoad = kTogether<Unit, Key>;
  Vec<typename P::Acc> sum[kRows * kKeys];
  repeat<kRows * kKeys>([&](int i) MHA_INLINE_LAMBDA { sum[i] = set1(typename P::Acc(0)); });
  auto multiply = [&](const typename P::Operand* k, int i, int l, const Unit* query) MHA_INLINE_LAMBDA {
    repeat<kRows>([&](int r) MHA_INLINE_LAMBDA {
      sum[kRows * i + r] = P::step(k[l], P::load_b(query + r * ld + l * L), sum[kRows * i + r]);
    });
  };
  int c = 0;
  for (; c + kLoad * L <= n; c += kLoad * L) {
    repeat<kLoad>([&](int l) MHA_INLINE_LAMBDA {
      const int64_t at = (c / L + l) * 64;
      if (at < fetch_bytes) repeat<kKeys>([&](int i) MHA_INLINE_LAMBDA { lines[i].fetch(at); });
    });
    repeat<kKeys>([&](int i) MHA_INLINE_LAMBDA {
      typename P::Operand k[kLoad];
      load_operands<Unit, true>(key[i] + c, kLoad * L, k);
      repeat<kLoad>([&](int l) MHA_INLINE_LAMBDA { multiply(k, i, l, q + c); });
    });
  }
  if (c < n) {
    const int vectors = (n - c + L - 1) / L;
    repeat<kKeys>([&](int i) MHA_INLINE_LAMBDA {
      typename P::Operand k[kLoad];
      load_operands<Unit, false>(key[i] + c, n - c, k);
      repeat<kLoad>([&](int l) MHA_INLINE_LAMBDA {
        if (l < vectors) multiply(k, i, l, q + c);
      });
    });
  }
  repeat<kRows * kKeys>([&](int i) MHA_INLINE_LAMBDA { to[i] = sum[i]; });
}

// Of kRows rows, of which there are `rows`.
template <class Unit, int kRows, class Key, class T>
inline void few_scores_of(const Key* key, int64_t stride, int keys, int n, const Unit* q, int64_t ld, int rows,
                          T* score, const ReadAhead& ahead, int64_t fetch_bytes) {
  // So many sums that whole vectors of them are added up, and that no product waits for the one before.
  constexpr int L = Vec<T>::lanes, kSums = std::max(L, kVecRegisters / 2), kKeys = kSums / kRows;
  for (int j = 0; j < keys; j += kKeys) {
    const Key* row[kKeys];
    ReadAhead::Lines lines[kKeys];
    repeat<kKeys>([&](int i) MHA_INLINE_LAMBDA {
      lines[i] = ahead.beside(j + i);
      row[i] = key + std::min(j + i, keys - 1) * stride;
    });
    Vec<T> sum[kSums];
    dot_step<Unit, kRows, kKeys>(row, q, ld, n, sum, lines, fetch_bytes);
    T total[kSums];
    for (int i = 0; i < kSums; i += L) store(total + i, reduce_block(sum + i));
    T* to = score + j * kMaxRows;
    const int last = std::min(kKeys, keys - j);
    if (rows == kRows) {
      for (int i = 0; i < last; ++i) std::memcpy(to + i * kMaxRows, total + kRows * i, kRows * sizeof(T));
    } else {
      for (int i = 0; i < last; ++i) {
        for (int r = 0; r < rows; ++r) to[i * kMaxRows + r] = total[kRows * i + r];
      }
    }
  }
}

// score[j][r] = sum_d key[j][d] * q[r][d], n units long. Keys are units, or what loads as a vector of them.
template <class Unit, class Key, class T>
inline void few_scores(const Key* key, int64_t stride, int keys, int n, const Unit* q, int64_t ld, int rows, T* score,
                       const ReadAhead& ahead) {
  for (int r = 0; r < rows; r += 4, q += 4 * ld) {
    const int left = std::min(4, rows - r);
    const int64_t fetch_bytes = r == 0 ? ahead.bytes() : 0;
    auto run = [&]<int kRows>() {
      few_scores_of<Unit, kRows>(key, stride, keys, n, q, ld, left, score + r, ahead, fetch_bytes);
    };
    if (left == 1)
      run.template operator()<1>();
    else if (left == 2)
      run.template operator()<2>();
    else
      run.template operator()<4>();
  }
}

// What one unit of weights is multiplied by: rows of values that lie as gemm's B; or, of pairs, two rows of bf16.
template <class Unit, class Value>
constexpr bool kRowsToPair = kPairs<Unit> && std::is_same_v<Value, bf16>;

// Vecs vectors of the k-th of these, from v on. With a tail, the only vector has that many lanes.
template <class Unit, int Vecs, bool HasTail, class Value>
MHA_INLINE void load_values(typename Product<Unit>::Operand* x, const Value* v, int64_t stride, int k,
                            [[maybe_unused]] int keys, [[maybe_unused]] int tail) {
  constexpr int L = Vec<typename Product<Unit>::Acc>::lanes;
#ifdef MHA_HAS_BF16_DOT
  if constexpr (kRowsToPair<Unit, Value>) {
    const bf16* row = v + 2 * k * stride;
    const bf16* next = 2 * k + 1 < keys ? row + stride : nullptr;
    if constexpr (Vecs % 2 == 0) {
      for (int i = 0; i < Vecs; i += 2) interleave_rows(x + i, row + i * L, next ? next + i * L : nullptr);
    } else {
      const int lanes = HasTail ? tail : L;
      x[0] = interleave_bf16(load_n(row, lanes), next ? load_n(next, lanes) : set1(0.0f));
    }
  } else
#endif
      if constexpr (kTogether<Unit, Value> > 1 && kTogether<Unit, Value> == Vecs) {
    load_together(v + k * stride, x);
  } else {
    using P = Product<Unit>;
    for (int i = 0; i < Vecs; ++i) x[i] = HasTail ? P::load_b(v + k * stride, tail) : P::load_b(v + k * stride + i * L);
  }
}

template <class Unit, class Value>
struct FewValues {
  using T = typename Product<Unit>::Acc;
  const Unit* weight;  // [units][kMaxRows]
  const Value* v;
  int64_t stride;
  int first_key, keys;
  T* out;
  int cols, rows;
  bool add;
  const ReadAhead& ahead;
};

// Rows of the output from r on, Vecs vectors from column c on.
template <int Rows, int Vecs, bool HasTail, class Unit, class Value>
inline void few_values_tile(const FewValues<Unit, Value>& g, int r, int c) {
  using P = Product<Unit>;
  using T = typename P::Acc;
  constexpr int L = Vec<T>::lanes, kUnit = kUnitK<Unit>;
  const int tail = g.cols - c;
  const int64_t ld = g.cols, stride = g.stride;
  const ReadAhead ahead = g.ahead;
  T* const out = g.out + r * ld + c;
  const Unit* weight = g.weight + r;
  Vec<T> sum[Rows * Vecs];
  repeat<Rows * Vecs>([&](int i) MHA_INLINE_LAMBDA { sum[i] = set1(T(0)); });
  const int64_t begin = r == 0 ? ahead.bytes() * c / g.cols : 0;
  const int64_t end = r == 0 ? ahead.bytes() * std::min(c + Vecs * L, g.cols) / g.cols : 0;
  for (int k = 0; k * kUnit < g.keys; ++k, weight += kMaxRows) {
    for (int i = 0; i < kUnit; ++i) {
      const ReadAhead::Lines lines = ahead.beside(g.first_key + k * kUnit + i);
      for (int64_t at = begin; at < end; at += 64) lines.fetch(at);
    }
    typename P::Operand x[Vecs];
    load_values<Unit, Vecs, HasTail>(x, g.v + c, stride, k, g.keys, tail);
    repeat<Rows>([&](int i) MHA_INLINE_LAMBDA {
      const typename P::Operand w = P::broadcast(weight + i);
      repeat<Vecs>([&](int n) MHA_INLINE_LAMBDA { sum[i * Vecs + n] = P::step(w, x[n], sum[i * Vecs + n]); });
    });
  }
  repeat<Rows * Vecs>([&](int i) MHA_INLINE_LAMBDA {
    T* to = out + i / Vecs * ld + i % Vecs * L;
    if (g.add) sum[i] = (HasTail ? load_n(to, tail) : load(to)) + sum[i];  // last, as in gemm
    HasTail ? store_n(to, sum[i], tail) : store(to, sum[i]);
  });
}

template <int Vecs, bool HasTail, class Unit, class Value>
inline void few_values_columns(const FewValues<Unit, Value>& g, int c) {
  int r = 0;
  for (; r + 4 <= g.rows; r += 4) few_values_tile<4, Vecs, HasTail>(g, r, c);
  for (; r + 2 <= g.rows; r += 2) few_values_tile<2, Vecs, HasTail>(g, r, c);
  for (; r < g.rows; ++r) few_values_tile<1, Vecs, HasTail>(g, r, c);
}

// out[r][c] = sum_j weight[j][r] * v[j][c], or that much more; so few keys together that all of their lines are read in
// nearly the order of memory.
template <class Unit, class Value, class T>
inline void few_values(const Unit* weight, const Value* v, int64_t stride, int keys, T* out, int cols, int rows,
                       bool add, int together, const ReadAhead& ahead) {
  constexpr int L = Vec<T>::lanes;
  const int step = together / kUnitK<Unit>, rows_of_step = kRowsToPair<Unit, Value> ? together : step;
  for (int j = 0; j < keys; j += together, weight += step * kMaxRows, v += rows_of_step * stride, add = true) {
    const FewValues<Unit, Value> g{weight, v, stride, j, std::min(together, keys - j), out, cols, rows, add, ahead};
    int c = 0;
    for (; c + kTileVecs * L <= cols; c += kTileVecs * L) few_values_columns<kTileVecs, false>(g, c);
    if constexpr (kTileVecs > 2) {
      for (; c + 2 * L <= cols; c += 2 * L) few_values_columns<2, false>(g, c);
    }
    for (; c + L <= cols; c += L) few_values_columns<1, false>(g, c);
    if (c < cols) few_values_columns<1, true>(g, c);
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
