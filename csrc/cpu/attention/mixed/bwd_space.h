// How attention backward with talking heads cuts its work, and the memory that it works in.
#pragma once

#include "../bwd/plan.h"
#include "tile.h"

MHA_ISA_BEGIN

// A task is a block of queries with all its heads. Tasks go in order: the last blocks of all sequences, which under a
// causal mask see most keys, then those before them, and so on; and in this order they add to dK, dV and dbias.
struct MixedBackwardPlan {
  int64_t blocks, tasks;
  bool bias_diagonals;      // tasks meet in a relative dbias: each sums its own, and adds that at its end
  int64_t bias_step;        // tasks meet in another dbias: each adds after the one so many before it; 0: they don't
  bool bias_across_blocks;  // blocks of a sequence do, too
  bool bias_by_keys;        // it has elements for each key; else a row's keys share one

  explicit MixedBackwardPlan(const AttentionBackward& p) : blocks(ceil_div(p.Sq, kMaxRows)), tasks(p.B * blocks) {
    const Tensor4& dbias = p.dbias;
    const bool batch = dbias.data && dbias.stride[0] == 0 && p.B > 1;
    const bool queries = dbias.data && dbias.stride[2] == 0 && blocks > 1;
    bias_diagonals = dbias.data && p.bias_relative && (batch || blocks > 1);
    bias_step = bias_diagonals || !(batch || queries) ? 0 : batch ? 1 : p.B;
    bias_across_blocks = queries;
    bias_by_keys = dbias.stride[3] != 0;
  }
};

// A task's turn at sums over queries, to which tasks add from the first key on, each behind the one `step` before it.
// Turns are by tasks: the keys to which one has added, and all before it.
class KeyTurn {
 public:
  KeyTurn() = default;
  KeyTurn(Turn* turns, int64_t task, int64_t step, int64_t first, const std::atomic<bool>& stopped)
      : turns_(turns), mine_(task), before_(task - step), step_(step), first_(first), stopped_(&stopped) {}

  // Until all tasks before have added to the keys below `end`.
  void wait(int64_t end) {
    for (; step_ > 0 && before_ >= first_; before_ -= step_) {
      wait_for(turns_[before_], end, *stopped_);
      if (turns_[before_].now.load(std::memory_order_acquire) != kAll) return;
    }
  }
  void pass(int64_t end) const {
    if (step_ > 0) pass_on(turns_[mine_], end);
  }
  // This task adds no more, whatever those before it do: who comes later asks them.
  void finish() const { pass(kAll); }

  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

 private:
  Turn* turns_ = nullptr;
  int64_t mine_ = 0, before_ = -1, step_ = 0, first_ = 0;
  const std::atomic<bool>* stopped_ = nullptr;
};

// What tasks share. Small sums that each task has for itself lie on lines of their own.
template <class T>
struct MixedBackwardShared {
  T *dk, *dv;                              // [B][Hk][Sk][size]
  double *dpre, *dpost;                    // [tasks][mix]
  double* dsinks;                          // [tasks][heads]
  int64_t mix, heads;                      // H * H and H, rounded up
  Turn *dk_turns, *dv_turns, *bias_turns;  // [tasks]
  Turn* diagonals_turn;                    // the number of the task that adds next

  MixedBackwardShared(Arena& arena, const AttentionMixedBackward& p, const MixedBackwardPlan& plan)
      : mix(whole_lines(p.H * p.H)), heads(whole_lines(p.H)) {
    dk = arena.take<T>(p.B * p.Hk * p.Sk * p.D);
    dv = arena.take<T>(p.B * p.Hk * p.Sk * p.Dv);
    dpre = arena.take<double>(p.pre_mix ? plan.tasks * mix : 0);
    dpost = arena.take<double>(p.post_mix ? plan.tasks * mix : 0);
    dsinks = arena.take<double>(p.dsinks ? plan.tasks * heads : 0);
    dk_turns = arena.take<Turn>(plan.tasks);
    dv_turns = arena.take<Turn>(plan.tasks);
    bias_turns = arena.take<Turn>(plan.bias_step > 0 ? plan.tasks : 0);
    diagonals_turn = arena.take<Turn>(1);
  }
  static int64_t whole_lines(int64_t doubles) { return ceil_div(doubles, 8) * 8; }

  // All turns as they begin, and zeros in dk and dv.
  void begin(const Threads& threads, const AttentionMixedBackward& p, const MixedBackwardPlan& plan) const {
    constexpr int64_t kRun = 4096;
    for (auto [sums, size] : {std::pair(dk, p.B * p.Hk * p.Sk * p.D), {dv, p.B * p.Hk * p.Sk * p.Dv}}) {
      for_each_task(threads, ceil_div(size, kRun), [&, sums = sums, size = size](int64_t task, int) {
        std::fill_n(sums + task * kRun, min64(kRun, size - task * kRun), T(0));
      });
    }
    for (Turn* turns : {dk_turns, dv_turns}) begin_turns(threads, turns, plan.tasks);
    begin_turns(threads, bias_turns, plan.bias_step > 0 ? plan.tasks : 0);
    begin_turns(threads, diagonals_turn, 1);
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
  T* diagonals;               // [H][Sk + kMaxRows]: of the block, where tasks meet in a relative dbias
  T *dout, *dq;               // [H][Dv][kMaxRows], [H][D][kMaxRows]
  T *q_rows, *dout_rows;      // a block of one head, if it must be widened
  T *values, *keys, *finite;  // a tile
  T *lse, *lse_rest, *delta;  // [H][kMaxRows]

  MixedBackwardScratch(Arena& arena, const AttentionMixedBackward& p, const MixedBackwardPlan& plan)
      : scores(arena, p, p.pre_mix), kept(kept_tiles<T>(p, 2)) {
    const int64_t tile = p.H * kHeadTile, rows = p.H * kMaxRows;
    capped = arena.take<T>((kept + 1) * tile);
    dweights = arena.take<T>((kept + 1) * tile);
    weights = arena.take<T>(tile);
    work = arena.take<T>(tile);
    dbias = arena.take<T>(p.dbias.data ? kHeadTile : 0);
    diagonals = arena.take<T>(plan.bias_diagonals ? p.H * (p.Sk + kMaxRows) : 0);
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
