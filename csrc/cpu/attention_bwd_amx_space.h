// What attention backward on AMX tiles works in, and how large its spans are.
#pragma once

#include "attention_bwd_amx_tile.h"
#include "attention_bwd_plan.h"

MHA_ISA_BEGIN

constexpr int kSpanKeys = 512, kSpanRows = 512;
constexpr int kKeyRuns = kSpanKeys / kRun, kRowRuns = kSpanRows / kRun, kSpanBlocks = kSpanRows / kMaxRows;
static_assert(kMaxRows == 2 * kRun && kMaxKeys == 2 * kRun);

template <int N>
inline TilePairs take_pairs(Arena& arena, int64_t pairs) {
  return {arena.take<HalfTile>(N * pairs * 2), 2, pairs * 2};
}

// What one thread works in.
template <int N>
struct AmxBackwardScratch {
  int64_t blocks, query_runs, d, dv_runs, key_runs;  // d, dv_runs: runs of features
  int64_t held_runs;                                 // of keys that are packed at a time
  QueryBlock<float>* block;
  TilePairs q_lanes, dout_lanes, q_features, dout_features;  // of a head
  TilePairs k_rows, v_rows, k_down;  // of a span of keys, or of all where several heads share them
  TilePairs p, ds, ds_lanes;         // p, ds: of a run of keys, [queries]; ds_lanes: [queries][keys]
  SumTile *s, *dp;                   // two of each, four tiles
  SumTile *dq, *dk, *dv;             // dq: of a head; dk, dv: of the keys of the chunk
  uint8_t *dq_begun, *keys_begun;    // whether sums hold anything yet
  uint8_t* keys_held;                // by spans
  uint32_t *q_left_out, *dout_left_out, *k_left_out, *v_left_out;  // of each run, a bit for each row that is not finite
  TileMask<float>* masks;
  float* minus_delta;  // of a head
  ProductSteps s_steps, dp_steps;
  float* repaired;

  AmxBackwardScratch(Arena& arena, const AttentionBackward& p_, const BackwardPlan& plan)
      : blocks(ceil_div(p_.Sq, kMaxRows)),
        query_runs(2 * blocks),
        d(runs(p_.D)),
        dv_runs(runs(p_.Dv)),
        key_runs(runs(plan.chunk_keys)),
        held_runs(plan.heads > 1 ? ceil_div(key_runs, kKeyRuns) * kKeyRuns : kKeyRuns) {
    block = arena.take<QueryBlock<float>>(blocks);
    q_lanes = take_pairs<N>(arena, query_runs * d), q_features = take_pairs<N>(arena, query_runs * d);
    dout_lanes = take_pairs<N>(arena, query_runs * dv_runs), dout_features = take_pairs<N>(arena, query_runs * dv_runs);
    k_rows = take_pairs<N>(arena, held_runs * d), k_down = take_pairs<N>(arena, held_runs * d);
    v_rows = take_pairs<N>(arena, held_runs * dv_runs);
    k_left_out = arena.take<uint32_t>(held_runs), v_left_out = arena.take<uint32_t>(held_runs);
    keys_held = arena.take<uint8_t>(held_runs / kKeyRuns);
    p = take_pairs<N>(arena, kRowRuns), ds = take_pairs<N>(arena, kRowRuns);
    ds_lanes = take_pairs<N>(arena, kKeyRuns * kRowRuns);
    s = arena.take<SumTile>(2 * 4), dp = arena.take<SumTile>(2 * 4);
    dq = arena.take<SumTile>(query_runs * d * 4);
    dk = arena.take<SumTile>(key_runs * d * 4), dv = arena.take<SumTile>(key_runs * dv_runs * 4);
    dq_begun = arena.take<uint8_t>(query_runs), keys_begun = arena.take<uint8_t>(key_runs);
    q_left_out = arena.take<uint32_t>(query_runs), dout_left_out = arena.take<uint32_t>(query_runs);
    masks = arena.take<TileMask<float>>(kSpanBlocks);
    minus_delta = arena.take<float>(query_runs * kRun);
    for (ProductSteps* steps : {&s_steps, &dp_steps}) {
      const int64_t most = N * N * std::max(d, dv_runs);
      steps->a = arena.take<int64_t>(most), steps->b = arena.take<int64_t>(most);
    }
    repaired = arena.take<float>(N > 1 ? kRun * kMaxRows : 0);
  }
};

MHA_ISA_END
