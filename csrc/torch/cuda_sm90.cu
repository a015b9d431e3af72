// The CUDA kernels for compute capability 9.0, as a module of their own: they are compiled with other flags than the
// rest.
#include <Python.h>

#include "instances.h"  // generate_instances.py

namespace {

constexpr mha::cuda::KernelsSm90 kernels = {mha::cuda::k_attention_fwd_sm90, mha::cuda::k_attention_bwd_sm90};

// For _C_cuda.use_sm90.
PyObject* get_kernels(PyObject*, PyObject*) {
  return PyCapsule_New(const_cast<mha::cuda::KernelsSm90*>(&kernels), "mha_ext.sm90", nullptr);
}

PyMethodDef methods[] = {{"kernels", get_kernels, METH_NOARGS, nullptr}, {}};

}  // namespace

PyMODINIT_FUNC PyInit__C_cuda_sm90() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda_sm90", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  PyObject* made = PyModule_Create(&module);
#ifdef Py_GIL_DISABLED
  if (made) PyUnstable_Module_SetGIL(made, Py_MOD_GIL_NOT_USED);
#endif
  return made;
}
