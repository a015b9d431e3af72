// Attention over a cache on tensor cores (compute capability 8.0 and later): fp16 or bf16 queries, keys and values in
// pages or not, as they are or of 8 bits. A tile's rows are the queries of the heads that share a key/value head, up to
// 8 or 16 of them, so that keys and values are read once for all. A block has a share of the keys that they see (a
// split), its warps take every kWarps-th tile of kKeys of them; what they find is merged at the end, the splits by
// attention_combine.
//
// With g = lane / 4 and t = lane % 4, a lane brings by cp.async, in pieces of 16 bytes, those parts of a tile that it
// multiplies itself: of key g (and g + 8) every fourth piece for S = Q K^T, where any order of the sum will do if
// queries follow it; of the values of keys 2t, 2t + 1, 2t + 8 and 2t + 9 the pieces g, g + 8 .. for O^T = V^T P^T,
// whose operand P^T has the layout in which S comes. So no lane reads what another one brought, and nothing but waits
// for its own copies orders them.
//
// Keys that no row sees are zeros, and are not read. Values that are not finite, of keys that some rows see and others
// do not, are multiplied row by row.
#pragma once
#include "../common/element.cuh"
#include "../common/error.h"
#include "../common/exact_sum.cuh"
#include "../prim/mma.cuh"
#include "attention_cached_reader.cuh"

namespace mha::cuda {

template <class C>
struct CachedState {
  float o[C::kHalves][C::kSums][4] = {};  // o[half][n][2 * i + e]: row 8 * half + 2t + e
  float max[C::kHalves], sum[C::kHalves] = {};
  __device__ CachedState() {
#pragma unroll
    for (float& x : max) x = -INFINITY;
  }
};

// Factors of rows g as rows 2t and 2t + 1 need them.
template <int kSums>
__device__ inline void multiply_rows(float (&o)[kSums][4], float factor, unsigned lane) {
  const float low = __shfl_sync(~0u, factor, lane % 4 * 8), high = __shfl_sync(~0u, factor, lane % 4 * 8 + 4);
#pragma unroll
  for (int n = 0; n < kSums; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) o[n][e] *= e % 2 ? high : low;
}

// Raises the maximum of the lane's row of a half where one of its scores asks for it.
template <class C>
__device__ inline void raise_maximum(CachedState<C>& state, int half, float top, unsigned lane) {
  // Only by what exceeds it by kSlack, in powers of two.
  if (!__any_sync(~0u, to_power_of_two(top - state.max[half]) > C::kSlack)) return;
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  const float before = state.max[half], after = to_power_of_two(top - before) > C::kSlack ? top : before;
  const float factor = after == before ? 1 : exp2_approx(to_power_of_two(before - after));
  state.max[half] = after;
  state.sum[half] *= factor;
  multiply_rows(state.o[half], factor, lane);
}

// s[n][2 * half + e], the score of row 8 * half + g and key 8n + 2t + e without the scale, becomes the weight relative
// to the maximum. bits: what the mask shows.
template <class C>
__device__ inline void cached_softmax(float (&s)[2][4], CachedState<C>& state, const AttentionForwardLaunch& p,
                                      const CachedPlace& at, const CachedReader<C>& reader, int tile, int stage,
                                      float scale, bool plain, uint32_t bits, unsigned lane) {
  const bool per_key = C::kNarrow && p.store.scale_per_key;
  float4 scales = {1, 1, 1, 1};
  if (per_key) scales = reader.scales(stage, 0);
  const float of_key[4] = {scales.x, scales.y, scales.z, scales.w};
  if (per_key) scales = reader.scales(stage, 1);
  const float of_value[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
  for (int half = 0; half < C::kHalves; ++half) {
#pragma unroll
    for (int j = 0; j < 4; ++j) s[j / 2][2 * half + j % 2] *= per_key ? scale * of_key[j] : scale;
    if (!plain || p.softcap != 0 || p.bias.data) {
      const unsigned r = lane / 4 + 8 * half;
      int64_t bias = 0;
      if (p.bias.data)
        bias = at.b * p.bias.stride[0] + at.head(r) * p.bias.stride[1] + int64_t(at.query(r)) * p.bias.stride[2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& x = s[j / 2][2 * half + j % 2];
        if (p.softcap != 0) x = p.cap * tanhf(x / p.cap);
        if (!(bits >> (j + 4 * half) & 1))
          x = -INFINITY;
        else if (p.bias.data)
          x += element<float>(p.bias.data, p.bias_dtype,
                              bias + int64_t(tile * C::kKeys + lane % 4 * 2 + cached_key(j)) * p.bias.stride[3]);
      }
    }
    float* const x = s[0] + 2 * half;
    float* const y = s[1] + 2 * half;
    raise_maximum(state, half, fmaxf(fmaxf(x[0], x[1]), fmaxf(y[0], y[1])), lane);
    const float base = state.max[half] == -INFINITY ? 0 : state.max[half];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& weight = s[j / 2][2 * half + j % 2];
      state.sum[half] += weight = exp2_approx(to_power_of_two(weight - base));
      if (per_key) weight = plain || bits >> (j + 4 * half) & 1 ? weight * of_value[j] : 0;  // the scale may be NaN
    }
  }
}

// S = Q K^T of a tile.
template <class C, int kSteps>
__device__ inline void cached_scores(float (&s)[2][4], const uint32_t (&q)[C::kHalves][kSteps][2],
                                     const CachedReader<C>& reader, int stage) {
  using T = typename C::T;
  constexpr int kHigh = C::kHalves - 1;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = 0;
#pragma unroll
    for (int c = 0; c < C::kKeyPieces; ++c) {
      const uint4 piece = reader.key_piece(stage, n, c);
      const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
      bool special = false;
      if constexpr (C::kStored == DType::e4m3) special = has_nan_e4m3(piece);
#pragma unroll
      for (int i = 0; i < C::kPiece / 4; ++i) {
        const int step = c * C::kPiece / 4 + i;
        uint32_t b0, b1;
        if constexpr (C::kNarrow) {
          b0 = widened_pair<T, C::kStored, 0, 1>(words[i], words[i]);
          b1 = widened_pair<T, C::kStored, 2, 3>(words[i], words[i]);
          if (special) b0 = with_nan_e4m3<T>(b0), b1 = with_nan_e4m3<T>(b1);
        } else {
          b0 = words[2 * i], b1 = words[2 * i + 1];
        }
        mma_16x8x16<T>(
            s[n], {q[0][step][0], kHigh ? q[kHigh][step][0] : 0, q[0][step][1], kHigh ? q[kHigh][step][1] : 0}, b0, b1);
      }
    }
  }
}

// The weights of 8 rows as an operand; a second plane is what rounding to the first one took.
template <class C>
struct CachedWeights {
  uint32_t pairs[C::kPlanes][2];

  __device__ CachedWeights(const float (&s)[2][4], int half) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float x = s[n][2 * half], y = s[n][2 * half + 1];
      const uint32_t pair = pack2<typename C::Weight>(x, y);
      pairs[0][n] = pair;
      if constexpr (C::kPlanes == 2)
        pairs[1][n] = pack2<typename C::Weight>(rest(x, pair << 16), rest(y, pair & 0xFFFF0000));
    }
  }
  __device__ static float rest(float x, uint32_t rounded) {
    return isinf(__uint_as_float(rounded)) ? 0 : x - __uint_as_float(rounded);
  }
};

template <class C>
__device__ inline void multiply(float (&o)[4], const uint32_t (&a)[4], const CachedWeights<C>& weights) {
#pragma unroll
  for (int i = 0; i < C::kPlanes; ++i) mma_16x8x16<typename C::Weight>(o, a, weights.pairs[i][0], weights.pairs[i][1]);
}

// Calls f(n, a) with the operands a of V^T that a lane's c-th pieces of values hold; those outside `seen` are zeros.
template <class C, class F>
__device__ inline void for_values(const CachedReader<C>& reader, int stage, int c, uint32_t seen, F f) {
  using T = typename C::Weight;
  uint32_t v[4][4];
  bool special = false;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    uint4 piece = reader.value_piece(stage, n, c);
    if (!(seen >> n & 1)) piece = {};
    v[n][0] = piece.x, v[n][1] = piece.y, v[n][2] = piece.z, v[n][3] = piece.w;
    if constexpr (C::kStored == DType::e4m3) special |= has_nan_e4m3(piece);
  }
  // Columns 2i and 2i + 1 of the piece are rows g and g + 8 of the product.
  unroll<C::kPiece / 2>([&](auto i) {
    uint32_t a[4];
    unroll<4>([&](auto r) {
      constexpr int column = 2 * int(decltype(i)()) + int(decltype(r)()) % 2, keys = int(decltype(r)()) / 2 * 2;
      if constexpr (C::kNarrow) {
        constexpr int word = column / 4, byte = column % 4;
        a[r] = widened_pair<T, C::kStored, byte, byte>(v[keys][word], v[keys + 1][word]);
        if (special) a[r] = with_nan_e4m3<T>(a[r]);
      } else {
        a[r] = __byte_perm(v[keys][column / 2], v[keys + 1][column / 2], column % 2 ? 0x7632 : 0x5410);
      }
    });
    f(c * (C::kPiece / 2) + i, a);
  });
}

// O^T += V^T P^T of a tile.
template <class C>
__device__ inline void cached_values(CachedState<C>& state, const float (&s)[2][4], const CachedReader<C>& reader,
                                     int stage) {
  const CachedWeights<C> low(s, 0), high(s, C::kHalves - 1);
#pragma unroll
  for (int c = 0; c < C::kValuePieces; ++c)
    for_values(reader, stage, c, 0xF, [&](int n, const uint32_t (&a)[4]) {
      multiply(state.o[0][n], a, low);
      if constexpr (C::kHalves == 2) multiply(state.o[1][n], a, high);
    });
}

// Whether a lane's values hold NaN or Inf.
template <class C>
__device__ inline bool special_values(const CachedReader<C>& reader, int stage) {
  if constexpr (C::kStored == DType::i8) return false;
  bool special = false;
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int c = 0; c < C::kValuePieces; ++c) {
      const uint4 piece = reader.value_piece(stage, n, c);
      if constexpr (C::kStored == DType::e4m3) {
        special |= has_nan_e4m3(piece);
      } else {
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
        uint32_t sum = 0;
#pragma unroll
        for (uint32_t word : words) sum = collect_nonfinite<typename C::T>(sum, word);
        special |= is_nonfinite(sum);
      }
    }
  return special;
}

// The same as cached_values, for each row with the values that it sees alone.
template <class C>
__device__ inline void cached_values_by_row(CachedState<C>& state, const float (&s)[2][4],
                                            const CachedReader<C>& reader, int stage, uint32_t bits, unsigned lane) {
  unroll<C::kHalves>([&](auto half) {
    const CachedWeights<C> weights(s, half);
#pragma unroll 1
    for (unsigned r = 0; r < 8; ++r) {
      const uint32_t seen = __shfl_sync(~0u, bits, r * 4 + lane % 4) >> 4 * half & 0xF;
      const bool even = lane % 4 * 2 == r, odd = lane % 4 * 2 + 1 == r;
#pragma unroll
      for (int c = 0; c < C::kValuePieces; ++c)
        for_values(reader, stage, c, seen, [&](int n, const uint32_t (&a)[4]) {
          float (&o)[4] = state.o[half][n], of_row[4] = {o[0], o[1], o[2], o[3]};
          multiply(of_row, a, weights);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (e % 2 ? odd : even) o[e] = of_row[e];
        });
    }
  });
}

// The warps' states become the split's: [rows][kHead] outputs, normalised, and logsumexps.
template <class C>
__device__ inline void cached_finish(CachedState<C>& state, const AttentionForwardLaunch& p, const CachedPlace& at,
                                     float* shared, uint32_t missing, unsigned warp, unsigned lane) {
  float* statistics = shared + C::kWarps * C::kRows * C::kPitch;  // [kWarps][kRows][2]
  missing |= __shfl_xor_sync(~0u, missing, 1);
  missing |= __shfl_xor_sync(~0u, missing, 2);
  unroll<C::kHalves>([&](auto half) {
    float sum = state.sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (lane % 4 == 0) {
      float* to = statistics + (warp * C::kRows + 8 * half + lane / 4) * 2;
      to[0] = state.max[half];
      to[1] = missing >> 4 * half & 0xF ? NAN : sum;
    }
    unroll<C::kSums>([&](auto n) {
      constexpr int kPerPiece = C::kPiece / 2, piece = n / kPerPiece, column = n % kPerPiece * 2;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        shared[(warp * C::kRows + 8 * half + lane % 4 * 2 + e % 2) * C::kPitch + (piece * 8 + lane / 4) * C::kPiece +
               column + e / 2] = state.o[half][n][e];
    });
  });
  __syncthreads();
  for (unsigned i = warp; i < at.rows; i += C::kWarps) {
    float max = -INFINITY, sum = 0, factor[C::kWarps];
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) max = fmaxf(max, statistics[(w * C::kRows + i) * 2]);
    const float base = max == -INFINITY ? 0 : max;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) {
      factor[w] = exp2_approx(to_power_of_two(statistics[(w * C::kRows + i) * 2] - base));
      if (max == INFINITY) factor[w] = NAN;
      sum += factor[w] * statistics[(w * C::kRows + i) * 2 + 1];
    }
    const int64_t to = ((at.split * p.B + at.b) * p.H + at.head(i)) * p.Sq + at.query(i);
    if (lane == 0) {
      const ExactSum<float> log = logsumexp<true>(max, sum);
      p.partial_lse[to] = isnan(sum) ? NAN : log.value;
      p.partial_rest[to] = log.rest;
    }
    const float scale = sum == 0 ? 0 : reciprocal_approx(sum);
    for (unsigned d = lane; d < C::kHead; d += 32) {
      float x = 0;
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) x += factor[w] * shared[(w * C::kRows + i) * C::kPitch + d];
      if (C::kNarrow && !p.store.scale_per_key)
        x *= p.store.v_scale[at.b * p.store.scale_stride_b + at.kv_head * p.store.scale_stride_h];
      p.partial_out[to * C::kHead + d] = x * scale;
    }
  }
}

// The lane's part of a query, in the order of its pieces of keys.
template <class C, int kSteps>
__device__ inline void load_query(uint32_t (&q)[kSteps][2], const AttentionForwardLaunch& p, const uint16_t* row,
                                  unsigned lane) {
#pragma unroll
  for (int i = 0; i < kSteps; i += 2) {  // 8 elements
    const int d = (i * 4 / C::kPiece * 4 + lane % 4) * C::kPiece + i * 4 % C::kPiece;
    uint4 x = {};
    if (p.aligned_q && d + 8 <= p.D) {
      x = load_global_16(row + d);
    } else {
      auto pair = [&](int e) { return e < p.D ? row[e] | (e + 1 < p.D ? uint32_t(row[e + 1]) << 16 : 0) : 0; };
      x = {pair(d), pair(d + 2), pair(d + 4), pair(d + 6)};
    }
    q[i][0] = x.x, q[i][1] = x.y, q[i + 1][0] = x.z, q[i + 1][1] = x.w;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 2)
    attention_cached_sm80(const __grid_constant__ AttentionForwardLaunch p) {
  extern __shared__ __align__(128) unsigned char cached_shared[];
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  CachedPlace at;
  at.group = unsigned(p.H) / unsigned(p.Hk);
  const unsigned rows = at.group * unsigned(p.Sq), tiles = (rows + C::kRows - 1) / C::kRows;
  unsigned index = blockIdx.x;
  at.split = index % unsigned(p.splits), index /= unsigned(p.splits);
  at.row = index % tiles * C::kRows, index /= tiles;
  at.rows = min(rows - at.row, unsigned(C::kRows));
  at.kv_head = index % unsigned(p.Hk), at.b = index / unsigned(p.Hk);

  uint32_t q[C::kHalves][C::kHead / 16][2] = {};
#pragma unroll
  for (int half = 0; half < C::kHalves; ++half) {
    const unsigned r = lane / 4 + 8 * half;
    if (r < at.rows)
      load_query<C>(q[half], p,
                    static_cast<const uint16_t*>(p.q.data) + at.b * p.q.stride[0] + at.head(r) * p.q.stride[1] +
                        at.query(r) * p.q.stride[2],
                    lane);
  }
  float scale = float(p.scale);
  if (C::kNarrow && !p.store.scale_per_key)
    scale *= p.store.k_scale[at.b * p.store.scale_stride_b + at.kv_head * p.store.scale_stride_h];

  const CachedView<C> view(p, at, lane);
  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(cached_shared));
  CachedReader<C> reader(p, at, view, shared + warp * C::kStages * C::kStageBytes, lane);
  CachedState<C> state;
  const int end = view.last_tile();
  int tile = view.first_tile() + int(warp), ahead = tile, stage = 0;
#pragma unroll
  for (int i = 0; i < C::kStages - 1; ++i, ahead += C::kWarps) {
    if (ahead < end) reader.issue(ahead, i);
    cp_async_commit();
  }
  for (; tile < end; tile += C::kWarps, ahead += C::kWarps) {
    if (ahead < end) reader.issue(ahead, stage == 0 ? C::kStages - 1 : stage - 1);
    cp_async_commit();
    cp_async_wait<C::kStages - 1>();
    float s[2][4];
    cached_scores<C>(s, q, reader, stage);
    const bool plain = view.plain(tile);
    const uint32_t bits = plain ? view.rows() : view.bits(tile);
    cached_softmax<C>(s, state, p, at, reader, tile, stage, scale, plain, bits, lane);
    if (!plain && view.rows_differ(bits) && __any_sync(~0u, special_values(reader, stage)))
      cached_values_by_row(state, s, reader, stage, bits, lane);
    else
      cached_values(state, s, reader, stage);
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  __syncthreads();
  cached_finish<C>(state, p, at, reinterpret_cast<float*>(cached_shared), reader.missing(), warp, lane);
}

template <class C>
void launch_attention_cached_sm80(const char* name, const AttentionForwardLaunch& p, cudaStream_t stream) {
  auto kernel = attention_cached_sm80<C>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes), name);
  const int64_t tiles = (p.H / p.Hk * p.Sq + C::kRows - 1) / C::kRows;
  kernel<<<grid_size(p.splits * tiles * p.Hk * p.B, name), C::kThreads, C::kSharedBytes, stream>>>(p);
  check(cudaGetLastError(), name);
}

}  // namespace mha::cuda
