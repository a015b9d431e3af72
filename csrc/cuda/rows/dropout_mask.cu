// The dropout decisions themselves: one thread per Philox call, which decides four neighbouring keys.
#include "../common/error.h"
#include "../kernels.h"

namespace mha::cuda {
namespace {

__global__ void dropout_mask_kernel(const __grid_constant__ DropoutMask p, uint32_t threshold) {
  const int64_t quads = (p.Sk + 3) / 4, n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= p.B * p.H * p.Sq * quads) return;
  const int64_t row = n / quads, quad = n - row * quads, bh = row / p.Sq;
  const int64_t b = bh / p.H;
  const Philox4 words = dropout_words(dropout_key(p.dropout), uint32_t(b), uint32_t(bh - b * p.H),
                                      uint32_t(row - bh * p.Sq), uint32_t(quad));
  uint8_t* to = p.out + row * p.Sk + 4 * quad;
  uchar4 kept;
  kept.x = p.dropout.p < 1 && words.word[0] >= threshold;
  kept.y = p.dropout.p < 1 && words.word[1] >= threshold;
  kept.z = p.dropout.p < 1 && words.word[2] >= threshold;
  kept.w = p.dropout.p < 1 && words.word[3] >= threshold;
  if (p.Sk % 4 == 0 && reinterpret_cast<std::size_t>(p.out) % 4 == 0) {
    *reinterpret_cast<uchar4*>(to) = kept;
    return;
  }
  const uint8_t each[4] = {kept.x, kept.y, kept.z, kept.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (4 * quad + i < p.Sk) to[i] = each[i];
}

}  // namespace

void dropout_mask(const DropoutMask& p, cudaStream_t stream) {
  const int64_t threads = p.B * p.H * p.Sq * ((p.Sk + 3) / 4);
  if (threads == 0) return;
  dropout_mask_kernel<<<grid_size((threads + 255) / 256, "dropout_mask"), 256, 0, stream>>>(
      p, dropout_threshold(p.dropout.p));
  check(cudaGetLastError(), "dropout_mask");
}

}  // namespace mha::cuda
