// The kernel tables to be tested: what this machine runs, and AMX, emulated where it is absent; or the one that
// MHA_EXT_CPU_ISA names.
#pragma once
#include <cstdlib>
#include <string>
#include <vector>

#include "../../csrc/cpu/isa.h"

inline std::vector<const mha::cpu::Kernels*> every_isa() {
  std::vector<const mha::cpu::Kernels*> all;
  for (const std::string& name : mha::cpu::available_isas()) all.push_back(&mha::cpu::kernels_for(name));
  if (std::getenv("MHA_EXT_CPU_ISA")) all = {&mha::cpu::kernels()};
  return all;
}
