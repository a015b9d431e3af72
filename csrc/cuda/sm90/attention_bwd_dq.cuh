// How blocks of attention_bwd_sm90 add up dQ in global memory (p.dq_sum), and the kernel that rounds the sums.
//
// For a row block of a head, the sums that thread x of a warpgroup has in c[i] of a wgmma accumulator (prim/wgmma.cuh)
// of columns [8 * n, 8 * n + 8) are four floats from (n * 128 + x) * 4 on, so that a warp adds to 512 bytes in a row.
//
// Blocks add in any order or, with p.deterministic, take turns (p.turns), from the last keys that a row block sees to
// the first. Those that a block waits for have started before it, as each takes its place by a ticket rather than by
// its index, and none waits for a block after it.
#pragma once
#include "../common/error.h"
#include "../prim/red.cuh"
#include "../sm80/attention_bwd_scores.cuh"

namespace mha::cuda {

// Adds a thread's sums of a tile of dQ, from `column` on.
template <class C>
__device__ inline void add_dq(float* dq_sum, int64_t block, const float (&dq)[C::kDqNt][4], int column,
                              unsigned thread) {
  float* to = dq_sum + block * (kRowBlock * C::kHead) + (column / 8 * 128 + thread) * 4;
  unroll<C::kDqNt>([&](auto n) { add_global_4<n * 2048>(to, dq[n]); });
}

// dq: the sums times scale, rounded.
template <class T, class C>
__global__ void __launch_bounds__(128 * C::kConsumers)
    attention_bwd_dq_round_sm90(const __grid_constant__ AttentionBackwardLaunch p) {
  constexpr int kNt = C::kDqColumns / 8;
  using Tile = TileSm80<T, C::kDqColumns, 128 * C::kConsumers>;
  __shared__ __align__(128) unsigned char shared[4 * C::kConsumers * 16 * Tile::kRowBytes];
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned block = blockIdx.x % p.row_blocks, bh = blockIdx.x / p.row_blocks, h = bh % unsigned(p.H);
  const Sequence sequence = cuda::sequence(p, bh / unsigned(p.H));
  if (block >= sequence.row_blocks) return;
  const float4* from =
      reinterpret_cast<const float4*>(p.dq_sum + int64_t(row_block(sequence, h, block)) * (kRowBlock * C::kHead)) +
      warp / 4 * kNt * 128 + threadIdx.x % 128;
  float dq[1][kNt][4];
#pragma unroll
  for (int n = 0; n < kNt; ++n) {
    const float4 four = from[n * 128];
    dq[0][n][0] = four.x, dq[0][n][1] = four.y, dq[0][n][2] = four.z, dq[0][n][3] = four.w;
  }
  store_rows<T, Tile>(dq, float(p.scale), query_rows<T>(p.dq, sequence, h, p.D), block * kRowBlock + warp % 4 * 16,
                      warp / 4 * C::kDqColumns, p.aligned_dq, shared_address(shared) + warp * 16 * Tile::kRowBytes,
                      lane);
}

template <class T, class C>
void launch_attention_bwd_dq_round_sm90(const char* name, const AttentionBackwardLaunch& p, cudaStream_t stream) {
  const int64_t blocks = p.B * p.H * p.row_blocks;
  if (blocks == 0) return;
  attention_bwd_dq_round_sm90<T, C><<<grid_size(blocks, name), 128 * C::kConsumers, 0, stream>>>(p);
  check(cudaGetLastError(), name);
}

}  // namespace mha::cuda
