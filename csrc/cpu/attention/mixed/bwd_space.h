// How attention backward with talking heads cuts its work, and the memory that it works in.
#pragma once

#include "../bwd/plan.h"
#include "tile.h"

MHA_ISA_BEGIN

// From the shapes alone, so that every sum has its order.
struct MixedBackwardPlan {
  int64_t blocks, chunks, tasks;  // blocks of queries; chunk c has the blocks c, c + chunks, ..; a task is (b, chunk)
  int64_t runs;                   // of tasks, one after the other on a thread: those of a run add to one dbias
  bool bias_parts;                // several runs meet in dbias: all but the first add to a part of their own
  int64_t bias_elements, bias_origin;

  explicit MixedBackwardPlan(const AttentionBackward& p) {
    blocks = ceil_div(p.Sq, kMaxRows);
    chunks = max64(1, min64(blocks, ceil_div(kBackwardTasks, max64(1, p.B))));
    tasks = p.B * chunks;
    const Tensor4& dbias = p.dbias;
    const bool shared =
        dbias.data && ((dbias.stride[0] == 0 && p.B > 1) || ((dbias.stride[2] == 0 || p.bias_relative) && chunks > 1));
    runs = shared ? min64(tasks, kBackwardTasks) : tasks;
    bias_parts = shared && runs > 1;
    const BackwardPlan bias(p, 1);
    bias_elements = bias.bias_elements, bias_origin = bias.bias_origin;
  }
};

// Partial sums.
template <class T>
struct MixedBackwardParts {
  T *dk, *dv;            // [chunks][B][Hk][Sk][size]
  T* dbias;              // [runs - 1][bias_elements]
  double *dpre, *dpost;  // [runs][H][H]
  double* dsinks;        // [runs][H]

  MixedBackwardParts(Arena& arena, const AttentionMixedBackward& p, const MixedBackwardPlan& plan) {
    dk = arena.take<T>(plan.tasks * p.Hk * p.Sk * p.D);
    dv = arena.take<T>(plan.tasks * p.Hk * p.Sk * p.Dv);
    dbias = arena.take<T>(plan.bias_parts ? (plan.runs - 1) * plan.bias_elements : 0);
    dpre = arena.take<double>(p.pre_mix ? plan.runs * p.H * p.H : 0);
    dpost = arena.take<double>(p.post_mix ? plan.runs * p.H * p.H : 0);
    dsinks = arena.take<double>(p.dsinks ? plan.runs * p.H : 0);
  }
};

// What one thread works in.
template <class T>
struct MixedBackwardScratch {
  MixedScores<T> scores;
  int64_t kept;
  T *capped, *dweights;       // [kept + 1][H][kHeadTile]: C, dW
  T *weights, *work;          // [H][kHeadTile]
  T* dbias;                   // of one head
  T *dout, *dq;               // [H][Dv][kMaxRows], [H][D][kMaxRows]
  T *q_rows, *dout_rows;      // a block of one head, if it must be widened
  T *values, *keys, *finite;  // a tile
  T *lse, *lse_rest, *delta;  // [H][kMaxRows]

  MixedBackwardScratch(Arena& arena, const AttentionMixedBackward& p)
      : scores(arena, p, p.pre_mix), kept(kept_tiles<T>(p, 2)) {
    const int64_t tile = p.H * kHeadTile, rows = p.H * kMaxRows;
    capped = arena.take<T>((kept + 1) * tile);
    dweights = arena.take<T>((kept + 1) * tile);
    weights = arena.take<T>(tile);
    work = arena.take<T>(tile);
    dbias = arena.take<T>(p.dbias.data ? kHeadTile : 0);
    dout = arena.take<T>(rows * p.Dv);
    dq = arena.take<T>(rows * p.D);
    const bool widens = !in_place<T>(p.dtype);
    q_rows = arena.take<T>(widens ? rows * p.D : 0);
    dout_rows = arena.take<T>(widens ? rows * p.Dv : 0);
    values = arena.take<T>(kMixKeys * p.Dv);
    keys = arena.take<T>(kMixKeys * p.D);
    finite = arena.take<T>(kMaxRows * max64(p.D, p.Dv));
    lse = arena.take<T>(rows);
    lse_rest = arena.take<T>(rows);
    delta = arena.take<T>(rows);
  }
};

MHA_ISA_END
