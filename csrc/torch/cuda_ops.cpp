// The ops on CUDA: the kernels of csrc/cuda, launched on the current stream of the tensors' device. Its own module, so
// that the package imports beside a torch without CUDA.
#include <Python.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "../cuda/common/error.h"
#include "../cuda/kernels.h"
#include "cached_ops.h"
#include "mixed_ops.h"

namespace mha::torch_layer {
namespace {

// Makes the device of `like` current while it lives, and refuses one that the kernels were not written for.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& like) : guard_(like.get_device_index()) {
    int device = like.get_device_index(), major = 0;
    cuda::check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                "reading the GPU's properties");
    MHA_CHECK(major >= 8, "the tensors are on a GPU of compute capability ", major,
              ".x; mha_ext's CUDA kernels need 8.0 or later: move the tensors to the CPU.");
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

// torch's allocator hands the memory out again only to later work on the same stream.
Tensor workspace(size_t bytes, const Tensor& like) { return empty({int64_t(bytes)}, ScalarType::Byte, like); }

// For explain: between note_kernels and noted_kernels this thread's calls of attention_fwd only note what they, and
// backward after them, would run.
struct Noted {
  bool on = false, deterministic = false;
  cuda::KernelChoice fwd = {}, bwd = {};
};
thread_local Noted noted;

void note(const AttentionForward& p) {
  noted.fwd = cuda::attention_fwd_kernel(p);
  AttentionBackward backward;
  static_cast<AttentionProblem&>(backward) = p;
  backward.out = backward.dout = p.out, backward.dq = p.q, backward.dk = p.k, backward.dv = p.v;
  backward.deterministic = noted.deterministic;
  noted.bwd = cuda::attention_bwd_kernel(backward);
}

struct Cuda {
  static void attention_fwd(const AttentionForward& p, const Tensor& like) {
    OnDevice on(like);
    if (noted.on) return note(p);
    Tensor space = workspace(cuda::attention_fwd_workspace(p), like);
    cuda::attention_fwd(p, space.data_ptr(), on.stream());
  }
  static void attention_bwd(const AttentionBackward& p, const Tensor& like) {
    OnDevice on(like);
    Tensor space = workspace(cuda::attention_bwd_workspace(p), like);
    cuda::attention_bwd(p, space.data_ptr(), on.stream());
  }
  static void attention_mixed_fwd(const AttentionMixedForward& p, const Tensor& like) {
    OnDevice on(like);
    Tensor space = workspace(cuda::attention_mixed_fwd_workspace(p), like);
    cuda::attention_mixed_fwd(p, space.data_ptr(), on.stream());
  }
  static void attention_mixed_bwd(const AttentionMixedBackward& p, const Tensor& like) {
    MHA_CHECK(
        !(p.bias_relative && p.dbias.data),
        "pre_mix or post_mix was given with a relative bias on a GPU that requires grad; accepted there: one that "
        "does not.");
    OnDevice on(like);
    Tensor space = workspace(cuda::attention_mixed_bwd_workspace(p), like);
    cuda::attention_mixed_bwd(p, space.data_ptr(), on.stream());
  }
  static void masked_softmax_fwd(const MaskedSoftmaxForward& p, const Tensor& like) {
    cuda::masked_softmax_fwd(p, OnDevice(like).stream());
  }
  static void masked_softmax_bwd(const MaskedSoftmaxBackward& p, const Tensor& like) {
    cuda::masked_softmax_bwd(p, OnDevice(like).stream());
  }
  static void split_heads(const SplitHeads& p, const Tensor& like) { cuda::split_heads(p, OnDevice(like).stream()); }
  static void merge_heads(const MergeHeads& p, const Tensor& like) { cuda::merge_heads(p, OnDevice(like).stream()); }
  static void dropout_mask(const DropoutMask& p, const Tensor& like) { cuda::dropout_mask(p, OnDevice(like).stream()); }
};

}  // namespace
}  // namespace mha::torch_layer

STABLE_TORCH_LIBRARY_IMPL(mha_ext, CUDA, m) {
  MHA_REGISTER_OPS(m, mha::torch_layer::Cuda);
  MHA_REGISTER_MIXED_OPS(m, mha::torch_layer::Cuda);
}

// Takes _C_cuda_sm90.kernels(). Importing the module runs the registration above; it holds nothing else.
static PyObject* use_sm90(PyObject*, PyObject* capsule) {
  auto* kernels = static_cast<const mha::cuda::KernelsSm90*>(PyCapsule_GetPointer(capsule, "mha_ext.sm90"));
  if (!kernels) return nullptr;
  mha::cuda::use_sm90(kernels);
  Py_RETURN_NONE;
}

// note_kernels(deterministic)
static PyObject* note_kernels(PyObject*, PyObject* deterministic) {
  mha::torch_layer::noted = {.on = true, .deterministic = PyObject_IsTrue(deterministic) == 1};
  Py_RETURN_NONE;
}

// ((forward's kernel, why it is none for 9.0 or None), (backward's, ..)); a name is None where nothing ran.
static PyObject* noted_kernels(PyObject*, PyObject*) {
  const auto [on, deterministic, fwd, bwd] = mha::torch_layer::noted;
  mha::torch_layer::noted = {};
  return Py_BuildValue("((zz)(zz))", fwd.name, fwd.not_sm90, bwd.name, bwd.not_sm90);
}

PyMODINIT_FUNC PyInit__C_cuda() {
  static PyMethodDef methods[] = {{"use_sm90", use_sm90, METH_O, nullptr},
                                  {"note_kernels", note_kernels, METH_O, nullptr},
                                  {"noted_kernels", noted_kernels, METH_NOARGS, nullptr},
                                  {}};
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  PyObject* made = PyModule_Create(&module);
#ifdef Py_GIL_DISABLED
  if (made) PyUnstable_Module_SetGIL(made, Py_MOD_GIL_NOT_USED);
#endif
  return made;
}
