// A loop whose counter is a constant in each turn, for what takes template arguments or immediates.
#pragma once
#include <utility>

namespace mha::cuda {

template <int kValue>
struct Constant {
  __host__ __device__ constexpr operator int() const { return kValue; }
};

// Calls f(Constant<i>()) for i in [0, kCount): a loop whose counter is a constant in each turn.
template <int kCount, class F>
__device__ inline void unroll(F f) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (f(Constant<i>()), ...);
  }(std::make_integer_sequence<int, kCount>());
}

}  // namespace mha::cuda
