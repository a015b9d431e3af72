#include <cstdlib>
#include <stdexcept>

#include "../isa.h"
#include "features.h"

namespace mha::cpu {
namespace {

bool always() { return true; }

struct Candidate {
  const char* name;
  bool present;  // in the processor
  const Kernels& (*table)();
  bool (*granted)() = always;  // by the system: asked of no table but the one that is to be used, or named as usable
  bool usable() const { return present && granted(); }
};

// Every table in the build, from the plainest to the best.
std::vector<Candidate> candidates() {
  std::vector<Candidate> all{{"scalar", true, kernels_scalar}};
#if defined(__x86_64__) || defined(_M_X64)
  const CpuFeatures f = detect_cpu_features();
  all.push_back({"avx2", f.avx2, kernels_avx2});
  all.push_back({"avx512", f.avx512, kernels_avx512});
  all.push_back({"avx512_bf16", f.avx512_bf16, kernels_avx512_bf16});
  all.push_back({"amx", f.amx, kernels_amx, request_tiles});
#elif defined(__aarch64__)
  all.push_back({"neon", true, kernels_neon});
  all.push_back({"neon_bf16", detect_cpu_features().neon_bf16, kernels_neon_bf16});
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
  return kernels_for(available_isas().back());
}

}  // namespace

std::vector<std::string> built_isas() {
  std::vector<std::string> names;
  for (const Candidate& c : candidates()) names.push_back(c.name);
  return names;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Candidate& c : candidates()) {
    if (c.usable()) names.push_back(c.name);
  }
  return names;
}

const Kernels& kernels_for(const std::string& isa) {
  const char* why = "is unknown";
  std::vector<std::string> others;
  for (const Candidate& c : candidates()) {
    if (c.name != isa) {
      if (c.usable()) others.push_back(c.name);
      continue;
    }
    if (c.usable()) return c.table();
    why = c.present ? "is refused by the operating system" : "is absent from this machine";
  }
  throw std::runtime_error("the CPU instruction set '" + isa + "' (MHA_EXT_CPU_ISA) " + why + "; choose one of " +
                           joined(others) + ", or leave the variable unset to get the default");
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace mha::cpu
