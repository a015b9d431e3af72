// Where the kernels for compute capability 9.0 are found.
#include "error.h"
#include "kernels.h"

namespace mha::cuda {
namespace {

const KernelsSm90* kernels = nullptr;

}  // namespace

void use_sm90(const KernelsSm90* given) { kernels = given; }

const KernelsSm90* kernels_sm90(const AttentionProblem& p) {
  if (!kernels || p.q_starts) return nullptr;
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  return major == 9 ? kernels : nullptr;
}

}  // namespace mha::cuda
