// cp.async of a single word, for scales; see cp_async.cuh.
#pragma once
#include <cstdint>

namespace mha::cuda {

// Copies 4 bytes, or with 0 bytes writes zeros and reads nothing.
__device__ inline void cp_async_4(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

}  // namespace mha::cuda
