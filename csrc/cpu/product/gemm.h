// The one matrix product: C[m][n] (+)= sum_k A(m,k) * B[k][n]. Elements of A are read one by one through two strides
// and broadcast, so that A is used as it lies in memory, transposed or not; rows of B and C are contiguous in n.
//
// Unit is float, double, or Pairs: two bf16 neighbours in k, multiplied and added to a float in one step. B holds
// Units, or what loads as a vector of them: half types for float.
//
// This room includes csrc/cpu.
#pragma once

#include "../tiles.h"
#include "quantised.h"

MHA_ISA_BEGIN

// An operand of Pairs<N> has N planes: numbers rounded to bf16, then, for N > 1, what that leaves of them, so that fp16
// is exactly the sum of two. Only tiles multiply more than one plane.
template <int N>
struct Pairs {
  bf16 x[2];
};
using Pair = Pairs<1>;

template <class Unit>
constexpr int kPlanes = 1;
template <int N>
constexpr int kPlanes<Pairs<N>> = N;
template <class Unit>
constexpr bool kPairs = false;
template <int N>
constexpr bool kPairs<Pairs<N>> = true;

template <class Unit>
struct Product {
  using Acc = Unit;
  using Operand = Vec<Unit>;
  static MHA_INLINE Operand broadcast(const Unit* a) { return set1(*a); }
  template <class B>
  static MHA_INLINE Operand load_b(const B* b) {
    return load(b);
  }
  template <class B>
  static MHA_INLINE Operand load_b(const B* b, int n) {
    return load_n(b, n);
  }
  static MHA_INLINE Vec<Acc> step(Operand a, Operand b, Vec<Acc> c) { return fma(a, b, c); }
};

#ifdef MHA_HAS_BF16_DOT
template <int N>
struct Product<Pairs<N>> {
  using Acc = float;
  using Operand = VecPair;
  static MHA_INLINE Operand broadcast(const Pairs<N>* a) { return set1_pair(a); }
  static MHA_INLINE Operand load_b(const Pairs<N>* b) { return load_pairs(b); }
  static MHA_INLINE Operand load_b(const Pairs<N>* b, int n) { return load_pairs(b, n); }
  static MHA_INLINE VecF step(Operand a, Operand b, VecF c) { return dot(a, b, c); }
};
#endif

enum class Start { zero, add, scale };  // C begins as 0, as it is, or as C[m][n] * scale[n]

// Units from one plane of A, and of B, to the next; and whether all products of planes are made, or only those that are
// not smaller than the last plane's rounding.
struct PlaneStrides {
  int64_t a = 0, b = 0;
  bool all = false;
};

// Rows of memory that are wanted soon: fetched while something else is computed.
struct Ahead {
  const void* first = nullptr;
  int64_t stride = 0, bytes = 0;  // bytes: from one row to the next, of a row
  int rows = 0;
  bool to_write = false;
  MHA_INLINE void fetch(int row) const {
    const char* p = static_cast<const char*>(first) + row * stride;
    for (int64_t i = 0; i < bytes; i += 64) to_write ? __builtin_prefetch(p + i, 1) : __builtin_prefetch(p + i, 0, 2);
  }
  // The rows' share of the steps first .. last of `steps`. (A product leaves its last few out.)
  MHA_INLINE void fetch_share(int first_step, int last_step, int steps) const {
    for (int row = first_step * rows / steps; row < last_step * rows / steps; ++row) fetch(row);
  }
};

template <class Unit, class B = Unit>
struct GemmArgs {
  using Acc = typename Product<Unit>::Acc;
  int K;
  const Unit* a;
  int64_t am, ak;
  const B* b;
  int64_t ldb;
  Acc* c;
  int64_t ldc;
  Start start;
  const Acc* scale;
  PlaneStrides plane;
  Ahead ahead;
};

// What a thread must hold while it multiplies.
template <class Unit>
struct ProductState {};

#ifdef MHA_HAS_AMX
template <int Planes>
inline void gemm_amx(const GemmArgs<Pairs<Planes>>& g, int M, int N);
#endif
#ifdef MHA_HAS_BFMMLA
inline void gemm_mmla(const GemmArgs<Pair>& g, int M, int N);
#endif

// Calls f(0) .. f(N - 1), written out: in a loop, GCC keeps the sums of a register tile in memory before and after the
// product, which takes 4 % of the time.
template <int N, class F>
MHA_INLINE void repeat(F f) {
  if constexpr (N > 1) repeat<N - 1>(f);
  f(N - 1);
}

// One register tile at (m, n). Tail > 0: the only vector has that many lanes.
template <int Rows, int Vecs, bool HasTail, class Unit, class B>
inline void gemm_tile(const GemmArgs<Unit, B>& g, int m, int n, int tail) {
  using P = Product<Unit>;
  using Acc = typename P::Acc;
  constexpr int L = Vec<Acc>::lanes;
  static_assert(!HasTail || Vecs == 1);
  auto load_c = [&](const Acc* p) MHA_INLINE_LAMBDA { return HasTail ? load_n(p, tail) : load(p); };
  Vec<Acc> sum[Rows * Vecs];
  const int64_t ldc = g.ldc, am = g.am, ak = g.ak, ldb = g.ldb;
  const int K = g.K;
  Acc* const c = g.c + m * ldc + n;
  repeat<Rows * Vecs>([&](int i) MHA_INLINE_LAMBDA { sum[i] = set1(Acc(0)); });
  const Unit* a = g.a + m * am;
  const B* b = g.b + n;
  for (int k = 0; k < K; ++k, a += ak, b += ldb) {
    typename P::Operand operand[Vecs];
    repeat<Vecs>([&](int v) MHA_INLINE_LAMBDA { operand[v] = HasTail ? P::load_b(b, tail) : P::load_b(b + v * L); });
    repeat<Rows>([&](int r) MHA_INLINE_LAMBDA {
      const typename P::Operand x = P::broadcast(a + r * am);
      repeat<Vecs>([&](int v) MHA_INLINE_LAMBDA { sum[r * Vecs + v] = P::step(x, operand[v], sum[r * Vecs + v]); });
    });
  }
  // What C was joins last: a running sum is large, and each term added to it alone would be rounded by its size.
  auto finish = [&](auto value) MHA_INLINE_LAMBDA {
    repeat<Rows * Vecs>([&](int i) MHA_INLINE_LAMBDA {
      Acc* to = c + i / Vecs * ldc + i % Vecs * L;
      if (HasTail)
        store_n(to, value(i, to), tail);
      else
        store(to, value(i, to));
    });
  };
  if (g.start == Start::zero) {
    finish([&](int i, const Acc*) MHA_INLINE_LAMBDA { return sum[i]; });
  } else if (g.start == Start::add) {
    finish([&](int i, const Acc* from) MHA_INLINE_LAMBDA { return load_c(from) + sum[i]; });
  } else {
    Vec<Acc> scale[Vecs];
    repeat<Vecs>([&](int v) MHA_INLINE_LAMBDA { scale[v] = load_c(g.scale + n + v * L); });
    finish([&](int i, const Acc* from) MHA_INLINE_LAMBDA { return fma(load_c(from), scale[i % Vecs], sum[i]); });
  }
}

template <int Vecs, bool HasTail, class Unit, class B>
inline void gemm_columns(const GemmArgs<Unit, B>& g, int M, int n, int tail) {
  constexpr int Rows = Vecs == kTileVecs ? kTileRows : 8;
  int m = 0;
  for (; m + Rows <= M; m += Rows) {
    if (n == 0) g.ahead.fetch_share(m, m + Rows, M);
    gemm_tile<Rows, Vecs, HasTail>(g, m, n, tail);
  }
  for (; m + 4 <= M; m += 4) gemm_tile<4, Vecs, HasTail>(g, m, n, tail);
  for (; m + 2 <= M; m += 2) gemm_tile<2, Vecs, HasTail>(g, m, n, tail);
  for (; m < M; ++m) gemm_tile<1, Vecs, HasTail>(g, m, n, tail);
}

// All strides are in elements of the pointer they belong to. scale[n] is read only with Start::scale.
template <class Unit, class B = Unit>
inline void gemm(int M, int N, int K, const Unit* a, int64_t am, int64_t ak, const B* b, int64_t ldb,
                 typename Product<Unit>::Acc* c, int64_t ldc, Start start,
                 const typename Product<Unit>::Acc* scale = nullptr, PlaneStrides plane = {}, const Ahead& ahead = {}) {
  constexpr int L = Vec<typename Product<Unit>::Acc>::lanes;
  GemmArgs<Unit, B> g{K, a, am, ak, b, ldb, c, ldc, start, scale, plane, ahead};
#ifdef MHA_HAS_AMX
  if constexpr (kPlanes<Unit> > 1) return gemm_amx(g, M, N);
  if constexpr (kPairs<Unit>) {
    if (ak == 1) return gemm_amx(g, M, N);
  }
#endif
#ifdef MHA_HAS_BFMMLA
  if constexpr (kPairs<Unit>) return gemm_mmla(g, M, N);
#endif
  int n = 0;
  for (; n + kTileVecs * L <= N; n += kTileVecs * L) gemm_columns<kTileVecs, false>(g, M, n, 0);
  if constexpr (kTileVecs > 2) {
    for (; n + 2 * L <= N; n += 2 * L) gemm_columns<2, false>(g, M, n, 0);
  }
  for (; n + L <= N; n += L) gemm_columns<1, false>(g, M, n, 0);
  if (n < N) gemm_columns<1, true>(g, M, n, N - n);
}

MHA_ISA_END

#ifdef MHA_HAS_AMX
#include "gemm_amx.h"
#endif
#ifdef MHA_HAS_BFMMLA
#include "gemm_mmla.h"
#endif
