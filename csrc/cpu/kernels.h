// The CPU kernels as a table per instruction set. Each isa/*.cpp exports one such table; isa.h chooses among them.
//
// This room includes none of the other rooms.
#pragma once
#include <cstddef>

#include "../attention.h"

namespace mha::cpu {

// How a kernel runs tasks in parallel; the torch layer backs it with torch's thread pool, tests with their own.
struct Threads {
  int count = 1;  // at most this many calls of body run at once
  // Calls body(context, thread) once for each thread in [0, count), possibly at the same time. Kernels share out their
  // tasks among the threads by for_each_task. An exception in body reaches the caller of run.
  void (*run)(int count, void (*body)(void* context, int thread), void* context) = nullptr;
  bool flush_denormals = true;  // see threads/denormals.h; never in kernels of double
};

struct AttentionPlan {
  const char* arithmetic;                    // what the products are computed in
  int block_rows, tile_keys;                 // queries and keys that are worked on together
  int64_t fwd_tasks, bwd_tasks;              // what the threads share
  double fwd_efficiency, bwd_efficiency;     // the share of the threads' time that they work; 0: not known
  std::size_t fwd_workspace, bwd_workspace;  // bytes
};

// workspace: at least the *_workspace(problem, threads.count) bytes, 64-byte aligned, uninitialised.
struct Kernels {
  const char* isa;
  void (*attention_fwd)(const AttentionForward&, const Threads&, void* workspace);
  std::size_t (*attention_fwd_workspace)(const AttentionForward&, int threads);
  void (*attention_bwd)(const AttentionBackward&, const Threads&, void* workspace);
  std::size_t (*attention_bwd_workspace)(const AttentionBackward&, int threads);
  void (*attention_mixed_fwd)(const AttentionMixedForward&, const Threads&, void* workspace);
  std::size_t (*attention_mixed_fwd_workspace)(const AttentionMixedForward&, int threads);
  void (*attention_mixed_bwd)(const AttentionMixedBackward&, const Threads&, void* workspace);
  std::size_t (*attention_mixed_bwd_workspace)(const AttentionMixedBackward&, int threads);
  AttentionPlan (*attention_plan)(const AttentionProblem&, int threads);
  AttentionPlan (*attention_mixed_plan)(const AttentionProblem&, int threads);
  void (*masked_softmax_fwd)(const MaskedSoftmaxForward&, const Threads&);
  void (*masked_softmax_bwd)(const MaskedSoftmaxBackward&, const Threads&);
  void (*split_heads)(const SplitHeads&, const Threads&);
  void (*merge_heads)(const MergeHeads&, const Threads&);
  void (*dropout_mask)(const DropoutMask&, const Threads&);
};

const Kernels& kernels_scalar();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_avx512_bf16();  // avx512 with bf16 dot products
const Kernels& kernels_amx();          // avx512_bf16 with bf16 tiles
const Kernels& kernels_neon();
const Kernels& kernels_neon_bf16();  // neon with bf16 dot products

// The table in use: the best that this machine runs, or the one named by MHA_EXT_CPU_ISA. Throws std::runtime_error,
// in one sentence, when this machine does not run the named one.
const Kernels& kernels();

}  // namespace mha::cpu
