// Clusters: blocks that run at the same time and reach each other's shared memory (compute capability 9.0 and later).
#pragma once
#include <cstdint>

namespace mha::cuda {

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of a cluster, in two halves.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Where the block of that rank has what this block has at `address`.
__device__ inline uint32_t address_in(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ inline void mbarrier_arrive_there(uint32_t there) {
  // With .release.cluster it would wait for all of the thread's accesses to the GPU's memory (MEMBAR.ALL.GPU), and all
  // that it orders here are reads of shared memory, which are over.
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

}  // namespace mha::cuda
