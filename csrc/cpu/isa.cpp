#include "isa.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "cpu_features.h"

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
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

// AMX has only run on emulated tiles (tests/cpp) and was never timed: MHA_EXT_CPU_ISA=amx chooses it, nothing else
// does.
constexpr bool kAmxByDefault = false;

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

// Linux saves the 8 KB of tiles for processes that have asked, and signal stacks must have room for them from then on.
// So this is asked when AMX is chosen, once, and answered for good.
bool may_use_tiles() {
#if defined(MHA_X86) && defined(__linux__)
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}
bool always() { return true; }

struct Candidate {
  const char* name;
  bool usable;
  const Kernels& (*table)();
  bool by_default = true;
  bool (*granted)() = always;  // by the system; asked before use
};

// Every table in the build, from the plainest to the best.
std::vector<Candidate> candidates() {
  std::vector<Candidate> all{{"scalar", true, kernels_scalar}};
#ifdef MHA_X86
  const CpuFeatures f = detect_cpu_features();
  all.push_back({"avx2", f.avx2, kernels_avx2});
  all.push_back({"avx512", f.avx512, kernels_avx512});
  all.push_back({"avx512_bf16", f.avx512_bf16, kernels_avx512_bf16});
  all.push_back({"amx", f.amx, kernels_amx, kAmxByDefault, may_use_tiles});
#endif
  return all;
}

std::string joined(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

const Kernels& choose() {
  const char* forced = std::getenv("MHA_EXT_CPU_ISA");
  if (forced && *forced) return kernels_for(forced);
  return kernels_for(default_isa());
}

}  // namespace

CpuFeatures detect_cpu_features() {
  CpuFeatures f;
#ifdef MHA_X86
  auto all_of = [](uint64_t value, uint64_t bits) { return (value & bits) == bits; };
  constexpr uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kF16c = 1u << 29;          // leaf 1, ecx
  constexpr uint32_t kAvx2 = 1u << 5, kBmi = 1u << 3 | 1u << 8;                       // leaf 7, ebx
  constexpr uint32_t kAvx512 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;  // F, DQ, CD, BW, VL: leaf 7, ebx
  constexpr uint32_t kAvx512Bf16 = 1u << 5;                                           // leaf 7 subleaf 1, eax
  constexpr uint32_t kAmx = 1u << 22 | 1u << 24;                                      // BF16, TILE: leaf 7, edx
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;

  const Registers base = cpuid(1, 0), extended = cpuid(7, 0);
  if (!all_of(base.ecx, kOsxsave)) return f;
  const uint64_t saved = saved_register_state();
  f.avx2 = all_of(saved, kYmm) && all_of(base.ecx, kFma | kF16c) && all_of(extended.ebx, kAvx2 | kBmi);
  f.avx512 = f.avx2 && all_of(saved, kZmm) && all_of(extended.ebx, kAvx512);
  f.avx512_bf16 = f.avx512 && extended.eax >= 1 && all_of(cpuid(7, 1).eax, kAvx512Bf16);
  f.amx = f.avx512_bf16 && all_of(saved, kTiles) && all_of(extended.edx, kAmx);
#endif
  return f;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Candidate& c : candidates()) {
    if (c.usable) names.push_back(c.name);
  }
  return names;
}

std::string default_isa() {
  std::string best;
  for (const Candidate& c : candidates()) {
    if (c.by_default && c.usable && c.granted()) best = c.name;
  }
  return best;
}

const Kernels& kernels_for(const std::string& isa) {
  const char* why = "is unknown";
  std::vector<std::string> others;
  for (const Candidate& c : candidates()) {
    if (c.name != isa) {
      if (c.usable) others.push_back(c.name);
      continue;
    }
    if (c.usable && c.granted()) return c.table();
    why = c.usable ? "is refused by the operating system" : "is absent from this machine";
  }
  throw std::runtime_error("the CPU instruction set '" + isa + "' (MHA_EXT_CPU_ISA) " + why + "; choose one of " +
                           joined(others) + ", or leave the variable unset to get the default");
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace mha::cpu
