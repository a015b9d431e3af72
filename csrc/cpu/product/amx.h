// AMX: the eight tile registers of a thread, each of up to 16 rows of 64 bytes. The only place that names its
// instructions, as assembly: the compiler's intrinsics take the number of a tile as text, which no template's argument
// is, and don't tell it that they read memory.
#pragma once

MHA_ISA_BEGIN

// What LDTILECFG reads and STTILECFG writes.
struct alignas(64) AmxShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};  // of each tile; there are eight
  uint8_t rows[16] = {};
};
static_assert(sizeof(AmxShapes) == 64);

MHA_INLINE void amx_configure(const AmxShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
MHA_INLINE void amx_release() { asm volatile("tilerelease"); }
// All zeros where tiles are not configured.
MHA_INLINE AmxShapes amx_configuration() {
  AmxShapes shapes;
  asm volatile("sttilecfg %0" : "=m"(shapes));
  return shapes;
}

template <int Tile>
MHA_INLINE void amx_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}
// Rows lie stride bytes apart.
template <int Tile>
MHA_INLINE void amx_load(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(Tile), "r"(rows), "r"(stride) : "memory");
}
// The same, without a place in the first-level cache for what is not there.
template <int Tile>
MHA_INLINE void amx_stream(const void* rows, int64_t stride) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" : : "i"(Tile), "r"(rows), "r"(stride) : "memory");
}
template <int Tile>
MHA_INLINE void amx_store(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(Tile), "r"(rows), "r"(stride) : "memory");
}
// C[m][n] += sum over k of the dot product of the bf16 pairs A[m][k] and B[k][n]; C holds floats.
template <int C, int A, int B>
MHA_INLINE void amx_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
// The same of four bytes with sign each; C holds int32.
template <int C, int A, int B>
MHA_INLINE void amx_dot_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

MHA_ISA_END
