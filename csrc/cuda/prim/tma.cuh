// Copies of boxes of a tensor to and from shared memory by the tensor memory accelerator (compute capability 9.0 and
// later). What lies outside of the tensor arrives as zeros, and is not written.
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

__device__ inline void tma_load_5d(uint32_t to, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2,
                                   int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The box at (c0, c1, c2, c3, c4) of the tensor is written from shared memory, whose ordinary writes a
// fence_async_proxy() must follow.
__device__ inline void tma_store_5d(const CUtensorMap* map, uint32_t from, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
               "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// Stores of a thread form groups. It waits until all of its groups have read shared memory.
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// bytes (a multiple of 16) from global memory, both sides at multiples of 16; they arrive at the mbarrier.
__device__ inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Between ordinary writes to shared memory and what wgmma or a bulk copy reads of it.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace mha::cuda
