// Attention with talking heads on ordinary cores, any type and head size. A block takes 32 queries against 32 keys with
// all heads at a time. A thread owns the same four pairs of every head's tile, so that mixing the heads is its own
// business; only the products with rows of q, k, v and dout go through shared memory. The tiles of all heads lie in the
// block's part of the workspace, since their number isn't known.
//
// Each kernel walks its tiles twice, as the CPU's does; sums run in a fixed order.
#pragma once
#include "../common/element.cuh"
#include "../common/exact_sum.cuh"
#include "attention_bwd.cuh"

namespace mha::cuda {

template <class T_, class A_>
struct MixedSimple {
  using T = T_;
  using A = A_;
  static constexpr int kTile = 32, kPer = 2, kThreads = 256, kDepth = 16;
  struct Shared {
    A x[kDepth][kTile + 1], y[kDepth][kTile + 1];
    A w[kTile][kTile + 1];
  };
};

constexpr int kMixedTile = 32, kMixedPairs = kMixedTile * kMixedTile;
constexpr int64_t kMixedBlocks = 256;  // at once; each has a part of the workspace

template <class Problem>
struct MixedLaunch : Problem, Numbers {
  int64_t query_tiles = 0, key_tiles = 0, slot = 0;  // slot: elements of a block's part of the workspace
  void* slots = nullptr;
  void* delta = nullptr;  // backward: as lse
  void* sums = nullptr;   // backward: [B * query_tiles][2][H][H], the parts of dpre_mix and dpost_mix
};

// A block's place: 32 queries, 32 keys.
struct MixedPlace {
  int64_t b;
  int row, key;
};

// What a thread has of the tile: pair (i, j) is row thread / 16 + 16 * i, key thread % 16 + 16 * j.
template <class S, class P>
struct MixedTile {
  using T = typename S::T;
  using A = typename S::A;
  static constexpr int kPer = S::kPer;
  const P& p;
  typename S::Shared& shared;
  A *capped, *weights, *dweights;  // [H][kMixedPairs]; capped: softcap(scale * q.k)
  int thread;
  Sequence sequence;  // of at.b
  MixedPlace at;
  bool by_head;             // masks differ by head
  bool seen[kPer][kPer];    // by some head
  Interval interval[kPer];  // of the own rows

  __device__ MixedTile(const P& problem, typename S::Shared& s, A* slot)
      : p(problem),
        shared(s),
        capped(slot),
        weights(slot + p.H * kMixedPairs),
        dweights(slot + 2 * p.H * kMixedPairs),
        thread(threadIdx.x),
        by_head((p.mask.dense && p.mask.dense_stride_h) || (p.mask.blocks && p.mask.blocks_stride_h)) {}

  __device__ int own(int i) const { return thread / 16 + 16 * i; }
  __device__ int other(int j) const { return thread % 16 + 16 * j; }
  __device__ int pair(int i, int j) const { return own(i) * kMixedTile + other(j); }

  // Of a row of head h in lse, lse_rest, dlse and delta.
  __device__ int64_t row_place(int64_t h, int row) const { return first_row(p, sequence, unsigned(h)) + row; }

  __device__ bool visible(int64_t h, int i, int j) const {
    const int row = at.row + own(i), key = at.key + other(j);
    return row < sequence.Sq && key >= interval[i].begin && key < interval[i].end &&
           visible_in_interval(p.mask, at.b, h, row, key);
  }

  // To be called before go, with the sample that it goes to.
  __device__ void enter(int64_t b) { sequence = cuda::sequence(p, unsigned(b)); }

  // Goes to a tile; returns whether some pair of it is visible, the same for all threads.
  __device__ bool go(MixedPlace to) {
    at = to;
    bool any = false;
    for (int i = 0; i < kPer; ++i) {
      const int row = at.row + own(i);
      interval[i] = row < sequence.Sq ? row_interval(p.mask, at.b, row, sequence.Sk, sequence.shift) : Interval{0, 0};
      for (int j = 0; j < kPer; ++j) {
        seen[i][j] = false;
        for (int64_t h = 0; h < (by_head ? p.H : 1) && !seen[i][j]; ++h) seen[i][j] = visible(h, i, j);
        any |= seen[i][j];
      }
    }
    return __syncthreads_or(any);
  }

  // to[h] = rows of x at the queries . rows of y at the keys, 0 where no head sees the pair
  template <class F>
  __device__ void products(A* to, const Tensor4& x, const Tensor4& y, int64_t size, F finish) {
    A c[kPer][kPer];
    for (int64_t h = 0; h < p.H; ++h) {
      const Matrix<T> rows = query_rows<T>(x, sequence, h, size),
                      keys = key_rows<T>(y, sequence, h / (p.H / p.Hk), size);
      multiply_rows_simple<S>(c, rows, at.row, keys, at.key, shared, thread);
      for_own<kPer>(
          [&](int i, int j) { to[h * kMixedPairs + pair(i, j)] = seen[i][j] ? finish(h, i, j, c[i][j]) : A(0); });
    }
  }

  __device__ void compute_capped() {
    const A scale = A(p.scale), cap = A(p.softcap);
    products(capped, p.q, p.k, p.D, [&](int64_t, int, int, A x) {
      x *= scale;
      return cap != 0 ? cap * A(tanh(x / cap)) : x;
    });
  }

  // sum over h of from[h] * mix[h][g] at a pair; without a mix, from[g]
  __device__ A mixed(const A* from, const void* mix, int64_t g, int at_pair, bool transposed = false) const {
    if (!mix) return from[g * kMixedPairs + at_pair];
    const A* m = static_cast<const A*>(mix) + (transposed ? g * p.H : g);
    A sum = 0;
    for (int64_t h = 0; h < p.H; ++h) sum += from[h * kMixedPairs + at_pair] * m[transposed ? h : h * p.H];
    return sum;
  }

  __device__ A factor(int64_t g, int i, int j) const {
    if (!p.dropout.rng_state) return A(1);
    const uint32_t row = at.row + own(i), key = at.key + other(j);
    const Philox4 words = dropout_words(dropout_key(p.dropout), uint32_t(at.b), uint32_t(g), row, key / 4);
    return p.dropout.p < 1 && words.word[key % 4] >= p.threshold ? A(1 / (1 - p.dropout.p)) : A(0);
  }

  // The mixed score of head g, -inf where hidden.
  __device__ A score(int64_t g, int i, int j) const {
    if (!visible(g, i, j)) return -A(INFINITY);
    A x = mixed(capped, p.pre_mix, g, pair(i, j));
    if (p.bias.data)
      x += element<A>(p.bias.data, p.bias_dtype,
                      bias_offset(p, p.bias, sequence, unsigned(g), at.row + own(i), at.key + other(j)));
    return x;
  }

  // The softmax, before post_mix, from the logsumexp.
  __device__ void compute_weights(const A* lse, const A* lse_rest) {
    for (int64_t g = 0; g < p.H; ++g)
      for (int i = 0; i < kPer; ++i) {
        const int64_t place = row_place(g, at.row + own(i));
        const bool sees = at.row + own(i) < sequence.Sq && lse[place] != -A(INFINITY);
        for (int j = 0; j < kPer; ++j)
          weights[g * kMixedPairs + pair(i, j)] =
              sees && visible(g, i, j)
                  ? exponential((score(g, i, j) - lse[place]) - (lse_rest ? lse_rest[place] : A(0)))
                  : A(0);
      }
  }

  // The weight that meets the value; -0, which multiply_columns_simple leaves out, where it is hidden.
  __device__ A dropped(int64_t g, int i, int j) const {
    if (p.post_mix ? !seen[i][j] : !visible(g, i, j)) return A(-0.0);
    return mixed(weights, p.post_mix, g, pair(i, j)) * factor(g, i, j) + A(0);
  }

  // sum[own row or key][column] += matrix of f(i, j) times rows of x; sum [kTile][columns] in the workspace.
  template <bool kOwnsKeys, class F>
  __device__ void add_rows(A* sum, int64_t columns, const Tensor4& x, int64_t h, F f) {
    __syncthreads();
    for_own<kPer>([&](int i, int j) {
      A& w = kOwnsKeys ? shared.w[other(j)][own(i)] : shared.w[own(i)][other(j)];
      w = f(i, j);
    });
    const Matrix<T> m = kOwnsKeys ? query_rows<T>(x, sequence, h, columns) : key_rows<T>(x, sequence, h, columns);
    for (int column = 0; column < columns; column += kMixedTile) {
      A c[kPer][kPer];
      auto place = [&](int i, int j) { return own(i) * columns + column + other(j); };
      for_own<kPer>([&](int i, int j) { c[i][j] = column + other(j) < columns ? sum[place(i, j)] : A(0); });
      multiply_columns_simple<S>(c, m, kOwnsKeys ? at.row : at.key, column, shared, thread);
      for_own<kPer>([&](int i, int j) {
        if (column + other(j) < columns) sum[place(i, j)] = c[i][j];
      });
    }
  }

  // Sets sums [heads][kTile][columns] to 0, or stores them; each thread its own elements, as add_rows has them.
  template <class F>
  __device__ void for_sums(A* sum, int64_t heads, int64_t columns, F f) const {
    for (int64_t h = 0; h < heads; ++h, sum += kMixedTile * columns)
      for (int column = 0; column < columns; column += kMixedTile)
        for_own<kPer>([&](int i, int j) {
          if (column + other(j) < columns) f(sum[own(i) * columns + column + other(j)], h, own(i), column + other(j));
        });
  }
  __device__ void clear(A* sum, int64_t heads, int64_t columns) const {
    for_sums(sum, heads, columns, [](A& x, int64_t, int, int) { x = 0; });
  }
  template <bool kOwnsKeys>
  __device__ void store(const Tensor4& to, A* sum, int64_t heads, int64_t columns, int first) const {
    for_sums(sum, heads, columns, [&](A x, int64_t h, int row, int column) {
      const Matrix<T> m = kOwnsKeys ? key_rows<T>(to, sequence, h, columns) : query_rows<T>(to, sequence, h, columns);
      if (first + row < m.rows) const_cast<T*>(m.data)[(first + row) * m.stride + column] = T(x);
    });
  }
};

// Sums over the 16 threads that share rows.
template <class A>
__device__ inline A sum_of_row(A x) {
#pragma unroll
  for (int d = 1; d < 16; d *= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    attention_mixed_fwd_simple(const __grid_constant__ MixedLaunch<AttentionMixedForward> p) {
  using A = typename S::A;
  using T = typename S::T;
  __shared__ typename S::Shared shared;
  A* slot = static_cast<A*>(p.slots) + blockIdx.x * p.slot;
  MixedTile<S, MixedLaunch<AttentionMixedForward>> tile(p, shared, slot);
  A *out = slot + 2 * p.H * kMixedPairs, *top = out + p.H * kMixedTile * p.Dv, *sum = top + p.H * kMixedTile * 16;
  A *lse = static_cast<A*>(p.lse), *lse_rest = static_cast<A*>(p.lse_rest);
  for (int64_t task = blockIdx.x; task < p.B * p.query_tiles; task += gridDim.x) {
    const int64_t b = task / p.query_tiles;
    const int row = int(task % p.query_tiles) * kMixedTile;
    tile.enter(b);
    const int Sq = tile.sequence.Sq, Sk = tile.sequence.Sk;
    if (row >= Sq) continue;
    // A thread's maximum and sum of its keys, of each head and row.
    auto mine = [&](int64_t g, int i) { return (g * kMixedTile + tile.own(i)) * 16 + tile.thread % 16; };
    for (int64_t g = 0; g < p.H; ++g)
      for (int i = 0; i < S::kPer; ++i) top[mine(g, i)] = -A(INFINITY), sum[mine(g, i)] = 0;
    tile.clear(out, p.H, p.Dv);
    for (int key = 0; key < Sk; key += kMixedTile) {
      if (!tile.go({b, row, key})) continue;
      tile.compute_capped();
      for (int64_t g = 0; g < p.H; ++g)
        for (int i = 0; i < S::kPer; ++i) {
          A &m = top[mine(g, i)], &s = sum[mine(g, i)];
          for (int j = 0; j < S::kPer; ++j) {
            const A x = tile.score(g, i, j);
            if (x == -A(INFINITY)) continue;
            if (x > m) s = s * exponential(m - x), m = x;
            s += exponential(x - m);
          }
        }
    }
    for (int64_t g = 0; g < p.H; ++g)
      for (int i = 0; i < S::kPer; ++i) {
        A m = top[mine(g, i)], s = sum[mine(g, i)];
        for (int d = 1; d < 16; d *= 2) m = max(m, __shfl_xor_sync(~0u, m, d));
        s = sum_of_row(s == 0 ? A(0) : s * exponential(top[mine(g, i)] - m));
        if (p.sinks) {
          const A sink = static_cast<const A*>(p.sinks)[g], higher = sink > m || isnan(sink) ? sink : m;
          if (higher != -A(INFINITY)) s = (s == 0 ? A(0) : s * exponential(m - higher)) + exponential(sink - higher);
          m = higher;
        }
        if (row + tile.own(i) >= Sq || tile.thread % 16) continue;
        const int64_t place = tile.row_place(g, row + tile.own(i));
        const ExactSum<A> log = s == 0 ? ExactSum<A>{-A(INFINITY), 0} : exact_sum(m, logarithm(s));
        lse[place] = log.value, lse_rest[place] = log.rest;
      }
    __syncthreads();
    for (int key = 0; key < Sk; key += kMixedTile) {
      const bool any = tile.go({b, row, key});
      if (any) {
        tile.compute_capped();
        tile.compute_weights(lse, lse_rest);
      }
      for (int64_t g = 0; g < p.H; ++g) {
        if (any)
          tile.template add_rows<false>(out + g * kMixedTile * p.Dv, p.Dv, p.v, g / (p.H / p.Hk),
                                        [&](int i, int j) { return tile.dropped(g, i, j); });
        if (p.weights.data)
          for_own<S::kPer>([&](int i, int j) {
            const int64_t r = row + tile.own(i), c = key + tile.other(j);
            if (r < Sq && c < Sk)
              static_cast<T*>(p.weights.data)[((b * p.H + g) * p.Sq + r) * p.Sk + c] =
                  T(any ? tile.dropped(g, i, j) + A(0) : A(0));
          });
      }
    }
    tile.template store<false>(p.out, out, p.H, p.Dv, row);
  }
}

}  // namespace mha::cuda
