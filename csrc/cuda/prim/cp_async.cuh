// cp.async: from global to shared memory without passing through registers. Both addresses are aligned to what is
// copied.
#pragma once
#include <cstdint>

namespace mha::cuda {

// Copies the first `bytes` (0 to 16) and fills the rest with zeros; with 0 the source is not read.
__device__ inline void cp_async_16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Copies 4 bytes, or with 0 bytes writes zeros and reads nothing.
__device__ inline void cp_async_4(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's latest groups are on their way.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace mha::cuda
