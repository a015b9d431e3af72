// The attention weights, from the logsumexp that attention forward left: one more pass over the keys, on tensor cores.
// Every element of weights is written; hidden ones are 0. Not for packed sequences.
#pragma once
#include "attention_fwd.cuh"

namespace mha::cuda {

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads)
    attention_weights_sm80(const __grid_constant__ AttentionForwardLaunch p) {
  using Tile = TileSm80<T, C::kHead, C::kThreads>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ RowRange ranges[C::kBlockM];
  __shared__ Span spans[C::kWarps];
  __shared__ Sequence sequence;
  static_assert(fits_everywhere(C::kTileBytes + C::kQueryBytes, sizeof(ranges) + sizeof(spans) + sizeof(sequence)));
  const unsigned thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int Sq = int(p.Sq), Sk = int(p.Sk), key_tiles = (Sk + C::kBlockN - 1) / C::kBlockN;
  const int tile = blockIdx.x % key_tiles;
  const int query_tile = blockIdx.x / key_tiles % p.query_tiles;
  const unsigned H = unsigned(p.H), bh = blockIdx.x / key_tiles / p.query_tiles, b = bh / H, h = bh % H,
                 hk = h / (H / unsigned(p.Hk));
  const int block_row = query_tile * C::kBlockM, first_row = block_row + warp * C::kRows;

  const uint32_t keys_at = shared_address(shared), query_at = keys_at + C::kTileBytes;
  if (thread == 0) sequence = cuda::sequence(p, b);
  __syncthreads();
  typename Tile::template Loader<C::kBlockM>(query_rows<T>(p.q, sequence, h, p.D), block_row, thread)
      .load(p.aligned_q, query_at, Sq - block_row);
  typename Tile::template Loader<C::kBlockN>(key_rows<T>(p.k, sequence, hk, p.D), tile * C::kBlockN, thread)
      .load(p.aligned_k, keys_at, Sk - tile * C::kBlockN);
  cp_async_commit();
  warp_span<C::kRows>(p.mask, sequence, first_row, ranges + warp * C::kRows, spans + warp, lane);
  cp_async_wait<0>();
  __syncthreads();

  const uint32_t q_lane = query_at + warp * C::kRows * Tile::kRowBytes + Tile::lane_a(lane);
  T* weights = static_cast<T*>(p.weights.data) + int64_t(bh) * Sq * Sk;
  const float* lse = static_cast<const float*>(p.lse) + int64_t(bh) * Sq;
  const float* lse_rest = p.lse_rest ? static_cast<const float*>(p.lse_rest) + int64_t(bh) * Sq : nullptr;
#pragma unroll 1
  for (int step = 0; step < C::kBlockN / C::kStep; ++step) {
    const int key = tile * C::kBlockN + step * C::kStep;
    const FragmentPlace at = {&sequence, h, first_row, key, ranges + warp * C::kRows};
    float s[C::kMt][C::kNt][4] = {};
    uint32_t visible = visible_bits<C::kMt, C::kNt, false>(p.mask, at, lane);
    if (__any_sync(~0u, visible)) {
      scores<T, C, Tile>(s, nullptr, q_lane, keys_at + Tile::lane_b(lane) + step * C::kStep * Tile::kRowBytes);
      to_scores<T>(s, p, at, lane);
      if (p.dropout.rng_state)
        visible &= kept_bits<C::kMt, C::kNt>(dropout_key(p.dropout, b, h), p.threshold, at, lane);
    }
#pragma unroll
    for (int m = 0; m < C::kMt; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = first_row + 16 * m + 8 * half + lane / 4;
        if (row >= Sq) continue;
        const float row_lse = lse[row], rest = lse_rest ? lse_rest[row] : 0;
#pragma unroll
        for (int n = 0; n < C::kNt; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            int j = key + 8 * n + lane % 4 * 2 + e;
            const bool shown = row_lse != -INFINITY && (visible >> fragment_bit<C::kNt>(m, n, half, e) & 1);
            const float above = to_power_of_two(s[m][n][2 * half + e] - row_lse - rest);
            float w = shown ? exp2_approx(above) * p.keep_scale : 0.0f;
            if (j < Sk) weights[int64_t(row) * Sk + j] = T(w);
          }
      }
  }
}

template <class T, class C>
void launch_attention_weights_sm80(const char* name, AttentionForwardLaunch p, cudaStream_t stream) {
  auto kernel = attention_weights_sm80<T, C>;
  constexpr int kShared = C::kTileBytes + C::kQueryBytes;
  p.query_tiles = int((p.Sq + C::kBlockM - 1) / C::kBlockM);
  int64_t key_tiles = (p.Sk + C::kBlockN - 1) / C::kBlockN;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), name);
  kernel<<<grid_size(key_tiles * p.query_tiles * p.B * p.H, name), C::kThreads, kShared, stream>>>(p);
  check(cudaGetLastError(), name);
}

}  // namespace mha::cuda
