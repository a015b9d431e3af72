// The CUDA kernels as the torch layer sees them: functions on the contract structs, and the table of what they are
// built from (instances.h, which generate_instances.py writes when it is built). Every function runs on the current
// device, is asynchronous in its stream, allocates nothing, and throws std::runtime_error naming the kernel when a
// launch fails.
//
// This room includes common.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <span>

#include "common/launch.h"

namespace mha::cuda {

struct AttentionBackwardLaunch;

// One compiled kernel. General instances do everything; the others only what `plain` in dispatch/attention_fwd.cu
// allows.
template <class Launch>
struct Instance {
  const char* name;
  DType dtype;
  int head, value_head;  // the largest head sizes, of queries and keys and of values
  bool general;
  void (*launch)(const Launch&, cudaStream_t);
};

// workspace: at least *_workspace(problem) bytes on the device, 256-byte aligned, uninitialised. The answer depends on
// the current device (how many blocks fill it).
std::size_t attention_fwd_workspace(const AttentionForward& p);
void attention_fwd(const AttentionForward& p, void* workspace, cudaStream_t stream);

// The instances for compute capability 9.0, which are compiled for it alone and live in a module of their own: that
// module hands them over when it is imported. Without them, or on another GPU, the others run.
struct KernelsSm90 {
  std::span<const Instance<AttentionForwardLaunch>> attention_fwd;
  std::span<const Instance<AttentionBackwardLaunch>> attention_bwd;
};
void use_sm90(const KernelsSm90* kernels);
// Why none of them takes a problem on the current device, in words for explain, or null; kernels_sm90() may be used
// where it is null. dout: of backward.
const char* refusal_sm90(const AttentionProblem& p, const Tensor4* dout = nullptr);
const KernelsSm90& kernels_sm90();

// What explain says of a kernel: its name in the table, and why it is none for 9.0 (null if it is). Both are static.
struct KernelChoice {
  const char *name, *not_sm90;
};

// The kernel for everything that no instance takes.
void attention_fwd_simple(const AttentionForwardLaunch& p, cudaStream_t stream);

// Attention over a cache with pages or of 8 bits. Whether it takes a problem, and in how many splits of the keys; its
// output lies in partial_out, of head size kCachedHead, for p.splits of them.
constexpr int kCachedHead = 128;
bool takes_cached(const AttentionForwardLaunch& p);
int cached_splits(const AttentionForward& p);
void attention_cached(const AttentionForwardLaunch& p, cudaStream_t stream);

KernelChoice attention_fwd_kernel(const AttentionForward& p);

std::size_t attention_bwd_workspace(const AttentionBackward& p);
void attention_bwd(const AttentionBackward& p, void* workspace, cudaStream_t stream);
KernelChoice attention_bwd_kernel(const AttentionBackward& p);

// Talking heads, on ordinary cores (simple/attention_mixed.cuh).
std::size_t attention_mixed_fwd_workspace(const AttentionMixedForward& p);
void attention_mixed_fwd(const AttentionMixedForward& p, void* workspace, cudaStream_t stream);
std::size_t attention_mixed_bwd_workspace(const AttentionMixedBackward& p);
void attention_mixed_bwd(const AttentionMixedBackward& p, void* workspace, cudaStream_t stream);

void masked_softmax_fwd(const MaskedSoftmaxForward& p, cudaStream_t stream);
// dbias, when it is broadcast, is summed in a fixed order.
void masked_softmax_bwd(const MaskedSoftmaxBackward& p, cudaStream_t stream);
void split_heads(const SplitHeads& p, cudaStream_t stream);
void merge_heads(const MergeHeads& p, cudaStream_t stream);
void dropout_mask(const DropoutMask& p, cudaStream_t stream);

}  // namespace mha::cuda
