// Attention backward: which kernels run, and what they share in the workspace.
#include <algorithm>
#include <span>

#include "../common/attention_bwd_rows.cuh"
#include "../simple/attention_bwd.cuh"
#include "../sm80/attention_bwd.cuh"
#include "instances.h"  // generate_instances.py
#include "smaller.h"

namespace mha::cuda {
namespace {

using Kernel = Instance<AttentionBackwardLaunch>;

// One pass that adds up dq, and its rounding (which the kernels for 9.0 do themselves: round is null); or two passes,
// dkv and dq. All null: attention_bwd_simple.
struct Plan {
  const Kernel *main = nullptr, *round = nullptr;
  const Kernel *dkv = nullptr, *dq = nullptr;
  const Kernel* dbias = nullptr;  // null: attention_bwd_dbias_simple
  AttentionBackwardLaunch launch;
  std::size_t rows_bytes = 0, dq_sum_bytes = 0, turns_bytes = 0, spans_bytes = 0, sinks_bytes = 0, tiles_bytes = 0;
  const char* not_sm90 = nullptr;
};

// What an instance that is not general leaves out.
bool plain(const AttentionBackwardLaunch& p) {
  return !p.bias.data && !p.mask.elementwise() && p.softcap == 0 && !p.dropout.rng_state && !p.dweights.data &&
         p.aligned;
}

const Kernel* find(std::span<const Kernel> table, const AttentionBackwardLaunch& p) {
  for (const Kernel& kernel : table)
    if (kernel.dtype == p.dtype && std::max(p.D, p.Dv) <= kernel.head && (kernel.general || plain(p))) return &kernel;
  return nullptr;
}

// Whether the current device has the shared memory that one pass needs.
bool fits(int head) {
  if (head <= 64) return true;
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return BackwardSm80<128, false, true>::kSharedBytes + 256 <= bytes;  // beside the static part
}

Plan plan(const AttentionBackward& p) {
  Plan plan;
  AttentionBackwardLaunch& launch = plan.launch;
  static_cast<AttentionBackward&>(launch) = p;
  static_cast<Numbers&>(launch) = numbers(p.scale, p.softcap, p.dropout);
  const std::size_t size = size_of(p.dtype), accumulate = size_of(accumulate_type(p.dtype));
  launch.aligned = aligned_16(p.q, size) && aligned_16(p.k, size) && aligned_16(p.v, size) && aligned_16(p.dout, size);
  launch.aligned_rows = aligned_16(p.dout, size) && aligned_16(p.out, size);
  launch.aligned_dq = aligned_16(p.dq, size);
  launch.aligned_dk = aligned_16(p.dk, size);
  launch.aligned_dv = aligned_16(p.dv, size);
  launch.row_blocks = int(row_blocks_of(p.Sq));
  plan.tiles_bytes = plan_mask_tiles(p, launch.tiles);
  plan.not_sm90 = refusal_sm90(p, &p.dout);
  if (!plan.not_sm90) plan.main = find(kernels_sm90().attention_bwd, launch);
  if (!p.deterministic && !plan.main) {
    plan.main = smaller<AttentionBackwardLaunch>(find(k_attention_bwd_sm80, launch), k_attention_bwd_sm86);
    if (plan.main && !fits(plan.main->head)) plan.main = nullptr;
  }
  if (plan.main && plan.not_sm90) {
    for (const Kernel& round : k_attention_bwd_dq_round)
      if (round.dtype == p.dtype && round.head == plan.main->head && round.general == plan.main->general)
        plan.round = &round;
  } else if (!plan.main) {
    plan.dkv = find(k_attention_bwd_dkv_sm80, launch);
    plan.dq = find(k_attention_bwd_dq_sm80, launch);
  }
  const Kernel* on_tensor_cores = plan.main ? plan.main : plan.dkv;
  launch.base_2 = on_tensor_cores && !on_tensor_cores->general;
  const bool all_pairs = !p.bias_relative && (p.dbias.stride[2] || p.Sq == 1) && (p.dbias.stride[3] || p.Sk == 1);
  if (p.dbias.data && all_pairs) plan.dbias = find(k_attention_bwd_dbias_sm80, launch);
  const std::size_t blocks = std::size_t(row_blocks_in_all(p));
  plan.rows_bytes = blocks * (accumulate == 8 ? sizeof(RowBlock<double>) : sizeof(RowBlock<float>));
  plan.spans_bytes = blocks * sizeof(Span);
  if (p.dsinks) plan.sinks_bytes = blocks * accumulate;
  if (plan.main) launch.dq_head = plan.main->head;
  plan.dq_sum_bytes = blocks * kRowBlock * launch.dq_head * sizeof(float);
  if (plan.main && p.deterministic) plan.turns_bytes = (1 + blocks) * sizeof(unsigned);
  return plan;
}

template <class T, class A>
void run(const Plan& plan, cudaStream_t stream) {
  const AttentionBackwardLaunch& launch = plan.launch;
  launch_attention_bwd_rows<T, A>(launch, stream);
  if (plan.main) {
    plan.main->launch(launch, stream);
    if (plan.round) plan.round->launch(launch, stream);
  } else if (plan.dkv) {
    plan.dkv->launch(launch, stream);
    plan.dq->launch(launch, stream);
  } else {
    launch_attention_bwd_simple<T, A, BackwardRole::dq>(launch, stream);
    launch_attention_bwd_simple<T, A, BackwardRole::dk>(launch, stream);
    launch_attention_bwd_simple<T, A, BackwardRole::dv>(launch, stream);
  }
  if (!launch.dbias.data) return;
  if (launch.bias_relative) return launch_attention_bwd_dbias_relative<T, A>(launch, stream);
  if (plan.dbias) return plan.dbias->launch(launch, stream);
  launch_attention_bwd_simple<T, A, BackwardRole::dbias>(launch, stream);
}

}  // namespace

std::size_t attention_bwd_workspace(const AttentionBackward& p) {
  const Plan plan = cuda::plan(p);
  return plan.rows_bytes + plan.dq_sum_bytes + plan.turns_bytes + plan.spans_bytes + plan.sinks_bytes +
         plan.tiles_bytes;
}

KernelChoice attention_bwd_kernel(const AttentionBackward& p) {
  const Plan plan = cuda::plan(p);
  return {plan.main ? plan.main->name : plan.dkv ? plan.dkv->name : "attention_bwd_simple", plan.not_sm90};
}

void attention_bwd(const AttentionBackward& p, void* workspace, cudaStream_t stream) {
  if (p.B == 0 || p.H == 0 || p.Hk == 0) return;
  Plan plan = cuda::plan(p);
  AttentionBackwardLaunch& launch = plan.launch;
  char* free = static_cast<char*>(workspace);
  auto take = [&]<class X>(X*& part, std::size_t bytes) {
    if (bytes) part = reinterpret_cast<X*>(free);
    free += bytes;
  };
  take(launch.rows, plan.rows_bytes);
  take(launch.dq_sum, plan.dq_sum_bytes);
  take(launch.spans, plan.spans_bytes);
  take(launch.sink_sums, plan.sinks_bytes);
  take(launch.turns, plan.turns_bytes);
  take(launch.tiles.code, plan.tiles_bytes);
  mask_tiles(launch, launch.tiles, stream);
  switch (p.dtype) {
    case DType::f64:
      return run<double, double>(plan, stream);
    case DType::f32:
      return run<float, float>(plan, stream);
    case DType::bf16:
      return run<__nv_bfloat16, float>(plan, stream);
    case DType::f16:
      return run<__half, float>(plan, stream);
    default:
      break;  // queries have no other type
  }
}

}  // namespace mha::cuda
