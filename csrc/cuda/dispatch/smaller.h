// Instances for GPUs whose multiprocessors have 100 KB of shared memory.
#pragma once
#include <span>

#include "../common/error.h"
#include "../kernels.h"

namespace mha::cuda {

// An instance for 8.0 or, on such a GPU, its like among `others`, where there is one.
template <class Launch>
const Instance<Launch>* smaller(const Instance<Launch>* instance, std::span<const Instance<Launch>> others) {
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device), "cudaDeviceGetAttribute");
  if (!instance || bytes > 100 * 1024) return instance;
  for (const auto& other : others)
    if (other.dtype == instance->dtype && other.head == instance->head && other.general == instance->general)
      return &other;
  return instance;
}

}  // namespace mha::cuda
