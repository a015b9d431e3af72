// pybind11: what is not a tensor op. Importing the module also registers the ops, by the other files' static
// initialisers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "cpu/isa.h"
#include "cpu/kernels.h"

namespace {

std::map<std::string, std::string> build_info() {
  return {{"version", MHA_EXT_VERSION},
#if defined(__clang__)
          {"compiler", std::string("clang ") + __clang_version__},
#elif defined(__GNUC__)
          {"compiler", std::string("g++ ") + __VERSION__},
#else
          {"compiler", "unknown"},
#endif
          {"torch_floor", "2.11"}};
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of mha_ext: importing it registers torch.ops.mha_ext.*";
  m.def("build_info", &build_info, "What this build is, as text by name.");
  m.def(
      "cpu_isa", [] { return std::string(mha::cpu::kernels().isa); }, "The instruction set of the CPU kernels in use.");
  m.def("available_isas", &mha::cpu::available_isas, "The instruction sets that this machine runs, plainest first.");
}
