// Decoding from a cache on tensor cores (compute capability 8.0 and later): one fp16 or bf16 query per head and
// sequence, keys and values in pages or not, as they are or of 8 bits. A tile's rows are up to 8 query heads that share
// a key/value head, so that keys and values are read once for all of them. A block has a share of the keys of a head (a
// split), its warps take every kWarps-th tile of kKeys of them; what they find is merged at the end, the splits by
// attention_combine.
//
// With g = lane / 4 and t = lane % 4, a lane brings by cp.async, in pieces of 16 bytes, those parts of a tile that it
// multiplies itself: of key g (and g + 8) every fourth piece for S = Q K^T, where any order of the sum will do if
// queries follow it; of the values of keys 2t, 2t + 1, 2t + 8 and 2t + 9 the pieces g, g + 8 .. for O^T = V^T P^T,
// whose operand P^T has the layout in which S comes. So no lane reads what another one brought, and nothing but waits
// for its own copies orders them.
//
// All heads of a tile see the same keys. The values of hidden keys are zeros, and are not read.
#pragma once
#include "../common/element.cuh"
#include "../common/error.h"
#include "../common/exact_sum.cuh"
#include "../common/launch.h"
#include "../prim/cp_async.cuh"
#include "../prim/mma.cuh"
#include "../prim/unroll.cuh"
#include "fragment.cuh"
#include "widen.cuh"

namespace mha::cuda {

// kStored: bf16 stands for the queries' type.
template <class T_, DType kStored_, int kHead_>
struct CachedSm80 {
  using T = T_;
  static constexpr DType kStored = kStored_;
  static constexpr bool kNarrow = kStored == DType::i8 || kStored == DType::e4m3;
  static constexpr int kHead = kHead_, kSize = kNarrow ? 1 : 2, kPiece = 16 / kSize;  // elements of 16 bytes
  static constexpr int kRows = 8, kKeys = 16, kWarps = 4, kThreads = 32 * kWarps;
  // Pieces of a key that a lane has, and of a value.
  static constexpr int kKeyPieces = kHead / (4 * kPiece), kValuePieces = kHead / (8 * kPiece);
  static constexpr int kPieces = 2 * kKeyPieces + 4 * kValuePieces, kStages = kNarrow ? 4 : 2;
  static constexpr int kStageBytes = kPieces * 512 + (kNarrow ? 2 * 512 : 0);  // of a warp, with the scales of keys
  static constexpr int kSums = kHead / 16;                                     // tiles of O^T
  static constexpr int kPitch = kHead + 4;
  static constexpr int kMergeBytes = kWarps * kRows * (kPitch + 2) * 4;
  static constexpr int kSharedBytes = kWarps * kStages * kStageBytes;
  static constexpr float kSlack = 8;
  static_assert(kValuePieces > 0 && kMergeBytes <= kSharedBytes && fits_everywhere(kSharedBytes, 0));
};

// Where the block is.
struct CachedPlace {
  unsigned b, kv_head, head, heads, split;  // head: the first of `heads` query heads
  int begin, end, first, last;              // visible keys; tiles of the split
};

// Brings tiles to a warp's part of shared memory, and what a lane brought to its registers.
template <class C>
class CachedReader {
 public:
  __device__ CachedReader(const AttentionForwardLaunch& p, const CachedPlace& at, uint32_t shared, unsigned lane)
      : p_(p),
        at_(at),
        shared_(shared + lane * 16),
        lane_(lane),
        one_row_((!p.store.table || p.store.page_size % C::kKeys == 0) && p.D == C::kHead && p.Dv == C::kHead &&
                 !p.mask.elementwise()),
        k_(static_cast<const char*>(p.k.data) + at.kv_head * p.k.stride[1] * C::kSize),
        v_(static_cast<const char*>(p.v.data) + at.kv_head * p.v.stride[1] * C::kSize),
        key_of_lane_(lane / 4 * p.k.stride[2] * C::kSize + lane % 4 * 16),
        value_of_lane_(lane % 4 * 2 * p.v.stride[2] * C::kSize + lane / 4 * 16) {}

  // Whether a key is visible: every head of the tile sees the same.
  __device__ bool visible(int key) const {
    return key >= at_.begin && key < at_.end && visible_in_interval(p_.mask, at_.b, at_.head, 0, key);
  }

  // Begins to bring a tile.
  __device__ void issue(int tile, int stage) {
    const int first = tile * C::kKeys;
    const uint32_t to = shared_ + stage * C::kStageBytes;
    if (one_row_ && first >= at_.begin && first + C::kKeys <= at_.end) {
      const Row row = row_of(first);
      if (row.there) return issue_whole(row, to);
    }
    issue_by_key(first, to);
  }

  __device__ uint4 key_piece(int stage, int n, int c) const {
    return load_shared_16(shared_ + stage * C::kStageBytes + (n * C::kKeyPieces + c) * 512);
  }
  __device__ uint4 value_piece(int stage, int n, int c) const {
    return load_shared_16(shared_ + stage * C::kStageBytes + (2 * C::kKeyPieces + n * C::kValuePieces + c) * 512);
  }
  // Of the lane's four keys; which: 0 for keys, 1 for values.
  __device__ float4 scales(int stage, int which) const {
    return __builtin_bit_cast(float4, load_shared_16(shared_ + stage * C::kStageBytes + (C::kPieces + which) * 512));
  }
  // Whether some visible key lies in no page.
  __device__ bool missing() const { return missing_; }

 private:
  struct Row {
    int64_t first = 0;  // sequence or page
    int index = 0;      // of the key in it
    bool there = false;
  };

  __device__ Row row_of(int key) const {
    if (!p_.store.table) return {at_.b, key, true};
    const unsigned page = unsigned(key) / unsigned(p_.store.page_size);  // in 64 bits this would be a call
    const int64_t first = p_.store.table[at_.b * p_.store.table_stride_b + page];
    return {first, key - int(page * unsigned(p_.store.page_size)), first >= 0 && first < p_.store.pages};
  }

  // The n-th of the keys whose values the lane has, less the first.
  __device__ static constexpr int value_key(int n) { return n % 2 + n / 2 * 8; }

  __device__ void issue_scales(uint32_t to, const Row& row, int n, int bytes) const {
    const int64_t at =
        bytes ? row.first * p_.store.scale_stride_b + at_.kv_head * p_.store.scale_stride_h + row.index : 0;
    cp_async_4(to + C::kPieces * 512 + n * 4, p_.store.k_scale + at, bytes);
    cp_async_4(to + (C::kPieces + 1) * 512 + n * 4, p_.store.v_scale + at, bytes);
  }

  // All keys are visible and lie one behind the other from row on, and their rows are kHead elements.
  __device__ void issue_whole(const Row& row, uint32_t to) const {
    const char* k = k_ + (row.first * p_.k.stride[0] + row.index * p_.k.stride[2]) * C::kSize + key_of_lane_;
    const char* v = v_ + (row.first * p_.v.stride[0] + row.index * p_.v.stride[2]) * C::kSize + value_of_lane_;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int c = 0; c < C::kKeyPieces; ++c)
        cp_async_16(to + (n * C::kKeyPieces + c) * 512, k + n * 8 * p_.k.stride[2] * C::kSize + c * 64, 16);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 0; c < C::kValuePieces; ++c)
        cp_async_16(to + (2 * C::kKeyPieces + n * C::kValuePieces + c) * 512,
                    v + value_key(n) * p_.v.stride[2] * C::kSize + c * 128, 16);
      if (C::kNarrow && p_.store.scale_per_key)
        issue_scales(to, {row.first, row.index + int(lane_ % 4) * 2 + value_key(n), true}, n, 4);
    }
  }

  __device__ void issue_by_key(int first, uint32_t to) {
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      const int key = first + lane_ / 4 + 8 * n;
      const Row row = visible(key) ? row_of(key) : Row{};
      const char* from = k_ + (row.first * p_.k.stride[0] + row.index * p_.k.stride[2]) * C::kSize;
#pragma unroll
      for (int c = 0; c < C::kKeyPieces; ++c)
        copy(to + (n * C::kKeyPieces + c) * 512, from, (c * 4 + lane_ % 4) * 16, row.there ? int(p_.D) * C::kSize : 0);
    }
#pragma unroll 1
    for (int n = 0; n < 4; ++n) {
      const int key = first + lane_ % 4 * 2 + value_key(n);
      const bool seen = visible(key);
      const Row row = seen ? row_of(key) : Row{};
      missing_ |= seen && !row.there;
      const char* from = v_ + (row.first * p_.v.stride[0] + row.index * p_.v.stride[2]) * C::kSize;
#pragma unroll
      for (int c = 0; c < C::kValuePieces; ++c)
        copy(to + (2 * C::kKeyPieces + n * C::kValuePieces + c) * 512, from, (c * 8 + lane_ / 4) * 16,
             row.there ? int(p_.Dv) * C::kSize : 0);
      if (C::kNarrow && p_.store.scale_per_key) issue_scales(to, row, n, row.there ? 4 : 0);
    }
  }
  __device__ static void copy(uint32_t to, const char* from, int offset, int bytes) {
    const int rest = min(max(bytes - offset, 0), 16);
    cp_async_16(to, rest ? from + offset : from, rest);
  }

  const AttentionForwardLaunch& p_;
  const CachedPlace& at_;
  uint32_t shared_;
  int lane_;
  bool one_row_;  // a tile's keys lie one behind the other, all of kHead elements
  bool missing_ = false;
  const char *k_, *v_;  // of the head
  int64_t key_of_lane_, value_of_lane_;
};

template <class C>
struct CachedState {
  float o[C::kSums][4] = {};  // o[n][2 * half + e]: row 2t + e
  float max = -INFINITY, sum = 0;
};

// Factors of rows g as rows 2t and 2t + 1 need them.
template <class C>
__device__ inline void multiply_rows(CachedState<C>& state, float factor, unsigned lane) {
  const float low = __shfl_sync(~0u, factor, lane % 4 * 8), high = __shfl_sync(~0u, factor, lane % 4 * 8 + 4);
#pragma unroll
  for (int n = 0; n < C::kSums; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) state.o[n][e] *= e % 2 ? high : low;
}

// s[n][e], the score of row g and key 8n + 2t + e without the scale, becomes the weight relative to the maximum.
template <class C>
__device__ inline void cached_softmax(float (&s)[2][4], CachedState<C>& state, const AttentionForwardLaunch& p,
                                      const CachedPlace& at, const CachedReader<C>& reader, int tile, int stage,
                                      float scale, unsigned lane) {
  const int first = tile * C::kKeys + lane % 4 * 2;
  const unsigned head = at.head + lane / 4;
  const bool plain = !p.mask.elementwise() && tile * C::kKeys >= at.begin && tile * C::kKeys + C::kKeys <= at.end;
  float4 scales = {1, 1, 1, 1};
  if (C::kNarrow && p.store.scale_per_key) scales = reader.scales(stage, 0);
  const float of_key[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) s[j / 2][j % 2] *= C::kNarrow && p.store.scale_per_key ? scale * of_key[j] : scale;
  if (!plain || p.softcap != 0 || p.bias.data)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& x = s[j / 2][j % 2];
      const int key = first + j / 2 * 8 + j % 2;
      if (p.softcap != 0) x = p.cap * tanhf(x / p.cap);
      if (!reader.visible(key))
        x = -INFINITY;
      else if (p.bias.data && lane / 4 < at.heads)
        x += element<float>(p.bias.data, p.bias_dtype,
                            at.b * p.bias.stride[0] + head * p.bias.stride[1] + int64_t(key) * p.bias.stride[3]);
    }
  float top = fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1]));
  // The maximum is raised only by what exceeds it by kSlack, in powers of two.
  if (__any_sync(~0u, to_power_of_two(top - state.max) > C::kSlack)) {
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float after = to_power_of_two(top - state.max) > C::kSlack ? top : state.max;
    const float factor = after == state.max ? 1 : exp2_approx(to_power_of_two(state.max - after));
    state.max = after;
    state.sum *= factor;
    multiply_rows(state, factor, lane);
  }
  const float base = state.max == -INFINITY ? 0 : state.max;
  if (C::kNarrow && p.store.scale_per_key) scales = reader.scales(stage, 1);
  const float of_value[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float& x = s[j / 2][j % 2];
    state.sum += x = exp2_approx(to_power_of_two(x - base));
    if (C::kNarrow && p.store.scale_per_key) x *= of_value[j];
  }
}

// S = Q K^T of a tile.
template <class C, int kSteps>
__device__ inline void cached_scores(float (&s)[2][4], const uint32_t (&q)[kSteps][2], const CachedReader<C>& reader,
                                     int stage) {
  using T = typename C::T;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = 0;
#pragma unroll
    for (int c = 0; c < C::kKeyPieces; ++c) {
      const uint4 piece = reader.key_piece(stage, n, c);
      const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
      bool special = false;
      if constexpr (C::kStored == DType::e4m3) special = has_nan_e4m3(piece);
#pragma unroll
      for (int i = 0; i < C::kPiece / 4; ++i) {
        const uint32_t (&x)[2] = q[c * C::kPiece / 4 + i];
        uint32_t b0, b1;
        if constexpr (C::kNarrow) {
          b0 = widened_pair<T, C::kStored, 0, 1>(words[i], words[i]);
          b1 = widened_pair<T, C::kStored, 2, 3>(words[i], words[i]);
          if (special) b0 = with_nan_e4m3<T>(b0), b1 = with_nan_e4m3<T>(b1);
        } else {
          b0 = words[2 * i], b1 = words[2 * i + 1];
        }
        mma_16x8x16<T>(s[n], {x[0], 0, x[1], 0}, b0, b1);
      }
    }
  }
}

// O^T += V^T P^T of a tile.
template <class C>
__device__ inline void cached_values(CachedState<C>& state, const float (&s)[2][4], const CachedReader<C>& reader,
                                     int stage) {
  using T = typename C::T;
  const uint32_t b0 = pack2<T>(s[0][0], s[0][1]), b1 = pack2<T>(s[1][0], s[1][1]);
#pragma unroll
  for (int c = 0; c < C::kValuePieces; ++c) {
    uint32_t v[4][4];
    bool special = false;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint4 piece = reader.value_piece(stage, n, c);
      v[n][0] = piece.x, v[n][1] = piece.y, v[n][2] = piece.z, v[n][3] = piece.w;
      if constexpr (C::kStored == DType::e4m3) special |= has_nan_e4m3(piece);
    }
    // Columns 2i and 2i + 1 of the piece are rows g and g + 8 of the product.
    unroll<C::kPiece / 2>([&](auto i) {
      uint32_t a[4];
      unroll<4>([&](auto r) {
        constexpr int column = 2 * int(decltype(i)()) + int(decltype(r)()) % 2, keys = int(decltype(r)()) / 2 * 2;
        if constexpr (C::kNarrow) {
          constexpr int word = column / 4, byte = column % 4;
          a[r] = widened_pair<T, C::kStored, byte, byte>(v[keys][word], v[keys + 1][word]);
          if (special) a[r] = with_nan_e4m3<T>(a[r]);
        } else {
          a[r] = __byte_perm(v[keys][column / 2], v[keys + 1][column / 2], column % 2 ? 0x7632 : 0x5410);
        }
      });
      mma_16x8x16<T>(state.o[c * (C::kPiece / 2) + i], a, b0, b1);
    });
  }
}

// The warps' states become the split's: [rows][kHead] outputs, normalised, and logsumexps.
template <class C>
__device__ inline void cached_finish(CachedState<C>& state, const AttentionForwardLaunch& p, const CachedPlace& at,
                                     float* shared, bool missing, unsigned warp, unsigned lane) {
  float* statistics = shared + C::kWarps * C::kRows * C::kPitch;  // [kWarps][kRows][2]
  state.sum += __shfl_xor_sync(~0u, state.sum, 1);
  state.sum += __shfl_xor_sync(~0u, state.sum, 2);
  if (__any_sync(~0u, missing)) state.sum = NAN;
  if (lane % 4 == 0) {
    statistics[(warp * C::kRows + lane / 4) * 2] = state.max;
    statistics[(warp * C::kRows + lane / 4) * 2 + 1] = state.sum;
  }
  unroll<C::kSums>([&](auto n) {
    constexpr int kPerPiece = C::kPiece / 2, piece = n / kPerPiece, column = n % kPerPiece * 2;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      shared[(warp * C::kRows + lane % 4 * 2 + e % 2) * C::kPitch + (piece * 8 + lane / 4) * C::kPiece + column +
             e / 2] = state.o[n][e];
  });
  __syncthreads();
  const int64_t rows = p.B * p.H, row = at.b * p.H + at.head;
  for (unsigned i = warp; i < at.heads; i += C::kWarps) {
    float max = -INFINITY, sum = 0, factor[C::kWarps];
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) max = fmaxf(max, statistics[(w * C::kRows + i) * 2]);
    const float base = max == -INFINITY ? 0 : max;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) {
      factor[w] = exp2_approx(to_power_of_two(statistics[(w * C::kRows + i) * 2] - base));
      if (max == INFINITY) factor[w] = NAN;
      sum += factor[w] * statistics[(w * C::kRows + i) * 2 + 1];
    }
    const int64_t to = at.split * rows + row + i;
    if (lane == 0) {
      const ExactSum<float> log = logsumexp<true>(max, sum);
      p.partial_lse[to] = isnan(sum) ? NAN : log.value;
      p.partial_rest[to] = log.rest;
    }
    const float scale = sum == 0 ? 0 : reciprocal_approx(sum);
    for (unsigned d = lane; d < C::kHead; d += 32) {
      float x = 0;
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) x += factor[w] * shared[(w * C::kRows + i) * C::kPitch + d];
      if (C::kNarrow && !p.store.scale_per_key)
        x *= p.store.v_scale[at.b * p.store.scale_stride_b + at.kv_head * p.store.scale_stride_h];
      p.partial_out[to * C::kHead + d] = x * scale;
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 2)
    attention_cached_sm80(const __grid_constant__ AttentionForwardLaunch p) {
  using T = typename C::T;
  extern __shared__ __align__(128) unsigned char cached_shared[];
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = unsigned(p.H) / unsigned(p.Hk),
                 tiles_of_heads = (group + C::kRows - 1) / C::kRows;
  CachedPlace at;
  unsigned index = blockIdx.x;
  at.split = index % unsigned(p.splits), index /= unsigned(p.splits);
  const unsigned of_group = index % tiles_of_heads * C::kRows;
  index /= tiles_of_heads;
  at.kv_head = index % unsigned(p.Hk), at.b = index / unsigned(p.Hk);
  at.head = at.kv_head * group + of_group, at.heads = min(group - of_group, unsigned(C::kRows));
  const Interval interval = row_interval(p.mask, at.b, 0, p.Sk);
  at.begin = int(interval.begin), at.end = int(interval.end);
  const int first = at.begin / C::kKeys, count = at.begin < at.end ? (at.end + C::kKeys - 1) / C::kKeys - first : 0,
            share = (count + p.splits - 1) / p.splits;
  at.first = first + min(int(at.split) * share, count), at.last = first + min((int(at.split) + 1) * share, count);

  // Row g of the queries, in the order of the lane's pieces of keys.
  constexpr int kSteps = C::kHead / 16;
  uint32_t q[kSteps][2] = {};
  if (lane / 4 < at.heads) {
    const uint16_t* row =
        static_cast<const uint16_t*>(p.q.data) + at.b * p.q.stride[0] + (at.head + lane / 4) * p.q.stride[1];
#pragma unroll
    for (int i = 0; i < kSteps; i += 2) {  // 8 elements
      const int d = (i * 4 / C::kPiece * 4 + lane % 4) * C::kPiece + i * 4 % C::kPiece;
      uint4 x = {};
      if (p.aligned_q && d + 8 <= p.D) {
        x = load_global_16(row + d);
      } else {
        auto pair = [&](int e) { return e < p.D ? row[e] | (e + 1 < p.D ? uint32_t(row[e + 1]) << 16 : 0) : 0; };
        x = {pair(d), pair(d + 2), pair(d + 4), pair(d + 6)};
      }
      q[i][0] = x.x, q[i][1] = x.y, q[i + 1][0] = x.z, q[i + 1][1] = x.w;
    }
  }
  float scale = float(p.scale);
  if (C::kNarrow && !p.store.scale_per_key)
    scale *= p.store.k_scale[at.b * p.store.scale_stride_b + at.kv_head * p.store.scale_stride_h];

  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(cached_shared));
  CachedReader<C> reader(p, at, shared + warp * C::kStages * C::kStageBytes, lane);
  CachedState<C> state;
  int ahead = at.first + int(warp);
#pragma unroll
  for (int stage = 0; stage < C::kStages - 1; ++stage, ahead += C::kWarps) {
    if (ahead < at.last) reader.issue(ahead, stage);
    cp_async_commit();
  }
  int stage = 0;
  for (int tile = at.first + int(warp); tile < at.last; tile += C::kWarps, ahead += C::kWarps) {
    if (ahead < at.last) reader.issue(ahead, stage == 0 ? C::kStages - 1 : stage - 1);
    cp_async_commit();
    cp_async_wait<C::kStages - 1>();
    float s[2][4];
    cached_scores<C>(s, q, reader, stage);
    cached_softmax<C>(s, state, p, at, reader, tile, stage, scale, lane);
    cached_values<C>(state, s, reader, stage);
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  __syncthreads();
  cached_finish<C>(state, p, at, reinterpret_cast<float*>(cached_shared), reader.missing(), warp, lane);
}

template <class C>
void launch_attention_cached_sm80(const char* name, const AttentionForwardLaunch& p, cudaStream_t stream) {
  auto kernel = attention_cached_sm80<C>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes), name);
  const int64_t tiles = (p.H / p.Hk + C::kRows - 1) / C::kRows;
  kernel<<<grid_size(p.splits * tiles * p.Hk * p.B, name), C::kThreads, C::kSharedBytes, stream>>>(p);
  check(cudaGetLastError(), name);
}

}  // namespace mha::cuda
