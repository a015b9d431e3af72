// Attention with talking heads on ordinary cores, any type and head size. A block takes 32 queries against 32 keys with
// all heads at a time. A thread owns the same four pairs of every head's tile, so that mixing the heads is its own
// business; only the products with rows of q, k, v and dout go through shared memory. The tiles of all heads lie in the
// block's part of the workspace, since their number isn't known.
//
// Each kernel walks its tiles twice, as the CPU's does; sums run in a fixed order.
#pragma once
#include "attention_bwd_simple.cuh"
#include "element.cuh"
#include "exact_sum.cuh"

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
  void* delta = nullptr;  // backward: [B,H,Sq]
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

  __device__ bool visible(int64_t h, int i, int j) const {
    const int row = at.row + own(i), key = at.key + other(j);
    return row < p.Sq && key >= interval[i].begin && key < interval[i].end &&
           visible_in_interval(p.mask, at.b, h, row, key);
  }

  // Goes to a tile; returns whether some pair of it is visible, the same for all threads.
  __device__ bool go(MixedPlace to) {
    at = to;
    bool any = false;
    for (int i = 0; i < kPer; ++i) {
      const int row = at.row + own(i);
      interval[i] = row < p.Sq ? row_interval(p.mask, at.b, row, p.Sk) : Interval{0, 0};
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
      const Matrix<T> rows = matrix<T>(x, at.b, h, p.Sq, size), keys = matrix<T>(y, at.b, h / (p.H / p.Hk), p.Sk, size);
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
    const Philox4 words =
        dropout_words(dropout_key(p.dropout.rng_state), uint32_t(p.dropout.first_head + at.b * p.H + g), row, key / 4);
    return p.dropout.p < 1 && words.word[key % 4] >= p.threshold ? A(1 / (1 - p.dropout.p)) : A(0);
  }

  // The mixed score of head g, -inf where hidden.
  __device__ A score(int64_t g, int i, int j) const {
    if (!visible(g, i, j)) return -A(INFINITY);
    A x = mixed(capped, p.pre_mix, g, pair(i, j));
    if (p.bias.data)
      x += element<A>(p.bias.data, p.bias_dtype,
                      at.b * p.bias.stride[0] + g * p.bias.stride[1] + (at.row + own(i)) * p.bias.stride[2] +
                          (at.key + other(j)) * p.bias.stride[3]);
    return x;
  }

  // The softmax, before post_mix, from the logsumexp.
  __device__ void compute_weights(const A* lse, const A* lse_rest) {
    for (int64_t g = 0; g < p.H; ++g)
      for (int i = 0; i < kPer; ++i) {
        const int64_t place = (at.b * p.H + g) * p.Sq + at.row + own(i);
        const bool sees = at.row + own(i) < p.Sq && lse[place] != -A(INFINITY);
        for (int j = 0; j < kPer; ++j)
          weights[g * kMixedPairs + pair(i, j)] =
              sees ? exponential((score(g, i, j) - lse[place]) - (lse_rest ? lse_rest[place] : A(0))) : A(0);
      }
  }

  // The weight that meets the value; -0, which multiply_columns_simple leaves out, where it is hidden.
  __device__ A dropped(int64_t g, int i, int j) const {
    if (p.post_mix ? !seen[i][j] : !visible(g, i, j)) return A(-0.0);
    return mixed(weights, p.post_mix, g, pair(i, j)) * factor(g, i, j) + A(0);
  }

  // sum[own row or key][column] += matrix of f(i, j) times rows of x; sum [kTile][columns] in the workspace.
  template <bool kOwnsKeys, class F>
  __device__ void add_rows(A* sum, int64_t columns, const Tensor4& x, int64_t h, int64_t rows, F f) {
    __syncthreads();
    for_own<kPer>([&](int i, int j) {
      A& w = kOwnsKeys ? shared.w[other(j)][own(i)] : shared.w[own(i)][other(j)];
      w = f(i, j);
    });
    const Matrix<T> m = matrix<T>(x, at.b, h, rows, columns);
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
  __device__ void store(const Tensor4& to, A* sum, int64_t heads, int64_t columns, int first, int64_t rows) const {
    for_sums(sum, heads, columns, [&](A x, int64_t h, int row, int column) {
      if (first + row < rows)
        static_cast<T*>(to.data)[at.b * to.stride[0] + h * to.stride[1] + (first + row) * to.stride[2] + column] = T(x);
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
    // A thread's maximum and sum of its keys, of each head and row.
    auto mine = [&](int64_t g, int i) { return (g * kMixedTile + tile.own(i)) * 16 + tile.thread % 16; };
    for (int64_t g = 0; g < p.H; ++g)
      for (int i = 0; i < S::kPer; ++i) top[mine(g, i)] = -A(INFINITY), sum[mine(g, i)] = 0;
    tile.clear(out, p.H, p.Dv);
    for (int key = 0; key < p.Sk; key += kMixedTile) {
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
        if (row + tile.own(i) >= p.Sq || tile.thread % 16) continue;
        const int64_t place = (b * p.H + g) * p.Sq + row + tile.own(i);
        const ExactSum<A> log = s == 0 ? ExactSum<A>{-A(INFINITY), 0} : exact_sum(m, logarithm(s));
        lse[place] = log.value, lse_rest[place] = log.rest;
      }
    __syncthreads();
    for (int key = 0; key < p.Sk; key += kMixedTile) {
      const bool any = tile.go({b, row, key});
      if (any) {
        tile.compute_capped();
        tile.compute_weights(lse, lse_rest);
      }
      for (int64_t g = 0; g < p.H; ++g) {
        if (any)
          tile.template add_rows<false>(out + g * kMixedTile * p.Dv, p.Dv, p.v, g / (p.H / p.Hk), p.Sk,
                                        [&](int i, int j) { return tile.dropped(g, i, j); });
        if (p.weights.data)
          for_own<S::kPer>([&](int i, int j) {
            const int64_t r = row + tile.own(i), c = key + tile.other(j);
            if (r < p.Sq && c < p.Sk)
              static_cast<T*>(p.weights.data)[((b * p.H + g) * p.Sq + r) * p.Sk + c] =
                  T(any ? tile.dropped(g, i, j) + A(0) : A(0));
          });
      }
    }
    tile.at = {b, row, 0};
    tile.store(p.out, out, p.H, p.Dv, row, p.Sq);
  }
}

using MixedBackwardLaunch = MixedLaunch<AttentionMixedBackward>;

// What the backward kernels share.
template <class S>
struct MixedBackwardTile : MixedTile<S, MixedBackwardLaunch> {
  using Base = MixedTile<S, MixedBackwardLaunch>;
  using A = typename S::A;
  using T = typename S::T;
  using Base::Base, Base::p, Base::at, Base::weights, Base::dweights, Base::capped, Base::seen;

  // P and dW; false where nothing is visible.
  __device__ bool compute(MixedPlace to) {
    if (!this->go(to)) return false;
    this->compute_capped();
    this->compute_weights(static_cast<const A*>(p.lse), static_cast<const A*>(p.lse_rest));
    this->products(dweights, p.dout, p.v, p.Dv, [&](int64_t g, int i, int j, A x) {
      if (p.dweights.data)
        x += A(static_cast<const T*>(p.dweights.data)[at.b * p.dweights.stride[0] + g * p.dweights.stride[1] +
                                                      (at.row + this->own(i)) * p.dweights.stride[2] +
                                                      (at.key + this->other(j)) * p.dweights.stride[3]]);
      return x * this->factor(g, i, j);
    });
    return true;
  }

  __device__ A dprobability(int64_t g, int at_pair) const {
    return this->mixed(dweights, p.post_mix, g, at_pair, true);
  }

  // dS, in place of P.
  __device__ void compute_dscores() {
    for (int64_t g = 0; g < p.H; ++g)
      for_own<S::kPer>([&](int i, int j) {
        const int at_pair = this->pair(i, j), row = at.row + this->own(i);
        A& x = weights[g * kMixedPairs + at_pair];
        if (x != 0) x *= dprobability(g, at_pair) - static_cast<const A*>(p.delta)[(at.b * p.H + g) * p.Sq + row];
      });
  }

  // The gradient of q.k in head h; -0 where it is hidden.
  __device__ A dproduct(int64_t h, int i, int j) const {
    if (p.pre_mix ? !seen[i][j] : !this->visible(h, i, j)) return A(-0.0);
    const int at_pair = this->pair(i, j);
    const A y = p.softcap != 0 ? capped[h * kMixedPairs + at_pair] / A(p.softcap) : A(0);
    return this->mixed(weights, p.pre_mix, h, at_pair, true) * (1 - y * y) * A(p.scale) + A(0);
  }

  // sum[m][n] += a[m] . b[n] over the pairs, a warp for each (m, n).
  __device__ void add_head_products(A* sum, const A* a, const A* b) const {
    __syncthreads();
    for (int64_t n = this->thread / 32; n < p.H * p.H; n += S::kThreads / 32) {
      const A *x = a + n / p.H * kMixedPairs, *y = b + n % p.H * kMixedPairs;
      A dot = 0;
      for (int e = this->thread % 32; e < kMixedPairs; e += 32) dot += x[e] * y[e];
      for (int d = 16; d; d /= 2) dot += __shfl_xor_sync(~0u, dot, d);
      if (this->thread % 32 == 0) sum[n] += dot;
    }
    __syncthreads();
  }
};

// delta, dQ, and this task's parts of dpre_mix and dpost_mix.
template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    attention_mixed_bwd_dq_simple(const __grid_constant__ MixedBackwardLaunch p) {
  using A = typename S::A;
  __shared__ typename S::Shared shared;
  A* slot = static_cast<A*>(p.slots) + blockIdx.x * p.slot;
  MixedBackwardTile<S> tile(p, shared, slot);
  A *dq = slot + 3 * p.H * kMixedPairs, *partial = dq + p.H * kMixedTile * p.D;
  for (int64_t task = blockIdx.x; task < p.B * p.query_tiles; task += gridDim.x) {
    const int64_t b = task / p.query_tiles, HH = p.H * p.H;
    const int row = int(task % p.query_tiles) * kMixedTile;
    A* sums = static_cast<A*>(p.sums) + task * 2 * HH;
    __syncthreads();
    for (int64_t n = threadIdx.x; n < 2 * HH; n += S::kThreads) sums[n] = 0;
    auto mine = [&](int64_t g, int i) { return (g * kMixedTile + tile.own(i)) * 16 + tile.thread % 16; };
    for (int64_t g = 0; g < p.H; ++g)
      for (int i = 0; i < S::kPer; ++i) partial[mine(g, i)] = 0;
    tile.clear(dq, p.H, p.D);
    for (int key = 0; key < p.Sk; key += kMixedTile) {
      if (!tile.compute({b, row, key})) continue;
      for (int64_t g = 0; g < p.H; ++g)
        for_own<S::kPer>([&](int i, int j) {
          const A weight = tile.weights[g * kMixedPairs + tile.pair(i, j)];
          if (weight != 0) partial[mine(g, i)] += weight * tile.dprobability(g, tile.pair(i, j));
        });
    }
    for (int64_t g = 0; g < p.H; ++g)
      for (int i = 0; i < S::kPer; ++i) {
        const A sum = sum_of_row(partial[mine(g, i)]);
        const int64_t place = (b * p.H + g) * p.Sq + row + tile.own(i);
        if (row + tile.own(i) < p.Sq && tile.thread % 16 == 0)
          static_cast<A*>(p.delta)[place] = sum - (p.dlse ? static_cast<const A*>(p.dlse)[place] : A(0));
      }
    __syncthreads();
    for (int key = 0; key < p.Sk; key += kMixedTile) {
      if (!tile.compute({b, row, key})) continue;
      if (p.post_mix) tile.add_head_products(sums + HH, tile.weights, tile.dweights);
      tile.compute_dscores();
      if (p.pre_mix) tile.add_head_products(sums, tile.capped, tile.weights);
      for (int64_t h = 0; h < p.H; ++h)
        tile.template add_rows<false>(dq + h * kMixedTile * p.D, p.D, p.k, h / (p.H / p.Hk), p.Sk,
                                      [&](int i, int j) { return tile.dproduct(h, i, j); });
    }
    tile.at = {b, row, 0};
    tile.store(p.dq, dq, p.H, p.D, row, p.Sq);
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    attention_mixed_bwd_dkv_simple(const __grid_constant__ MixedBackwardLaunch p) {
  using A = typename S::A;
  __shared__ typename S::Shared shared;
  A* slot = static_cast<A*>(p.slots) + blockIdx.x * p.slot;
  MixedBackwardTile<S> tile(p, shared, slot);
  A *dk = slot + 3 * p.H * kMixedPairs, *dv = dk + p.Hk * kMixedTile * p.D;
  const int64_t group = p.H / p.Hk;
  for (int64_t task = blockIdx.x; task < p.B * p.key_tiles; task += gridDim.x) {
    const int64_t b = task / p.key_tiles;
    const int key = int(task % p.key_tiles) * kMixedTile;
    tile.clear(dk, p.Hk, p.D);
    tile.clear(dv, p.Hk, p.Dv);
    for (int row = 0; row < p.Sq; row += kMixedTile) {
      if (!tile.compute({b, row, key})) continue;
      for (int64_t g = 0; g < p.H; ++g)
        tile.template add_rows<true>(dv + g / group * kMixedTile * p.Dv, p.Dv, p.dout, g, p.Sq,
                                     [&](int i, int j) { return tile.dropped(g, i, j); });
      tile.compute_dscores();
      for (int64_t h = 0; h < p.H; ++h)
        tile.template add_rows<true>(dk + h / group * kMixedTile * p.D, p.D, p.q, h, p.Sq,
                                     [&](int i, int j) { return tile.dproduct(h, i, j); });
    }
    tile.at = {b, 0, key};
    tile.store(p.dk, dk, p.Hk, p.D, key, p.Sk);
    tile.store(p.dv, dv, p.Hk, p.Dv, key, p.Sk);
  }
}

// A block owns a tile of dbias (all of a broadcast dimension) and walks over all that it was broadcast to.
template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    attention_mixed_bwd_dbias_simple(const __grid_constant__ MixedBackwardLaunch p,
                                     const __grid_constant__ BiasGrid grid) {
  using A = typename S::A;
  __shared__ typename S::Shared shared;
  A* slot = static_cast<A*>(p.slots) + blockIdx.x * p.slot;
  MixedBackwardTile<S> tile(p, shared, slot);
  A* sum = slot + 3 * p.H * kMixedPairs;  // [H][kMixedPairs]
  const int64_t* stride = p.dbias.stride;
  const bool all_heads = stride[1] == 0, all_rows = stride[2] == 0, all_keys = stride[3] == 0;
  for (int64_t task = blockIdx.x; task < grid.n[0] * grid.n[2] * grid.n[3]; task += gridDim.x) {
    const int64_t first_b = task / grid.n[3] / grid.n[2];
    const int first_row = int(task / grid.n[3] % grid.n[2]) * kMixedTile,
              first_key = int(task % grid.n[3]) * kMixedTile;
    __syncthreads();
    for (int64_t n = threadIdx.x; n < p.H * kMixedPairs; n += S::kThreads) sum[n] = 0;
    __syncthreads();
    for (int64_t b = first_b; b < (stride[0] ? first_b + 1 : p.B); ++b)
      for (int row = first_row; row < (all_rows ? p.Sq : min64(p.Sq, first_row + 1)); row += kMixedTile)
        for (int key = first_key; key < (all_keys ? p.Sk : min64(p.Sk, first_key + 1)); key += kMixedTile) {
          if (!tile.compute({b, row, key})) continue;
          tile.compute_dscores();
          for (int64_t g = 0; g < p.H; ++g)
            for_own<S::kPer>([&](int i, int j) {
              const int64_t e = g * kMixedPairs + tile.pair(i, j);
              sum[e] += tile.weights[e];
            });
        }
    __syncthreads();
    const int rows = all_rows ? 1 : kMixedTile, keys = all_keys ? 1 : kMixedTile;
    for (int64_t n = threadIdx.x; n < (all_heads ? 1 : p.H) * rows * keys; n += S::kThreads) {
      const int64_t g = n / keys / rows;
      const int i = int(n / keys % rows), j = int(n % keys);
      A x = 0;
      for (int64_t h = g; h < (all_heads ? p.H : g + 1); ++h)
        for (int r = i; r < (all_rows ? kMixedTile : i + 1); ++r)
          for (int c = j; c < (all_keys ? kMixedTile : j + 1); ++c) x += sum[h * kMixedPairs + r * kMixedTile + c];
      const int64_t row = first_row + i, key = first_key + j;
      if (row < p.Sq && key < p.Sk)
        static_cast<A*>(p.dbias.data)[first_b * stride[0] + g * stride[1] + row * stride[2] + key * stride[3]] = x;
    }
  }
}

// The parts of the tasks, added up: dpre_mix, dpost_mix, and of delta the gradient of the sinks, keys of value 0.
template <class A>
__global__ void attention_mixed_bwd_sums_simple(const __grid_constant__ MixedBackwardLaunch p) {
  const int64_t HH = p.H * p.H, n = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (n < 2 * HH) {
    void* to = n < HH ? p.dpre_mix : p.dpost_mix;
    double sum = 0;
    for (int64_t task = 0; to && task < p.B * p.query_tiles; ++task)
      sum += double(static_cast<const A*>(p.sums)[task * 2 * HH + n]);
    if (to) static_cast<A*>(to)[n % HH] = A(sum);
  } else if (n < 2 * HH + p.H && p.dsinks) {
    const int64_t g = n - 2 * HH;
    const A sink = static_cast<const A*>(p.sinks)[g];
    double sum = 0;
    for (int64_t row = 0; sink != -A(INFINITY) && row < p.B * p.Sq; ++row) {
      const int64_t place = (row / p.Sq * p.H + g) * p.Sq + row % p.Sq;
      const A over = (sink - static_cast<const A*>(p.lse)[place]) - static_cast<const A*>(p.lse_rest)[place];
      sum -= double(exponential(over) * static_cast<const A*>(p.delta)[place]);
    }
    static_cast<A*>(p.dsinks)[g] = A(sum);
  }
}

}  // namespace mha::cuda
