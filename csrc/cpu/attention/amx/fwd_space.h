// The memory that AMX forward works in.
#pragma once

#include "../../tile/score.h"
#include "../fwd/space.h"
#include "products.h"

MHA_ISA_BEGIN

constexpr int kStripRows = kRun, kUnitKeys = 512, kUnitRuns = kUnitKeys / kRun;
constexpr int kStrips = kMaxRows / kStripRows;

// Keys and values that are packed as one task, where threads pack a head together.
constexpr int64_t kPieceKeys = 128;
static_assert(kPieceKeys % kRun == 0);

// The packed keys and values of a head, in pieces that may be packed at the same time.
template <int N>
struct AmxHead {
  struct alignas(64) Piece {
    uint16_t greatest_key;
    bool left_out;  // whether some values are not finite
  };
  int64_t* held;  // of a thread's own: b * Hk + key/value head; -1: none yet
  Piece* piece;   // [pieces]
  int64_t pieces;
  HalfTile* k;           // [run of keys][run of features][plane][2]: lanes
  HalfTile* v;           // [run of keys][plane][run of features][2]: features, of pairs from the halves of a run
  uint32_t* left_out;    // [run of keys], a bit for each whose values are not finite
  int64_t k_run, v_run;  // tiles of a run of keys
  std::size_t bytes;

  AmxHead(const AttentionForward& p, void* base) : k_run(N * 2 * runs(p.D)), v_run(N * 2 * runs(p.Dv)) {
    Arena arena(base);
    pieces = max64(1, (p.Sk + kPieceKeys - 1) / kPieceKeys);
    held = arena.take<int64_t>(1);
    piece = arena.take<Piece>(pieces);
    k = arena.take<HalfTile>(runs(p.Sk) * k_run);
    v = arena.take<HalfTile>(runs(p.Sk) * v_run);
    left_out = arena.take<uint32_t>(runs(p.Sk));
    bytes = arena.used();
  }
};

// What the rows of a unit see.
struct CellMasks {
  uint64_t seen[kStrips][kStripRows][kUnitRuns / 2];  // a bit a key
  TileKind kind[kStrips][kUnitRuns];
};

// What one thread works in.
template <int N>
struct AmxForwardScratch {
  RowBlock* block;
  HalfTile* q;           // [kStrips][run of features][plane][2]: rows
  SumTile* score;        // [2][2 x 2], and of settled ones 2 x 2
  HalfTile* weight;      // [kStrips][plane][two of rows][kUnitRuns]: rows, of pairs from the halves of a run
  SumTile* out;          // [kStrips][run of features][2 x 2]
  float *sum, *base;     // [kMaxRows][16], [kMaxRows]
  float *factor, *far;   // [kMaxRows]
  float* step_factor;    // [kMaxRows][kUnitRuns], of rows whose base was raised in a unit
  __mmask16 (*kept)[2];  // [kStripRows], of a cell: what dropout keeps of 32 keys; null without
  CellMasks* masks;      // [2], of this unit and the next; null without a mask that is not one of intervals
  ProductSteps score_steps;
  uint16_t* page_rows;  // [kRun][D or Dv], rows from several pages; null without pages
  std::size_t bytes;

  AmxForwardScratch(const AttentionForward& p, void* base_address) {
    Arena arena(base_address);
    const int64_t d = runs(p.D), dv = runs(p.Dv);
    block = arena.take<RowBlock>(1);
    q = arena.take<HalfTile>(kStrips * N * 2 * d);
    score = arena.take<SumTile>(3 * 4);
    weight = arena.take<HalfTile>(kStrips * N * 2 * kUnitRuns);
    out = arena.take<SumTile>(kStrips * dv * 4);
    sum = arena.take<float>(kMaxRows * 16);
    base = arena.take<float>(kMaxRows);
    factor = arena.take<float>(kMaxRows);
    far = arena.take<float>(kMaxRows);
    step_factor = arena.take<float>(kMaxRows * kUnitRuns);
    kept = p.dropout.rng_state ? arena.take<__mmask16[2]>(kStripRows) : nullptr;
    masks = p.mask.elementwise() ? arena.take<CellMasks>(2) : nullptr;
    score_steps.a = arena.take<int64_t>(N * N * d), score_steps.b = arena.take<int64_t>(N * N * d);
    page_rows = p.store.table ? arena.take<uint16_t>(kRun * std::max(p.D, p.Dv)) : nullptr;
    bytes = arena.used();
  }
};

// Whether AmxForwardBlock knows all that the problem asks for. (A scale of plain products must leave room for a score
// that is hidden.)
inline bool on_tiles(const AttentionForward& p, const ForwardPlan& plan) {
  const bool scores = !ScoreRule<float>(p).raw || p.scale >= 1e-30;
  return plan.parts == 1 && p.Sq >= kMaxRows && p.D > 0 && p.Dv > 0 && scores && !p.store.quantised;
}

MHA_ISA_END
