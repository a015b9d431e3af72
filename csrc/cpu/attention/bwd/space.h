// The memory of attention_bwd: what a thread works in, the queries and dQ of a head, and what tasks share.
#pragma once

#include "../../threads/parallel.h"
#include "operands.h"
#include "plan.h"

MHA_ISA_BEGIN

// The queries of a head and what becomes dQ, transposed: of the heads of one thread, or of all its tasks in turn.
template <class Unit>
struct BackwardHead {
  using T = typename Product<Unit>::Acc;
  QueryBlock<T>* blocks;
  QueryScratch<Unit> queries;
  QueryOperands<Unit>* operands;  // [blocks]
  Unit* few_rows;                 // [kFewRows][few_ld]
  T* dq;                          // [blocks][D][kMaxRows]

  BackwardHead(Arena& arena, const AttentionBackward& p, const BackwardPlan&) {
    const int64_t n = ceil_div(p.Sq, kMaxRows);
    blocks = arena.take<QueryBlock<T>>(n);
    queries = take_query_scratch<Unit>(arena, p, n);
    operands = arena.take<QueryOperands<Unit>>(n);
    few_rows = arena.take<Unit>(kPairs<Unit> ? 0 : kFewRows * few_ld<Unit>(int(p.D)));
    dq = arena.take<T>(n * kMaxRows * p.D);
  }
};

// What one thread works in.
template <class Unit>
struct BackwardScratch {
  using T = typename Product<Unit>::Acc;
  using Head = BackwardHead<Unit>;
  KeyOperands<Unit> keys[kPassTiles];
  TileScratch<Unit> tile;
  TileMask<T>* mask;
  Unit* finite;       // rows of one operand of a tile for FiniteRows
  T *dk, *dv;         // [keys of a pass][features], of one head
  double* diagonals;  // [Sq + keys of the chunk - 1]: sums of a head's dS by query less key, where the bias is relative

  BackwardScratch(Arena& arena, const AttentionBackward& p, const BackwardPlan& plan) {
    const int64_t size = kMaxKeys * kMaxRows;
    for (KeyOperands<Unit>& k : keys) k = take_key_operands<Unit>(arena, p);
    tile.s = arena.take<T>(size);
    tile.dp = arena.take<T>(size);
    tile.bias = arena.take<T>(p.bias.data || p.dweights.data ? size : 0);
    tile.factor = arena.take<T>(p.dropout.rng_state ? size : 0);
    const int64_t rounded = kPairs<Unit> ? kPlanes<Unit> * kLanesPlane<Unit> : 0;
    tile.p_rows = arena.take<Unit>(rounded);
    tile.ds_rows = arena.take<Unit>(rounded);
    tile.ds_lanes = arena.take<Unit>(rounded);
    mask = arena.take<TileMask<T>>(1);
    finite = arena.take<Unit>(columns_size<Unit>(std::max(kMaxRows, kMaxKeys), max64(p.D, p.Dv)));
    dk = arena.take<T>(plan.pass_keys * p.D);
    dv = arena.take<T>(plan.pass_keys * p.Dv);
    diagonals = arena.take<double>(p.dbias.data && p.bias_relative ? p.Sq + plan.chunk_keys : 0);
  }
};

// dK and dV of a key/value head, summed over heads so far: of the chunk of a thread, or of all keys in turn.
template <class T>
struct KeySums {
  T *dk, *dv;  // [keys][features]

  KeySums(Arena& arena, const AttentionBackward& p, int64_t keys) {
    dk = arena.take<T>(keys * p.D);
    dv = arena.take<T>(keys * p.Dv);
  }
};

// Of a pass's work with a block, for the simulation: what comes before the wait for dQ's turn, and what is done in it.
struct DqTurn {
  double before, held;
};

// A task's turn at a block of queries.
struct BlockTurn {
  Turn* turn = nullptr;  // null: the task is alone with the head
  Turn* done = nullptr;
  const std::atomic<bool>* stopped = nullptr;
  int64_t free = 0, packed_by_first = 0, mine = 0;  // `done` where it is free for this head; `turn` where its queries
                                                    // are packed, and where this pass may add to dQ
  int64_t passes = 1;                               // that this one stands for
  bool first = true, last = true;                   // of the passes that see something of the block

  void wait_until_free() const {
    if (turn) wait_for(*done, free, *stopped);
  }
  void packed() const {
    if (turn) pass_on(*turn, packed_by_first);
  }
  void wait_until_packed() const {
    if (turn) wait_for(*turn, packed_by_first, *stopped);
  }
  void wait_for_dq() const {
    if (turn) wait_for(*turn, mine, *stopped);
  }
  void pass_dq_on() const {
    if (turn) pass_on(*turn, mine + 1);
  }
  // The block's queries are read no more.
  void leave() const {
    if (turn) count_on(*done, passes);
  }
};

// What the tasks that go by turns share. Numbers of a slot's turns at a block: each head that has the slot takes `step`
// of them: packed, one pass through with dQ, two passes through, ..., and so on to the next head, which begins when all
// passes of this one have left.
struct BackwardTurns {
  int64_t blocks, chunks, step;
  BackwardPasses* passes;       // [B][blocks], worked out once
  Turn *queries, *done, *keys;  // [slots][blocks] both; [key slots][chunks]
  Turn* bias;                   // [dbias that heads have in common][tiles of queries][of keys]: how many have added
  int64_t bias_rows, bias_keys, bias_turns;
  std::atomic<bool>* stopped;

  BackwardTurns(Arena& arena, const AttentionBackward& p, const BackwardPlan& plan)
      : blocks(ceil_div(p.Sq, kMaxRows)), chunks(plan.chunks), step(plan.chunks + 1) {
    bias_rows = ceil_div(p.Sq, plan.bias_tile), bias_keys = ceil_div(p.Sk, plan.bias_tile);
    bias_turns = plan.bias_turns ? plan.bias_owners(p) * bias_rows * bias_keys : 0;
    passes = arena.take<BackwardPasses>(plan.by_turns ? p.B * blocks : 0);
    queries = arena.take<Turn>(plan.slots * blocks);
    done = arena.take<Turn>(plan.slots * blocks);
    keys = arena.take<Turn>(plan.key_slots * plan.chunks);
    bias = arena.take<Turn>(bias_turns);
    stopped = reinterpret_cast<std::atomic<bool>*>(arena.take<Turn>(plan.waits() ? 1 : 0));
  }
  void begin(const Threads& threads, const AttentionBackward& p, const BackwardPlan& plan) const {
    constexpr int64_t kPage = 4096 / sizeof(BackwardPasses);  // as begin_turns
    const int64_t known = plan.by_turns ? p.B * blocks : 0;
    for_each_task(threads, ceil_div(known, kPage), [&](int64_t page, int) {
      for (int64_t n = page * kPage; n < min64(known, (page + 1) * kPage); ++n) {
        const int64_t first = n % blocks * kMaxRows;
        new (passes + n) BackwardPasses(p.mask, n / blocks, first, min64(kMaxRows, p.Sq - first), p.Sk, plan.pass_keys);
      }
    });
    for (Turn* turns : {queries, done}) begin_turns(threads, turns, plan.slots * blocks);
    begin_turns(threads, keys, plan.key_slots * plan.chunks);
    begin_turns(threads, bias, bias_turns);
    new (stopped) std::atomic<bool>(false);
  }
  BlockTurn at(const BackwardTask& t, int64_t block, const BackwardPasses& passes) const {
    const int64_t packed = t.round * step + 1, at = t.slot * blocks + block;
    const bool first = t.chunk == passes.first;
    // The first one stands for those that see nothing, too.
    const int64_t count = first ? 1 + chunks - (passes.last - passes.first) : 1;
    return {queries + at,
            done + at,
            stopped,
            t.round * chunks,
            packed,
            packed + t.chunk - passes.first,
            count,
            first,
            t.chunk + 1 == passes.last};
  }
};

// What tasks share: sums of which a task writes one part, [part][output contiguous], where it does not write the output
// itself, and what is used by turns.
template <class Head>
struct BackwardShared {
  using T = typename Head::T;
  T *dq, *dk, *dv;  // parts: copies of dQ, splits, splits
  T* dbias;         // parts - 1: the first part is dbias itself
  BackwardTurns turns;
  std::size_t head_bytes, sums_bytes;
  char *heads, *sums;  // by turns: Head [slots]; KeySums of all keys [key slots]

  BackwardShared(Arena& arena, const AttentionBackward& p, const BackwardPlan& plan)
      : dq(arena.take<T>(plan.copies() > 1 ? plan.copies() * p.B * p.H * p.Sq * p.D : 0)),
        dk(arena.take<T>(plan.partial_keys() > 1 ? plan.splits * p.B * p.Hk * p.Sk * p.D : 0)),
        dv(arena.take<T>(plan.partial_keys() > 1 ? plan.splits * p.B * p.Hk * p.Sk * p.Dv : 0)),
        dbias(arena.take<T>((plan.parts - 1) * plan.bias_elements)),
        turns(arena, p, plan) {
    Arena head(nullptr), sum(nullptr);
    Head(head, p, plan);
    KeySums<T>(sum, p, p.Sk);
    head_bytes = head.used(), sums_bytes = sum.used();
    heads = arena.take<char>(plan.slots * int64_t(head_bytes));
    sums = arena.take<char>(plan.key_slots * int64_t(sums_bytes));
  }
  Arena head(int64_t slot) const { return Arena(heads + std::size_t(slot) * head_bytes); }
  Arena sum(int64_t slot) const { return Arena(sums + std::size_t(slot) * sums_bytes); }
};

// Where a thread is: its task, and the memory that goes with it.
template <class Head>
class BackwardPlace {
  using T = typename Head::T;

 protected:
  BackwardPlace(const AttentionBackward& p, const BackwardPlan& plan, const BackwardShared<Head>& shared, Arena& own)
      : p_(p), plan_(plan), shared_(shared), head_(own_head(own)), sums_(own_sums(own)) {}

  // Takes what a thread has besides its scratch.
  static void take_own(Arena& own, const AttentionBackward& p, const BackwardPlan& plan,
                       const BackwardShared<Head>& shared) {
    BackwardPlace(p, plan, shared, own);
  }

  // Calls f() once for each task of a unit.
  template <class F>
  void for_each_task_of(const BackwardUnit& unit, F f) {
    dbias_ = p_.dbias;
    if (unit.bias_part > 0)
      dbias_.data = shared_.dbias + (unit.bias_part - 1) * plan_.bias_elements + plan_.bias_origin;
    for (int64_t n = unit.first_shared; n < unit.last_shared; ++n) {
      at_ = plan_.task(unit.owned, n);
      b_ = at_.b, hk_ = at_.hk;
      first_key_ = min64(p_.Sk, at_.chunk * plan_.chunk_keys);
      last_key_ = min64(p_.Sk, first_key_ + plan_.chunk_keys);
      if (plan_.by_turns) {
        Arena head = shared_.head(at_.slot), sums = shared_.sum(plan_.key_slots ? pair() % plan_.key_slots : 0);
        head_ = Head(head, p_, plan_), sums_ = KeySums<T>(sums, p_, p_.Sk);
      }
      f();
    }
  }

  // The task's turn at a block, where the keys from `first` on come next; false where they are nothing to it.
  bool reach(int64_t block, int64_t first, int64_t keys, BlockTurn* turn) const {
    if (!plan_.by_turns) {
      *turn = BlockTurn();
      turn->first = first == first_key_, turn->last = first + keys >= last_key_;
      return true;
    }
    const BackwardPasses& passes = shared_.turns.passes[b_ * shared_.turns.blocks + block];
    if (at_.chunk < passes.first || at_.chunk >= passes.last) return false;
    *turn = shared_.turns.at(at_, block, passes);
    return true;
  }

  // Whether a block sees any of the keys that it will meet here.
  bool sees_keys(const RowBlock& rows) const {
    return plan_.by_turns ? rows.any_begin < rows.any_end : rows.any_begin < last_key_ && rows.any_end > first_key_;
  }

  // Calls f() when head h is next to add to the dbias of a tile, and passes that on.
  template <class F>
  void add_bias(int64_t h, int64_t first_query, int64_t first_key, F f) const {
    if (!plan_.bias_turns) return f();
    const BackwardTurns& turns = shared_.turns;
    const int64_t rows = plan_.bias_owner(p_, b_, h) * turns.bias_rows + first_query / plan_.bias_tile;
    const int64_t number = plan_.bias_number(p_, b_, h);
    Turn& turn = turns.bias[rows * turns.bias_keys + first_key / plan_.bias_tile];
    wait_for(turn, number, *turns.stopped);
    f();
    pass_on(turn, number + 1);
  }
  // The same of tiles that are left out; where a band alone says so, all heads leave them out.
  void skip_bias(int64_t h, int64_t first_query, int64_t rows, int64_t first_key, int64_t keys) const {
    if (!plan_.bias_turns || !(p_.mask.begin || p_.mask.end || p_.mask.elementwise())) return;
    const int64_t last_query = min64(p_.Sq, first_query + rows), last_key = min64(last_key_, first_key + keys);
    for (int64_t query = first_query; query < last_query; query += plan_.bias_tile) {
      for (int64_t key = first_key; key < last_key; key += plan_.bias_tile) add_bias(h, query, key, [] {});
    }
  }

  // Calls f(first, last, dk, dv) when head h is next to add to the sums of its group: whether it is the first and the
  // last head that does so, and the sums of the keys from first_key on.
  template <class F>
  void add_head(int64_t h, int64_t first_key, F f) const {
    const bool turns = plan_.by_turns && plan_.group > 1;
    const int64_t n = turns ? h % plan_.group : h - at_.first_head;
    const int64_t last = turns ? plan_.group : at_.last_head - at_.first_head;
    const int64_t key = turns ? first_key : first_key - first_key_;
    Turn* turn = turns ? shared_.turns.keys + pair() % plan_.key_slots * plan_.chunks + at_.chunk : nullptr;
    const int64_t number = turns ? pair() / plan_.key_slots * plan_.group + n : 0;
    if (turn) wait_for(*turn, number, *shared_.turns.stopped);
    f(n == 0, n + 1 == last, sums_.dk + key * p_.D, sums_.dv + key * p_.Dv);
    if (turn) pass_on(*turn, number + 1);
  }

  // A head's gradient of a relative bias, in `sums`, which has room for the diagonals of its queries and the task's
  // keys: begin, add tile [key][row], and store.
  int64_t diagonals() const {
    const bool some = p_.dbias.data && p_.bias_relative && p_.Sq > 0 && first_key_ < last_key_;
    return some ? p_.Sq + last_key_ - first_key_ - 1 : 0;
  }
  void begin_diagonals(double* sums) const { std::fill_n(sums, diagonals(), 0.0); }
  void store_diagonals_of(double* sums, int64_t h) const {
    if (diagonals() == 0) return;
    store_diagonals<T>(dbias_, sums, b_, h, 0, p_.Sq, first_key_, last_key_ - first_key_);
  }
  // A tile's gradient of the bias.
  void add_bias_gradient(T* tile, const RowBlock& rows, int64_t first_key, int keys, double* sums) const {
    if (!p_.bias_relative) return add_tile(dbias_, tile, rows, first_key, keys);
    add_diagonals(sums + rows.query[0] + (last_key_ - 1 - first_key), tile, rows.rows, keys);
  }

  const AttentionBackward& p_;
  const BackwardPlan& plan_;
  const BackwardShared<Head>& shared_;
  BackwardTask at_{};
  Head head_;
  KeySums<T> sums_;  // of the group's heads; where a task has one head that is alone in its group, nothing
  int64_t b_ = 0, hk_ = 0, first_key_ = 0, last_key_ = 0;
  Tensor4 dbias_;

 private:
  Head own_head(Arena& own) const {
    Arena none(nullptr);
    return Head(plan_.by_turns ? none : own, p_, plan_);
  }
  KeySums<T> own_sums(Arena& own) const { return KeySums<T>(own, p_, plan_.heads > 1 ? plan_.chunk_keys : 0); }
  int64_t pair() const { return b_ * p_.Hk + hk_; }
};

MHA_ISA_END
