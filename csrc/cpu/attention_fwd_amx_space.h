// The memory that AMX forward works in, and how its work is shared out.
#pragma once

#include "amx_forward_operands.h"
#include "attention_fwd_space.h"
#include "score_tile.h"

MHA_ISA_BEGIN

constexpr int kStripRows = kStep, kUnitKeys = 512, kUnitSteps = kUnitKeys / kStep;
constexpr int kStrips = kMaxRows / kStripRows;

// The packed keys and values of a head, [32 keys][..], see pack_keys and pack_values.
struct AmxHead {
  struct State {
    int64_t head;  // b * Hk + key/value head; -1: none yet
    uint16_t greatest_key;
    bool left_out;  // whether some values are not finite
  };
  State* state;
  char *k, *v;
  uint32_t* left_out;  // [32 keys]
  std::size_t bytes;

  AmxHead(const AttentionForward& p, int planes, void* base) {
    Arena arena(base);
    const int64_t steps = steps_of(p.Sk);
    state = arena.take<State>(1);
    k = arena.take<char>(steps * planes * step_bytes(p.D));
    v = arena.take<char>(steps * planes * step_bytes(p.Dv));
    left_out = arena.take<uint32_t>(steps);
    bytes = arena.used();
  }
};

// A step of scores: where its tiles lie within a strip's queries and a step's keys.
struct ScoreStep {
  int a, b;
};

// What the rows of a unit see.
struct CellMasks {
  uint64_t seen[kStrips][kStripRows][kUnitSteps / 2];  // a bit a key
  TileKind kind[kStrips][kUnitSteps];
};

// What one thread works in.
template <int N>
struct AmxForwardScratch {
  RowBlock* block;
  char* q;              // [kStrips][..], see pack_queries
  char* score;          // [2][2 x 2 tiles]
  char* weight;         // [kStrips][plane][two tiles of rows][kUnitSteps]
  char* out;            // [kStrips][32 columns][2 x 2 tiles]
  float *sum, *base;    // [kMaxRows][16], [kMaxRows]
  float *factor, *far;  // [kMaxRows]
  CellMasks* masks;     // [2], of this unit and the next; null without a mask that is not one of intervals
  ScoreStep* score_steps;
  std::size_t bytes;

  AmxForwardScratch(const AttentionForward& p, void* base_address) {
    Arena arena(base_address);
    const int64_t d = steps_of(p.D), dv = steps_of(p.Dv);
    block = arena.take<RowBlock>(1);
    q = arena.take<char>(kStrips * N * step_bytes(p.D));
    score = arena.take<char>(2 * 4 * kTileBytes);
    weight = arena.take<char>(kStrips * N * 2 * kUnitSteps * kTileBytes);
    out = arena.take<char>(kStrips * dv * 4 * kTileBytes);
    sum = arena.take<float>(kMaxRows * 16);
    base = arena.take<float>(kMaxRows);
    factor = arena.take<float>(kMaxRows);
    far = arena.take<float>(kMaxRows);
    masks = p.mask.elementwise() ? arena.take<CellMasks>(2) : nullptr;
    score_steps = arena.take<ScoreStep>(N * N * d);
    bytes = arena.used();
  }
};

// Whether AmxForwardBlock knows all that the problem asks for. (A scale must leave room for a score that is hidden.)
inline bool on_tiles(const AttentionForward& p, const ForwardPlan& plan) {
  return plan.parts == 1 && p.Sq >= kMaxRows && p.D > 0 && p.Dv > 0 && ScoreRule<float>(p).raw && p.scale >= 1e-30 &&
         !p.dropout.rng_state && !p.weights.data && !p.store.table && !p.store.quantised;
}

// A head that is small is packed by each thread that works on it. Long ones, or where there are fewer than threads, are
// packed by all threads together, as many at a time as take this much memory.
constexpr int64_t kSharedHeadBytes = int64_t(8) << 20;

template <int N>
struct AmxForwardPlan {
  const AttentionForward& p;
  const ForwardPlan& plan;
  const int threads;
  const std::size_t scratch_bytes, head_bytes;
  const bool shared;
  const int64_t heads_together;

  AmxForwardPlan(const AttentionForward& problem, const ForwardPlan& forward, int thread_count)
      : p(problem),
        plan(forward),
        threads(thread_count),
        scratch_bytes(AmxForwardScratch<N>(p, nullptr).bytes),
        head_bytes(AmxHead(p, N, nullptr).bytes),
        shared(int64_t(head_bytes) > N * kPackedHeadBytes || p.B * p.Hk < threads),
        heads_together(shared ? max64(1, min64(p.B * p.Hk, kSharedHeadBytes / int64_t(head_bytes))) : threads) {}

  std::size_t bytes() const { return std::size_t(threads) * scratch_bytes + std::size_t(heads_together) * head_bytes; }
  void* scratch(void* workspace, int thread) const {
    return static_cast<char*>(workspace) + std::size_t(thread) * scratch_bytes;
  }
  AmxHead head(void* workspace, int64_t index) const {
    return AmxHead(p, N, static_cast<char*>(scratch(workspace, threads)) + std::size_t(index) * head_bytes);
  }
};

template <int N>
inline std::size_t workspace_on_tiles(const AttentionForward& p, const ForwardPlan& plan, int threads) {
  return AmxForwardPlan<N>(p, plan, threads).bytes();
}

MHA_ISA_END
