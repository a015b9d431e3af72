// The ops on the CPU: the kernels of the instruction set in use, run on torch's thread pool.
#include <exception>

#include "../cpu/kernels.h"
#include "cached_ops.h"
#include "mixed_ops.h"

namespace mha::torch_layer {
namespace {

void run_on_torch_threads(int count, void (*body)(void*, int), void* context) {
  // What is thrown must not reach torch, which would put a sentence of its own in its place.
  std::vector<std::exception_ptr> thrown(static_cast<size_t>(count));
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) try {
        body(context, int(thread));
      } catch (...) {
        thrown[size_t(thread)] = std::current_exception();
      }
  });
  for (const std::exception_ptr& exception : thrown)
    if (exception) std::rethrow_exception(exception);
}

cpu::Threads torch_threads() { return {int(torch::stable::get_num_threads()), run_on_torch_threads}; }

// torch allocates on 64-byte boundaries on the CPU.
Tensor workspace(size_t bytes, const Tensor& like) { return empty({int64_t(bytes)}, ScalarType::Byte, like); }

struct Cpu {
  static void attention_fwd(const AttentionForward& p, const Tensor& like) {
    cpu::Threads threads = torch_threads();
    Tensor space = workspace(cpu::kernels().attention_fwd_workspace(p, threads.count), like);
    cpu::kernels().attention_fwd(p, threads, space.data_ptr());
  }
  static void attention_bwd(const AttentionBackward& p, const Tensor& like) {
    cpu::Threads threads = torch_threads();
    Tensor space = workspace(cpu::kernels().attention_bwd_workspace(p, threads.count), like);
    cpu::kernels().attention_bwd(p, threads, space.data_ptr());
  }
  static void attention_mixed_fwd(const AttentionMixedForward& p, const Tensor& like) {
    cpu::Threads threads = torch_threads();
    Tensor space = workspace(cpu::kernels().attention_mixed_fwd_workspace(p, threads.count), like);
    cpu::kernels().attention_mixed_fwd(p, threads, space.data_ptr());
  }
  static void attention_mixed_bwd(const AttentionMixedBackward& p, const Tensor& like) {
    cpu::Threads threads = torch_threads();
    Tensor space = workspace(cpu::kernels().attention_mixed_bwd_workspace(p, threads.count), like);
    cpu::kernels().attention_mixed_bwd(p, threads, space.data_ptr());
  }
  static void masked_softmax_fwd(const MaskedSoftmaxForward& p, const Tensor&) {
    cpu::kernels().masked_softmax_fwd(p, torch_threads());
  }
  static void masked_softmax_bwd(const MaskedSoftmaxBackward& p, const Tensor&) {
    cpu::kernels().masked_softmax_bwd(p, torch_threads());
  }
  static void split_heads(const SplitHeads& p, const Tensor&) { cpu::kernels().split_heads(p, torch_threads()); }
  static void merge_heads(const MergeHeads& p, const Tensor&) { cpu::kernels().merge_heads(p, torch_threads()); }
  static void dropout_mask(const DropoutMask& p, const Tensor&) { cpu::kernels().dropout_mask(p, torch_threads()); }
};

}  // namespace
}  // namespace mha::torch_layer

STABLE_TORCH_LIBRARY_IMPL(mha_ext, CPU, m) {
  MHA_REGISTER_OPS(m, mha::torch_layer::Cpu);
  MHA_REGISTER_MIXED_OPS(m, mha::torch_layer::Cpu);
}
