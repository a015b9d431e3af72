// Attention backward, blocked: the scores are recomputed tile by tile, nothing of size Sq x Sk is stored.
//
//   S^T = K Q^T    dP^T = V dO^T    P = exp(S - lse)    dS = P * (dP - delta)
//   dQ^T += K^T dS^T    dK += dS^T Q    dV += P^T dO
//
// Queries lie in vector lanes in the first two and dQ, features in dK and dV; each is a product of product/gemm.h. The
// queries of a head are laid out once, by the first pass over some keys that meets them; in a pass, query blocks are
// the outer loop and its few key tiles the inner one.
#pragma once

#include "../product/gemm.h"
#include "../tile/finite_rows.h"
#include "bwd/operands.h"
#include "bwd/space.h"
#include "bwd/sums.h"
#include "bwd/tile.h"
#ifdef MHA_HAS_AMX
#include "amx/bwd.h"
#endif
#include "../threads/parallel.h"
#include "../tile/sequence.h"

MHA_ISA_BEGIN

// One thread's work.
template <class Unit, int Degree>
class BackwardWorker : BackwardPlace<BackwardHead<Unit>> {
  using T = typename Product<Unit>::Acc;
  using Place = BackwardPlace<BackwardHead<Unit>>;
  using Place::p_, Place::plan_, Place::shared_, Place::at_, Place::head_, Place::b_, Place::hk_, Place::first_key_,
      Place::last_key_, Place::dbias_;
  static constexpr int L = Vec<T>::lanes;

 public:
  using Scratch = BackwardScratch<Unit>;

  // Of a pass's five products with a block: two come before the wait for dQ's turn, two after it is passed on.
  static constexpr int kBlocksAtOnce = 1;
  static constexpr int kBiasTile = kMaxKeys;
  static constexpr int64_t visits(int64_t) { return 1; }
  static constexpr DqTurn dq_turn(double tiles) { return {0.4 / tiles, 1 - 0.8 / tiles}; }

  BackwardWorker(const AttentionBackward& p, const BackwardPlan& plan, const BackwardShared<BackwardHead<Unit>>& shared,
                 Arena arena)
      : Place(p, plan, shared, arena), s_(arena, p, plan), plain_(plain_scores(p) && ScoreRule<T>(p).raw) {}

  static std::size_t bytes(const AttentionBackward& p, const BackwardPlan& plan,
                           const BackwardShared<BackwardHead<Unit>>& shared) {
    Arena own(nullptr);
    Place::take_own(own, p, plan, shared);
    Scratch(own, p, plan);
    return own.used();
  }

  void run(const BackwardUnit& unit) {
    this->for_each_task_of(unit, [&] {
      for (int64_t h = at_.first_head; h < at_.last_head; ++h) run_head(h);
    });
  }

 private:
  void run_head(int64_t h) {
    this->begin_diagonals(s_.diagonals);
    int64_t first = first_key_;
    do {
      run_pass(h, first, min64(plan_.pass_keys, last_key_ - first));
    } while ((first += plan_.pass_keys) < last_key_);
    this->store_diagonals_of(s_.diagonals, h);
  }

  // The keys from `first` on against the head's queries, the last ones first: under a causal mask passes that begin
  // together then meet the same block one after the other.
  void run_pass(int64_t h, int64_t first, int64_t keys) {
    std::fill_n(s_.dk, keys * p_.D, T(0));
    std::fill_n(s_.dv, keys * p_.Dv, T(0));
    pass_key_ = first;
    bool loaded[kPassTiles] = {};
    for (int64_t n = ceil_div(p_.Sq, kMaxRows); n-- > 0;) {
      if (!this->reach(n, first, keys, &turn_)) {
        this->skip_bias(h, n * kMaxRows, kMaxRows, first, keys);
        continue;
      }
      if (turn_.first) {
        turn_.wait_until_free();
        load_queries(h, int(n));
        turn_.packed();
      } else {
        turn_.wait_until_packed();
      }
      last_tile_ = false;
      for (int64_t t = 0; t * kMaxKeys < keys; ++t) {
        const int64_t key = first + t * kMaxKeys;
        const int tile_keys = int(min64(kMaxKeys, first + keys - key));
        const TileKind kind = classify(s_.mask, p_.mask, head_.blocks[n].rows, key, tile_keys);
        if (kind == TileKind::none) {
          this->skip_bias(h, n * kMaxRows, kMaxRows, key, tile_keys);
          continue;
        }
        if (!loaded[t]) load_keys<T>(s_.keys[t], p_, b_, hk_, key, tile_keys);
        loaded[t] = true;
        last_tile_ = key + tile_keys >= first + keys;
        run_tile(int(n), s_.keys[t], kind == TileKind::all ? nullptr : s_.mask, key, tile_keys);
      }
      if (!last_tile_) finish_dq(h, int(n));
      turn_.leave();
    }
    finish_keys(h, first, keys);
  }

  // This pass adds no more to dQ of a block: the next one may.
  void finish_dq(int64_t h, int n) {
    turn_.wait_for_dq();
    if (turn_.last) finish_queries(h, n);
    turn_.pass_dq_on();
  }

  // Units of a plane of q_lanes and dout_lanes.
  int64_t q_plane() const { return int64_t(units<Unit>(int(p_.D))) * kMaxRows; }
  int64_t dout_plane() const { return int64_t(units<Unit>(int(p_.Dv))) * kMaxRows; }

  void load_queries(int64_t h, int n) {
    const int64_t first = int64_t(n) * kMaxRows, D = p_.D, Dv = p_.Dv;
    const int rows = int(min64(kMaxRows, p_.Sq - first));
    QueryBlock<T>& block = head_.blocks[n];
    set_rows(&block.rows, p_.mask, b_, h, first, rows, p_.Sq, p_.Sk);
    T* dq = head_.dq + n * kMaxRows * D;
    for (int64_t d = 0; d < D; ++d) std::fill_n(dq + d * kMaxRows, round_up(rows, L), T(0));
    if (!this->sees_keys(block.rows)) return;
    if constexpr (!kPairs<Unit>) {
      block.few_begin = few_from(p_, h, first, rows);
      int64_t offset[kMaxRows];
      for (int r = block.few_begin; r < rows; ++r) offset[r - block.few_begin] = r * p_.q.stride[2];
      const void* src = first_row(p_.q, p_.dtype, block.rows);
      if (block.few_begin < rows) few_queries(head_.few_rows, src, p_.dtype, offset, rows - block.few_begin, int(D));
    }
    const QueryScratch<Unit>& q = head_.queries;
    QueryOperands<Unit>& to = head_.operands[n];
    const int planes = n * kPlanes<Unit>;  // before this block's
    to.q_lanes = q.q_lanes + planes * q_plane();
    to.dout_lanes = q.dout_lanes + planes * dout_plane();
    to.q_rows = load_rows(p_.q, p_.dtype, block.rows, int(D), const_cast<Unit*>(to.q_lanes),
                          q.q_rows + planes * units<Unit>(kMaxRows) * D, copies_rows<Unit>(p_));
    to.dout_rows = load_rows(p_.dout, p_.dtype, block.rows, int(Dv), const_cast<Unit*>(to.dout_lanes),
                             q.dout_rows + planes * units<Unit>(kMaxRows) * Dv, copies_rows<Unit>(p_));
    if constexpr (kPairs<Unit>) {
      block.finite =
          rows_finite<T>(p_.q, p_.dtype, block.rows, int(D)) && rows_finite<T>(p_.dout, p_.dtype, block.rows, int(Dv));
    } else {
      block.finite = all_finite<T>(to.q_rows.b, to.q_rows.ld, rows, int(D)) &&
                     all_finite<T>(to.dout_rows.b, to.dout_rows.ld, rows, int(Dv));
    }
    row_dots(p_, block.rows, block.delta);
    load_statistics(block, p_, b_ * p_.rows_stride_b + h * p_.rows_stride_h + first);
  }

  void run_tile(int n, const KeyOperands<Unit>& k, const TileMask<T>* mask, int64_t first_key, int keys) {
    const QueryBlock<T>& block = head_.blocks[n];
    const QueryOperands<Unit>& q = head_.operands[n];
    const int rows = block.rows.rows, lanes = round_up(rows, L), D = int(p_.D), Dv = int(p_.Dv);
    if (mask)
      strips_.take(*mask, lanes, keys);
    else
      strips_.take_whole(lanes, keys);
    const Ahead bias = bias_ahead(p_.bias, p_.bias_dtype, block.rows, first_key, keys);
    Ahead dbias = plan_.bias_turns ? Ahead()  // another thread may be at it
                                   : bias_ahead(dbias_, accumulate_type(p_.dtype), block.rows, first_key, keys);
    dbias.to_write = true;
    const int first = strips_.by_keys[0].first;  // whose products fetch for the whole tile
    strips_.for_each_by_keys([&](const Strip& t) {
      const int at = t.first * kMaxRows + t.begin, width = t.end - t.begin;
      gemm<Unit>(t.keys, width, units<Unit>(D), k.k.a + t.first * k.k.am, k.k.am, k.k.ak, q.q_lanes + t.begin, kMaxRows,
                 s_.tile.s + at, kMaxRows, Start::zero, nullptr, {k.k.plane, q_plane(), true},
                 t.first == first ? bias : Ahead());
      gemm<Unit>(t.keys, width, units<Unit>(Dv), k.v.a + t.first * k.v.am, k.v.am, k.v.ak, q.dout_lanes + t.begin,
                 kMaxRows, s_.tile.dp + at, kMaxRows, Start::zero, nullptr, {k.v.plane, dout_plane()},
                 t.first == first ? dbias : Ahead());
    });
    if constexpr (!kPairs<Unit>) {
      if (block.few_begin < rows)
        few_scores(k.k.a, k.k.am, keys, D, head_.few_rows, few_ld<Unit>(D), rows - block.few_begin,
                   s_.tile.s + block.few_begin, ReadAhead(Ahead(), keys, nullptr, 0));
    }
    if constexpr (kPlanes<Unit> > 1) {
      if (!block.finite || !k.finite || !k.finite_v) repair(block.rows, k, keys);
    }
    const TileOperands<Unit> t = !plain_ ? general_tile<Unit, Degree>(s_.tile, p_, block, mask, first_key, keys)
                                 : mask  ? plain_tile<Unit, Degree, true>(s_.tile, block, p_.scale, mask, keys)
                                         : plain_tile<Unit, Degree, false>(s_.tile, block, p_.scale, mask, keys);
    if (p_.dbias.data) {
      this->add_bias(block.rows.head[0], block.rows.query[0], first_key,
                     [&] { this->add_bias_gradient(s_.tile.bias, block.rows, first_key, keys, s_.diagonals); });
    }
    add_products(n, k, t, mask, first_key, keys);
  }

  void repair(const RowBlock& rows, const KeyOperands<Unit>& k, int keys) {
    auto rows_of = [&](const void* first, const Tensor4& x) {
      return [=, this](int i) { return element(first, p_.dtype, i * x.stride[2]); };
    };
    auto repair_one = [&](T* product, const void* key, const Tensor4& keys_of, const Tensor4& queries_of,
                          int64_t cols) {
      repair_products(product, rows_of(key, keys_of), keys, rows_of(first_row(queries_of, p_.dtype, rows), queries_of),
                      rows.rows, p_.dtype, p_.dtype, int(cols));
    };
    repair_one(s_.tile.s, k.k_rows, p_.k, p_.q, p_.D);
    repair_one(s_.tile.dp, k.v_rows, p_.v, p_.dout, p_.Dv);
  }

  // The products of one tile: dQ, dK, dV. mask is null when all is visible.
  void add_products(int n, const KeyOperands<Unit>& k, const TileOperands<Unit>& t, const TileMask<T>* mask,
                    int64_t first_key, int keys) {
    const QueryBlock<T>& block = head_.blocks[n];
    const int rows = block.rows.rows, lanes = round_up(rows, L), D = int(p_.D), Dv = int(p_.Dv);
    T* dq = head_.dq + int64_t(n) * kMaxRows * D;
    T* dk = s_.dk + (first_key - pass_key_) * D;
    T* dv = s_.dv + (first_key - pass_key_) * Dv;
    FiniteRows<Unit> finite_k, finite_q, finite_dout;

    Broadcast<Unit> features = k.k_features;
    if (mask && !k.finite) features = finite_k.take(k.k_rows, p_.dtype, p_.k.stride[2], keys, D, s_.finite);
    turn_.wait_for_dq();
    strips_.for_each_by_rows([&](const Strip& strip) {
      const int64_t first = strip.first / kUnitK<Unit>;
      gemm<Unit>(D, strip.end - strip.begin, units<Unit>(strip.keys), features.a + first * features.ak, features.am,
                 features.ak, t.ds_lanes + first * kMaxRows + strip.begin, kMaxRows, dq + strip.begin, kMaxRows,
                 Start::add, nullptr, {features.plane, kLanesPlane<Unit>});
    });
    if (mask) finite_k.add_keys(dq, s_.tile.dp, *mask, lanes);
    if (last_tile_) finish_dq(block.rows.head[0], n);

    auto rows_of = [&](FiniteRows<Unit>& finite, const Tensor4& x, int cols, const RowsOperand<Unit>& as_they_are) {
      if (!mask || block.finite) return as_they_are;
      const void* first = first_row(x, p_.dtype, block.rows);
      const Broadcast<Unit> clean = finite.take(first, p_.dtype, x.stride[2], rows, cols, s_.finite, Side::b);
      return RowsOperand<Unit>{clean.a, clean.ak, clean.plane};
    };
    const RowsOperand<Unit> q = rows_of(finite_q, p_.q, D, head_.operands[n].q_rows);
    add_rows(t.ds, q, rows, dk, D);
    if (mask) finite_q.add_queries(dk, s_.tile.dp, *mask, keys);

    const RowsOperand<Unit> dout = rows_of(finite_dout, p_.dout, Dv, head_.operands[n].dout_rows);
    add_rows(t.p, dout, rows, dv, Dv);
    if (mask) finite_dout.add_queries(dv, s_.tile.s, *mask, keys);
  }

  // sum[key][column] += weight[key][query] * row[query][column]
  void add_rows(const Broadcast<Unit>& weight, const RowsOperand<Unit>& row, int rows, T* sum, int cols) {
    strips_.for_each_by_keys([&](const Strip& t) {
      const int64_t first = t.begin / kUnitK<Unit>;
      gemm<Unit>(t.keys, cols, units<Unit>(std::min(t.end, rows) - t.begin),
                 weight.a + t.first * weight.am + first * weight.ak, weight.am, weight.ak, row.b + first * row.ld,
                 row.ld, sum + t.first * cols, cols, Start::add, nullptr, {weight.plane, row.plane});
    });
  }

  void finish_queries(int64_t h, int n) {
    const int64_t first = int64_t(n) * kMaxRows, D = p_.D;
    const int rows = int(min64(kMaxRows, p_.Sq - first));
    T* dq = head_.dq + n * kMaxRows * D;
    const Vec<T> scale = set1(T(p_.scale));
    for (int64_t i = 0; i < kMaxRows * D; i += kMaxRows)
      for (int r = 0; r < rows; r += L) store(dq + i + r, load(dq + i + r) * scale);
    const bool whole = plan_.copies() == 1;
    int64_t offset[kMaxRows];
    for (int r = 0; r < rows; ++r) offset[r] = r * (whole ? p_.dq.stride[2] : D);
    if (whole) {
      const int64_t corner = b_ * p_.dq.stride[0] + h * p_.dq.stride[1] + first * p_.dq.stride[2];
      untranspose_rows(element(p_.dq.data, p_.dtype, corner), p_.dtype, offset, dq, kMaxRows, rows, int(D));
    } else {
      T* part = shared_.dq + (((at_.chunk * p_.B + b_) * p_.H + h) * p_.Sq + first) * D;
      untranspose_rows(part, offset, dq, kMaxRows, rows, int(D));
    }
  }

  // dK and dV of the pass's keys, of this head or, with it, of all its group.
  void finish_keys(int64_t h, int64_t first, int64_t keys) {
    this->add_head(h, first, [&](bool is_first, bool is_last, T* dk, T* dv) {
      if (!is_first) add_sums(dk, s_.dk, keys * p_.D), add_sums(dv, s_.dv, keys * p_.Dv);
      if (is_last) {
        store_keys(p_.dk, shared_.dk, is_first ? s_.dk : dk, first, keys, p_.D, T(p_.scale));
        store_keys(p_.dv, shared_.dv, is_first ? s_.dv : dv, first, keys, p_.Dv, T(1));
      } else if (is_first) {
        std::memcpy(dk, s_.dk, size_t(keys * p_.D) * sizeof(T));
        std::memcpy(dv, s_.dv, size_t(keys * p_.Dv) * sizeof(T));
      }
    });
  }

  static void add_sums(T* sum, const T* more, int64_t n) {
    int64_t i = 0;
    for (; i + L <= n; i += L) store(sum + i, load(sum + i) + load(more + i));
    if (i < n) store_n(sum + i, load_n(sum + i, int(n - i)) + load_n(more + i, int(n - i)), int(n - i));
  }

  void store_keys(const Tensor4& out, T* parts, const T* sum, int64_t first, int64_t keys, int64_t cols, T scale) {
    if (plan_.partial_keys() > 1) {
      T* part = parts + (((at_.split * p_.B + b_) * p_.Hk + hk_) * p_.Sk + first) * cols;
      for (int64_t i = 0; i < keys * cols; ++i) part[i] = sum[i] * scale;
      return;
    }
    with_storage<T>(p_.dtype, [&](auto* s) {
      using S = std::remove_const_t<std::remove_pointer_t<decltype(s)>>;
      S* to = static_cast<S*>(out.data) + b_ * out.stride[0] + hk_ * out.stride[1] + first * out.stride[2];
      const Ahead rows{to, out.stride[2] * int64_t(sizeof(S)), cols * int64_t(sizeof(S)), int(keys), true};
      for (int64_t j = 0; j < keys; ++j, to += out.stride[2], sum += cols) {
        if (j + kWriteAhead < keys) rows.fetch(int(j + kWriteAhead));
        for (int64_t c = 0; c < cols; c += L) {
          const int lanes = int(min64(L, cols - c));
          store_n(to + c, load_n(sum + c, lanes) * set1(scale), lanes);
        }
      }
    });
  }

  Scratch s_;
  const bool plain_;
  Strips<Unit> strips_;
  ProductState<Unit> products_;
  BlockTurn turn_;
  int64_t pass_key_ = 0;    // the first key of the pass
  bool last_tile_ = false;  // of the pass
};

// Calls f.operator()<Worker, Head>().
template <class Unit, int Degree, class F>
void with_worker([[maybe_unused]] const AttentionBackward& p, F f) {
#ifdef MHA_HAS_AMX
  if constexpr (kPairs<Unit>) {
    constexpr int N = kPlanes<Unit>;
    if (on_tiles(p)) return f.template operator()<AmxBackwardWorker<N>, AmxBackwardHead<N>>();
  }
#endif
  f.template operator()<BackwardWorker<Unit, Degree>, BackwardHead<Unit>>();
}

template <class Unit, int Degree>
std::size_t backward_workspace(const AttentionBackward& p, int threads) {
  std::size_t bytes = 0;
  with_worker<Unit, Degree>(p, [&]<class Worker, class Head>() {
    const BackwardPlan plan(p, threads, Worker::kBiasTile);
    Arena all(nullptr);
    const BackwardShared<Head> shared(all, p, plan);
    bytes = all.used() + std::size_t(threads) * Worker::bytes(p, plan, shared);
  });
  return bytes;
}

// All tasks.
template <class Worker, class Head>
void run_tasks(const AttentionBackward& p, const BackwardPlan& plan, const BackwardShared<Head>& shared,
               const Threads& threads, char* scratch) {
  const std::size_t own = Worker::bytes(p, plan, shared);
  auto run_unit = [&](int64_t n, int thread) {
    Worker(p, plan, shared, Arena(scratch + std::size_t(thread) * own)).run(plan.unit(n));
  };
  if (!plan.waits()) return for_each_task(threads, plan.units(), run_unit, plan.share());
  shared.turns.begin(threads, p, plan);
  for_each_task_by_turns(threads, plan.units(), *shared.turns.stopped, run_unit);
}

template <class Unit, int Degree>
void run_backward(const AttentionBackward& p, const Threads& threads, void* workspace) {
  with_worker<Unit, Degree>(p, [&]<class Worker, class Head>() {
    using T = typename Head::T;
    const BackwardPlan plan(p, threads.count, Worker::kBiasTile);
    Arena all(workspace);
    const BackwardShared<Head> shared(all, p, plan);
    // Calls f(part of dbias, first element, elements).
    auto for_each_bias_part = [&](auto f) {
      constexpr int64_t kRun = 4096;
      const int64_t size = plan.bias_elements;
      if (plan.parts == 1) return;
      for_each_task(threads, ceil_div(size, kRun), [&](int64_t task, int) {
        const int64_t first = task * kRun;
        for (int64_t n = 1; n < plan.parts; ++n)
          f(shared.dbias + (n - 1) * size + first, first, min64(kRun, size - first));
      });
    };
    for_each_bias_part([](T* part, int64_t, int64_t n) { std::fill_n(part, n, T(0)); });
    run_tasks<Worker>(p, plan, shared, threads, static_cast<char*>(workspace) + all.used());
    if (plan.copies() > 1) sum_parts(threads, p.dq, p.dtype, p.B, p.H, p.Sq, p.D, shared.dq, plan.copies());
    if (plan.partial_keys() > 1) {
      sum_parts(threads, p.dk, p.dtype, p.B, p.Hk, p.Sk, p.D, shared.dk, plan.splits);
      sum_parts(threads, p.dv, p.dtype, p.B, p.Hk, p.Sk, p.Dv, shared.dv, plan.splits);
    }
    for_each_bias_part([&](const T* part, int64_t first, int64_t n) {
      T* sum = static_cast<T*>(p.dbias.data) - plan.bias_origin + first;
      for (int64_t i = 0; i < n; ++i) sum[i] += part[i];
    });
    if (p.dsinks) add_sink_gradients<T>(p, threads);
  });
}

// Calls f.operator()<Unit, Degree>(), as forward does.
template <class F>
auto with_backward_unit(const AttentionBackward& p, F f) {
  if (p.dtype == DType::f64) return f.template operator()<double, 5>();
  if (p.dtype == DType::f32) return f.template operator()<float, 5>();
#ifdef MHA_HAS_BF16_DOT
  if (p.dtype == DType::bf16) return f.template operator()<Pair, 4>();
#endif
#ifdef MHA_HAS_AMX
  return f.template operator()<Pairs<2>, 4>();
#endif
  return f.template operator()<float, 4>();
}

inline void attention_bwd(const AttentionBackward& p, const Threads& threads, void* workspace) {
  for_each_sequence(p, [&](const AttentionBackward& s) {
    with_backward_unit(s, [&]<class Unit, int Degree>() { run_backward<Unit, Degree>(s, threads, workspace); });
  });
}

inline std::size_t sequence_bwd_workspace(const AttentionBackward& p, int threads) {
  return with_backward_unit(p, [&]<class Unit, int Degree>() { return backward_workspace<Unit, Degree>(p, threads); });
}

inline std::size_t attention_bwd_workspace(const AttentionBackward& p, int threads) {
  std::size_t bytes = 0;
  for_each_sequence(p,
                    [&](const AttentionBackward& s) { bytes = std::max(bytes, sequence_bwd_workspace(s, threads)); });
  return bytes;
}

MHA_ISA_END
