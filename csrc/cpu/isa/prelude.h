// What every isa/*.cpp includes before its target region: standard headers and shared headers must be parsed with the
// default target, so that their inline functions never carry instructions that the machine may lack. And the one place
// where compilers differ.
//
// This room includes csrc/cpu, vector, threads, product, tile, attention/bwd, attention, attention/mixed, rows.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own AVX-512 headers set these off.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "../../attention.h"
#include "../kernels.h"
#include "../threads/schedule.h"

// Between these, functions are compiled for the named features. GCC instantiates templates at the end of the file with
// the options that it has there, so its region is not closed.
#define MHA_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define MHA_TARGET_BEGIN(features) \
  MHA_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define MHA_TARGET_END MHA_PRAGMA(clang attribute pop)
#else
#define MHA_TARGET_BEGIN(features) MHA_PRAGMA(GCC target(features))
#define MHA_TARGET_END
#endif

#if defined(__x86_64__)
#define MHA_AVX2 "avx2,fma,f16c"
#ifdef __clang__  // which has no option for the width of vectors that it makes of loops
#define MHA_AVX512 MHA_AVX2 ",avx512f,avx512bw,avx512dq,avx512vl"
#else
#define MHA_AVX512 MHA_AVX2 ",avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"
#endif
#define MHA_AVX512_BF16 MHA_AVX512 ",avx512bf16"
#define MHA_AMX MHA_AVX512_BF16 ",avx512vbmi,amx-tile,amx-bf16,amx-int8"
#elif defined(__clang__)
#define MHA_NEON_BF16 "bf16"
#else
#define MHA_NEON_BF16 "+bf16"
#endif

#define MHA_INLINE inline __attribute__((always_inline))
#define MHA_INLINE_LAMBDA __attribute__((always_inline))

namespace mha::cpu {

// Storage of half types.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
// Of caches: 1 sign, 4 exponent (bias 7) and 3 mantissa bits; no infinity, NaN is 0x7F and 0xFF.
struct e4m3 {
  uint8_t bits;
};

}  // namespace mha::cpu

// Kernel code lives in a namespace of its ISA, and unnamed: the same templates compiled for two ISAs never meet in the
// linker, and an ISA file exports nothing but its kernels_<isa>().
#define MHA_ISA_BEGIN              \
  namespace mha::cpu::MHA_ISA_NS { \
  namespace {
#define MHA_ISA_END \
  }                 \
  }
