// Attention forward: which kernel instances run, and in how many parts.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <span>

#include "attention_combine.cuh"
#include "inst/instances.h"

namespace mha::cuda {
namespace {

struct Plan {
  const Instance<AttentionForwardLaunch>* main = nullptr;  // null: attention_fwd_simple
  const Instance<AttentionForwardLaunch>* weights = nullptr;
  AttentionForwardLaunch launch;
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
    if (instance.dtype == p.dtype && std::max(p.D, p.Dv) <= instance.head && (instance.general || plain))
      return &instance;
  return nullptr;
}

int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

// In how many parts to take the keys: only when the blocks leave more than half of the GPU idle; then as many as fill
// it, each with at least 256 keys.
int key_splits(const AttentionForward& p, int block_rows) {
  const int64_t blocks = p.B * p.H * ((p.Sq + block_rows - 1) / block_rows),
                wanted = multiprocessors() / std::max<int64_t>(blocks, 1);
  return int(std::max<int64_t>(1, std::min({wanted, p.Sk / 256, int64_t(kMaxSplits)})));
}

Plan plan(const AttentionForward& p) {
  Plan plan;
  static_cast<AttentionForward&>(plan.launch) = p;
  static_cast<Numbers&>(plan.launch) = numbers(p.scale, p.softcap, p.dropout);
  const std::size_t size = size_of(p.dtype);
  plan.launch.aligned_q = aligned_16(p.q, size);
  plan.launch.aligned_k = aligned_16(p.k, size);
  plan.launch.aligned_v = aligned_16(p.v, size);
  plan.launch.aligned_out = aligned_16(p.out, size);
  plan.tiles_bytes = plan_mask_tiles(p, plan.launch.tiles);
  if (p.store.table || p.store.quantised) {  // attention_fwd_simple takes them
    plan.not_sm90 = "they don't take caches with pages or of 8 bits";
    return plan;
  }
  const bool plain = cuda::plain(plan.launch);
  plan.not_sm90 = refusal_sm90(p);
  if (!plan.not_sm90) plan.main = find(kernels_sm90().attention_fwd, plan.launch, plain);
  if (!plan.not_sm90 && !plan.main) plan.not_sm90 = kNoInstanceSm90;
  if (!plan.main) plan.main = find(k_attention_fwd_sm80, plan.launch, plain);
  if (!plan.main) return plan;
  plan.weights = find(k_attention_weights_sm80, plan.launch, false);
  plan.launch.splits = key_splits(p, plan.main->head <= 128 ? 128 : 64);
  return plan;
}

std::size_t partial_rows(const AttentionForwardLaunch& p) {
  return p.splits > 1 ? std::size_t(p.splits * p.B * p.H * p.Sq) : 0;
}

template <class T>
void combine(const AttentionForwardLaunch& p, int head, cudaStream_t stream) {
  attention_combine<T><<<grid_size((p.B * p.H * p.Sq + 3) / 4, "attention_combine"), 128, 0, stream>>>(p, head);
  check(cudaGetLastError(), "attention_combine");
}

}  // namespace

std::size_t attention_fwd_workspace(const AttentionForward& p) {
  const Plan plan = cuda::plan(p);
  const std::size_t partial = plan.main ? partial_rows(plan.launch) * std::size_t(plan.main->head + 2) : 0;
  return partial * sizeof(float) + plan.tiles_bytes;
}

KernelChoice attention_fwd_kernel(const AttentionForward& p) {
  const Plan plan = cuda::plan(p);
  return {plan.main ? plan.main->name : "attention_fwd_simple", plan.not_sm90};
}

void attention_fwd(const AttentionForward& p, void* workspace, cudaStream_t stream) {
  if (p.B == 0 || p.H == 0 || p.Sq == 0) return;
  Plan plan = cuda::plan(p);
  AttentionForwardLaunch& launch = plan.launch;
  const std::size_t rows = plan.main ? partial_rows(launch) : 0;
  launch.partial_out = static_cast<float*>(workspace);
  launch.partial_lse = launch.partial_out + rows * (plan.main ? plan.main->head : 0);
  launch.partial_rest = launch.partial_lse + rows;
  if (plan.tiles_bytes) launch.tiles.code = reinterpret_cast<uint8_t*>(launch.partial_rest + rows);
  mask_tiles(launch, launch.tiles, stream);
  if (!plan.main) return attention_fwd_simple(launch, stream);
  plan.main->launch(launch, stream);
  if (launch.splits > 1) {
    if (p.dtype == DType::f16)
      combine<__half>(launch, plan.main->head, stream);
    else
      combine<__nv_bfloat16>(launch, plan.main->head, stream);
  }
  if (p.weights.data && p.Sk > 0) plan.weights->launch(launch, stream);
}

}  // namespace mha::cuda
