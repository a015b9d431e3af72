// ldmatrix: four 8x8 tiles of 16-bit elements from shared memory into a warp's registers. Lane l gives the address of
// row l % 8 of tile l / 8 (16 bytes, 16-byte aligned); r[i] holds tile i: elements [l/4][2*(l%4)..] (or, transposed,
// [2*(l%4)..][l/4]).
#pragma once
#include <cstdint>

namespace mha::cuda {

__device__ inline uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

template <int kOffset = 0>
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4+%5];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address), "n"(kOffset));
}

template <int kOffset = 0>
__device__ inline void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4+%5];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address), "n"(kOffset));
}

}  // namespace mha::cuda
