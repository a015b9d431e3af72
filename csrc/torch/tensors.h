// From torch tensors to the plain structs of the contract. Every check on an op's tensors and every allocation is made
// with these functions, for the CPU and for CUDA.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../attention.h"

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // before torch 2.13
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace mha::torch_layer {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

// Throws what becomes Python's RuntimeError, with a message put together from parts.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// A macro, so that the parts of the message are worked out only on failure.
#define MHA_CHECK(ok, ...)                            \
  do {                                                \
    if (!(ok)) ::mha::torch_layer::fail(__VA_ARGS__); \
  } while (false)

inline std::string shape_text(const Sizes& sizes) {
  std::string s = "[";
  for (size_t i = 0; i < sizes.size(); ++i) s += (i ? "," : "") + std::to_string(sizes[i]);
  return s + "]";
}

inline std::string shape_text(const Tensor& t) {
  Sizes sizes;
  for (int64_t i = 0; i < t.dim(); ++i) sizes.push_back(t.size(i));
  return shape_text(sizes);
}

inline DType dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Double:
      return DType::f64;
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::f16;
    default:
      break;
  }
  fail(name, " has dtype ", torch::headeronly::toString(t.scalar_type()),
       "; mha_ext computes in float64, float32, bfloat16 and float16: convert it first.");
}

inline size_t size_of_element(ScalarType t) {
  switch (t) {
    case ScalarType::Double:
      return 8;
    case ScalarType::Float:
      return 4;
    case ScalarType::BFloat16:
    case ScalarType::Half:
      return 2;
    default:
      return 1;  // bool and bytes, the only others that the ops allocate
  }
}

inline ScalarType scalar_type_of(DType t) {
  switch (t) {
    case DType::f64:
      return ScalarType::Double;
    case DType::f32:
      return ScalarType::Float;
    case DType::bf16:
      return ScalarType::BFloat16;
    default:
      return ScalarType::Half;
  }
}

inline void check_device(const Tensor& t, const char* name, const Tensor& like, const char* like_name) {
  MHA_CHECK(t.is_cpu() == like.is_cpu() && t.get_device_index() == like.get_device_index(), name, " and ", like_name,
            " are on different devices; move them to one.");
}

// Shape check in one sentence; -1 accepts any size, kOneOr + n accepts 1 or n.
constexpr int64_t kOneOr = int64_t(1) << 56;

inline void check_shape(const Tensor& t, const char* name, const Sizes& want) {
  bool fits = t.dim() == int64_t(want.size());
  for (int64_t i = 0; fits && i < t.dim(); ++i) {
    int64_t n = t.size(i), w = want[i];
    fits = w == -1 || (w >= kOneOr ? n == 1 || n == w - kOneOr : n == w);
  }
  if (fits) return;
  std::string text = "[";
  for (size_t i = 0; i < want.size(); ++i) {
    int64_t w = want[i];
    text += i ? "," : "";
    text += w == -1 ? "any" : w >= kOneOr ? "1 or " + std::to_string(w - kOneOr) : std::to_string(w);
  }
  fail(name, " has shape ", shape_text(t), "; the op accepts ", text, "].");
}

// Asks for huge pages under a big new tensor on the CPU: its memory comes fresh from the system, and touching it page
// by page would take longer than most kernels here. Up to 32 MB malloc recycles memory, and the advice would cost more.
inline void advise_huge_pages(void* data, size_t bytes) {
#ifdef __linux__
  constexpr uintptr_t kPage = uintptr_t(2) << 20;
  if (bytes < 16 * kPage) return;
  uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // only advice: failing changes nothing
#else
  (void)data, (void)bytes;
#endif
}

inline Tensor empty_strided(const Sizes& sizes, const Sizes& strides, ScalarType dtype, const Tensor& like) {
  AtenTensorHandle handle = nullptr;
  const AOTITorchError failed = aoti_torch_empty_strided(
      int64_t(sizes.size()), sizes.data(), strides.data(), int32_t(dtype),
      like.is_cpu() ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda(), like.get_device_index(), &handle);
  // "out of memory." is what libraries look for that then try smaller batches.
  MHA_CHECK(!failed, like.is_cpu() ? "CPU" : "CUDA", " out of memory. A tensor ", shape_text(sizes), " of ",
            torch::headeronly::toString(dtype), " could not be allocated: give smaller inputs.");
  Tensor t(handle);
  if (like.is_cpu()) advise_huge_pages(t.data_ptr(), size_t(t.numel()) * size_of_element(dtype));
  return t;
}

inline Tensor empty(const Sizes& sizes, ScalarType dtype, const Tensor& like) {
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  return empty_strided(sizes, strides, dtype, like);
}

// [n0,n1,n2,last] dense in memory, its first three dimensions in the memory order of `like`'s: what `like` is a view of
// (say [B,S,H,D]) the result is a view of too.
inline Tensor empty_in_order_of(const Tensor& like, int64_t last) {
  Sizes sizes = {like.size(0), like.size(1), like.size(2), last}, strides(4);
  int order[3] = {0, 1, 2};
  std::stable_sort(order, order + 3, [&](int a, int b) { return like.stride(a) > like.stride(b); });
  int64_t step = std::max<int64_t>(last, 1);
  strides[3] = 1;
  for (int i = 3; i-- > 0;) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return empty_strided(sizes, strides, like.scalar_type(), like);
}

// The kernels want unit stride in the last dimension of queries, keys and values.
inline Tensor unit_last_stride(const Tensor& t) {
  return t.stride(t.dim() - 1) == 1 || t.size(t.dim() - 1) <= 1 ? t : torch::stable::contiguous(t);
}

// A view for the kernels; a dimension of size 1 gets stride 0, so that it broadcasts.
inline Tensor4 view4(const Tensor& t, bool broadcast = false) {
  Tensor4 v;
  v.data = t.data_ptr();
  for (int i = 0; i < 4; ++i) v.stride[i] = broadcast && t.size(i) == 1 ? 0 : t.stride(i);
  return v;
}

}  // namespace mha::torch_layer
