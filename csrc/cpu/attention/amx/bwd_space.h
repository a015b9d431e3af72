// What attention backward on AMX tiles works in, and how large its spans are.
#pragma once

#include "../bwd/space.h"
#include "bwd_tile.h"

MHA_ISA_BEGIN

constexpr int kSpanKeys = 512, kSpanRows = 512;
constexpr int kKeyRuns = kSpanKeys / kRun, kRowRuns = kSpanRows / kRun, kSpanBlocks = kSpanRows / kMaxRows;
static_assert(kMaxRows == 2 * kRun && kMaxKeys == 2 * kRun);

// Whether AmxBackwardWorker knows all that the problem asks for.
inline bool on_tiles(const AttentionBackward& p) { return p.D > 0 && p.Dv > 0; }

// Whether more than scale and mask lies between S and the softmax, or more than a product with values comes of weights.
inline bool is_modified(const AttentionBackward& p) {
  return p.bias.data || p.softcap != 0 || p.dropout.rng_state || p.dweights.data;
}

template <int N>
inline TilePairs take_pairs(Arena& arena, int64_t pairs) {
  return {arena.take<HalfTile>(N * pairs * 2), 2, pairs * 2};
}

// The queries of a head and its dQ, as BackwardHead has them. What is written while other tasks are at their own blocks
// lies on lines of its own.
template <int N>
struct AmxBackwardHead {
  using T = float;
  static constexpr int kBlockBytes = 64;
  int64_t blocks, query_runs;
  QueryBlock<float>* block;
  TilePairs q_lanes, dout_lanes, q_features, dout_features;
  SumTile* dq;
  uint8_t* dq_begun;                     // [blocks][kBlockBytes], of which two: whether sums hold anything yet
  uint32_t *q_left_out, *dout_left_out;  // of each run, a bit for each row that is not finite
  float* minus_delta;                    // what sums of dP begin with
  RowBlock* rows;                        // of each run; null where nobody asks

  AmxBackwardHead(Arena& arena, const AttentionBackward& p, const BackwardPlan&)
      : blocks(ceil_div(p.Sq, kMaxRows)), query_runs(2 * blocks) {
    const int64_t d = runs(p.D), dv_runs = runs(p.Dv);
    block = arena.take<QueryBlock<float>>(blocks);
    q_lanes = take_pairs<N>(arena, query_runs * d), q_features = take_pairs<N>(arena, query_runs * d);
    dout_lanes = take_pairs<N>(arena, query_runs * dv_runs), dout_features = take_pairs<N>(arena, query_runs * dv_runs);
    dq = arena.take<SumTile>(query_runs * d * 4);
    dq_begun = arena.take<uint8_t>(blocks * kBlockBytes);
    q_left_out = arena.take<uint32_t>(query_runs), dout_left_out = arena.take<uint32_t>(query_runs);
    minus_delta = arena.take<float>(query_runs * kRun);
    rows = is_modified(p) ? arena.take<RowBlock>(query_runs) : nullptr;
  }
  uint8_t& begun(int64_t run) const { return dq_begun[run / 2 * kBlockBytes + run % 2]; }
};

// What one thread works in.
template <int N>
struct AmxBackwardScratch {
  int64_t d, dv_runs;                // runs of features
  int64_t held_runs;                 // of keys that are packed at a time
  TilePairs k_rows, v_rows, k_down;  // of a span of keys, or of all where several heads share them
  TilePairs p, ds, ds_lanes;         // p, ds: of a run of keys, [queries]; ds_lanes: [queries][keys]
  SumTile *s, *dp;                   // two of each, four tiles
  SumTile *dk, *dv;                  // of the keys of the span, of one head
  uint8_t* keys_held;                // by spans
  uint32_t *k_left_out, *v_left_out;
  TileMask<float>* masks;
  ProductSteps s_steps, dp_steps;
  float* repaired;
  Modifiers modifiers;
  double* diagonals;  // as BackwardScratch has them

  AmxBackwardScratch(Arena& arena, const AttentionBackward& p_, const BackwardPlan& plan)
      : d(runs(p_.D)), dv_runs(runs(p_.Dv)) {
    held_runs = plan.heads > 1 ? ceil_div(runs(plan.chunk_keys), kKeyRuns) * kKeyRuns : kKeyRuns;
    k_rows = take_pairs<N>(arena, held_runs * d), k_down = take_pairs<N>(arena, held_runs * d);
    v_rows = take_pairs<N>(arena, held_runs * dv_runs);
    k_left_out = arena.take<uint32_t>(held_runs), v_left_out = arena.take<uint32_t>(held_runs);
    keys_held = arena.take<uint8_t>(held_runs / kKeyRuns);
    p = take_pairs<N>(arena, kRowRuns), ds = take_pairs<N>(arena, kRowRuns);
    ds_lanes = take_pairs<N>(arena, kKeyRuns * kRowRuns);
    s = arena.take<SumTile>(2 * 4), dp = arena.take<SumTile>(2 * 4);
    dk = arena.take<SumTile>(kKeyRuns * d * 4), dv = arena.take<SumTile>(kKeyRuns * dv_runs * 4);
    masks = arena.take<TileMask<float>>(kSpanBlocks);
    for (ProductSteps* steps : {&s_steps, &dp_steps}) {
      const int64_t most = N * N * std::max(d, dv_runs);
      steps->a = arena.take<int64_t>(most), steps->b = arena.take<int64_t>(most);
    }
    repaired = arena.take<float>(N > 1 ? kRun * kMaxRows : 0);
    modifiers.bias = p_.bias.data ? arena.take<float>(kRun * kMaxRows) : nullptr;
    modifiers.factor = p_.dropout.rng_state ? arena.take<float>(kRun * kMaxRows) : nullptr;
    modifiers.dweights = p_.dweights.data ? arena.take<float>(kRun * kMaxRows) : nullptr;
    diagonals = arena.take<double>(p_.dbias.data && p_.bias_relative ? p_.Sq + plan.chunk_keys : 0);
  }
};

MHA_ISA_END
