// Copies of boxes of a tensor to shared memory by the tensor memory accelerator (compute capability 9.0 and later).
// What lies outside of the tensor arrives as zeros.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace mha::cuda {

// The box at (c0, c1, c2, c3), innermost first; its bytes arrive at the mbarrier.
__device__ inline void tma_load_4d(uint32_t to, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2,
                                   int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same to each block of a cluster that has its bit in `blocks`, at the same place, with its own mbarrier.
__device__ inline void tma_load_4d_multicast(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint16_t blocks,
                                             int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
      : "memory");
}

// bytes (a multiple of 16) from global memory, both sides at multiples of 16; they arrive at the mbarrier.
__device__ inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Between ordinary writes to shared memory and what wgmma or a bulk copy reads of it.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace mha::cuda
