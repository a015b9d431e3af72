// Element types of tensors, as the kernels name them.
#pragma once
#include <cstddef>

namespace mha {

enum class DType { f64, f32, bf16, f16, e4m3, i8 };  // the last two: keys and values of caches only

inline std::size_t size_of(DType t) { return t == DType::f64 ? 8 : t == DType::f32 ? 4 : t < DType::e4m3 ? 2 : 1; }

// Softmax statistics and gradient sums are kept in this type (DESIGN: fp32, or fp64 for fp64 inputs).
inline DType accumulate_type(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }

}  // namespace mha
