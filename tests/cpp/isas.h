// The kernel tables that can be tested here: what this machine runs, and AMX, emulated where it is absent.
#pragma once
#include <string>
#include <vector>

#include "../../csrc/cpu/isa.h"

inline std::vector<const mha::cpu::Kernels*> every_isa() {
  std::vector<const mha::cpu::Kernels*> all;
  for (const std::string& name : mha::cpu::available_isas()) all.push_back(&mha::cpu::kernels_for(name));
  return all;
}
