// Additions to global memory from which nothing comes back, and what orders them between blocks.
#pragma once

namespace mha::cuda {

// Adds to four neighbours, from a multiple of 16 bytes on (compute capability 9.0 and later). kOffset in bytes.
template <int kOffset = 0>
__device__ inline void add_global_4(float* to, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0+%5], {%1,%2,%3,%4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]),
               "n"(kOffset)
               : "memory");
}

// Adds 1 after all that happened before; load_acquire that sees it happens before all that follows.
__device__ inline void increment_release(unsigned* to) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(to) : "memory");
}

__device__ inline unsigned load_acquire(const unsigned* from) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

}  // namespace mha::cuda
