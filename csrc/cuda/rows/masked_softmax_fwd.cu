// Masked softmax over the last dimension: one block per row. A row of up to kHeld elements per thread stays in
// registers, so that scores are read once; a longer one is read twice more.
#include "../common/error.h"
#include "../kernels.h"
#include "row_mask.cuh"

namespace mha::cuda {
namespace {

struct Launch : MaskedSoftmaxForward, Numbers {
  bool packs;  // scores and out move in 16-byte packs
};

// scale * score + bias, or -inf where hidden.
template <class T, class Acc>
__device__ inline Acc score(const Launch& p, const ScoreRow& row, Acc raw, int64_t j) {
  if (!row.sees(p.mask, j)) return -INFINITY;
  Acc s = raw * Acc(p.scale);
  if (p.bias.data) s += element<Acc>(p.bias.data, p.bias_dtype, row.offset(p.bias) + j * p.bias.stride[3]);
  return s;
}

// The kSize scores from j on.
template <class T, int kSize, class Acc>
__device__ inline void load_scores(const Launch& p, const ScoreRow& row, int64_t j, Acc (&s)[kSize]) {
  const T* from = static_cast<const T*>(p.scores.data) + row.offset(p.scores) + j * p.scores.stride[3];
  if (j >= row.interval.end || j + kSize <= row.interval.begin) {  // what nobody sees isn't read
#pragma unroll
    for (int i = 0; i < kSize; ++i) s[i] = -INFINITY;
    return;
  }
  if constexpr (kSize == 1) {
    s[0] = score<T>(p, row, Acc(*from), j);
  } else {
    const Pack<T> pack = load_pack(from);
    if (!p.bias.data && row.sees_all(p.mask, j, kSize)) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) s[i] = Acc(pack.x[i]) * Acc(p.scale);
      return;
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) s[i] = score<T>(p, row, Acc(pack.x[i]), j + i);
  }
}

// x: exponentials.
template <class T, int kSize, class Acc>
__device__ inline void write_weights(const Launch& p, const ScoreRow& row, int64_t j, const Acc (&x)[kSize],
                                     Acc factor) {
  T* to = static_cast<T*>(p.out.data) + row.offset(p.out) + j;
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < kSize; ++i) pack.x[i] = T(factor == 0 ? Acc(0) : x[i] * factor);
  if (p.dropout.rng_state) {
    Philox4 words = {};
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i % 4 == 0)
        words = dropout_words(dropout_key(p.dropout), uint32_t(row.b), uint32_t(row.h), uint32_t(row.i),
                              uint32_t((j + i) / 4));
      if (words.word[kSize % 4 == 0 ? i % 4 : (j + i) % 4] < p.threshold) pack.x[i] = T(Acc(0));
    }
  }
  if constexpr (kSize == 1)
    *to = pack.x[0];
  else
    store_pack(to, pack);
}

template <class T, int kSize, int kHeld>
__global__ void masked_softmax_fwd_kernel(const __grid_constant__ Launch p) {
  using Acc = Accumulate<T>;
  __shared__ Acc scratch[32];
  const int64_t r = blockIdx.x;
  const ScoreRow row(p, r);
  const int64_t step = int64_t(blockDim.x) * kSize, start = int64_t(threadIdx.x) * kSize;
  const bool held = p.Sk <= step * kHeld;
  const auto larger = [](Acc a, Acc b) { return a > b || a != a ? a : b; };  // NaN stays
  const auto add = [](Acc a, Acc b) { return a + b; };
  Acc s[kHeld][kSize], top = -INFINITY, sum = 0;

  auto each = [&](auto f) {  // f(scores, first key) for this thread's part of the row
    if (held) {
#pragma unroll
      for (int n = 0; n < kHeld; ++n)
        if (start + n * step < p.Sk) f(s[n], start + n * step);
    } else {
      for (int64_t j = start; j < p.Sk; j += step) {
        load_scores<T, kSize>(p, row, j, s[0]);
        f(s[0], j);
      }
    }
  };
  if (held) {
#pragma unroll
    for (int n = 0; n < kHeld; ++n)
      if (start + n * step < p.Sk) load_scores<T, kSize>(p, row, start + n * step, s[n]);
  }
  each([&](Acc(&x)[kSize], int64_t) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) top = larger(x[i], top);
  });
  top = block_reduce(top, scratch, larger);
  const Acc base = top == -Acc(INFINITY) ? Acc(0) : top;
  each([&](Acc(&x)[kSize], int64_t) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum += x[i] = row_exponential<T>(x[i] - base);
  });
  sum = block_reduce(sum, scratch, add);
  if (threadIdx.x == 0) static_cast<Acc*>(p.lse)[r] = sum == 0 ? -Acc(INFINITY) : base + logarithm(sum);
  const Acc keep = !p.dropout.rng_state ? Acc(1) : p.dropout.p >= 1 ? Acc(0) : Acc(1 / (1 - p.dropout.p));
  const Acc factor = sum == 0 ? Acc(0) : keep / sum;
  each([&](Acc(&x)[kSize], int64_t j) {
    if (!held) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] = row_exponential<T>(x[i] - base);
    }
    write_weights<T, kSize>(p, row, j, x, factor);
  });
}

template <class T, int kSize>
void launch(const Launch& p, cudaStream_t stream) {
  constexpr int kHeld = kSize == 1 ? 4 : sizeof(T) == 2 ? 2 : 4;
  int threads = 32;
  while (threads < 512 && p.Sk > int64_t(threads) * kSize * kHeld) threads *= 2;
  masked_softmax_fwd_kernel<T, kSize, kHeld>
      <<<grid_size(p.B * p.H * p.Sq, "masked_softmax_fwd"), threads, 0, stream>>>(p);
  check(cudaGetLastError(), "masked_softmax_fwd");
}

}  // namespace

void masked_softmax_fwd(const MaskedSoftmaxForward& problem, cudaStream_t stream) {
  if (problem.B == 0 || problem.H == 0 || problem.Sq == 0) return;
  Launch p;
  static_cast<MaskedSoftmaxForward&>(p) = problem;
  static_cast<Numbers&>(p) = numbers(p.scale, 0, p.dropout);
  const std::size_t size = size_of(p.dtype);
  p.packs = p.scores.stride[3] == 1 && p.Sk * size % 16 == 0 && aligned_16(p.scores, size) && aligned_16(p.out, size);
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.packs)
      launch<T, Pack<T>::kSize>(p, stream);
    else
      launch<T, 1>(p, stream);
  });
}

}  // namespace mha::cuda
