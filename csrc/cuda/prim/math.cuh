// Single instructions of the special-function unit, and memory accesses whose width matters (shared memory by
// 32-bit address).
//
// This room includes none of the other rooms.
#pragma once
#include <cstdint>

namespace mha::cuda {

__device__ inline float exp2_approx(float x) {  // relative error 2^-22; -inf gives 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// threadIdx.x, read anew each time: what is worked out from it does not stay in registers from one use to the next.
__device__ inline unsigned thread_index() {
  unsigned x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

__device__ inline uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Written out, as the compiler may take 16-byte accesses apart.
__device__ inline uint4 load_global_16(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

__device__ inline void store_global_16(void* to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ inline void store_shared_16(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

template <int kOffset = 0>
__device__ inline void store_shared_4(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0+%2], %1;" ::"r"(address), "r"(v), "n"(kOffset) : "memory");
}

// Adds to global memory; nothing comes back. kOffset in bytes.
template <int kOffset = 0>
__device__ inline void add_global(float* to, float x) {
  asm volatile("red.global.add.f32 [%0+%2], %1;" ::"l"(to), "f"(x), "n"(kOffset) : "memory");
}

}  // namespace mha::cuda
