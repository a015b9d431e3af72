// Backward of attention with talking heads, on ordinary cores: dQ with delta and the mixes' gradients by blocks of
// queries, dK and dV by blocks of keys, the gradient of the bias by its own tiles. See attention_mixed.cuh.
#pragma once
#include "attention_mixed.cuh"

namespace mha::cuda {

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
        if (x != 0) x *= dprobability(g, at_pair) - static_cast<const A*>(p.delta)[this->row_place(g, row)];
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
    tile.enter(b);
    const int Sq = tile.sequence.Sq, Sk = tile.sequence.Sk;
    if (row >= Sq) continue;
    auto mine = [&](int64_t g, int i) { return (g * kMixedTile + tile.own(i)) * 16 + tile.thread % 16; };
    for (int64_t g = 0; g < p.H; ++g)
      for (int i = 0; i < S::kPer; ++i) partial[mine(g, i)] = 0;
    tile.clear(dq, p.H, p.D);
    for (int key = 0; key < Sk; key += kMixedTile) {
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
        const int64_t place = tile.row_place(g, row + tile.own(i));
        if (row + tile.own(i) < Sq && tile.thread % 16 == 0)
          static_cast<A*>(p.delta)[place] = sum - (p.dlse ? static_cast<const A*>(p.dlse)[place] : A(0));
      }
    __syncthreads();
    for (int key = 0; key < Sk; key += kMixedTile) {
      if (!tile.compute({b, row, key})) continue;
      if (p.post_mix) tile.add_head_products(sums + HH, tile.weights, tile.dweights);
      tile.compute_dscores();
      if (p.pre_mix) tile.add_head_products(sums, tile.capped, tile.weights);
      for (int64_t h = 0; h < p.H; ++h)
        tile.template add_rows<false>(dq + h * kMixedTile * p.D, p.D, p.k, h / (p.H / p.Hk),
                                      [&](int i, int j) { return tile.dproduct(h, i, j); });
    }
    tile.template store<false>(p.dq, dq, p.H, p.D, row);
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
    tile.enter(b);
    if (key >= tile.sequence.Sk) continue;
    tile.clear(dk, p.Hk, p.D);
    tile.clear(dv, p.Hk, p.Dv);
    for (int row = 0; row < tile.sequence.Sq; row += kMixedTile) {
      if (!tile.compute({b, row, key})) continue;
      for (int64_t g = 0; g < p.H; ++g)
        tile.template add_rows<true>(dv + g / group * kMixedTile * p.Dv, p.Dv, p.dout, g,
                                     [&](int i, int j) { return tile.dropped(g, i, j); });
      tile.compute_dscores();
      for (int64_t h = 0; h < p.H; ++h)
        tile.template add_rows<true>(dk + h / group * kMixedTile * p.D, p.D, p.q, h,
                                     [&](int i, int j) { return tile.dproduct(h, i, j); });
    }
    tile.template store<true>(p.dk, dk, p.Hk, p.D, key);
    tile.template store<true>(p.dv, dv, p.Hk, p.Dv, key);
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
    for (int64_t b = first_b; b < (stride[0] ? first_b + 1 : p.B); ++b) {
      tile.enter(b);
      const int Sq = tile.sequence.Sq, Sk = tile.sequence.Sk;
      for (int row = first_row; row < (all_rows ? Sq : min(Sq, first_row + 1)); row += kMixedTile)
        for (int key = first_key; key < (all_keys ? Sk : min(Sk, first_key + 1)); key += kMixedTile) {
          if (!tile.compute({b, row, key})) continue;
          tile.compute_dscores();
          for (int64_t g = 0; g < p.H; ++g)
            for_own<S::kPer>([&](int i, int j) {
              const int64_t e = g * kMixedPairs + tile.pair(i, j);
              sum[e] += tile.weights[e];
            });
        }
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
    // Packed, the rows of all sequences lie in one piece.
    const int64_t in_one = p.q_starts ? p.rows_stride_h : p.Sq, rows = p.q_starts ? in_one : p.B * p.Sq;
    for (int64_t row = 0; sink != -A(INFINITY) && row < rows; ++row) {
      const int64_t place = (row / in_one * p.H + g) * in_one + row % in_one;
      const A over = (sink - static_cast<const A*>(p.lse)[place]) - static_cast<const A*>(p.lse_rest)[place];
      sum -= double(exponential(over) * static_cast<const A*>(p.delta)[place]);
    }
    static_cast<A*>(p.dsinks)[g] = A(sum);
  }
}

}  // namespace mha::cuda
