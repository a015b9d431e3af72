// Attention backward on AMX tiles.
//
// The products are those of attention/bwd.h. What is different is their order: a load and a store of a tile of sums
// costs as much as four products, more where sums come from the second-level cache. So keys and queries come in spans,
// and a sum over a span's queries (dK, dV) or keys (dQ) is made in one go:
//
//   for each run of 32 keys of a span: S and dP, P and dS for all queries of a span; dK and dV of these keys
//   then dQ of these queries
//
// Where tasks go by turns (BackwardPlan), a pass over some keys is a span of its own.
//
// All operands are packed once per head as whole tiles (operands.h). Rows of K, Q and dO that hold NaN or Inf are 0
// there, and what they add is added pair by pair, to those who see them.
#pragma once

#include "../../tile/finite_rows.h"
#include "bwd_results.h"

MHA_ISA_BEGIN

// A run of queries that sees some of a run of keys.
struct SeeingRun {
  int run;  // in its span
  RunMask mask;
};

template <int N>
class AmxBackwardWorker : AmxBackwardResults<N> {
  using Place = BackwardPlace<AmxBackwardHead<N>>;
  using Results = AmxBackwardResults<N>;
  using Place::first_key_, Place::last_key_;
  using Results::p_, Results::plan_, Results::shared_, Results::at_, Results::head_, Results::b_, Results::hk_;
  using Results::s_, Results::keys_begun_, Results::span_key_, Results::begin;

 public:
  using Scratch = AmxBackwardScratch<N>;

  // A pass visits the blocks of a span for each run of its keys, and adds to the bias then; dQ comes last, block after
  // block.
  static constexpr int kBlocksAtOnce = kSpanBlocks;
  static constexpr int kBiasTile = kRun;
  static constexpr int64_t visits(int64_t pass_keys) { return pass_keys / kRun; }
  static constexpr DqTurn dq_turn(double) { return {0.8, 0.2}; }

  AmxBackwardWorker(const AttentionBackward& p, const BackwardPlan& plan,
                    const BackwardShared<AmxBackwardHead<N>>& shared, Arena arena)
      : Results(p, plan, shared, arena), modified_(is_modified(p)) {
    s_.s_steps.template set<N>(s_.d, s_.k_rows, head_.q_lanes, true);
    s_.dp_steps.template set<N>(s_.dv_runs, s_.v_rows, head_.dout_lanes, false);
  }

  static std::size_t bytes(const AttentionBackward& p, const BackwardPlan& plan,
                           const BackwardShared<AmxBackwardHead<N>>& shared) {
    Arena own(nullptr);
    Place::take_own(own, p, plan, shared);
    AmxBackwardScratch<N>(own, p, plan);
    return own.used();
  }

  void run(const BackwardUnit& unit) {
    this->for_each_task_of(unit, [&] {
      std::fill_n(s_.keys_held, s_.held_runs / kKeyRuns, uint8_t(0));
      for (int64_t h = at_.first_head; h < at_.last_head; ++h) run_head(h);
    });
  }

 private:
  void run_head(int64_t h) {
    this->begin_diagonals(s_.diagonals);
    span_key_ = first_key_;
    do {
      const int64_t keys = min64(kSpanKeys, last_key_ - span_key_);
      held_ = plan_.heads > 1 ? (span_key_ - first_key_) / kRun : 0;
      if (plan_.heads <= 1) s_.keys_held[0] = 0;
      std::fill_n(keys_begun_, kKeyRuns, uint8_t(0));
      for (int64_t n = ceil_div(head_.blocks, kSpanBlocks); n-- > 0;) run_span(h, n * kSpanBlocks, keys);
      this->finish_keys(h, keys);
    } while ((span_key_ += kSpanKeys) < last_key_);
    this->store_diagonals_of(s_.diagonals, h);
  }

  void load_queries(int64_t h, int64_t n) {
    const int64_t first = n * kMaxRows;
    const int rows = int(min64(kMaxRows, p_.Sq - first));
    QueryBlock<float>& block = head_.block[n];
    set_rows(&block.rows, p_.mask, b_, h, first, rows, p_.Sq, p_.Sk);
    head_.begun(2 * n) = head_.begun(2 * n + 1) = 0;
    if (!this->sees_keys(block.rows)) return;
    for (int half = 0; half < 2; ++half) {
      const int64_t run = 2 * n + half;
      const int count = std::clamp(rows - half * kRun, 0, kRun);
      auto pack = [&](const Tensor4& x, const TilePairs& lanes, const TilePairs& features, int64_t cols) {
        const void* src = element(first_row(x, p_.dtype, block.rows), p_.dtype, half * kRun * x.stride[2]);
        PackedRun to;
        to.lanes = lanes.from(run * runs(cols) * 2);
        to.features = {features.tiles + run * 2, head_.query_runs * 2, features.plane};
        return pack_run<N>(to, src, x.stride[2], count, int(cols)).not_finite;
      };
      head_.q_left_out[run] = pack(p_.q, head_.q_lanes, head_.q_features, p_.D);
      head_.dout_left_out[run] = pack(p_.dout, head_.dout_lanes, head_.dout_features, p_.Dv);
      if (head_.rows) take_rows(head_.rows + run, block.rows, half * kRun, count);
    }
    row_dots(p_, block.rows, block.delta);
    load_statistics(block, p_, b_ * p_.rows_stride_b + h * p_.rows_stride_h + first);
    // Dropout multiplies dP before delta is subtracted.
    for (int r = 0; r < kMaxRows; ++r) head_.minus_delta[first + r] = p_.dropout.rng_state ? 0.0f : -block.delta[r];
  }

  void load_keys() {
    s_.keys_held[held_ / kKeyRuns] = 1;
    for (int64_t run = held_; run < held_ + kKeyRuns; ++run) {
      const int64_t first = span_key_ + (run - held_) * kRun;
      if (first >= last_key_) break;
      const int keys = int(min64(kRun, last_key_ - first));
      PackedRun k, v;
      k.rows = s_.k_rows.from(run * s_.d * 2);
      k.down = {s_.k_down.tiles + run * 2, s_.held_runs * 2, s_.k_down.plane};
      v.rows = s_.v_rows.from(run * s_.dv_runs * 2);
      s_.k_left_out[run] = pack_run<N>(k, key_row(p_.k, first), p_.k.stride[2], keys, int(p_.D)).not_finite;
      s_.v_left_out[run] = pack_run<N>(v, key_row(p_.v, first), p_.v.stride[2], keys, int(p_.Dv)).not_finite;
    }
  }

  const void* key_row(const Tensor4& x, int64_t key) const {
    return element(x.data, p_.dtype, b_ * x.stride[0] + hk_ * x.stride[1] + key * x.stride[2]);
  }

  // The keys from span_key_ on against the head's blocks of queries from `block` on.
  void run_span(int64_t h, int64_t block, int64_t span_keys) {
    const int blocks = int(min64(kSpanBlocks, head_.blocks - block));
    for (int n = blocks; n-- > 0;) {
      BlockTurn& turn = turns_[n];
      reached_[n] = this->reach(block + n, span_key_, span_keys, &turn);
      if (!reached_[n]) {
        this->skip_bias(h, (block + n) * kMaxRows, kMaxRows, span_key_, span_keys);
        continue;
      }
      if (turn.first) {
        turn.wait_until_free();
        load_queries(h, block + n);
        turn.packed();
      } else {
        turn.wait_until_packed();
      }
    }
    first_run_ = 2 * block;
    std::memset(seen_, 0, sizeof(seen_));
    for (int64_t key = span_key_; key < span_key_ + span_keys; key += kMaxKeys) {
      const int keys = int(min64(kMaxKeys, span_key_ + span_keys - key));
      TileKind kind[kSpanBlocks];
      bool some = false;
      for (int n = 0; n < blocks; ++n) {
        kind[n] = TileKind::none;
        if (!reached_[n]) continue;
        const RowBlock& rows = head_.block[block + n].rows;
        kind[n] = classify(s_.masks + n, p_.mask, rows, key, keys);
        if (kind[n] == TileKind::all && keys < kMaxKeys) {
          s_.masks[n].show_all(rows.rows, keys);
          kind[n] = TileKind::some;
        }
        some |= kind[n] != TileKind::none;
        if (kind[n] == TileKind::none) this->skip_bias(h, (block + n) * kMaxRows, kMaxRows, key, keys);
      }
      if (!some) continue;
      if (!s_.keys_held[held_ / kKeyRuns]) load_keys();
      for (int half = 0; half < 2 && half * kRun < keys; ++half)
        run_keys(h, int((key - span_key_) / kRun) + half, kind, blocks, half * kRun);
    }
    for (int n = blocks; n-- > 0;) {
      if (!reached_[n]) continue;
      turns_[n].wait_for_dq();
      for (int run = 2 * n; run < 2 * n + 2; ++run) {
        add_dq(run);
        if (turns_[n].last) this->finish_queries(h, first_run_ + run);
      }
      turns_[n].pass_dq_on();
      turns_[n].leave();
    }
  }

  // One run of the span's keys, from first_key of its tile on.
  void run_keys(int64_t h, int run, const TileKind* kind, int blocks, int first_key) {
    SeeingRun seeing[kRowRuns];
    int count = 0;
    for (int q = 0; q < 2 * blocks; ++q) {
      RunMask mask{s_.masks + q / 2, first_key, q % 2 * kRun};
      TileKind part = kind[q / 2];
      if (part == TileKind::some && (part = part_kind(mask)) == TileKind::none)
        this->skip_bias(h, (first_run_ + q) * kRun, kRun, span_key_ + run * kRun, kRun);
      if (part == TileKind::none) continue;
      if (part == TileKind::all) mask.mask = nullptr;
      seeing[count++] = {q, mask};
      seen_[run][q] = true;
    }
    if (count == 0) return;
    products(run, seeing[0].run, 0).all();
    for (int n = 0; n < count; ++n) run_weights(run, seeing[n], n % 2, n + 1 < count ? seeing + n + 1 : nullptr);
    for (int n = 0; n < count; ++n) add_left_out(run, seeing[n]);
    // Runs of queries in between that see nothing may not even be packed.
    for (int n = 0, end; n < count; n = end) {
      for (end = n + 1; end < count && seeing[end].run == seeing[end - 1].run + 1;) ++end;
      const int first = seeing[n].run, last = seeing[end - 1].run + 1;
      add_rows(s_.dv + run * s_.dv_runs * 4, s_.p, head_.dout_features, s_.dv_runs, first, last, run);
      add_rows(s_.dk + run * s_.d * 4, s_.ds, head_.q_features, s_.d, first, last, run);
      keys_begun_[run] = 1;
    }
  }

  static TileKind part_kind(const RunMask& m) {
    if (m.mask->listed) return TileKind::some;
    bool any = false, all = true;
    for (int r = 0; r < kRun; ++r) {
      const float lo = m.mask->lo[m.first_row + r], hi = m.mask->hi[m.first_row + r];
      any |= lo < hi && lo < float(m.first_key + kRun) && hi > float(m.first_key);
      all &= lo <= float(m.first_key) && hi >= float(m.first_key + kRun);
    }
    return !any ? TileKind::none : all ? TileKind::all : TileKind::some;
  }

  void clear(const TilePairs& x, int64_t pair) {
    for (int n = 0; n < N; ++n) std::memset(x.tiles + n * x.plane + 2 * pair, 0, 2 * sizeof(HalfTile));
  }

  // S and dP of a run of keys and one of queries.
  ScoreProducts products(int run, int query_run, int buffer) const {
    const int64_t q = first_run_ + query_run;
    return {&s_.s_steps,
            &s_.dp_steps,
            s_.k_rows.tiles + (held_ + run) * s_.d * 2,
            s_.v_rows.tiles + (held_ + run) * s_.dv_runs * 2,
            head_.q_lanes.tiles + q * s_.d * 2,
            head_.dout_lanes.tiles + q * s_.dv_runs * 2,
            head_.minus_delta + q * kRun,
            s_.s + 4 * buffer,
            s_.dp + 4 * buffer};
  }

  // P and dS; beside, the products of the run of queries that comes next, if any.
  void run_weights(int run, const SeeingRun& at, int buffer, const SeeingRun* next) {
    const int64_t q = first_run_ + at.run;
    SumTile *s = s_.s + 4 * buffer, *dp = s_.dp + 4 * buffer;
    if constexpr (N > 1) {
      const uint32_t *q_left = head_.q_left_out + q, *dout_left = head_.dout_left_out + q;
      if (s_.k_left_out[held_ + run] | *q_left)
        repair(s, run, q, p_.k, p_.q, p_.D, nullptr, s_.k_left_out[held_ + run], *q_left);
      if (s_.v_left_out[held_ + run] | *dout_left)
        repair(dp, run, q, p_.v, p_.dout, p_.Dv, head_.minus_delta + q * kRun, s_.v_left_out[held_ + run], *dout_left);
    }
    const RowStatistics rows(head_.block[q / 2], int(q % 2) * kRun);
    const WeightTiles<N> to{s_.p.tiles + 2 * at.run, s_.ds.tiles + 2 * at.run,
                            s_.ds_lanes.tiles + 2 * (at.run * kKeyRuns + run), s_.p.plane, s_.ds_lanes.plane};
    const ScoreProducts beside = next ? products(run, next->run, 1 - buffer) : ScoreProducts();
    auto all = [&](const auto& pairs) MHA_INLINE_LAMBDA {
      auto quarter = [&]<int kQuarter>() MHA_INLINE_LAMBDA {
        weights<N>(s, dp, pairs, to, kQuarter, [&](int i) MHA_INLINE_LAMBDA {
          if (next) beside.template part<kQuarter>(i);
        });
      };
      quarter.template operator()<0>();
      quarter.template operator()<1>();
      quarter.template operator()<2>();
      quarter.template operator()<3>();
    };
    if (modified_) {
      load_modifiers(run, q);
      const bool raw = !p_.bias.data && p_.softcap == 0;
      raw ? all(ModifiedPairs<N, true>(p_, rows, at.mask, s_.modifiers))
          : all(ModifiedPairs<N, false>(p_, rows, at.mask, s_.modifiers));
      add_bias_gradient(run, q);
    } else if (at.mask.mask) {
      all(PlainPairs<N, true>(p_, rows, at.mask));
    } else {
      all(PlainPairs<N, false>(p_, rows, at.mask));
    }
  }

  // The bias of a run of keys and one of queries, what dropout multiplies with, and the gradient of the weights.
  void load_modifiers(int run, int64_t query_run) {
    const RowBlock& rows = head_.rows[query_run];
    const Modifiers& to = s_.modifiers;
    const int64_t first = span_key_ + run * kRun;
    const int keys = int(min64(kRun, last_key_ - first));
    if (rows.rows < kRun) {  // lanes that are no rows
      for (float* x : {to.bias, to.factor, to.dweights})
        if (x) std::fill_n(x, kRun * kMaxRows, 0.0f);
    }
    if (rows.rows == 0) return;
    if (p_.bias.data) load_tile(to.bias, p_.bias, p_.bias_dtype, rows, first, keys);
    if (p_.dropout.rng_state) load_dropout(to.factor, p_, rows, first, keys);
    if (p_.dweights.data) load_tile(to.dweights, p_.dweights, p_.dtype, rows, first, keys);
  }
  void add_bias_gradient(int run, int64_t query_run) {
    const RowBlock& rows = head_.rows[query_run];
    if (!p_.dbias.data || rows.rows == 0) return;
    const int64_t first = span_key_ + run * kRun;
    this->add_bias(rows.head[0], query_run * kRun, first, [&] {
      Place::add_bias_gradient(s_.modifiers.bias, rows, first, int(min64(kRun, last_key_ - first)), s_.diagonals);
    });
  }

  // sum[key][column] += weight[key][query] * row[query][column] for the queries of the runs first .. last of the span.
  void add_rows(SumTile* sum, const TilePairs& weight, const TilePairs& rows, int64_t cols, int first, int last,
                int key_run) {
    for (int64_t c = 0; c < cols; ++c)
      multiply<N>({sum + 4 * c, !keys_begun_[key_run], weight.from(2 * first),
                   rows.from((c * head_.query_runs + first_run_ + first) * 2), last - first});
  }

  // dQ^T += K^T dS^T over the span's keys, for a run of its queries.
  void add_dq(int q) {
    int first = kKeyRuns, last = 0;
    for (int run = 0; run < kKeyRuns; ++run) {
      if (seen_[run][q]) first = std::min(first, run), last = run + 1;
    }
    if (last == 0) return;
    for (int run = first; run < last; ++run) {
      if (!seen_[run][q]) clear(s_.ds_lanes, q * kKeyRuns + run);
    }
    uint8_t& begun = head_.begun(first_run_ + q);
    for (int64_t m = 0; m < s_.d; ++m) {
      multiply<N, true>({head_.dq + ((first_run_ + q) * s_.d + m) * 4, !begun,
                         s_.k_down.from((m * s_.held_runs + held_ + first) * 2),
                         s_.ds_lanes.from((q * kKeyRuns + first) * 2), last - first});
    }
    begun = 1;
  }

  // Products of planes, of rows that are not finite: once more, one by one.
  void repair(SumTile* sums, int run, int64_t query_run, const Tensor4& keys, const Tensor4& queries, int64_t cols,
              const float* add, uint32_t keys_left, uint32_t queries_left) {
    const int64_t first = span_key_ + run * kRun;
    const void* key = key_row(keys, first);
    const RowBlock& rows = head_.block[query_run / 2].rows;
    const int skipped = int(query_run % 2) * kRun, count = std::clamp(rows.rows - skipped, 0, kRun);
    const int key_count = int(min64(kRun, last_key_ - first));
    const void* query = element(first_row(queries, p_.dtype, rows), p_.dtype, skipped * queries.stride[2]);
    repair_products(
        s_.repaired, [&](int j) { return element(key, p_.dtype, j * keys.stride[2]); }, key_count,
        [&](int r) { return element(query, p_.dtype, r * queries.stride[2]); }, count, p_.dtype, p_.dtype, int(cols));
    for (int j = 0; j < key_count; ++j) {
      for (int r = 0; r < count; ++r) {
        if (!((keys_left >> j | queries_left >> r) & 1)) continue;
        sums[j / 16 * 2 + r / 16].x[j % 16][r % 16] = s_.repaired[j * kMaxRows + r] + (add ? add[r] : 0.0f);
      }
    }
  }

  // What rows that are not finite add, to those who see them.
  void add_left_out(int run, const SeeingRun& at) {
    const int64_t q = first_run_ + at.run;
    const uint32_t k_left = s_.k_left_out[held_ + run], q_left = head_.q_left_out[q],
                   dout_left = head_.dout_left_out[q];
    if (!(k_left | q_left | dout_left)) return;
    turns_[at.run / 2].wait_for_dq();
    begin(head_.dq + q * s_.d * 4, s_.d, head_.begun(q));
    begin(s_.dk + run * s_.d * 4, s_.d, keys_begun_[run]);
    if (!keys_begun_[run]) begin(s_.dv + run * s_.dv_runs * 4, s_.dv_runs, keys_begun_[run]);
    head_.begun(q) = keys_begun_[run] = 1;
    const RowBlock& rows = head_.block[q / 2].rows;
    const int first_row_of = int(q % 2) * kRun;
    auto widened = [&](const HalfTile* tile, int64_t plane, int j, int r) {
      float sum = 0;
      for (int n = 0; n < N; ++n) sum += widen(tile[n * plane + j / 16].x[j % 16][r]);
      return sum;
    };
    for (int j = 0; j < kRun; ++j) {
      for (int r = 0; r < kRun; ++r) {
        if (!((k_left >> j | q_left >> r | dout_left >> r) & 1) || !at.mask.visible_pair(j, r)) continue;
        const float p = widened(s_.p.tiles + 2 * at.run, s_.p.plane, j, r);
        const float ds = widened(s_.ds.tiles + 2 * at.run, s_.ds.plane, j, r);
        auto row_of = [&](const Tensor4& x) {
          return element(first_row(x, p_.dtype, rows), p_.dtype, (first_row_of + r) * x.stride[2]);
        };
        const int half = j / 16, at_key = j % 16;
        if (k_left >> j & 1) {
          const void* key = key_row(p_.k, span_key_ + run * kRun + j);
          const int q_half = r / 4 % 2, column = r / 8 * 4 + r % 4;
          add_row(key, p_.D, ds, [&](int64_t c) {
            return &head_.dq[(q * s_.d + c / kRun) * 4 + c % kRun / 16 * 2 + q_half].x[c % 16][column];
          });
        }
        if (q_left >> r & 1) {
          add_row(row_of(p_.q), p_.D, ds, [&](int64_t c) {
            return &s_.dk[(run * s_.d + c / kRun) * 4 + half * 2 + c % kRun / 16].x[at_key][c % 16];
          });
        }
        if (dout_left >> r & 1) {
          add_row(row_of(p_.dout), p_.Dv, p, [&](int64_t c) {
            return &s_.dv[(run * s_.dv_runs + c / kRun) * 4 + half * 2 + c % kRun / 16].x[at_key][c % 16];
          });
        }
      }
    }
  }

  template <class F>
  void add_row(const void* row, int64_t cols, float weight, F sum) {
    with_storage<float>(p_.dtype, [&](auto* s) {
      for (int64_t c = 0; c < cols; ++c) *sum(c) += weight * widen(static_cast<decltype(s)>(row)[c]);
    });
  }

  const bool modified_;
  ProductState<Pairs<N>> tiles_;
  BlockTurn turns_[kSpanBlocks];
  bool reached_[kSpanBlocks];
  bool seen_[kKeyRuns][kRowRuns];  // by runs of keys and of queries
  int64_t held_ = 0;               // the span's first among the runs of keys that are packed
  int64_t first_run_ = 0;
};

MHA_ISA_END
