// Which of the kernel tables this machine can run. kernels() in kernels.h is the one in use.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace mha::cpu {

// Names of the tables that this machine runs, from the plainest ("scalar") to the best.
std::vector<std::string> available_isas();

// The one in use where MHA_EXT_CPU_ISA names none.
std::string default_isa();

// The table of that name. Throws std::runtime_error, in one sentence, when it is unknown or absent from this machine.
const Kernels& kernels_for(const std::string& isa);

}  // namespace mha::cpu
