// What csrc/cuda/common/error.h throws is no longer the runtime's last error, so that what runs next is not blamed for
// it.
#include <cstdio>

#include "../../csrc/cuda/common/error.h"

__global__ void kernel(int* out) {
  extern __shared__ int shared[];
  shared[threadIdx.x] = 1;
  *out = shared[0];
}

int main() {
  int failures = 0;
  auto expect = [&](bool holds, const char* what) {
    if (!holds) ++failures, std::printf("failed: %s\n", what);
  };
  int *out, value = 0;
  mha::cuda::check(cudaMalloc(&out, sizeof value), "cudaMalloc");
  bool refused = false;
  try {
    mha::cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 24), "kernel");
  } catch (const std::runtime_error& error) {
    refused = std::string(error.what()).find("kernel failed: ") == 0;
  }
  expect(refused, "so much shared memory is refused, by name");
  expect(cudaPeekAtLastError() == cudaSuccess, "nothing is left of it");
  kernel<<<1, 1, 4>>>(out);
  mha::cuda::check(cudaGetLastError(), "the next launch");
  mha::cuda::check(cudaMemcpy(&value, out, sizeof value, cudaMemcpyDeviceToHost), "cudaMemcpy");
  expect(value == 1, "the next launch runs");
  return failures != 0;
}
