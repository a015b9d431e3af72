#include <algorithm>

#include "../kernels.h"
#include "attention_mixed_bwd.cuh"

namespace mha::cuda {
namespace {

int64_t tiles(int64_t n) { return (n + kMixedTile - 1) / kMixedTile; }
int64_t blocks(int64_t tasks) { return std::min(tasks, kMixedBlocks); }

std::size_t round_up(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

template <class Problem>
MixedLaunch<Problem> prepared(const Problem& p) {
  MixedLaunch<Problem> launch;
  static_cast<Problem&>(launch) = p;
  static_cast<Numbers&>(launch) = numbers(p.scale, p.softcap, p.dropout);
  launch.query_tiles = tiles(p.Sq), launch.key_tiles = tiles(p.Sk);
  return launch;
}

int64_t forward_slot(const AttentionMixedForward& p) {
  return 2 * p.H * kMixedPairs + p.H * kMixedTile * p.Dv + 2 * p.H * kMixedTile * 16;
}

int64_t backward_slot(const AttentionMixedBackward& p) {
  const int64_t dq = p.H * kMixedTile * p.D + p.H * kMixedTile * 16, dkv = p.Hk * kMixedTile * (p.D + p.Dv);
  return 3 * p.H * kMixedPairs + std::max({dq, dkv, p.H * kMixedPairs});
}

// The elements of lse and of delta.
int64_t rows_in_all(const AttentionMixedBackward& p) { return p.H * (p.q_starts ? p.rows_stride_h : p.B * p.Sq); }

// Blocks that are at work at once in the largest of backward's grids.
int64_t backward_blocks(const AttentionMixedBackward& p) {
  const int64_t bias = p.dbias.data ? p.B * tiles(p.Sq) * tiles(p.Sk) : 0;
  return blocks(std::max({p.B * tiles(p.Sq), p.B * tiles(p.Sk), bias}));
}

template <class T, class A>
void run_backward(const MixedBackwardLaunch& p, cudaStream_t stream) {
  using S = MixedSimple<T, A>;
  const int64_t queries = p.B * p.query_tiles, keys = p.B * p.key_tiles;
  if (queries > 0) {
    attention_mixed_bwd_dq_simple<S><<<unsigned(blocks(queries)), S::kThreads, 0, stream>>>(p);
    check(cudaGetLastError(), "attention_mixed_bwd_dq_simple");
  }
  if (keys > 0) {
    attention_mixed_bwd_dkv_simple<S><<<unsigned(blocks(keys)), S::kThreads, 0, stream>>>(p);
    check(cudaGetLastError(), "attention_mixed_bwd_dkv_simple");
  }
  if (p.dbias.data && queries > 0 && keys > 0) {
    const int64_t* s = p.dbias.stride;
    const BiasGrid grid = {{s[0] ? p.B : 1, 1, s[2] ? p.query_tiles : 1, s[3] ? p.key_tiles : 1}};
    const int64_t tasks = grid.n[0] * grid.n[2] * grid.n[3];
    attention_mixed_bwd_dbias_simple<S><<<unsigned(blocks(tasks)), S::kThreads, 0, stream>>>(p, grid);
    check(cudaGetLastError(), "attention_mixed_bwd_dbias_simple");
  }
  const int64_t sums = 2 * p.H * p.H + p.H;
  attention_mixed_bwd_sums_simple<A>
      <<<grid_size((sums + 63) / 64, "attention_mixed_bwd_sums_simple"), 64, 0, stream>>>(p);
  check(cudaGetLastError(), "attention_mixed_bwd_sums_simple");
}

}  // namespace

std::size_t attention_mixed_fwd_workspace(const AttentionMixedForward& p) {
  return std::size_t(blocks(p.B * tiles(p.Sq)) * forward_slot(p)) * size_of(accumulate_type(p.dtype));
}

void attention_mixed_fwd(const AttentionMixedForward& p, void* workspace, cudaStream_t stream) {
  if (p.B == 0 || p.H == 0 || p.Sq == 0) return;
  MixedLaunch<AttentionMixedForward> launch = prepared(p);
  launch.slots = workspace, launch.slot = forward_slot(p);
  with_type(p.dtype, [&](auto zero) {
    using S = MixedSimple<decltype(zero), Accumulate<decltype(zero)>>;
    attention_mixed_fwd_simple<S><<<unsigned(blocks(p.B * launch.query_tiles)), S::kThreads, 0, stream>>>(launch);
  });
  check(cudaGetLastError(), "attention_mixed_fwd_simple");
}

std::size_t attention_mixed_bwd_workspace(const AttentionMixedBackward& p) {
  const std::size_t size = size_of(accumulate_type(p.dtype));
  return round_up(std::size_t(rows_in_all(p)) * size) +
         round_up(std::size_t(p.B * tiles(p.Sq) * 2 * p.H * p.H) * size) +
         std::size_t(backward_blocks(p) * backward_slot(p)) * size;
}

void attention_mixed_bwd(const AttentionMixedBackward& p, void* workspace, cudaStream_t stream) {
  if (p.B == 0 || p.H == 0 || p.Hk == 0) return;
  MixedBackwardLaunch launch = prepared(p);
  const std::size_t size = size_of(accumulate_type(p.dtype));
  char* free = static_cast<char*>(workspace);
  launch.delta = free;
  launch.sums = free += round_up(std::size_t(rows_in_all(p)) * size);
  launch.slots = free + round_up(std::size_t(p.B * launch.query_tiles * 2 * p.H * p.H) * size);
  launch.slot = backward_slot(p);
  with_type(p.dtype, [&](auto zero) { run_backward<decltype(zero), Accumulate<decltype(zero)>>(launch, stream); });
}

}  // namespace mha::cuda
