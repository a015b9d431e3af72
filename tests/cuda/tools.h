// What the tests of CUDA kernels without torch share: managed memory that the oracle reads too, tensors in NaN-filled
// buffers, comparison.
#pragma once
#include <cstdio>
#include <cstring>

#include "../../csrc/cuda/common/error.h"
#include "../cpp/naive.h"

namespace tools {

using mha::DType;
using mha::Tensor4;
using mha::cuda::check;

inline uint64_t random_state = 1;
inline double uniform() {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return double(random_state >> 33) / 2147483648.0 * 2 - 1;
}

// Memory that the GPU and the oracle both read.
inline void* allocate(std::size_t bytes) {
  void* p = nullptr;
  check(cudaMallocManaged(&p, bytes + 16), "cudaMallocManaged");
  memset(p, 0xFF, bytes + 16);
  return p;
}

// order: memory order of the axes. With odd_gap, rows don't start at multiples of 16 bytes.
inline Tensor4 tensor(DType type, int64_t n0, int64_t n1, int64_t n2, int64_t n3, bool heads_inside, int64_t gap,
                      double size) {
  Tensor4 t;
  const int64_t n[4] = {n0, n1, n2, n3};
  const int order[4] = {0, heads_inside ? 2 : 1, heads_inside ? 1 : 2, 3};
  int64_t stride = 1;
  for (int a = 3; a >= 0; --a) {
    t.stride[order[a]] = stride;
    stride *= n[order[a]];
    if (a == 3) stride += gap;
  }
  t.data = allocate(std::size_t(stride) * size_of(type));
  if (size != 0)
    naive::for_each(naive::Array4(n0, n1, n2, n3),
                    [&](auto... at) { naive::store(t.data, type, naive::offset(t, at...), uniform() * size); });
  return t;
}

inline double unit(DType t) {
  return t == DType::f64 ? 1e-15 : t == DType::f32 ? 2e-7 : t == DType::bf16 ? 1.0 / 256 : 1.0 / 2048;
}

// The largest |got - want| / allowed; allowed is relative to both the element and 1. A mismatch of NaN or Inf is
// infinite.
inline double compare(const Tensor4& got, const Tensor4& want, DType type, DType want_type, int64_t n0, int64_t n1,
                      int64_t n2, int64_t n3, double relative) {
  naive::Array4 x = naive::read(got, type, n0, n1, n2, n3), y = naive::read(want, want_type, n0, n1, n2, n3);
  double worst = 0;
  for (std::size_t i = 0; i < x.values.size(); ++i) {
    double a = x.values[i], b = y.values[i];
    if (std::isnan(a) && std::isnan(b)) continue;
    if (a == b) continue;
    double e = std::fabs(a - b) / (relative * (1 + std::fabs(b)));
    worst = std::max(worst, std::isfinite(e) ? e : 1e30);
  }
  return worst;
}

}  // namespace tools
