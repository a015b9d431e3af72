// Attention forward on Hopper (compute capability 9.0: TMA, mbarriers, wgmma), fp16 and bf16, head sizes up to kHead
// for queries and keys and kValueHead for values (smaller ones are filled up with zeros by TMA).
//
// One warp of the first warpgroup, the producer, brings the query tile and, through a ring of kStages stages, the key
// and value tiles to shared memory. Two more warpgroups, the consumers, take 64 query rows each: S = Q K^T from shared
// memory, the online softmax in registers, O += P V with P from registers. The products of the next tile's scores run
// while this tile's softmax is worked out, and one warpgroup computes while the other waits for its products.
//
// Two blocks with neighbouring query tiles of a head may form a cluster: each loads half of every key and value tile,
// and TMA writes it to both.
//
// The rules of softmax (kSlack) and of hidden values (specials) are those of attention_fwd_sm80.cuh.
#pragma once
#include "attention_fwd_sm80.cuh"
#include "prim/cluster.cuh"
#include "prim/mbarrier.cuh"
#include "prim/tma.cuh"
#include "prim/warpgroup.cuh"
#include "prim/wgmma.cuh"
#include "tensor_map.h"

namespace mha::cuda {

template <int kHead_, int kValueHead_, bool kGeneral_>
struct ForwardSm90 {
  static constexpr int kHead = kHead_, kValueHead = kValueHead_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
  static constexpr int kRows = 16, kBlockM = 64 * kConsumers;  // kRows: of a warp
  static constexpr int kBlockN = kValueHead <= (kGeneral ? 64 : 128)    ? 128
                                 : kValueHead <= (kGeneral ? 128 : 256) ? 64
                                                                        : 32;
  static constexpr int kNt = kBlockN / 8, kOt = kValueHead / 8;
  static constexpr int kCount =
      kNt < 8 ? 2 : 8;  // tiles of scores that are masked at once: few where registers are short
  static constexpr int kStages = 2;
  static constexpr int kColumns = kHead / 64, kValueColumns = kValueHead / 64;  // boxes of 64 columns side by side
  static constexpr int kQueryBytes = kBlockM * kHead * 2, kKeyBytes = kBlockN * kHead * 2,
                       kValueBytes = kBlockN * kValueHead * 2;
  static constexpr int kSharedBytes = 1024 + kQueryBytes + kStages * (kKeyBytes + kValueBytes);
  static constexpr float kSlack = 8;
  static_assert(kValueHead <= kHead);  // the output is staged where the query tile was

  struct Output {  // as ForwardState and write_out take it
    static constexpr int kHead = kValueHead_, kMt = 1, kRows = 16, kOt = kValueHead_ / 8;
    static constexpr bool kGeneral = kGeneral_;
  };
  using State = ForwardState<Output>;
};

struct AttentionForwardMaps {
  CUtensorMap q, k, v;  // boxes of 64 columns: kBlockM rows of q, kBlockN / cluster of k and v
  int cluster;          // blocks, 1 or 2
};

// Loads rows [row, row + kRows) of a head as boxes of 64 columns, one after the other.
template <int kRows, int kColumns>
__device__ inline void load_boxes(uint32_t to, const CUtensorMap* map, uint32_t barrier, int row, int head, int batch) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) tma_load_4d(to + c * kRows * 128, map, barrier, c * 64, row, head, batch);
}

// The same by a block of a cluster of two, to both: it loads half of the rows of each box.
template <int kRows, int kColumns>
__device__ inline void load_boxes_for_two(uint32_t to, const CUtensorMap* map, uint32_t barrier, int row, int head,
                                          int batch) {
  const int half = int(cluster_rank()) * kRows / 2;
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    tma_load_4d_multicast(to + c * kRows * 128 + half * 128, map, barrier, 3, c * 64, row + half, head, batch);
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
  for (int n = 0; n < kNt; n += kCount, at.key += 8 * kCount) f(at, tiles<kCount>(s, n));
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

// Stages and barriers of a ring, walked by producer and consumers alike.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_fwd_sm90(const __grid_constant__ AttentionForwardLaunch p,
                       const __grid_constant__ AttentionForwardMaps maps) {
  // Where TMA writes and wgmma reads, a box of 64 columns is a tile of 128-byte rows.
  using Box = TileSm80<T, 64, 128 * C::kConsumers>;
  extern __shared__ unsigned char shared[];
  __shared__ RowRange ranges[C::kBlockM];
  __shared__ Span spans[C::kBlockM / C::kRows + 1];  // of each warp's rows, and of all
  __shared__ uint64_t barriers[1 + 4 * C::kStages];
  __shared__ uint16_t specials[C::kBlockN * C::kValueHead / 8];
  // The shuffle tells the compiler that a warpgroup's threads agree.
  const unsigned thread = threadIdx.x, lane = thread % 32, group = __shfl_sync(~0u, thread / 128, 0);
  // Late query tiles first: under a causal mask they have the most to do.
  const unsigned H = unsigned(p.H), rest = blockIdx.x / unsigned(p.query_tiles),
                 query_tile = p.query_tiles - 1 - blockIdx.x % p.query_tiles;
  const unsigned bh = rest / p.splits, split = rest % p.splits, b = bh / H, h = bh % H, hk = h / (H / unsigned(p.Hk));
  const int block_row = query_tile * C::kBlockM;
  __shared__ Sequence sequence;
  if (thread == 0) sequence = cuda::sequence(p, b);

  const uint32_t query_at = (shared_address(shared) + 1023) & ~1023u, keys_at = query_at + C::kQueryBytes,
                 values_at = keys_at + C::kStages * C::kKeyBytes;
  const uint32_t query_full = shared_address(barriers);
  auto keys_full = [&](int s) { return query_full + 8 * (1 + s); };
  auto values_full = [&](int s) { return query_full + 8 * (1 + C::kStages + s); };
  auto keys_empty = [&](int s) { return query_full + 8 * (1 + 2 * C::kStages + s); };
  auto values_empty = [&](int s) { return query_full + 8 * (1 + 3 * C::kStages + s); };
  if (thread == 0) {
    mbarrier_init(query_full, 1);
    for (int s = 0; s < C::kStages; ++s) {
      mbarrier_init(keys_full(s), 1), mbarrier_init(values_full(s), 1);
      mbarrier_init(keys_empty(s), C::kConsumers * maps.cluster);
      mbarrier_init(values_empty(s), C::kConsumers * maps.cluster);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const bool two = maps.cluster == 2;
  if (!two && block_row >= sequence.Sq) return;
  if (group > 0) {
    const int warp = thread / 32 - 4;
    warp_span<C::kRows>(p.mask, sequence, block_row + warp * C::kRows, ranges + warp * C::kRows, spans + warp, lane);
  }
  __syncthreads();
  if (thread == 0) {
    Span s = spans[0];
    for (int w = 1; w < C::kBlockM / C::kRows; ++w) s = merge(s, spans[w]);
    spans[C::kBlockM / C::kRows] = s;
  }
  __syncthreads();
  const Span all = spans[C::kBlockM / C::kRows];
  int begin = all.begin, end = all.end;
  if (two) {  // both walk over what one of them sees
    cluster_arrive();
    cluster_wait();
    const uint32_t other = address_in(shared_address(spans + C::kBlockM / C::kRows), cluster_rank() ^ 1);
    begin = min(begin, load_from_cluster(other)), end = max(end, load_from_cluster(other + offsetof(Span, end)));
  }
  int tile = begin / C::kBlockN, tile_end = (end + C::kBlockN - 1) / C::kBlockN;
  const int share = (max(0, tile_end - tile) + p.splits - 1) / p.splits;  // key tiles of one split
  tile_end = min(tile_end, tile + int(split + 1) * share);
  tile += int(split) * share;

  if (group == 0) {
    give_registers<40>();
    if (thread == 0 && tile < tile_end) {
      const int first_key = int(sequence.first_key), batch = p.q_starts ? 0 : b;
      mbarrier_arrive_expect(query_full, C::kQueryBytes);
      load_boxes<C::kBlockM, C::kColumns>(query_at, &maps.q, query_full, int(sequence.first_query) + block_row, h,
                                          batch);
      RingPlace<C::kStages> at;
      for (; tile < tile_end; ++tile, at.next()) {
        const uint32_t k = keys_at + at.stage * C::kKeyBytes, v = values_at + at.stage * C::kValueBytes;
        const int row = first_key + tile * C::kBlockN;
        mbarrier_wait(keys_empty(at.stage), at.parity ^ 1);
        mbarrier_arrive_expect(keys_full(at.stage), C::kKeyBytes);
        if (two)
          load_boxes_for_two<C::kBlockN, C::kColumns>(k, &maps.k, keys_full(at.stage), row, hk, batch);
        else
          load_boxes<C::kBlockN, C::kColumns>(k, &maps.k, keys_full(at.stage), row, hk, batch);
        mbarrier_wait(values_empty(at.stage), at.parity ^ 1);
        mbarrier_arrive_expect(values_full(at.stage), C::kValueBytes);
        if (two)
          load_boxes_for_two<C::kBlockN, C::kValueColumns>(v, &maps.v, values_full(at.stage), row, hk, batch);
        else
          load_boxes<C::kBlockN, C::kValueColumns>(v, &maps.v, values_full(at.stage), row, hk, batch);
      }
    }
    __syncwarp();
    if (two) cluster_arrive(), cluster_wait();
    return;
  }

  take_registers<232>();
  const unsigned consumer = thread - 128, warp = consumer / 32;  // warp: of all consumers' warps
  Span own = spans[group * 4 - 4];
  for (int w = 1; w < 4; ++w) own = merge(own, spans[group * 4 - 4 + w]);
  typename C::State state;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    state.negative_max[0][half] = ForwardSm80<C::kHead, C::kGeneral>::kUnset, state.sum[0][half] = 0;
  const uint32_t q = query_at + (group - 1) * 64 * 128;
  const int first_row = block_row + warp * C::kRows;
  float s[1][C::kNt][4], factor[2] = {1, 1};
  uint32_t weights[C::kNt / 2][4];
  bool rescale = false;
  const bool elementwise = C::kGeneral && p.mask.elementwise();
  RingPlace<C::kStages> at;
  // A stage is written again when both blocks are done with it: one thread arrives here, another one there.
  const bool releases = consumer % 128 == 0 || (two && consumer % 128 == 32);
  const uint32_t to_releasing = address_in(query_full, cluster_rank() ^ (two && consumer % 128 == 32)) - query_full;
  auto release = [&](uint32_t barrier) {
    if (releases) mbarrier_arrive_there(barrier + to_releasing);
  };
  // A value tile that some rows of the block don't see whole: NaN and Inf must not reach them through products with 0.
  // All consumers look at it together.
  auto await_values = [&](int t) {
    mbarrier_wait(values_full(at.stage), at.parity);
    if (!elementwise && t * C::kBlockN >= all.full_begin && (t + 1) * C::kBlockN <= all.full_end) return false;
    const uint32_t v = values_at + at.stage * C::kValueBytes;
    const bool found = Box::template any_nonfinite<C::kBlockN * C::kValueColumns>(v, consumer);
    if (!named_barrier_or<128 * C::kConsumers>(1, found)) return false;
    Box::template take_specials<C::kBlockN * C::kValueColumns>(v, specials, consumer);
    fence_async_proxy();
    named_barrier<128 * C::kConsumers>(1);
    return true;
  };
  auto finish_values = [&](int stage, bool nonfinite) {
    if (nonfinite) named_barrier<128 * C::kConsumers>(1);  // before the next tile's specials
    release(values_empty(stage));
  };
  auto pass = [&](int t) {  // a tile that only other warpgroups see
    mbarrier_wait(keys_full(at.stage), at.parity);
    release(keys_empty(at.stage));
    const bool nonfinite = await_values(t);
    finish_values(at.stage, nonfinite);
    at.next();
  };
  auto place = [&](int t) { return FragmentPlace{&sequence, h, first_row, t * C::kBlockN, ranges + warp * C::kRows}; };
  auto softmax = [&](int t) {
    const int key = t * C::kBlockN;
    if constexpr (C::kGeneral)
      for_each<C::kCount>(s[0], place(t), [&](const FragmentPlace& at, auto& scores) {
        to_scores<T>(scores, p, at, lane);
        hide(scores, visible_bits<1, C::kCount, false>(p.mask, at, lane), -INFINITY);
      });
    else if (key < own.full_begin || key + C::kBlockN > own.full_end)
      hide_outside(s, place(t), lane);
    rescale = raise_maximum<C>(s[0], state, p.scale_log2, factor);
    exponentials<C>(s[0], state, p.scale_log2);
    if (C::kGeneral && p.dropout.rng_state)
      for_each<C::kCount>(s[0], place(t), [&](const FragmentPlace& at, auto& weights) {
        hide(weights,
             kept_bits<1, C::kCount>(dropout_key(p.dropout.rng_state), p.threshold, sequence.b * H + h, at, lane),
             0.0f);
      });
  };
  auto add_specials_of = [&](int t) { add_tile_specials<C>(state.o[0], p.mask, place(t), specials, lane); };
  const int own_tile = max(tile, own.begin / C::kBlockN);
  const int own_end = min(tile_end, (own.end + C::kBlockN - 1) / C::kBlockN);
  if (tile < tile_end) mbarrier_wait(query_full, 0);  // also those that see nothing: its place is used again
  for (; tile < min(own_tile, tile_end); ++tile) pass(tile);
  if (tile < own_end) {
    mbarrier_wait(keys_full(at.stage), at.parity);
    start_scores<T, C>(s[0], q, keys_at + at.stage * C::kKeyBytes);
    wgmma_wait<0>();
    hold(s[0]);
    release(keys_empty(at.stage));
    softmax(tile);  // there is nothing to rescale yet
#pragma unroll 1
    for (; tile < own_end - 1; ++tile) {
      const bool nonfinite = await_values(tile);
      const int stage = at.stage;
      pack_weights<T>(weights, s[0]);
      at.next();
      mbarrier_wait(keys_full(at.stage), at.parity);
      start_scores<T, C>(s[0], q, keys_at + at.stage * C::kKeyBytes);
      start_values<T, C>(state.o[0], weights, values_at + stage * C::kValueBytes);
      wgmma_wait<1>();
      hold(s[0]);
      release(keys_empty(at.stage));
      softmax(tile + 1);
      wgmma_wait<0>();
      hold(state.o[0]);
      if (nonfinite) add_specials_of(tile);
      finish_values(stage, nonfinite);
      if (rescale)
#pragma unroll
        for (int n = 0; n < C::kOt; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) state.o[0][n][e] *= factor[e / 2];
    }
    const bool nonfinite = await_values(tile);
    pack_weights<T>(weights, s[0]);
    start_values<T, C>(state.o[0], weights, values_at + at.stage * C::kValueBytes);
    wgmma_wait<0>();
    hold(state.o[0]);
    if (nonfinite) add_specials_of(tile);
    finish_values(at.stage, nonfinite);
    at.next();
    ++tile;
  }
  for (; tile < tile_end; ++tile) pass(tile);
  if (two) cluster_arrive();              // this block needs nothing more of the other's shared memory
  named_barrier<128 * C::kConsumers>(1);  // the query tile's place is used again, to stage the output
  write_out<T, typename C::Output, TileSm80<T, C::kValueHead, 128>>(
      p, state, sequence, h, split, first_row, query_at + warp * C::kRows * C::kValueHead * 2, lane);
  if (two) cluster_wait();
}

// Two query tiles of a head share loads where all rows see the same keys: elsewhere one would wait for the other.
inline bool shares_loads(const AttentionForwardLaunch& p) {
  const Mask& m = p.mask;
  const bool alike = m.band_lo <= -p.Sq && m.band_hi >= p.Sk && !m.top_left && (!m.begin || m.begin_stride_q == 0) &&
                     (!m.end || m.end_stride_q == 0);
  return alike && !p.q_starts && p.splits == 1 && p.query_tiles > 1;
}

template <class T, class C>
void launch_attention_fwd_sm90(const char* name, AttentionForwardLaunch p, cudaStream_t stream) {
  auto kernel = attention_fwd_sm90<T, C>;
  p.query_tiles = int((p.Sq + C::kBlockM - 1) / C::kBlockM);
  AttentionForwardMaps maps;
  maps.cluster = shares_loads(p) ? 2 : 1;
  p.query_tiles += p.query_tiles % maps.cluster;
  maps.q = tensor_map<T>(p.q, query_sizes(p, p.D), C::kBlockM);
  maps.k = tensor_map<T>(p.k, key_sizes(p, p.D), C::kBlockN / maps.cluster);
  maps.v = tensor_map<T>(p.v, key_sizes(p, p.Dv), C::kBlockN / maps.cluster);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes), name);
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {unsigned(maps.cluster), 1, 1};
  cudaLaunchConfig_t config = {
      grid_size(p.query_tiles * p.splits * p.B * p.H, name), C::kThreads, C::kSharedBytes, stream, &cluster, 1};
  check(cudaLaunchKernelEx(&config, kernel, p, maps), name);
}

}  // namespace mha::cuda
