// Where the kernels for compute capability 9.0 are found, and what they take.
#include <algorithm>

#include "../common/error.h"
#include "../kernels.h"
#include "tensor_map.h"

// A string literal, as refusals are static.
#define MHA_NOT_BY_TMA(x) "TMA cannot read " x ": it must start at, and have strides of, multiples of 16 bytes"

namespace mha::cuda {
namespace {

const KernelsSm90* kernels = nullptr;

}  // namespace

void use_sm90(const KernelsSm90* given) { kernels = given; }

const KernelsSm90& kernels_sm90() { return *kernels; }

const char* refusal_sm90(const AttentionProblem& p, const Tensor4* dout) {
  if (!kernels) return "this build has none (TORCH_CUDA_ARCH_LIST was set without 9.0)";
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major != 9) return "the GPU has another compute capability";
  if (p.dtype != DType::f16 && p.dtype != DType::bf16) return "they take float16 and bfloat16";
  if (std::max(p.D, p.Dv) > 256) return "they take head sizes up to 256";
  if (std::min({p.B, p.H, p.Sq, p.Sk, p.D, p.Dv}) == 0) return "a size is 0";
  if (!tma_reads(p.q, query_sizes(p, p.D))) return MHA_NOT_BY_TMA("q");
  if (!tma_reads(p.k, key_sizes(p, p.D))) return MHA_NOT_BY_TMA("k");
  if (!tma_reads(p.v, key_sizes(p, p.Dv))) return MHA_NOT_BY_TMA("v");
  if (dout && !tma_reads(*dout, query_sizes(p, p.Dv))) return MHA_NOT_BY_TMA("dout");
  return nullptr;
}

}  // namespace mha::cuda
