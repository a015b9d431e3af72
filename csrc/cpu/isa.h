// Which of the kernel tables this machine can run. kernels() in kernels.h is the one in use.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace mha::cpu {

// Names of the tables in this build, from the plainest ("scalar") to the best.
std::vector<std::string> built_isas();

// Names of the tables that this machine runs, from the plainest ("scalar") to the best, which is the default.
std::vector<std::string> available_isas();

// The table of that name. Throws std::runtime_error, in one sentence, when it is unknown, absent from this machine or
// refused by its system.
const Kernels& kernels_for(const std::string& isa);

}  // namespace mha::cpu
