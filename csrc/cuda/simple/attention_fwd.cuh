// Attention forward on the ordinary cores, for what the tensor-core kernels don't take: fp32 and fp64 in full accuracy,
// and head sizes beyond theirs. Any head size: the block's output columns are a chunk of kColumns, and each chunk works
// out the scores anew.
//
// 128 threads: thread (y, x) of 16 x 8 owns rows 4 * y .. of the query tile, and keys 4 * x .. of the key tile while it
// handles scores, columns 4 * x + 32 * c .. of the output otherwise; so row statistics are reduced over 8 lanes and
// stay put.
//
// This room includes common, csrc/cuda.
#pragma once
#include "../common/element.cuh"
#include "../common/error.h"
#include "../common/exact_sum.cuh"
#include "../common/launch.h"
#include "../common/span.cuh"
#include "../common/tile.cuh"

namespace mha::cuda {

// kStore: whether keys and values lie in pages or are quantised (KeyValueStore).
template <class T_, class Acc_, int kColumnGroups, bool kStore_ = false>
struct SimpleForward {
  using T = T_;
  using Acc = Acc_;
  static constexpr bool kStore = kStore_;
  static constexpr int kThreads = 128, kRows = 64, kKeys = 32, kDepth = 32, kColumns = 32 * kColumnGroups;
  static constexpr int kRowPitch = kRows + 4, kKeyPitch = kKeys + 4;
  struct Shared {
    union {  // weights replace the queries that they were made of
      Acc query[kDepth][kRowPitch];
      Acc weight[kKeys][kRowPitch];
    };
    Acc key[kDepth][kKeyPitch];
    Acc value[kKeys][kColumns];
  };
};

template <class Acc>
struct SimpleRow {
  int begin, end;  // visible keys
  Acc max = -INFINITY, sum = 0;
  Acc factor = 0;  // of the weights, at the end
};

__device__ inline float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ inline double hyperbolic_tangent(double x) { return tanh(x); }

// Copies [kRows x kDepth] elements of a matrix, transposed, widened and filled up with zeros.
template <int kRows, int kThreads, class T, class Acc, int kDepth, int kPitch>
__device__ inline void load_transposed(Acc (&to)[kDepth][kPitch], const T* from, int64_t stride, int rows,
                                       int columns) {
  for (int i = threadIdx.x; i < kRows * kDepth; i += kThreads) {
    int row = i / kDepth, d = i % kDepth;
    to[d][row] = row < rows && d < columns ? Acc(from[row * stride + d]) : Acc(0);
  }
}

// An element of row j of the keys or values of one head as a cache holds them; NaN where block_table names no page.
template <class Acc>
__device__ inline Acc stored_element(const AttentionForwardLaunch& p, const Tensor4& t, const float* scales, unsigned b,
                                     unsigned query_head, unsigned j, unsigned column) {
  const KeyValueStore& store = p.store;
  const unsigned head = query_head / (unsigned(p.H) / unsigned(p.Hk));
  int64_t first = b;
  if (store.table) {
    const unsigned page = j / unsigned(store.page_size);  // in 64 bits this would be a call
    first = store.table[b * store.table_stride_b + page];
    if (first < 0 || first >= store.pages) return Acc(NAN);
    j -= page * unsigned(store.page_size);
  }
  const Acc x = element<Acc>(t.data, store.quantised ? store.type : p.dtype,
                             first * t.stride[0] + head * t.stride[1] + j * t.stride[2] + column);
  if (!store.quantised) return x;
  const int64_t scale = store.scale_per_key ? first * store.scale_stride_b + j : b * store.scale_stride_b;
  return x * Acc(scales[scale + head * store.scale_stride_h]);
}

// The scores of the thread's 4 x 4 pairs: -inf where hidden. Returns which are (bit 4 * r + c).
template <class C>
__device__ inline uint32_t simple_scores(typename C::Acc (&s)[4][4], typename C::Shared& shared,
                                         const AttentionForwardLaunch& p, const Sequence& sequence, unsigned h,
                                         int first_row, int first_key, const SimpleRow<typename C::Acc> (&row)[4]) {
  using T = typename C::T;
  using Acc = typename C::Acc;
  const int x = threadIdx.x % 8, y = threadIdx.x / 8;
  const T* q = query_rows<T>(p.q, sequence, h, p.D).data + first_row * p.q.stride[2];
  const T* k = key_rows<T>(p.k, sequence, h / unsigned(p.H / p.Hk), p.D).data + first_key * p.k.stride[2];
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c) s[r][c] = 0;
  for (int d0 = 0; d0 < p.D; d0 += C::kDepth) {
    __syncthreads();
    load_transposed<C::kRows, C::kThreads>(shared.query, q + d0, p.q.stride[2], sequence.Sq - first_row, int(p.D) - d0);
    if constexpr (C::kStore) {
#pragma unroll 1
      for (int i = threadIdx.x; i < C::kKeys * C::kDepth; i += C::kThreads) {
        const int j = first_key + i / C::kDepth, d = d0 + i % C::kDepth;
        shared.key[i % C::kDepth][i / C::kDepth] =
            j < p.Sk && d < p.D ? stored_element<Acc>(p, p.k, p.store.k_scale, sequence.b, h, j, d) : Acc(0);
      }
    } else {
      load_transposed<C::kKeys, C::kThreads>(shared.key, k + d0, p.k.stride[2], sequence.Sk - first_key, int(p.D) - d0);
    }
    __syncthreads();
#pragma unroll 4
    for (int d = 0; d < C::kDepth; ++d)
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[r][c] += shared.query[d][4 * y + r] * shared.key[d][4 * x + c];
  }
  const Acc scale = Acc(p.scale), cap = Acc(p.softcap);
  uint32_t hidden = 0;
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int i = first_row + 4 * y + r, j = first_key + 4 * x + c;
      s[r][c] *= scale;
      if (cap != 0) s[r][c] = cap * hyperbolic_tangent(s[r][c] / cap);
      if (j < row[r].begin || j >= row[r].end || !visible_in_interval(p.mask, sequence.b, h, i, j))
        s[r][c] = -INFINITY, hidden |= 1u << (4 * r + c);
      else if (p.bias.data)
        s[r][c] += element<Acc>(p.bias.data, p.bias_dtype, bias_offset(p, p.bias, sequence, h, i, j));
    }
  return hidden;
}

// Zeroes the weights that dropout drops, in the thread's four rows; its four keys share one Philox call.
template <class Acc>
__device__ inline void simple_dropout(Acc (&w)[4][4], const AttentionForwardLaunch& p, uint32_t b, uint32_t h,
                                      int first_row, int first_key) {
  const DropoutKey key = dropout_key(p.dropout);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    Philox4 words = dropout_words(key, b, h, first_row + threadIdx.x / 8 * 4 + r, first_key / 4 + threadIdx.x % 8);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (words.word[c] < p.threshold) w[r][c] = 0;
  }
}

// The weights of the scores s against the running maximum, which is raised first (with sum and o) where they exceed it.
template <class Acc, int kColumns>
__device__ inline void simple_softmax(Acc (&s)[4][4], SimpleRow<Acc> (&row)[4], Acc (&o)[4][kColumns]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    Acc top = max(max(s[r][0], s[r][1]), max(s[r][2], s[r][3]));
#pragma unroll
    for (int d = 1; d < 8; d *= 2) top = max(top, __shfl_xor_sync(~0u, top, d));
    top = max(top, row[r].max);
    const Acc base = top == -Acc(INFINITY) ? Acc(0) : top, factor = exponential(row[r].max - base);
    row[r].max = top;
    row[r].sum *= factor;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) o[r][c] *= factor;
#pragma unroll
    for (int c = 0; c < 4; ++c) row[r].sum += s[r][c] = exponential(s[r][c] - base);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_fwd_simple_kernel(const __grid_constant__ AttentionForwardLaunch p) {
  using T = typename C::T;
  using Acc = typename C::Acc;
  __shared__ __align__(16) typename C::Shared shared;
  __shared__ Sequence sequence;
  const int x = threadIdx.x % 8, y = threadIdx.x / 8;
  const int chunks = max(1, int((p.Dv + C::kColumns - 1) / C::kColumns));
  const int first_column = blockIdx.x % chunks * C::kColumns;
  const int first_row = (p.query_tiles - 1 - blockIdx.x / chunks % p.query_tiles) * C::kRows;
  const unsigned bh = blockIdx.x / chunks / p.query_tiles, b = bh / unsigned(p.H), h = bh % unsigned(p.H);
  if (threadIdx.x == 0) sequence = cuda::sequence(p, b);
  __syncthreads();
  const int Sq = sequence.Sq, Sk = sequence.Sk;
  if (first_row >= Sq) return;

  SimpleRow<Acc> row[4];
  int begin = Sk, end = 0;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int i = first_row + 4 * y + r;
    Interval interval = i < Sq ? row_interval(p.mask, b, i, Sk, sequence.shift) : Interval{0, 0};
    row[r].begin = int(interval.begin);
    row[r].end = int(interval.end);
    if (interval.begin < interval.end) begin = min(begin, row[r].begin), end = max(end, row[r].end);
  }
  begin = -__reduce_max_sync(~0u, -begin);
  end = __reduce_max_sync(~0u, end);
  __shared__ int begins[C::kThreads / 32], ends[C::kThreads / 32];
  if (threadIdx.x % 32 == 0) begins[threadIdx.x / 32] = begin, ends[threadIdx.x / 32] = end;
  __syncthreads();
  for (int w = 0; w < C::kThreads / 32; ++w) begin = min(begin, begins[w]), end = max(end, ends[w]);

  Acc s[4][4], o[4][C::kColumns / 8] = {};
  const T* values = key_rows<T>(p.v, sequence, h / unsigned(p.H / p.Hk), p.Dv).data + first_column;
  auto shows = [&](int key) { return mask_tile_code(p.tiles, b, h, first_row, C::kRows, key, C::kKeys) & kShowsSome; };
  for (int key = begin / C::kKeys * C::kKeys; key < end; key += C::kKeys) {
    if (!shows(key)) continue;
    const uint32_t hidden = simple_scores<C>(s, shared, p, sequence, h, first_row, key, row);
    simple_softmax(s, row, o);
    if (p.dropout.rng_state) simple_dropout(s, p, b, h, first_row, key);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int r = 0; r < 4; ++r) shared.weight[4 * x + c][4 * y + r] = hidden >> (4 * r + c) & 1 ? Acc(-1) : s[r][c];
#pragma unroll(C::kStore ? 1 : 4)
    for (int i = threadIdx.x; i < C::kKeys * C::kColumns; i += C::kThreads) {
      const int j = i / C::kColumns, c = i % C::kColumns;
      const bool there = key + j < Sk && first_column + c < p.Dv;
      if constexpr (C::kStore) {
        shared.value[j][c] =
            there ? stored_element<Acc>(p, p.v, p.store.v_scale, b, h, key + j, first_column + c) : Acc(0);
      } else {
        shared.value[j][c] = there ? Acc(values[(key + j) * p.v.stride[2] + c]) : Acc(0);
      }
    }
    __syncthreads();
    for (int j = 0; j < C::kKeys; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const Acc w = shared.weight[j][4 * y + r];
        if (w < 0) continue;  // hidden: its value may be NaN
#pragma unroll
        for (int c = 0; c < C::kColumns / 8; ++c) o[r][c] += w * shared.value[j][c / 4 * 32 + 4 * x + c % 4];
      }
  }

  const Acc keep = p.dropout.rng_state ? (p.dropout.p >= 1 ? Acc(0) : Acc(1 / (1 - p.dropout.p))) : Acc(1);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int i = first_row + 4 * y + r;
#pragma unroll
    for (int d = 1; d < 8; d *= 2) row[r].sum += __shfl_xor_sync(~0u, row[r].sum, d);
    row[r].factor = row[r].sum == 0 ? Acc(0) : keep / row[r].sum;
    if (i >= Sq) continue;
    ExactSum<Acc> log = row[r].sum == 0 ? ExactSum<Acc>{-INFINITY, 0} : exact_sum(row[r].max, logarithm(row[r].sum));
    if (p.sinks) {
      const WithSink<Acc> all = add_sink(log, static_cast<const Acc*>(p.sinks)[h]);
      log = all.lse;
      row[r].factor *= all.factor;
    }
    if (x == 0 && first_column == 0) {
      const int64_t at = cuda::first_row(p, sequence, h) + i;
      static_cast<Acc*>(p.lse)[at] = log.value;
      if (p.lse_rest) static_cast<Acc*>(p.lse_rest)[at] = log.rest;
    }
    T* out = const_cast<T*>(query_rows<T>(p.out, sequence, h, p.Dv).data) + i * p.out.stride[2] + first_column;
#pragma unroll
    for (int c = 0; c < C::kColumns / 8; ++c) {
      const int column = c / 4 * 32 + 4 * x + c % 4;
      if (first_column + column < p.Dv) out[column] = T(o[r][c] * row[r].factor);
    }
  }
  if (!p.weights.data || first_column > 0) return;

  T* weights = static_cast<T*>(p.weights.data) + int64_t(bh) * Sq * Sk;
  for (int key = 0; key < Sk; key += C::kKeys) {
    const bool seen = key < end && key + C::kKeys > begin && shows(key);
    if (seen) simple_scores<C>(s, shared, p, sequence, h, first_row, key, row);
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        s[r][c] = seen && row[r].sum != 0 ? exponential(s[r][c] - row[r].max) * row[r].factor : Acc(0);
    if (p.dropout.rng_state) simple_dropout(s, p, b, h, first_row, key);
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (first_row + 4 * y + r < Sq && key + 4 * x + c < Sk)
          weights[int64_t(first_row + 4 * y + r) * Sk + key + 4 * x + c] = T(s[r][c]);
  }
}

template <class C>
void launch_attention_fwd_simple(const char* name, AttentionForwardLaunch p, cudaStream_t stream) {
  p.query_tiles = int((p.Sq + C::kRows - 1) / C::kRows);
  const int64_t chunks = p.Dv > C::kColumns ? (p.Dv + C::kColumns - 1) / C::kColumns : 1;
  attention_fwd_simple_kernel<C><<<grid_size(chunks * p.query_tiles * p.B * p.H, name), C::kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), name);
}

}  // namespace mha::cuda
