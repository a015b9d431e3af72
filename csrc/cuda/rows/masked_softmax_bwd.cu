// Backward of the masked softmax: one block per row. With y the weights before dropout and g = dropout(dout),
// dscore = y * (g - sum(y * g)) * scale, and the bias gets the same without scale.
#include "../common/error.h"
#include "../kernels.h"
#include "row_mask.cuh"

namespace mha::cuda {
namespace {

struct Launch : MaskedSoftmaxBackward, Numbers {};

// One element's y and g; both 0 where hidden.
template <class Acc>
struct Pair {
  Acc y, g;
};

template <class Acc>
__device__ inline Pair<Acc> pair_of(const Launch& p, const ScoreRow& row, Acc lse, Acc keep, int64_t j, Acc score,
                                    Acc g) {
  if (lse == -Acc(INFINITY) || !row.sees(p.mask, j)) return {0, 0};
  Acc s = score * Acc(p.scale);
  if (p.bias.data) s += element<Acc>(p.bias.data, p.bias_dtype, row.offset(p.bias) + j * p.bias.stride[3]);
  if (p.dropout.rng_state) {
    const Philox4 words =
        dropout_words(dropout_key(p.dropout), uint32_t(row.b), uint32_t(row.h), uint32_t(row.i), uint32_t(j / 4));
    g = words.word[j % 4] >= p.threshold ? g * keep : Acc(0);
  }
  return {exponential(s - lse), g};
}

template <class T, class Acc>
__device__ inline Pair<Acc> pair_at(const Launch& p, const ScoreRow& row, Acc lse, Acc keep, int64_t j) {
  return pair_of(p, row, lse, keep, j,
                 Acc(static_cast<const T*>(p.scores.data)[row.offset(p.scores) + j * p.scores.stride[3]]),
                 Acc(static_cast<const T*>(p.dout.data)[row.offset(p.dout) + j * p.dout.stride[3]]));
}

template <class Acc>
__device__ inline Acc keep_factor(const Dropout& d) {
  return !d.rng_state ? Acc(1) : d.p >= 1 ? Acc(0) : Acc(1 / (1 - d.p));
}

// sum(y * g) over a row, by the whole block.
template <class T, class Acc>
__device__ inline Acc row_delta(const Launch& p, const ScoreRow& row, Acc lse, Acc keep, Acc* scratch) {
  Acc sum = 0;
  for (int64_t j = threadIdx.x; j < p.Sk; j += blockDim.x) {
    const Pair<Acc> x = pair_at<T>(p, row, lse, keep, j);
    sum += x.y * x.g;
  }
  return block_reduce(sum, scratch, [](Acc a, Acc b) { return a + b; });
}

// Rows of up to kHeld packs per thread stay in registers; longer ones are read twice. With kPack 1, any strides.
template <class T, int kPack, int kHeld>
__global__ void masked_softmax_bwd_kernel(const __grid_constant__ Launch p) {
  using Acc = Accumulate<T>;
  struct alignas(kPack == 1 ? sizeof(T) : 16) Values {
    T x[kPack];
  };
  const auto read = [](const T* from) -> Values {
    if constexpr (kPack == 1)
      return {*from};
    else
      return __builtin_bit_cast(Values, load_global_16(from));
  };
  __shared__ Acc scratch[32];
  const ScoreRow row(p, blockIdx.x);
  const Acc lse = static_cast<const Acc*>(p.lse)[blockIdx.x], keep = keep_factor<Acc>(p.dropout), scale = Acc(p.scale);
  const bool plain = !p.bias.data && !p.dropout.rng_state && lse != -Acc(INFINITY);
  T* to = static_cast<T*>(p.dscores.data) + row.offset(p.dscores);
  const int64_t step = int64_t(blockDim.x) * kPack, start = int64_t(threadIdx.x) * kPack;

  auto load = [&](Pair<Acc>(&x)[kPack], int64_t j) {
    if (j >= row.interval.end || j + kPack <= row.interval.begin) {  // what nobody sees isn't read
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[i] = {0, 0};
      return;
    }
    const T* s = static_cast<const T*>(p.scores.data) + row.offset(p.scores) + j * p.scores.stride[3];
    const T* g = static_cast<const T*>(p.dout.data) + row.offset(p.dout) + j * p.dout.stride[3];
    const Values score = read(s), dout = read(g);
    if (kPack > 1 && plain && row.sees_all(p.mask, j, kPack)) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[i] = {row_exponential<T>(Acc(score.x[i]) * scale - lse), Acc(dout.x[i])};
      return;
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) x[i] = pair_of(p, row, lse, keep, j + i, Acc(score.x[i]), Acc(dout.x[i]));
  };
  auto store = [&](const Pair<Acc>(&x)[kPack], int64_t j, Acc delta) {
    Values v;
#pragma unroll
    for (int i = 0; i < kPack; ++i) v.x[i] = T(x[i].y * (x[i].g - delta) * scale);
    if constexpr (kPack == 1)
      to[j] = v.x[0];
    else
      store_global_16(to + j, __builtin_bit_cast(uint4, v));
  };
  const auto add = [](Acc a, Acc b) { return a + b; };
  Pair<Acc> x[kHeld][kPack];
  Acc delta = 0;
  if (p.Sk <= step * kHeld) {
#pragma unroll
    for (int n = 0; n < kHeld; ++n)
      if (start + n * step < p.Sk) {
        load(x[n], start + n * step);
#pragma unroll
        for (int i = 0; i < kPack; ++i) delta += x[n][i].y * x[n][i].g;
      }
    delta = block_reduce(delta, scratch, add);
#pragma unroll
    for (int n = 0; n < kHeld; ++n)
      if (start + n * step < p.Sk) store(x[n], start + n * step, delta);
    return;
  }
  for (int64_t j = start; j < p.Sk; j += step) {
    load(x[0], j);
#pragma unroll
    for (int i = 0; i < kPack; ++i) delta += x[0][i].y * x[0][i].g;
  }
  delta = block_reduce(delta, scratch, add);
  for (int64_t j = start; j < p.Sk; j += step) {
    load(x[0], j);
    store(x[0], j, delta);
  }
}

// The gradient of the bias. dscores of every row is worked out anew (a broadcast bias is small beside the scores), and
// each element of dbias is summed by one block in the order of its rows.
//
// A block takes one (b, h, i) of dbias, standing for all rows that bias broadcasts it over.
template <class T>
__global__ void masked_softmax_dbias_kernel(const __grid_constant__ Launch p, int64_t nb, int64_t nh, int64_t nq) {
  using Acc = Accumulate<T>;
  __shared__ Acc scratch[32];
  const int64_t b0 = blockIdx.x / nq / nh, h0 = blockIdx.x / nq % nh, i0 = blockIdx.x % nq;
  const Acc keep = keep_factor<Acc>(p.dropout);
  Acc* to = static_cast<Acc*>(p.dbias.data) + b0 * p.dbias.stride[0] + h0 * p.dbias.stride[1] + i0 * p.dbias.stride[2];
  Acc total = 0;
  for (int64_t b = b0; b < p.B; b += nb)
    for (int64_t h = h0; h < p.H; h += nh)
      for (int64_t i = i0; i < p.Sq; i += nq) {
        const int64_t r = (b * p.H + h) * p.Sq + i;
        const ScoreRow row(p, r);
        const Acc lse = static_cast<const Acc*>(p.lse)[r], sum = row_delta<T>(p, row, lse, keep, scratch);
        for (int64_t j = threadIdx.x; j < p.Sk; j += blockDim.x) {
          const Pair<Acc> x = pair_at<T>(p, row, lse, keep, j);
          if (p.dbias.stride[3])
            to[j * p.dbias.stride[3]] += x.y * (x.g - sum);
          else
            total += x.y * (x.g - sum);
        }
      }
  if (p.dbias.stride[3]) return;
  total = block_reduce(total, scratch, [](Acc a, Acc b) { return a + b; });
  if (threadIdx.x == 0) *to = total;
}

}  // namespace

void masked_softmax_bwd(const MaskedSoftmaxBackward& problem, cudaStream_t stream) {
  if (problem.B == 0 || problem.H == 0 || problem.Sq == 0 || problem.Sk == 0) return;
  Launch p;
  static_cast<MaskedSoftmaxBackward&>(p) = problem;
  static_cast<Numbers&>(p) = numbers(p.scale, 0, p.dropout);
  const std::size_t size = size_of(p.dtype);
  const bool packs = p.scores.stride[3] == 1 && p.dout.stride[3] == 1 && p.Sk * size % 16 == 0 &&
                     aligned_16(p.scores, size) && aligned_16(p.dout, size) && aligned_16(p.dscores, size);
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kPack = Pack<T>::kSize;
    auto threads_for = [&](int64_t elements) {  // enough threads that each has at most so many elements
      int threads = 32;
      while (threads < 512 && p.Sk > threads * elements) threads *= 2;
      return threads;
    };
    const unsigned rows = grid_size(p.B * p.H * p.Sq, "masked_softmax_bwd");
    if (packs)
      masked_softmax_bwd_kernel<T, kPack, 2><<<rows, threads_for(2 * kPack), 0, stream>>>(p);
    else
      masked_softmax_bwd_kernel<T, 1, 8><<<rows, threads_for(8), 0, stream>>>(p);
    check(cudaGetLastError(), "masked_softmax_bwd");
    const int threads = threads_for(8);
    if (!p.dbias.data) return;
    const int64_t nb = p.dbias.stride[0] ? p.B : 1, nh = p.dbias.stride[1] ? p.H : 1, nq = p.dbias.stride[2] ? p.Sq : 1;
    masked_softmax_dbias_kernel<T>
        <<<grid_size(nb * nh * nq, "masked_softmax_dbias"), threads, 0, stream>>>(p, nb, nh, nq);
    check(cudaGetLastError(), "masked_softmax_dbias");
  });
}

}  // namespace mha::cuda
