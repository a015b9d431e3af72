// How TMA sees a 4-d tensor. The driver's function that encodes it is looked up at run time: nothing links libcuda.
//
// This room includes prim, common, csrc/cuda, sm80.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../../attention.h"
#include "../common/error.h"

namespace mha::cuda {

// The sizes of q (or dout), and of k or v, as TMA sees them: packed sequences are one long sample.
inline std::array<int64_t, 4> query_sizes(const AttentionProblem& p, int64_t columns) {
  if (p.q_starts) return {1, p.H, p.rows_stride_h, columns};
  return {p.B, p.H, p.Sq, columns};
}

inline std::array<int64_t, 4> key_sizes(const AttentionProblem& p, int64_t columns) {
  if (p.q_starts) return {1, p.Hk, p.packed_keys, columns};
  return {p.B, p.Hk, p.Sk, columns};
}

// Whether TMA can read t, [n0,n1,n2,n3] of 2-byte elements: where it starts and its strides are multiples of 16 bytes.
inline bool tma_reads(const Tensor4& t, const std::array<int64_t, 4>& size) {
  bool fits = reinterpret_cast<std::size_t>(t.data) % 16 == 0;
  for (int i = 0; i < 3; ++i) {
    const int64_t bytes = t.stride[i] * 2;
    fits &= size[i] == 1 || (bytes > 0 && bytes % 16 == 0 && bytes < int64_t(1) << 40);
  }
  for (const int64_t n : size) fits &= n > 0 && n < int64_t(1) << 31;
  return fits;
}

inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult status;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &status),
          "finding cuTensorMapEncodeTiled");
    if (status != cudaDriverEntryPointSuccess || !function)
      throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled: it needs CUDA 12.0 or later");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encode;
}

// The driver wants a context on the calling thread, which a new thread has only from the first call of the runtime on
// that needs one. This is such a call, also while a graph is captured.
inline void bind_context() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaSetDevice(device), "cudaSetDevice");
}

// Boxes of 2-byte elements with the 128-byte swizzle. Innermost dimension, whose stride is 1, first; strides in bytes.
template <class T, int kRank>
CUtensorMap encode_tensor_map(void* data, const cuuint64_t (&dims)[kRank], const cuuint64_t (&strides)[kRank - 1],
                              const cuuint32_t (&box)[kRank]) {
  bind_context();
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(
      &map, std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, data,
      dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled failed with CUresult " + std::to_string(int(result)));
  return map;
}

// Where there is one index only, its stride doesn't matter, but must be one.
inline cuuint64_t stride_bytes(const Tensor4& t, const std::array<int64_t, 4>& size, int i) {
  return size[i] == 1 ? 16 : cuuint64_t(t.stride[i]) * 2;
}

// Boxes of 64 columns and so many rows. tma_reads(t, size) must hold.
template <class T>
CUtensorMap tensor_map(const Tensor4& t, const std::array<int64_t, 4>& size, int rows) {
  const cuuint64_t dims[4] = {cuuint64_t(size[3]), cuuint64_t(size[2]), cuuint64_t(size[1]), cuuint64_t(size[0])},
                   strides[3] = {stride_bytes(t, size, 2), stride_bytes(t, size, 1), stride_bytes(t, size, 0)};
  const cuuint32_t box[4] = {64, cuuint32_t(rows), 1, 1};
  return encode_tensor_map<T>(t.data, dims, strides, box);
}

// The heads of a group (1, or a power of two) beside each other: [heads / group] [queries] [group] rows, of which a box
// has so many (a power of two).
template <class T>
CUtensorMap grouped_tensor_map(const Tensor4& t, const std::array<int64_t, 4>& size, int group, int rows) {
  const cuuint64_t head = stride_bytes(t, size, group == 1 ? 2 : 1), groups = stride_bytes(t, size, 1) * group,
                   dims[5] = {cuuint64_t(size[3]), cuuint64_t(group), cuuint64_t(size[2]), cuuint64_t(size[1] / group),
                              cuuint64_t(size[0])},
                   strides[4] = {head, stride_bytes(t, size, 2), groups, stride_bytes(t, size, 0)};
  const int heads = group < rows ? group : rows;
  const cuuint32_t box[5] = {64, cuuint32_t(heads), cuuint32_t(rows / heads), 1, 1};
  return encode_tensor_map<T>(t.data, dims, strides, box);
}

}  // namespace mha::cuda
