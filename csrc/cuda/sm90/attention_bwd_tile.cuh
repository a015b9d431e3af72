// What a warpgroup of attention_bwd_sm90 does with one tile of queries that lies in shared memory.
#pragma once
#include "../prim/mbarrier.cuh"
#include "../prim/stmatrix.cuh"
#include "../prim/warpgroup.cuh"
#include "../sm80/attention_bwd_scores.cuh"
#include "attention_fwd_tile.cuh"
#include "tensor_map.h"

namespace mha::cuda {

// A warpgroup's keys and values, as operands, where they are held in registers.
template <class C>
struct HeldSm90 {
  uint32_t k[C::kHeldSteps][4], v[C::kHeldSteps][4];
};

// A tile of queries that has come in, as a thread of a warpgroup sees it. Addresses are of shared memory.
struct TileSm90 {
  uint32_t keys, values;    // of the warpgroup
  uint32_t finite_keys;     // of the block: without NaN and Inf
  uint32_t queries, douts;  // 64 rows each
  uint32_t weights,
      gradients;           // where P^T (if it goes there at all) and dS^T go to
  GradientPlace place;     // of the warp's keys and the first query
  bool edge, elementwise;  // whether pairs need a look at their rows' intervals,
                           // and at more than these
  unsigned turn;           // where blocks take turns: how many add to the row block before this one
};

// c = A B^T, started: both have rows along kHead, in boxes of 64 columns kARows and kBRows high, or A is held.
template <class T, class C, int kARows, int kBRows, int kNt>
__device__ inline void start_rows(float (&c)[kNt][4], uint32_t a, const uint32_t (&held)[C::kHeldSteps][4], uint32_t b,
                                  bool add) {
  const uint64_t rows_a = describe_rows(a), rows_b = describe_rows(b);
#pragma unroll
  for (int d = 0; d < C::kHead / 16; ++d) {
    const uint64_t step_b = further(rows_b, d / 4 * kBRows * 128 + d % 4 * 32);
    if constexpr (C::kHeld)
      wgmma_rows<T, kNt>(c, held[d], step_b, add || d > 0);
    else
      wgmma_rows<T, kNt>(c, further(rows_a, d / 4 * kARows * 128 + d % 4 * 32), step_b, add || d > 0);
  }
}

// Two tiles of an accumulator, as the functions on fragments take them.
template <int kNt>
__device__ inline float (&two(float (&s)[kNt][4], int first))[1][2][4] {
  return reinterpret_cast<float (&)[1][2][4]>(s[first]);
}

template <class T, class C>
__device__ inline void pack_operands(uint32_t (&a)[C::kNt / 2][4], const float (&x)[C::kNt][4]) {
#pragma unroll
  for (int step = 0; step < C::kNt / 2; ++step) pack_operand<T>(a[step], x, 2 * step);
}

// The place some queries further.
__device__ inline GradientPlace further(GradientPlace at, int queries) {
  at.row += queries;
  at.negative_lse += queries, at.negative_rest += queries, at.negative_delta += queries;
  at.ranges += queries;
  return at;
}

// Which of C::kPart queries see which of the warp's keys.
template <class C>
__device__ inline uint32_t visible_part(const Mask& mask, const GradientPlace& at, bool elementwise, unsigned lane) {
  if (C::kGeneral && elementwise) return visible_pairs<1, C::kNt, true, false>(mask, at, lane);
  return visible_pairs<1, C::kNt, true, true>(mask, at, lane);
}

// P^T and dS^T of the warpgroup's 64 keys and of C::kPart queries from `first` on, rounded, as operands. Where nothing
// but scores decides P^T, it is worked out while V dO^T is still going on; start_values may then start one product
// more. both_started is called when the two products, a group each, have been started.
template <class T, class C, class F, class G>
__device__ inline void part_scores(uint32_t (&weights)[C::kNt / 2][4], uint32_t (&gradients)[C::kNt / 2][4],
                                   const AttentionBackwardLaunch& p, const HeldSm90<C>& held, const TileSm90& tile,
                                   int first, unsigned lane, G both_started, F start_values) {
  const GradientPlace at = further(tile.place, first);
  float s[1][C::kNt][4], ds[1][C::kNt][4];
  // dP's sums start from what to_gradients wants, but not beside products of the tile before: if anything but a product
  // writes to a product's sums, ptxas waits for all that are in flight.
  constexpr bool kFromDelta = !C::kOverlaps;
  if constexpr (kFromDelta) {
    start_gradients<true, C::kGeneral>(ds, at, lane);
    hold(ds[0]);
  }
  wgmma_fence();
  start_rows<T, C, C::kKeys, C::kQueries>(s[0], tile.keys, held.k, tile.queries + first * 128, false);
  wgmma_commit();
  start_rows<T, C, C::kKeys, C::kQueries>(ds[0], tile.values, held.v, tile.douts + first * 128, kFromDelta);
  wgmma_commit();
  both_started();
  if constexpr (C::kGeneral) {
    const uint32_t visible = visible_part<C>(p.mask, at, tile.elementwise, lane);
    wgmma_wait<0>();
    hold(s[0]);
    hold(ds[0]);
#pragma unroll
    for (int step = 0; step < C::kNt / 2; ++step)  // 16 queries
      to_gradients<T, true, true, false>(two(s[0], 2 * step), two(ds[0], 2 * step), p, further(at, 16 * step), true,
                                         visible >> 8 * step & 0xFF, lane);
    pack_operands<T, C>(weights, s[0]);
    start_values();
  } else {
    wgmma_wait<1>();
    hold(s[0]);
    float negative_lse[kRowNumbers<true, 1, C::kNt>];
    row_numbers<true, 1, C::kNt>(negative_lse, at.negative_lse, lane);
    for_fragment<1, C::kNt>([&](int m, int n, int half, int e) {
      float& x = s[m][n][2 * half + e];
      x = exp2_approx(fmaf(x, p.scale_log2, negative_lse[row_number<true>(m, n, half, e)]));
    });
    if (tile.edge) hide_outside_transposed(at, lane, s);
    pack_operands<T, C>(weights, s[0]);
    start_values();
    wgmma_wait<C::kOverlaps>();
    hold(ds[0]);
    float negative_delta[kRowNumbers<true, 1, C::kNt>] = {};
    if constexpr (!kFromDelta) row_numbers<true, 1, C::kNt>(negative_delta, at.negative_delta, lane);
    for_fragment<1, C::kNt>([&](int m, int n, int half, int e) {
      float& x = ds[m][n][2 * half + e];
      if constexpr (!kFromDelta) x += negative_delta[row_number<true>(m, n, half, e)];
      x *= s[m][n][2 * half + e];
    });
    if (tile.edge) hide_outside_transposed(at, lane, ds);
  }
  pack_operands<T, C>(gradients, ds[0]);
}

// c += A B, started, for B of the rows of a tile from `first` on; c has C::kOt * 8 columns.
template <class T, class C>
__device__ inline void start_columns(float (&c)[C::kOt][4], const uint32_t (&a)[C::kNt / 2][4], uint32_t rows,
                                     int first) {
  const uint64_t b = describe_columns(rows + first * 128, C::kQueries * 128);
#pragma unroll
  for (int step = 0; step < C::kNt / 2; ++step) wgmma_columns<T, C::kOt>(c, a[step], further(b, step * 2048));
}

// Adds C::kPart queries' part to dv and dk, started.
template <class T, class C>
__device__ inline void start_sums(float (&dv)[C::kOt][4], float (&dk)[C::kOt][4],
                                  const uint32_t (&weights)[C::kNt / 2][4], const uint32_t (&gradients)[C::kNt / 2][4],
                                  const TileSm90& tile, unsigned half, int first) {
  const uint32_t columns = C::kShared ? half * C::kBoxes * C::kQueries * 128 : 0;  // before the warpgroup's own
  wgmma_fence();
  start_columns<T, C>(dv, weights, tile.douts + columns, first);
  start_columns<T, C>(dk, gradients, tile.queries + columns, first);
  wgmma_commit();
}

// Packed scores, keys down, to a tile of shared memory that has rows of 64 queries, and back. key: this lane's row.
template <class Box, int kSteps>
__device__ inline void store_part(uint32_t tile, unsigned key, int first, const uint32_t (&a)[kSteps][4],
                                  unsigned lane) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    stmatrix_x4(tile + Box::offset(key, first / 8 + 2 * step + lane / 16), a[step][0], a[step][1], a[step][2],
                a[step][3]);
}

template <class Box, int kSteps>
__device__ inline void load_part(uint32_t (&a)[kSteps][4], uint32_t tile, unsigned key, int first, unsigned lane) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    ldmatrix_x4(a[step], tile + Box::offset(key, first / 8 + 2 * step + lane / 16));
}

template <class C>
__device__ inline void await_sums(float (&dv)[C::kOt][4], float (&dk)[C::kOt][4]) {
  wgmma_wait<0>();
  hold(dk);
  hold(dv);
}

// Adds a tile's part to dv and dk (with kOverlaps, to dv) and puts dS^T into shared memory, for all consumers. The last
// products are only started. gradients: this warp's dS^T. key: this lane's row of it. release_before: with kOverlaps,
// called when the tile's first two products have been started, as two groups, behind those of the tile before.
template <class T, class C, class F>
__device__ inline void add_key_gradients(float (&dv)[C::kOt][4], float (&dk)[C::kOt][4],
                                         uint32_t (&gradients)[C::kNt / 2][4], const AttentionBackwardLaunch& p,
                                         const HeldSm90<C>& held, const TileSm90& tile, unsigned half, unsigned key,
                                         unsigned lane, F release_before) {
  using Box = TileSm80<T, 64, 128 * C::kConsumers>;
  constexpr int kAll = 128 * C::kConsumers;
  uint32_t weights[C::kNt / 2][4];
  auto nothing = [] {};
  if constexpr (C::kOverlaps) {
    part_scores<T, C>(weights, gradients, p, held, tile, 0, lane, release_before, [&] {
      wgmma_fence();
      start_columns<T, C>(dv, weights, tile.douts, 0);
      wgmma_commit();
    });
    store_part<Box>(tile.gradients, key, 0, gradients, lane);
  } else if constexpr (!C::kShared) {
#pragma unroll 1
    for (int first = 0; first < C::kQueries; first += C::kPart) {
      part_scores<T, C>(weights, gradients, p, held, tile, first, lane, nothing, nothing);
      store_part<Box>(tile.gradients, key, first, gradients, lane);  // first: products in flight own their registers
      start_sums<T, C>(dv, dk, weights, gradients, tile, half, first);
      if constexpr (C::kPart < C::kQueries) await_sums<C>(dv, dk);  // their registers are needed
    }
  } else {
    const int first = half * C::kPart;
    part_scores<T, C>(weights, gradients, p, held, tile, first, lane, nothing, nothing);
    named_barrier<kAll>(1);  // the tile before is done
    store_part<Box>(tile.weights, key, first, weights, lane);
    store_part<Box>(tile.gradients, key, first, gradients, lane);
    start_sums<T, C>(dv, dk, weights, gradients, tile, half, first);
  }
  fence_async_proxy();
  if (C::kShared && p.deterministic) asm volatile("fence.acq_rel.cta;" ::: "memory");  // else ptxas spills a register
  named_barrier<kAll>(2);
  if constexpr (C::kShared) {
    const int first = (1 - half) * C::kPart;
    uint32_t other_weights[C::kNt / 2][4], other_gradients[C::kNt / 2][4];
    load_part<Box>(other_weights, tile.weights, key, first, lane);
    load_part<Box>(other_gradients, tile.gradients, key, first, lane);
    start_sums<T, C>(dv, dk, other_weights, other_gradients, tile, half, first);
  }
}

// dQ = dS K, started: C::kDqNt * 8 of the warpgroup's columns, from `first` on.
template <class T, class C>
__device__ inline void start_dq(float (&dq)[C::kDqNt][4], const TileSm90& tile, unsigned half, int first) {
  const unsigned column = half * C::kDqColumns + first;
  const uint64_t a = describe_columns(tile.gradients, 0);
  const uint64_t b =
      describe_columns(tile.finite_keys + column / 64 * C::kKeys * 128 + column % 64 * 2, C::kKeys * 128);
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < C::kKeys / 16; ++j)
    wgmma_columns<T, C::kDqNt>(dq, further(a, j * 2048), further(b, j * 2048), j > 0);
  wgmma_commit();
}

// Adds what take_specials took out of the tile's queries and dout to the gradients of those keys that they see.
template <class C>
__device__ inline void add_tile_specials(float (&dv)[C::kOt][4], float (&dk)[C::kOt][4], const Mask& mask,
                                         const TileSm90& tile, unsigned half, const uint16_t* of_queries,
                                         const uint16_t* of_douts, unsigned lane) {
#pragma unroll 1
  for (int first = 0; first < C::kQueries; first += C::kPart) {
    const uint32_t visible = visible_part<C>(mask, further(tile.place, first), tile.elementwise, lane);
#pragma unroll
    for (int c = 0; c < C::kBoxes; ++c) {
      const int at = ((C::kShared ? half * C::kBoxes + c : c) * C::kQueries + first) * 8;
      add_specials<1, C::kNt, 8>(eight(dv, 8 * c), visible, of_douts + at, lane);
      add_specials<1, C::kNt, 8>(eight(dk, 8 * c), visible, of_queries + at, lane);
    }
  }
}

}  // namespace mha::cuda
