// Attention backward without tensor cores, for whatever attention_bwd_*_sm80 doesn't take: fp32 and fp64 in their full
// accuracy, and any head size. Sums run in a fixed order.
//
// One kernel in four roles, each of which works the scores out again. A block owns kTile rows of its output (queries
// for dQ, keys for dK and dV) and kTile of its columns, and walks over tiles of the other side: scores and their
// gradients come into registers (kPer x kPer per thread), go to shared memory as the matrix W, and are multiplied with
// the other side's rows. For the gradient of the bias, a block owns a tile of its elements and walks over all that they
// were broadcast to; where the bias is relative, it owns tiles along a diagonal.
#pragma once
#include "../common/attention_bwd_launch.h"
#include "../common/error.h"
#include "../common/tile.cuh"

namespace mha::cuda {

enum class BackwardRole { dq, dk, dv, dbias };

template <class T_, class A_, BackwardRole kRole_>
struct BackwardSimple {
  using T = T_;
  using A = A_;
  static constexpr BackwardRole kRole = kRole_;
  static constexpr bool kOwnsKeys = kRole == BackwardRole::dk || kRole == BackwardRole::dv;
  static constexpr int kTile = sizeof(A) == 8 ? 32 : 64, kPer = kTile / 16, kThreads = 256, kDepth = 16;

  struct Shared {
    A x[kDepth][kTile + 1], y[kDepth][kTile + 1];
    A w[kTile][kTile + 1];
  };
  // What a block is at: tiles' first rows and keys.
  struct Place {
    const Sequence& sequence;
    unsigned h;
    int row, key;  // key may be negative
  };
};

// Calls f(i, j) for a thread's kPer x kPer elements of a tile.
template <int kPer, class F>
__device__ inline void for_own(F f) {
#pragma unroll
  for (int i = 0; i < kPer; ++i)
#pragma unroll
    for (int j = 0; j < kPer; ++j) f(i, j);
}

// c[i][j] = x[first_x + own row i] . y[first_y + own row j]
template <class S, class T, class A>
__device__ inline void multiply_rows_simple(A (&c)[S::kPer][S::kPer], const Matrix<T>& x, int first_x,
                                            const Matrix<T>& y, int first_y, typename S::Shared& shared, int thread) {
  for_own<S::kPer>([&](int i, int j) { c[i][j] = 0; });
  for (int d0 = 0; d0 < x.columns; d0 += S::kDepth) {
    __syncthreads();
    for (int n = thread; n < S::kTile * S::kDepth; n += S::kThreads) {
      const int r = n / S::kDepth, d = d0 + n % S::kDepth;
      auto at = [&](const Matrix<T>& m, int row) {
        return unsigned(row) < unsigned(m.rows) && d < m.columns ? A(m.data[row * m.stride + d]) : A(0);
      };
      shared.x[d - d0][r] = at(x, first_x + r);
      shared.y[d - d0][r] = at(y, first_y + r);
    }
    __syncthreads();
#pragma unroll 4
    for (int d = 0; d < S::kDepth; ++d)
      for_own<S::kPer>(
          [&](int i, int j) { c[i][j] += shared.x[d][thread / 16 + 16 * i] * shared.y[d][thread % 16 + 16 * j]; });
  }
}

// c[i][j] += sum over the tile's other rows o of w[own row i][o] * x[first + o][column + own column j]. A weight of -0
// marks a hidden pair, which adds nothing whatever x holds.
template <class S, class T, class A>
__device__ inline void multiply_columns_simple(A (&c)[S::kPer][S::kPer], const Matrix<T>& x, int first, int column,
                                               typename S::Shared& shared, int thread) {
  for (int o = 0; o < S::kTile; o += S::kDepth) {
    __syncthreads();
    bool nonfinite = false;
    for (int n = thread; n < S::kTile * S::kDepth; n += S::kThreads) {
      const int r = first + o + n / S::kTile, d = column + n % S::kTile;
      const A value = r < x.rows && d < x.columns ? A(x.data[r * x.stride + d]) : A(0);
      shared.x[n / S::kTile][n % S::kTile] = value;
      nonfinite |= !isfinite(value);
    }
    nonfinite = __syncthreads_or(nonfinite);
#pragma unroll 4
    for (int k = 0; k < S::kDepth; ++k)
      for_own<S::kPer>([&](int i, int j) {
        const A w = shared.w[thread / 16 + 16 * i][o + k];
        if (!nonfinite || w != 0 || !signbit(w)) c[i][j] += w * shared.x[k][thread % 16 + 16 * j];
      });
  }
}

// A pair's weight (for dV) or the gradient of its score; -0 if hidden.
template <class S, class A>
__device__ inline A pair_simple(const AttentionBackwardLaunch& p, const typename S::Place& at, int row, int key, A s,
                                A dp) {
  using T = typename S::T;
  const Sequence& sequence = at.sequence;
  const auto& rows = static_cast<const RowBlock<A>*>(p.rows)[row_block(sequence, at.h, row / kRowBlock)];
  const RowRange range = rows.ranges[row % kRowBlock];
  if (key < range.begin || key >= range.end || !visible_in_interval(p.mask, sequence.b, at.h, row, key)) return A(-0.0);
  A x = s * A(p.scale), derivative = 1;
  if (p.softcap != 0) {
    const A t = tanh(x / A(p.softcap));
    x = A(p.softcap) * t;
    derivative = 1 - t * t;
  }
  if (p.bias.data) {
    const int64_t from = bias_offset(p, p.bias, sequence, at.h, row, key);
    x += p.bias_dtype == (sizeof(A) == 8 ? DType::f64 : DType::f32) ? static_cast<const A*>(p.bias.data)[from]
                                                                    : A(static_cast<const T*>(p.bias.data)[from]);
  }
  const A weight = exp(x + rows.negative_lse[row % kRowBlock] + rows.negative_rest[row % kRowBlock]);
  A factor = 1;
  if (p.dropout.rng_state) {
    const Philox4 words =
        dropout_words(dropout_key(p.dropout), uint32_t(sequence.b), uint32_t(at.h), uint32_t(row), uint32_t(key / 4));
    const bool keeps = p.dropout.p < 1 && words.word[key % 4] >= p.threshold;
    factor = keeps ? A(1 / (1 - p.dropout.p)) : A(0);
  }
  if constexpr (S::kRole == BackwardRole::dv) return weight * factor + A(0);
  if (const Tensor4& t = p.dweights; t.data)
    dp += A(static_cast<const T*>(
        t.data)[sequence.b * t.stride[0] + at.h * t.stride[1] + row * t.stride[2] + key * t.stride[3]]);
  const A gradient = weight * (dp * factor + rows.negative_delta[row % kRowBlock]);
  if constexpr (S::kRole == BackwardRole::dbias) return gradient;
  return gradient * derivative * A(p.scale) + A(0);
}

// The pairs of a tile of rows and one of keys: c[i][j], own rows down (S::kOwnsKeys: own keys down).
template <class S, class A>
__device__ inline void pairs_simple(A (&c)[S::kPer][S::kPer], const AttentionBackwardLaunch& p,
                                    const typename S::Place& at, typename S::Shared& shared, int thread) {
  using T = typename S::T;
  const int64_t hk = at.h / (p.H / p.Hk);
  const Matrix<T> q = query_rows<T>(p.q, at.sequence, at.h, p.D), k = key_rows<T>(p.k, at.sequence, hk, p.D);
  const Matrix<T> dout = query_rows<T>(p.dout, at.sequence, at.h, p.Dv), v = key_rows<T>(p.v, at.sequence, hk, p.Dv);
  A dp[S::kPer][S::kPer] = {};
  if constexpr (S::kOwnsKeys) {
    multiply_rows_simple<S>(c, k, at.key, q, at.row, shared, thread);
    if constexpr (S::kRole == BackwardRole::dk) multiply_rows_simple<S>(dp, v, at.key, dout, at.row, shared, thread);
  } else {
    multiply_rows_simple<S>(c, q, at.row, k, at.key, shared, thread);
    multiply_rows_simple<S>(dp, dout, at.row, v, at.key, shared, thread);
  }
  for_own<S::kPer>([&](int i, int j) {
    const int own = thread / 16 + 16 * i, other = thread % 16 + 16 * j;
    const int row = at.row + (S::kOwnsKeys ? other : own), key = at.key + (S::kOwnsKeys ? own : other);
    c[i][j] = pair_simple<S>(p, at, row, key, c[i][j], dp[i][j]);
  });
}

template <class S, class A>
__device__ inline void keep_simple(const A (&c)[S::kPer][S::kPer], typename S::Shared& shared, int thread) {
  __syncthreads();
  for_own<S::kPer>([&](int i, int j) { shared.w[thread / 16 + 16 * i][thread % 16 + 16 * j] = c[i][j]; });
}

__device__ inline bool sees(const AttentionBackwardLaunch& p, const Sequence& sequence, unsigned h, int row, int key,
                            int keys) {
  if (row >= sequence.Sq) return false;
  const Span s = p.spans[row_block(sequence, h, row / kRowBlock)];
  return s.begin < key + keys && s.end > key &&
         mask_tile_code(p.tiles, sequence.b, h, row, keys, key, keys) & kShowsSome;
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    attention_bwd_simple(const __grid_constant__ AttentionBackwardLaunch p) {
  using T = typename S::T;
  using A = typename S::A;
  __shared__ typename S::Shared shared;
  constexpr bool kOwnsKeys = S::kOwnsKeys;
  const int thread = threadIdx.x;
  const Tensor4& to = S::kRole == BackwardRole::dq ? p.dq : S::kRole == BackwardRole::dk ? p.dk : p.dv;
  const int columns = int(S::kRole == BackwardRole::dv ? p.Dv : p.D),
            column_tiles = (columns + S::kTile - 1) / S::kTile;
  const int own_tiles = (int(kOwnsKeys ? p.Sk : p.Sq) + S::kTile - 1) / S::kTile;
  const int column = int(blockIdx.x % column_tiles) * S::kTile,
            own = int(blockIdx.x / column_tiles % own_tiles) * S::kTile;
  const unsigned bh = blockIdx.x / column_tiles / own_tiles, heads = unsigned(kOwnsKeys ? p.Hk : p.H),
                 group = unsigned(p.H / p.Hk);
  const unsigned own_head = bh % heads, first_head = kOwnsKeys ? own_head * group : own_head;
  const Sequence sequence = cuda::sequence(p, bh / heads);
  const int own_rows = kOwnsKeys ? sequence.Sk : sequence.Sq, other_rows = kOwnsKeys ? sequence.Sq : sequence.Sk;
  if (own >= own_rows) return;

  A sum[S::kPer][S::kPer] = {}, w[S::kPer][S::kPer];
  for (unsigned h = first_head; h < first_head + (kOwnsKeys ? group : 1); ++h)
    for (int other = 0; other < other_rows; other += S::kTile) {
      const typename S::Place at = {sequence, h, kOwnsKeys ? other : own, kOwnsKeys ? own : other};
      if (!sees(p, sequence, h, at.row, at.key, S::kTile)) continue;
      pairs_simple<S>(w, p, at, shared, thread);
      keep_simple<S>(w, shared, thread);
      const Matrix<T> x = S::kRole == BackwardRole::dq   ? key_rows<T>(p.k, sequence, h / group, p.D)
                          : S::kRole == BackwardRole::dk ? query_rows<T>(p.q, sequence, h, p.D)
                                                         : query_rows<T>(p.dout, sequence, h, p.Dv);
      multiply_columns_simple<S>(sum, x, other, column, shared, thread);
    }
  for_own<S::kPer>([&](int i, int j) {
    const int64_t r = own + thread / 16 + 16 * i, d = column + thread % 16 + 16 * j;
    const Matrix<T> m =
        kOwnsKeys ? key_rows<T>(to, sequence, own_head, columns) : query_rows<T>(to, sequence, own_head, columns);
    if (r < own_rows && d < columns) const_cast<T*>(m.data)[r * m.stride + d] = T(sum[i][j]);
  });
}

// How dbias is shared out: sizes of the grid over batch, heads, tiles of rows and of keys (1 where it is broadcast).
struct BiasGrid {
  int64_t n[4];
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    attention_bwd_dbias_simple(const __grid_constant__ AttentionBackwardLaunch p,
                               const __grid_constant__ BiasGrid grid) {
  using A = typename S::A;
  __shared__ typename S::Shared shared;
  const int thread = threadIdx.x;
  int64_t index = blockIdx.x, at[4], step[4];
  for (int i = 3; i >= 0; --i) {
    at[i] = index % grid.n[i] * (i < 2 ? 1 : S::kTile);
    index /= grid.n[i];
  }
  // An own dimension is taken at one place, a broadcast one as a whole.
  const int64_t size[4] = {p.B, p.H, p.Sq, p.Sk};
  for (int i = 0; i < 4; ++i) step[i] = p.dbias.stride[i] ? size[i] : i < 2 ? 1 : S::kTile;
  A sum[S::kPer][S::kPer] = {}, w[S::kPer][S::kPer];
  for (int64_t b = at[0]; b < p.B; b += step[0]) {
    const Sequence sequence = cuda::sequence(p, unsigned(b));
    for (unsigned h = unsigned(at[1]); h < p.H; h += unsigned(step[1]))
      for (int64_t row = at[2]; row < sequence.Sq; row += step[2])
        for (int64_t key = at[3]; key < sequence.Sk; key += step[3]) {
          if (!sees(p, sequence, h, int(row), int(key), S::kTile)) continue;
          pairs_simple<S>(w, p, {sequence, h, int(row), int(key)}, shared, thread);
          for_own<S::kPer>([&](int i, int j) { sum[i][j] += w[i][j]; });
        }
  }
  keep_simple<S>(sum, shared, thread);
  __syncthreads();
  const bool all_rows = p.dbias.stride[2] == 0, all_keys = p.dbias.stride[3] == 0;
  for (int n = thread; n < (all_rows ? 1 : S::kTile) * (all_keys ? 1 : S::kTile); n += S::kThreads) {
    const int i = all_rows ? 0 : all_keys ? n : n / S::kTile, j = all_keys ? 0 : n % S::kTile;
    A x = 0;
    for (int r = i; r < (all_rows ? S::kTile : i + 1); ++r)
      for (int c = j; c < (all_keys ? S::kTile : j + 1); ++c) x += shared.w[r][c];
    const int64_t row = at[2] + i, key = at[3] + j;
    if (row < p.Sq && key < p.Sk)
      static_cast<A*>(p.dbias.data)[at[0] * p.dbias.stride[0] + at[1] * p.dbias.stride[1] + row * p.dbias.stride[2] +
                                    key * p.dbias.stride[3]] = x;
  }
}

// The gradient of a relative bias: sums over diagonals. A block owns the tiles along one diagonal of tiles, which hold
// parts of 2 * kTile - 1 diagonals. It adds to those that the next and the last diagonal of tiles hold the other parts
// of, so every second diagonal of tiles takes part in a launch.
template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    attention_bwd_dbias_relative(const __grid_constant__ AttentionBackwardLaunch p, int diagonals, int parity) {
  using A = typename S::A;
  __shared__ typename S::Shared shared;
  const int thread = threadIdx.x, Sq = int(p.Sq), Sk = int(p.Sk), row_tiles = (Sq + S::kTile - 1) / S::kTile;
  // The first tile's first key less its row; a sequence's own is shifted.
  const int diagonal = (int(blockIdx.x) % diagonals * 2 + parity - row_tiles) * S::kTile;
  const Tensor4& to = p.dbias;
  const unsigned own = blockIdx.x / diagonals, B = unsigned(p.B), H = unsigned(p.H), heads = to.stride[1] ? H : 1;
  A sum[S::kPer][S::kPer] = {}, w[S::kPer][S::kPer];
  for (unsigned b = own / heads; b < B; b += to.stride[0] ? B : 1) {
    const Sequence sequence = cuda::sequence(p, b);
    for (unsigned h = own % heads; h < H; h += to.stride[1] ? H : 1)
      for (int row = 0; row < sequence.Sq; row += S::kTile) {
        const int key = row + diagonal + sequence.shift;
        if (!sees(p, sequence, h, row, key, S::kTile)) continue;
        pairs_simple<S>(w, p, {sequence, h, row, key}, shared, thread);
        for_own<S::kPer>([&](int i, int j) { sum[i][j] += w[i][j]; });
      }
  }
  keep_simple<S>(sum, shared, thread);
  __syncthreads();
  for (int n = thread; n < 2 * S::kTile - 1; n += S::kThreads) {
    const int d = n - (S::kTile - 1);
    A x = 0;
    for (int i = max(0, -d); i < S::kTile - max(0, d); ++i) x += shared.w[i][i + d];
    if (diagonal + d > -Sq && diagonal + d < Sk)
      static_cast<A*>(to.data)[own / heads * to.stride[0] + own % heads * to.stride[1] + diagonal + d] += x;
  }
}

template <class T, class A>
void launch_attention_bwd_dbias_relative(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  using S = BackwardSimple<T, A, BackwardRole::dbias>;
  const char* name = "attention_bwd_dbias_relative";
  auto tiles = [](int64_t n) { return (n + S::kTile - 1) / S::kTile; };
  const int64_t owners = (p.dbias.stride[0] ? p.B : 1) * (p.dbias.stride[1] ? p.H : 1);
  const int64_t diagonals = (tiles(p.Sq) + tiles(p.Sk) + 2) / 2;
  if (owners == 0) return;
  for (int parity = 0; parity < 2; ++parity) {
    attention_bwd_dbias_relative<S>
        <<<grid_size(diagonals * owners, name), S::kThreads, 0, stream>>>(p, int(diagonals), parity);
    check(cudaGetLastError(), name);
  }
}

template <class T, class A, BackwardRole kRole>
void launch_attention_bwd_simple(const AttentionBackwardLaunch& p, cudaStream_t stream) {
  using S = BackwardSimple<T, A, kRole>;
  auto tiles = [](int64_t n) { return (n + S::kTile - 1) / S::kTile; };
  if constexpr (kRole == BackwardRole::dbias) {
    const char* name = "attention_bwd_dbias_simple";
    const int64_t* s = p.dbias.stride;
    const BiasGrid grid = {{s[0] ? p.B : 1, s[1] ? p.H : 1, s[2] ? tiles(p.Sq) : 1, s[3] ? tiles(p.Sk) : 1}};
    const int64_t blocks = grid.n[0] * grid.n[1] * grid.n[2] * grid.n[3];
    if (blocks == 0) return;
    attention_bwd_dbias_simple<S><<<grid_size(blocks, name), S::kThreads, 0, stream>>>(p, grid);
    check(cudaGetLastError(), name);
  } else {
    const char* name = "attention_bwd_simple";
    const int64_t columns = tiles(kRole == BackwardRole::dv ? p.Dv : p.D);
    const int64_t blocks = columns * (S::kOwnsKeys ? tiles(p.Sk) * p.Hk : tiles(p.Sq) * p.H) * p.B;
    if (blocks == 0) return;
    attention_bwd_simple<S><<<grid_size(blocks, name), S::kThreads, 0, stream>>>(p);
    check(cudaGetLastError(), name);
  }
}

}  // namespace mha::cuda
