// What a consumer warpgroup of attention_fwd.cuh does with one tile of keys and values: the sizes of its tiles,
// the products, the softmax.
#pragma once
#include "../prim/tma.cuh"
#include "../prim/wgmma.cuh"
#include "../sm80/attention_fwd.cuh"

namespace mha::cuda {

template <int kHead_, int kValueHead_, bool kGeneral_>
struct ForwardSm90 {
  static constexpr int kHead = kHead_, kValueHead = kValueHead_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
  static constexpr int kRows = 16, kBlockM = 64 * kConsumers;  // kRows: of a warp
  // General kernels have fewer registers left.
  static constexpr int kBlockN = (kValueHead <= 128 ? 128 : 64) / (kGeneral ? 2 : 1);
  static constexpr int kNt = kBlockN / 8, kOt = kValueHead / 8;
  static constexpr int kCount = kNt < 8 ? 1 : 2;  // tiles of scores that are masked at once, by general kernels
  static constexpr int kStages = 2;
  static constexpr int kColumns = kHead / 64, kValueColumns = kValueHead / 64;  // boxes of 64 columns side by side
  static constexpr int kQueryBytes = kBlockM * kHead * 2, kKeyBytes = kBlockN * kHead * 2,
                       kValueBytes = kBlockN * kValueHead * 2;
  // The output is staged in a place of its own if there is one (beside some KB for masks), else in that of the queries.
  static constexpr int kOutputBytes = kBlockM * kValueHead * 2,
                       kInputBytes = 1024 + kQueryBytes + kStages * (kKeyBytes + kValueBytes);
  static constexpr bool kOutputApart = kInputBytes + kOutputBytes + 8 * 1024 <= 227 * 1024;
  static constexpr int kSharedBytes = kInputBytes + (kOutputApart ? kOutputBytes : 0);
  // The consumers start their products in turns, so that one's softmax runs beside the other's products instead of both
  // waiting for the tensor cores and then both leaving them idle (FlashAttention-3, section 3.1). Where a tile's
  // products take longer than its softmax, or the other way round (general), the longer part runs all the time anyway.
  static constexpr bool kTakesTurns = kHead <= 128 && !kGeneral;
  static constexpr float kSlack = 8;
  static_assert(kValueHead <= kHead);

  struct Output {  // as ForwardState and finish_rows take it
    static constexpr int kHead = kValueHead_, kMt = 1, kRows = 16, kOt = kValueHead_ / 8;
    static constexpr bool kGeneral = kGeneral_;
  };
  using State = ForwardState<Output>;
};

// Loads rows [row, row + kRows) of a head as boxes of 64 columns, one after the other.
template <int kRows, int kColumns>
__device__ inline void load_boxes(uint32_t to, const CUtensorMap* map, uint32_t barrier, int row, int head, int batch) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) tma_load_4d(to + c * kRows * 128, map, barrier, c * 64, row, head, batch);
}

// S = Q K^T, started. q: the warpgroup's rows of a query tile of kBlockM.
template <class T, class C>
__device__ inline void start_scores(float (&s)[C::kNt][4], uint32_t q, uint32_t k) {
  const uint64_t a = describe_rows(q), b = describe_rows(k);
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < C::kHead / 16; ++d)
    wgmma_rows<T, C::kNt>(s, further(a, d / 4 * C::kBlockM * 128 + d % 4 * 32),
                          further(b, d / 4 * C::kBlockN * 128 + d % 4 * 32), d > 0);
  wgmma_commit();
}

// O += P V, started.
template <class T, class C>
__device__ inline void start_values(float (&o)[C::kOt][4], const uint32_t (&p)[C::kNt / 2][4], uint32_t v) {
  const uint64_t b = describe_columns(v, C::kBlockN * 128);
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < C::kNt / 2; ++j) wgmma_columns<T, C::kOt>(o, p[j], further(b, j * 2048));
  wgmma_commit();
}

// Raises the rows' maxima where a score exceeds them by kSlack; returns what the sums are to be multiplied with.
template <class C>
__device__ inline bool raise_maximum(const float (&s)[C::kNt][4], typename C::State& state, float scale_log2,
                                     float (&factor)[2]) {
  float top[2];
  bool grows = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
    for (int n = 1; n < C::kNt; ++n) x = fmaxf(fmaxf(x, s[n][2 * half]), s[n][2 * half + 1]);
    top[half] = x;
    factor[half] = 1;
    grows |= power_above<C>(x, scale_log2, state.negative_max[0][half]) > C::kSlack;
  }
  if (!__any_sync(~0u, grows)) return false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x = top[half], before = state.negative_max[0][half];
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
    const float highest = C::kGeneral ? -x : -x * scale_log2;
    const float after = power_above<C>(x, scale_log2, before) > C::kSlack ? highest : before;
    factor[half] = exp2_approx(C::kGeneral ? to_power_of_two(after - before) : after - before);
    state.negative_max[0][half] = after;
    state.sum[0][half] *= factor[half];
  }
  return true;
}

// s becomes the weights 2^(s * scale - max), added to the rows' sums.
template <class C>
__device__ inline void exponentials(float (&s)[C::kNt][4], typename C::State& state, float scale_log2) {
#pragma unroll
  for (int n = 0; n < C::kNt; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[n][e] = exp2_approx(power_above<C>(s[n][e], scale_log2, state.negative_max[0][e / 2]));
      state.sum[0][e / 2] += s[n][e];
    }
}

// Weights, rounded, as operand A of the next product.
template <class T, int kNt>
__device__ inline void pack_weights(uint32_t (&a)[kNt / 2][4], const float (&s)[kNt][4]) {
#pragma unroll
  for (int n = 0; n < kNt; ++n) {
    a[n / 2][n % 2 * 2] = pack2<T>(s[n][0], s[n][1]);
    a[n / 2][n % 2 * 2 + 1] = pack2<T>(s[n][2], s[n][3]);
  }
}

// Some tiles of an accumulator, as the functions on fragments take them: 32 bits of a lane speak of eight, of 64 keys.
template <int kCount, int kNt>
__device__ inline float (&tiles(float (&s)[kNt][4], int first))[1][kCount][4] {
  return reinterpret_cast<float (&)[1][kCount][4]>(s[first]);
}

template <int kNt>
__device__ inline float (&eight(float (&s)[kNt][4], int first))[1][8][4] {
  return tiles<8>(s, first);
}

// Calls f(place, tiles) for each kCount tiles of scores.
template <int kCount, int kNt, class F>
__device__ inline void for_each(float (&s)[kNt][4], FragmentPlace at, F f) {
#pragma unroll
  for (int n = 0; n < kNt; n += kCount, at.key += 8 * kCount) {
    f(at, tiles<kCount>(s, n));
    __syncwarp();  // the compiler would load for all of them at once
  }
}

// Adds what take_specials took out of a value tile.
template <class C>
__device__ inline void add_tile_specials(float (&o)[C::kOt][4], const Mask& mask, FragmentPlace at,
                                         const uint16_t* specials, unsigned lane) {
  for (int n = 0; n < C::kNt; n += C::kCount, at.key += 8 * C::kCount) {
    const uint32_t visible = visible_bits<1, C::kCount, !C::kGeneral>(mask, at, lane);
#pragma unroll
    for (int c = 0; c < C::kValueColumns; ++c)
      add_specials<1, C::kCount, 8>(eight(o, 8 * c), visible, specials + (c * C::kBlockN + 8 * n) * 8, lane);
  }
}

}  // namespace mha::cuda
