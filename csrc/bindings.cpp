// pybind11: what is not a tensor op. Importing the module also registers the ops, by the other files' static
// initialisers.
//
// torch 2.11 and 2.12 keep their copy of pybind11 from files for the stable ABI, of which it is no part; nothing else
// of torch's is used here.
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

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
  info["cuda"] = bool(MHA_EXT_CUDA);
  info["cuda_reason"] = MHA_EXT_CUDA_REASON;
  return info;
}

pybind11::dict attention_plan(const std::string& dtype, std::array<int64_t, 7> sizes, bool dropout, bool mixed,
                              int threads, std::array<std::optional<int64_t>, 2> band,
                              std::optional<std::vector<int64_t>> summed_bias) {
  mha::AttentionProblem p;
  p.dtype = dtype == "float64"    ? mha::DType::f64
            : dtype == "float32"  ? mha::DType::f32
            : dtype == "bfloat16" ? mha::DType::bf16
                                  : mha::DType::f16;
  p.B = sizes[0], p.H = sizes[1], p.Hk = sizes[2], p.Sq = sizes[3], p.Sk = sizes[4], p.D = sizes[5], p.Dv = sizes[6];
  p.mask.band_lo = band[0].value_or(-mha::kNoLimit), p.mask.band_hi = band[1].value_or(mha::kNoLimit);
  if (summed_bias) {  // its gradient's sum, which is contiguous; only what shares an element counts
    const std::vector<int64_t>& shape = *summed_bias;
    p.bias_relative = shape.size() == 3;
    int64_t strides[4], stride = 1;
    for (std::size_t i = shape.size(); i-- > 0; stride *= shape[i]) strides[i] = shape[i] == 1 ? 0 : stride;
    if (p.bias_relative) strides[2] = -1, strides[3] = 1;
    p.bias.data = &p;
    std::copy(strides, strides + 4, p.bias.stride);
  }
  static const int64_t state[2] = {};
  if (dropout) p.dropout = {0.5, state};  // any value: only whether there is dropout counts
  const mha::cpu::Kernels& kernels = mha::cpu::kernels();
  const mha::cpu::AttentionPlan plan = (mixed ? kernels.attention_mixed_plan : kernels.attention_plan)(p, threads);
  pybind11::dict d;
  d["arithmetic"] = plan.arithmetic;
  d["block_rows"] = plan.block_rows;
  d["tile_keys"] = plan.tile_keys;
  d["forward_tasks"] = plan.fwd_tasks;
  d["backward_tasks"] = plan.bwd_tasks;
  d["forward_efficiency"] = plan.fwd_efficiency;
  d["backward_efficiency"] = plan.bwd_efficiency;
  d["forward_workspace"] = plan.fwd_workspace;
  d["backward_workspace"] = plan.bwd_workspace;
  return d;
}

}  // namespace

// Nothing here counts on the interpreter's lock: what is written once (the choice of the instruction set) is a static
// of a function, and what a call needs lies on its stack or in its own workspace.
PYBIND11_MODULE(_C, m, pybind11::mod_gil_not_used()) {
  m.doc() = "Compiled part of mha_ext: importing it registers torch.ops.mha_ext.*";
  m.def("build_info", &build_info, "What this build is, by name.");
  m.def(
      "cpu_isa", [] { return std::string(mha::cpu::kernels().isa); }, "The instruction set of the CPU kernels in use.");
  m.def("attention_plan", &attention_plan, pybind11::arg("dtype"), pybind11::arg("sizes"), pybind11::arg("dropout"),
        pybind11::arg("mixed"), pybind11::arg("threads"), pybind11::arg("band"), pybind11::arg("summed_bias"),
        "What the CPU kernels do for sizes (B, H, Hk, Sq, Sk, D, Dv), where query i sees the keys band[0] <= j - i <= "
        "band[1], and a bias of the shape summed_bias has a gradient.");
  m.def("built_isas", &mha::cpu::built_isas, "The instruction sets of this build, plainest first.");
  m.def("available_isas", &mha::cpu::available_isas, "The instruction sets that this machine runs, plainest first.");
}
