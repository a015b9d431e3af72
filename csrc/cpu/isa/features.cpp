#include "features.h"

#include <cstdint>

#ifdef __linux__
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#if defined(__x86_64__) || defined(_M_X64)
#define MHA_X86 1
#ifdef _MSC_VER
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif

namespace mha::cpu {
namespace {

#ifdef MHA_X86
struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
#ifdef _MSC_VER
  int out[4];
  __cpuid(out, 0);
  if (uint32_t(out[0]) < leaf) return r;
  __cpuidex(out, int(leaf), int(subleaf));
  r = {uint32_t(out[0]), uint32_t(out[1]), uint32_t(out[2]), uint32_t(out[3])};
#else
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);  // leaves zeros when the leaf does not exist
#endif
  return r;
}

uint64_t saved_register_state() {
#ifdef _MSC_VER
  return _xgetbv(0);
#else
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
#endif
}
#endif

}  // namespace

CpuFeatures detect_cpu_features() {
  CpuFeatures f;
#ifdef MHA_X86
  auto all_of = [](uint64_t value, uint64_t bits) { return (value & bits) == bits; };
  constexpr uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kF16c = 1u << 29;          // leaf 1, ecx
  constexpr uint32_t kAvx2 = 1u << 5, kBmi = 1u << 3 | 1u << 8;                       // leaf 7, ebx
  constexpr uint32_t kAvx512 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;  // F, DQ, CD, BW, VL: leaf 7, ebx
  constexpr uint32_t kAvx512Bf16 = 1u << 5;                                           // leaf 7 subleaf 1, eax
  constexpr uint32_t kAmx = 1u << 22 | 1u << 24 | 1u << 25;                           // BF16, TILE, INT8: leaf 7, edx
  constexpr uint32_t kVbmi = 1u << 1;                                                 // leaf 7, ecx
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;

  const Registers base = cpuid(1, 0), extended = cpuid(7, 0);
  if (!all_of(base.ecx, kOsxsave)) return f;
  const uint64_t saved = saved_register_state();
  f.avx2 = all_of(saved, kYmm) && all_of(base.ecx, kFma | kF16c) && all_of(extended.ebx, kAvx2 | kBmi);
  f.avx512 = f.avx2 && all_of(saved, kZmm) && all_of(extended.ebx, kAvx512);
  f.avx512_bf16 = f.avx512 && extended.eax >= 1 && all_of(cpuid(7, 1).eax, kAvx512Bf16);
  const Registers tiles = cpuid(0x1D, 1);  // of palette 1: bytes in a row, then tiles; rows
  f.amx = f.avx512_bf16 && all_of(saved, kTiles) && all_of(extended.edx, kAmx) && all_of(extended.ecx, kVbmi) &&
          (tiles.ebx & 0xFFFF) >= 64 && tiles.ebx >> 16 >= 8 && (tiles.ecx & 0xFFFF) >= 16;
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which older headers don't have
  f.neon_bf16 = (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
  int there = 0;
  size_t size = sizeof(there);
  f.neon_bf16 = sysctlbyname("hw.optional.arm.FEAT_BF16", &there, &size, nullptr, 0) == 0 && there != 0;
#endif
  return f;
}

bool request_tiles() {
#if defined(MHA_X86) && defined(__linux__)
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

}  // namespace mha::cpu
