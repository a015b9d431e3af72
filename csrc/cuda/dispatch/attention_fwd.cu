// Attention forward: which kernel instances run, and in how many parts.
//
// This room includes common, csrc/cuda, sm80, simple.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <span>

#include "../common/attention_combine.cuh"
#include "../common/attention_fwd_plan.h"
#include "instances.h"  // generate_instances.py
#include "smaller.h"

namespace mha::cuda {
namespace {

struct Plan {
  const Instance<AttentionForwardLaunch>* main = nullptr;  // null: attention_fwd_simple
  const Instance<AttentionForwardLaunch>* weights = nullptr;
  AttentionForwardLaunch launch;
  bool heads_as_rows = false;  // main takes the problem that way
  bool cached = false;         // attention_cached takes it
  std::size_t tiles_bytes = 0;
  const char* not_sm90 = nullptr;
};

// What an instance that is not general leaves out.
bool plain(const AttentionForwardLaunch& p) {
  return !p.bias.data && !p.mask.elementwise() && p.softcap == 0 && !p.dropout.rng_state && p.scale > 0 &&
         p.aligned_q && p.aligned_k && p.aligned_v;
}

const Instance<AttentionForwardLaunch>* find(std::span<const Instance<AttentionForwardLaunch>> table,
                                             const AttentionForwardLaunch& p, bool plain) {
  for (const auto& instance : table)
    if (instance.dtype == p.dtype && p.D <= instance.head && p.Dv <= instance.value_head && (instance.general || plain))
      return &instance;
  return nullptr;
}

void set_alignment(AttentionForwardLaunch& p) {
  const std::size_t size = size_of(p.dtype);
  p.aligned_q = aligned_16(p.q, size);
  p.aligned_k = aligned_16(p.k, size);
  p.aligned_v = aligned_16(p.v, size);
  p.aligned_out = aligned_16(p.out, size);
}

// With one query per sample, the query heads that share a key/value head become the rows of one head, so that keys and
// values are read once for all of them. False, and nothing is changed, where the heads must be told apart.
bool heads_as_rows(AttentionForwardLaunch& p) {
  Mask& m = p.mask;
  const int64_t group = p.Hk ? p.H / p.Hk : 1, first = std::max<int64_t>(m.band_lo, 0),
                end = std::min(m.band_hi + 1, p.Sk);
  if (p.Sq != 1 || group == 1 || p.q_starts || p.rows_stride_h != 1 || p.dropout.rng_state || p.bias_relative ||
      p.weights.data || m.elementwise() || m.top_left)
    return false;
  if (first > 0 || end < p.Sk) {  // the band is that of row 0
    if (m.begin || m.end || p.bias.data || first >= end) return false;
    const auto from_first = [&](Tensor4& t) {
      t.data = static_cast<char*>(t.data) + first * t.stride[2] * int64_t(size_of(p.dtype));
    };
    from_first(p.k), from_first(p.v);
    p.Sk = end - first;
  }
  m.band_lo = -kNoLimit, m.band_hi = kNoLimit;
  m.begin_stride_q = m.end_stride_q = 0;
  for (Tensor4* t : {&p.q, &p.out, &p.bias}) t->stride[2] = t->stride[1], t->stride[1] *= group;
  p.rows_stride_h = group;
  p.H = p.Hk, p.Sq = group;
  set_alignment(p);
  return true;
}

// In how many parts to take the keys: only when the blocks leave more than half of the GPU idle; then as many as fill
// it, each with at least 256 keys.
int key_splits(const AttentionForward& p, int block_rows, int group_bits) {
  const int64_t blocks = p.B * (p.H >> group_bits) * (((p.Sq << group_bits) + block_rows - 1) / block_rows),
                wanted = multiprocessors() / std::max<int64_t>(blocks, 1);
  return int(std::max<int64_t>(1, std::min({wanted, p.Sk / 256, int64_t(kMaxSplits)})));
}

// The instance that takes p, and the number of parts.
void choose_main(Plan& plan, const AttentionForwardLaunch& p) {
  const bool plain = cuda::plain(p);
  plan.not_sm90 = refusal_sm90(p);
  plan.main = plan.not_sm90 ? nullptr : find(kernels_sm90().attention_fwd, p, plain);
  const bool sm90 = plan.main;
  if (!sm90) plan.main = smaller<AttentionForwardLaunch>(find(k_attention_fwd_sm80, p, plain), k_attention_fwd_sm86);
  if (plan.main)
    plan.launch.splits =
        key_splits(p, sm90 || plan.main->head <= 128 ? 128 : 64, sm90 && !plan.main->general ? group_bits(p) : 0);
}

Plan plan(const AttentionForward& p) {
  Plan plan;
  static_cast<AttentionForward&>(plan.launch) = p;
  static_cast<Numbers&>(plan.launch) = numbers(p.scale, p.softcap, p.dropout);
  set_alignment(plan.launch);
  plan.tiles_bytes = plan_mask_tiles(p, plan.launch.tiles);
  if (p.store.table || p.store.quantised) {  // attention_fwd_simple takes what attention_cached does not
    plan.not_sm90 = "they don't take caches with pages or of 8 bits";
    plan.cached = takes_cached(plan.launch);
    if (plan.cached) plan.launch.splits = cached_splits(p);
    return plan;
  }
  AttentionForwardLaunch main = plan.launch;
  plan.heads_as_rows = heads_as_rows(main);
  choose_main(plan, main);
  if (plan.heads_as_rows && p.sinks && plan.launch.splits == 1) {  // main would have to join the sinks
    plan.heads_as_rows = false;
    choose_main(plan, plan.launch);
  }
  if (plan.main) plan.weights = find(k_attention_weights_sm80, plan.launch, false);
  return plan;
}

// What attention_combine gets to merge, and of what head size.
std::size_t partial_rows(const Plan& plan) {
  const AttentionForwardLaunch& p = plan.launch;
  return plan.cached || (plan.main && p.splits > 1) ? std::size_t(p.splits * p.B * p.H * p.Sq) : 0;
}
int partial_head(const Plan& plan) { return plan.cached ? kCachedHead : plan.main ? plan.main->value_head : 0; }

void combine(const AttentionForwardLaunch& p, int head, cudaStream_t stream) {
  auto kernel = p.dtype == DType::f16 ? attention_combine<__half> : attention_combine<__nv_bfloat16>;
  kernel<<<grid_size((p.B * p.H * p.Sq + 3) / 4, "attention_combine"), 128, 0, stream>>>(p, head);
  check(cudaGetLastError(), "attention_combine");
}

}  // namespace

std::size_t attention_fwd_workspace(const AttentionForward& p) {
  const Plan plan = cuda::plan(p);
  return partial_rows(plan) * std::size_t(partial_head(plan) + 2) * sizeof(float) + plan.tiles_bytes;
}

KernelChoice attention_fwd_kernel(const AttentionForward& p) {
  const Plan plan = cuda::plan(p);
  return {plan.cached ? "attention_cached_sm80" : plan.main ? plan.main->name : "attention_fwd_simple", plan.not_sm90};
}

void attention_fwd(const AttentionForward& p, void* workspace, cudaStream_t stream) {
  if (p.B == 0 || p.H == 0 || p.Sq == 0) return;
  Plan plan = cuda::plan(p);
  AttentionForwardLaunch& launch = plan.launch;
  const std::size_t rows = partial_rows(plan);
  launch.partial_out = static_cast<float*>(workspace);
  launch.partial_lse = launch.partial_out + rows * partial_head(plan);
  launch.partial_rest = launch.partial_lse + rows;
  if (plan.tiles_bytes) launch.tiles.code = reinterpret_cast<uint8_t*>(launch.partial_rest + rows);
  if (plan.cached) {
    attention_cached(launch, stream);
    return combine(launch, partial_head(plan), stream);
  }
  mask_tiles(launch, launch.tiles, stream);
  if (!plan.main) return attention_fwd_simple(launch, stream);
  AttentionForwardLaunch main = launch;
  if (plan.heads_as_rows) heads_as_rows(main);
  plan.main->launch(main, stream);
  if (launch.splits > 1) combine(launch, partial_head(plan), stream);
  if (p.weights.data && p.Sk > 0) plan.weights->launch(launch, stream);
}

}  // namespace mha::cuda
