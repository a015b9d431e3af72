// What every isa_*.cpp includes before its target region: standard headers and shared headers must be parsed with the
// default target, so that their inline functions never carry instructions that the machine may lack.
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
#endif
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own AVX-512 headers set these off.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "../attention.h"
#include "kernels.h"

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
