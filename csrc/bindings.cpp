// pybind11: what is not a tensor op. Importing the module also registers the ops, by the other files' static
// initialisers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "cpu/isa.h"
#include "cpu/kernels.h"

namespace {

pybind11::dict build_info() {
  pybind11::dict info;
  info["version"] = MHA_EXT_VERSION;
  info["torch"] = MHA_EXT_TORCH;
  info["torch_floor"] = "2.11";
#if defined(__clang__)
  info["compiler"] = std::string("clang ") + __clang_version__;
#elif defined(__GNUC__)
  info["compiler"] = std::string("g++ ") + __VERSION__;
#else
  info["compiler"] = "unknown";
#endif
  info["cuda"] = false;
  info["cuda_reason"] = MHA_EXT_CUDA_REASON;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of mha_ext: importing it registers torch.ops.mha_ext.*";
  m.def("build_info", &build_info, "What this build is, by name.");
  m.def(
      "cpu_isa", [] { return std::string(mha::cpu::kernels().isa); }, "The instruction set of the CPU kernels in use.");
  m.def("available_isas", &mha::cpu::available_isas, "The instruction sets that this machine runs, plainest first.");
}
