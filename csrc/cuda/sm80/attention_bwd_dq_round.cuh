// The last kernel of attention's backward with atomics: p.dq_sum, whose elements lie as attention_bwd_sm80 adds them,
// times scale, rounded, in order: dq.
#pragma once
#include "attention_bwd.cuh"

namespace mha::cuda {

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads)
    attention_bwd_dq_round(const __grid_constant__ AttentionBackwardLaunch p) {
  using Tile = TileSm80<T, 32, C::kThreads>;
  __shared__ __align__(128) unsigned char shared[C::kWarps * 16 * C::kDqMt * Tile::kRowBytes];
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned block = blockIdx.x % p.row_blocks, bh = blockIdx.x / p.row_blocks, h = bh % unsigned(p.H);
  const Sequence sequence = cuda::sequence(p, bh / unsigned(p.H));
  if (block >= sequence.row_blocks) return;
  const float* from =
      p.dq_sum + int64_t(row_block(sequence, h, block)) * (kRowBlock * C::kHead) + warp * (C::kDqMt * 16 * 32) + lane;
  float dq[C::kDqMt][4][4];
#pragma unroll
  for (int m = 0; m < C::kDqMt; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dq[m][n][e] = from[((m * 4 + n) * 4 + e) * 32];
  const unsigned first_row = warp % C::kDqRowWarps * 16 * C::kDqMt, column = warp / C::kDqRowWarps * 32;
  store_rows<T, Tile>(dq, float(p.scale), query_rows<T>(p.dq, sequence, h, p.D), block * kRowBlock + first_row, column,
                      p.aligned_dq, shared_address(shared) + warp * 16 * C::kDqMt * Tile::kRowBytes, lane);
}

template <class T, class C>
void launch_attention_bwd_dq_round(const char* name, const AttentionBackwardLaunch& p, cudaStream_t stream) {
  const int64_t blocks = p.B * p.H * p.row_blocks;
  if (blocks == 0) return;
  attention_bwd_dq_round<T, C><<<grid_size(blocks, name), C::kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), name);
}

}  // namespace mha::cuda
