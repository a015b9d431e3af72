// What the host works out once per launch, passed to the kernels by value beside the contract.
//
// This room includes prim.
#pragma once
#include "../../attention.h"
#include "mask_tiles.h"

namespace mha::cuda {

struct Numbers {            // the problem's doubles as the kernels use them
  float scale_f32 = 1;      // scale
  float scale_log2 = 1;     // scale * log2(e)
  float cap = 0;            // softcap
  float softcap_scale = 0;  // scale / softcap
  float keep_scale = 1;     // 1 / (1 - p); 0 when p is 1
  uint32_t threshold = 0;   // dropout keeps words from here on
};

inline Numbers numbers(double scale, double softcap, const Dropout& dropout) {
  Numbers n;
  n.scale_f32 = float(scale);
  n.scale_log2 = float(scale * 1.4426950408889634);
  n.cap = float(softcap);
  n.softcap_scale = softcap == 0 ? 0 : float(scale / softcap);
  if (dropout.rng_state) {
    n.keep_scale = dropout.p >= 1 ? 0 : float(1 / (1 - dropout.p));
    n.threshold = dropout_threshold(dropout.p);
  }
  return n;
}

// Shared memory that a block may have on every GPU of compute capability 8.0 or later (8.6, 8.9 and 12.0 have least),
// and on those that have more.
constexpr std::size_t kSharedEverywhere = 99 * 1024, kSharedSm80 = 163 * 1024;

// Whether a kernel with so much dynamic shared memory, which starts at a multiple of 128 bytes behind the static, fits.
constexpr bool fits(std::size_t limit, std::size_t dynamic_bytes, std::size_t static_bytes) {
  return dynamic_bytes + (static_bytes + 127) / 128 * 128 <= limit;
}
constexpr bool fits_everywhere(std::size_t dynamic_bytes, std::size_t static_bytes) {
  return fits(kSharedEverywhere, dynamic_bytes, static_bytes);
}

// Whether every row of a tensor (over its last dimension) starts at a multiple of 16 bytes.
inline bool aligned_16(const Tensor4& t, std::size_t element) {
  std::size_t bits = reinterpret_cast<std::size_t>(t.data);
  for (int i = 0; i < 3; ++i) bits |= std::size_t(t.stride[i]) * element;
  return bits % 16 == 0;
}

struct AttentionForwardLaunch : AttentionForward, Numbers {
  bool aligned_q = false, aligned_k = false, aligned_v = false, aligned_out = false;  // rows at multiples of 16 bytes
  MaskTiles tiles;
  int query_tiles = 1;
  int splits = 1;                 // over keys, merged afterwards
  float* partial_out = nullptr;   // [splits,B,H,Sq,head size of the instance]
  float* partial_lse = nullptr;   // [splits,B,H,Sq]
  float* partial_rest = nullptr;  // likewise, for lse_rest
};

}  // namespace mha::cuda
