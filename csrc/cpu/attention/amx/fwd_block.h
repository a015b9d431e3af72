// A block of queries in attention forward on tiles: rows of a tile are queries, so that outputs and weights lie as they
// are wanted, and keys and values are packed once per head.
//
// A cell is a strip of 32 queries and 32 keys: while its scores become weights, those of the next cell are made. A unit
// is all strips of a block and 512 keys, whose weights, in second-level cache, then multiply the values, so that the
// output is loaded and stored once for so many keys. (Tiles are loaded and stored at the cost of whatever vectors do
// meanwhile; only their products overlap. So the output is not made in the course of the next unit.)
//
// While tiles are at work, and for some hundred cycles after, only one of two ports multiplies vectors. So exp2 is a
// table of sixteenths and a short polynomial; and no maximum is looked for: weights are 2^(score - base), where base is
// set from the first cell in which a row sees a key, and raised when a sum of weights has grown too large.
#pragma once

#include "fwd_rows.h"

MHA_ISA_BEGIN

template <int N>
class AmxForwardBlock : AmxRows<N> {
  using Rows = AmxRows<N>;
  using Rows::kHalf, Rows::kRowsTogether, Rows::any_far_, Rows::rescaled_, Rows::rows_of;
  using Rows::p_, Rows::s_, Rows::kv_, Rows::dv_runs_, Rows::sixteenths_;
  using typename Rows::Cell;
  using typename Rows::Unit;

 public:
  AmxForwardBlock(const AttentionForward& p, void* scratch, const AmxHead<N>& head) : Rows(p, scratch), head_(head) {
    // An error here is multiplied by the scale, in lse as it is: all products of planes.
    s_.score_steps.template set<N>(runs(p.D), rows_of_queries(0), {nullptr, 2 * N, 2}, true);
  }

  // Of a head whose keys and values are packed. next: the block that this thread is likely to take after this one;
  // next_head: the key/value head that is likely to be packed next.
  void run(const ForwardPlan::Place& at, const ForwardPlan::Place& next, int64_t next_head) {
    kv_ = StoredHead(p_, at.b, at.first_head / (p_.H / p_.Hk));
    set_rows(s_.block, p_.mask, at.b, at.first_head, at.first, at.rows, p_.Sq, p_.Sk);
    Rows::begin_rows();
    if (p_.dropout.rng_state) kept_keys_ = KeptKeys(p_.dropout, at.b, at.first_head, s_.block->query[0]);
    if (s_.block->any_begin < s_.block->any_end) {
      load_rows();
      look_ahead(at, next, next_head);
      visit_units();
    }
    Rows::store_rows();
    if (p_.weights.data) store_weights();
  }

  // All of a head (b * Hk + key/value head), unless it is held already.
  void pack_head(int64_t head) {
    if (*head_.held == head) return;
    *head_.held = head;
    pack_pieces(head, 0, head_.pieces);
  }

  // Of the keys of these pieces those that some query sees.
  void pack_pieces(int64_t head, int64_t first, int64_t last) {
    const int64_t b = head / p_.Hk;
    kv_ = StoredHead(p_, b, head % p_.Hk);
    const Interval seen = keys_of_rows(p_.mask, b, 0, p_.Sq, p_.Sk);
    for (int64_t n = first; n < last; ++n) {
      typename AmxHead<N>::Piece& piece = head_.piece[n];
      piece = {0, false};
      const int64_t begin = max64(seen.begin, n * kPieceKeys) / kRun, end = min64(seen.end, (n + 1) * kPieceKeys);
      for (int64_t run = begin; run * kRun < end; ++run) pack_keys(run, piece);
      for (int64_t run = begin; run * kRun < end; ++run) pack_values(run, piece);
    }
  }

 private:
  void pack_keys(int64_t run, typename AmxHead<N>::Piece& piece) {
    PackedRun to;
    to.lanes = {head_.k + run * head_.k_run, 2 * N, 2};
    const KeyRows k = rows_of_run(run, p_.k, p_.D, [&](int64_t j) { return kv_.key(j); });
    const Seen seen = pack_run<N>(to, k.first, k.stride, k.count, int(p_.D));
    piece.greatest_key = std::max(piece.greatest_key, seen.greatest);
  }
  void pack_values(int64_t run, typename AmxHead<N>::Piece& piece) {
    PackedRun to;
    to.features = {head_.v + run * head_.v_run, 2, 2 * dv_runs_};
    const KeyRows v = rows_of_run(run, p_.v, p_.Dv, [&](int64_t j) { return kv_.value(j); });
    head_.left_out[run] = pack_run<N, PairsOf::halves>(to, v.first, v.stride, v.count, int(p_.Dv)).not_finite;
    piece.left_out |= head_.left_out[run] != 0;
  }

  // A run of keys or values, one stride apart: those that lie in several pages are copied, and what has no page is 0.
  struct KeyRows {
    const void* first;
    int64_t stride;
    int count;
  };
  template <class F>
  KeyRows rows_of_run(int64_t run, const Tensor4& x, int64_t cols, F row) const {
    const int64_t first = run * kRun, end = min64(first + kRun, p_.Sk);
    if (kv_.tile_keys(first, end) == end - first && kv_.has_key(first))
      return {row(first), x.stride[2], int(end - first)};
    for (int64_t j = first; j < end; ++j) {
      uint16_t* to = s_.page_rows + (j - first) * cols;
      kv_.has_key(j) ? std::memcpy(to, row(j), size_t(cols) * 2) : std::memset(to, 0, size_t(cols) * 2);
    }
    return {s_.page_rows, cols, int(end - first)};
  }
  // The pages of what is seen must be there.
  void need_pages(const Cell& cell) const {
    uint32_t seen = 0;
    for (int row = 0; row < rows_of(cell.strip); ++row)
      seen |= Rows::seen(cell.masks, cell.strip, cell.step, row, cell.first_key);
    for (int j = 0, keys = 0; j < kRun && cell.first_key + j < p_.Sk; j += keys) {
      keys = kv_.tile_keys(cell.first_key + j, min64(cell.first_key + kRun, p_.Sk));
      if (seen >> j & first_bits(keys)) kv_.key(cell.first_key + j);
    }
  }

  TilePairs rows_of_queries(int strip) const { return {s_.q + strip * N * 2 * runs(p_.D), 2 * N, 2}; }

  void load_rows() {
    uint16_t greatest = 0;
    for (int strip = 0; strip < kStrips && rows_of(strip) > 0; ++strip) {
      PackedRun to;
      to.rows = rows_of_queries(strip);
      const void* q = element(first_row(p_.q, p_.dtype, *s_.block), p_.dtype, strip * kStripRows * p_.q.stride[2]);
      greatest = std::max(greatest, pack_run<N>(to, q, p_.q.stride[2], rows_of(strip), int(p_.D)).greatest);
      started_[strip] = false;
    }
    uint16_t key = 0;
    left_out_ = false;
    for (int64_t n = 0; n < head_.pieces; ++n) {
      key = std::max(key, head_.piece[n].greatest_key);
      left_out_ |= head_.piece[n].left_out;
    }
    finite_ = greatest < kInfinite<N> && key < kInfinite<N>;
    // Sums of products that may be infinite are looked through.
    bounded_ = finite_ && (N > 1 || (greatest >> 7) + (key >> 7) < 2 * 127 + 80);
  }

  // ---- what is wanted soon, fetched a few rows at a time between those of softmaxes: the next queries, this block's
  // rows of the output, and this block's share of the next head's keys and values.

  void look_ahead(const ForwardPlan::Place& at, const ForwardPlan::Place& next, int64_t next_head) {
    const int64_t size = int64_t(size_of(p_.dtype)), group = p_.H / p_.Hk;
    auto rows_at = [&](const Tensor4& x, int64_t b, int64_t head, int64_t row, int64_t rows, int64_t cols) {
      const int64_t first = b * x.stride[0] + head * x.stride[1] + row * x.stride[2];
      return Ahead{element(x.data, p_.dtype, first), x.stride[2] * size, cols * size, int(rows)};
    };
    ahead_[0] = rows_at(p_.q, next.b, next.first_head, next.first, next.rows, p_.D);
    ahead_[1] = rows_at(p_.out, at.b, at.first_head, at.first, at.rows, p_.Dv);
    ahead_[1].to_write = true;
    const int64_t b = next_head / p_.Hk, head = next_head % p_.Hk;
    const int64_t shares = group * ((p_.Sq + kMaxRows - 1) / kMaxRows);
    const int64_t share = at.first_head % group * (shares / group) + at.first / kMaxRows;
    const int64_t first = p_.Sk * share / shares,
                  keys = b < p_.B && !p_.store.table ? p_.Sk * (share + 1) / shares - first : 0;
    ahead_[2] = ahead_[3] = Ahead();
    if (keys > 0) {
      ahead_[2] = rows_at(p_.k, b, head, first, keys, p_.D);
      ahead_[3] = rows_at(p_.v, b, head, first, keys, p_.Dv);
    }
    const int64_t keys_seen = s_.block->any_end - s_.block->any_begin;
    const int64_t chunks = max64(1, keys_seen * s_.block->rows / (kRun * kRowsTogether));
    ahead_row_ = 0, ahead_rows_ = std::max(std::max(next.rows, at.rows), int(keys));
    ahead_step_ = int((ahead_rows_ + chunks - 1) / chunks);
  }
  MHA_INLINE void fetch_ahead() {
    for (int n = 0; n < ahead_step_ && ahead_row_ < ahead_rows_; ++n, ++ahead_row_) {
      for (const Ahead& ahead : ahead_)
        if (ahead_row_ < ahead.rows) ahead.fetch(ahead_row_);
    }
  }

  // ---- products

  // The steps first .. last of a cell's scores.
  MHA_INLINE void multiply_scores(const Cell& cell, int first, int last) {
    const HalfTile *a = rows_of_queries(cell.strip).tiles, *b = head_.k + cell.first_key / kRun * head_.k_run;
    const ProductSteps steps = s_.score_steps;
    for (int n = first; n < last; ++n) {
      if (n == 0)
        sums_.template multiply<Begin::zero, Pass::stays>(a + steps.a[n], 1, b + steps.b[n]);
      else
        sums_.template multiply<Begin::keep, Pass::stays>(a + steps.a[n], 1, b + steps.b[n]);
      if (n + 1 == steps.count) sums_.complete(s_.score + cell.buffer * 4);
    }
  }

  // Adds a unit's weights times values.
  void multiply_values(const Unit& u) {
    for (int d = 0; d < dv_runs_; ++d) {
      for (int strip = 0; strip < kStrips; ++strip) {
        if (u.begin[strip] >= u.end[strip]) continue;
        SumTile* c = s_.out + (strip * dv_runs_ + d) * 4;
        bool begun = false;
        for_each_product_of_planes<N>(false, [&](int weight_plane, int value_plane) MHA_INLINE_LAMBDA {
          const HalfTile* a = s_.weight + (strip * N + weight_plane) * 2 * kUnitRuns;
          const HalfTile* b = head_.v + u.first_key / kRun * head_.v_run + value_plane * 2 * dv_runs_ + d * 2;
          for (int step = u.begin[strip]; step < u.end[strip]; ++step, begun = true) {
            const HalfTile *at = a + step, *bt = b + step * head_.v_run;
            if (begun)
              sums_.template multiply<Begin::keep, Pass::by>(at, kUnitRuns, bt);
            else if (started_[strip])
              sums_.template multiply<Begin::load, Pass::by>(at, kUnitRuns, bt, c);
            else
              sums_.template multiply<Begin::zero, Pass::by>(at, kUnitRuns, bt);
          }
        });
        sums_.complete(c);
      }
    }
    sums_.store();
    for (int strip = 0; strip < kStrips; ++strip) started_[strip] |= u.begin[strip] < u.end[strip];
  }

  // ---- units

  // The keys that all rows of a strip see, and those that some see.
  void look_at_strips() {
    for (int strip = 0; strip < kStrips; ++strip) {
      Interval some{p_.Sk, 0}, all{0, p_.Sk};
      for (int r = strip * kStripRows; r < strip * kStripRows + rows_of(strip); ++r) {
        const int64_t begin = s_.block->begin[r], end = s_.block->end[r];
        all.begin = max64(all.begin, begin), all.end = min64(all.end, end);
        if (begin < end) some.begin = min64(some.begin, begin), some.end = max64(some.end, end);
      }
      some_[strip] = some, all_[strip] = all;
    }
  }

  // The next unit that has cells.
  bool next_unit(Unit& u) {
    for (; next_key_ < s_.block->any_end; next_key_ += kUnitKeys) {
      u.first_key = next_key_;
      bool any = false;
      for (int strip = 0; strip < kStrips; ++strip) {
        const int64_t begin = max64(some_[strip].begin - next_key_, 0);
        const int64_t end = min64(some_[strip].end - next_key_, kUnitKeys);
        u.begin[strip] = u.end[strip] = 0;
        if (begin >= end) continue;
        u.begin[strip] = int(begin / kRun), u.end[strip] = int(runs(end));
        any = true;
      }
      if (any && s_.masks) {
        Rows::look_at_cells(s_.masks + units_ % 2, u);
        any = false;
        for (int strip = 0; strip < kStrips; ++strip) any |= u.begin[strip] < u.end[strip];
      }
      if (!any) continue;
      next_key_ += kUnitKeys, ++units_;
      return true;
    }
    return false;
  }

  int cells_of(const Unit& u, Cell* cell) {
    int n = 0;
    for (int step = 0; step < kUnitRuns; ++step) {
      for (int strip = 0; strip < kStrips; ++strip) {
        if (step < u.begin[strip] || step >= u.end[strip]) continue;
        const Cell next{strip, step, cells_ % 2, u.first_key + step * kRun, u.masks};
        if (next.kind() == TileKind::none) continue;
        if (p_.store.table) need_pages(next);
        cell[n++] = next, ++cells_;
      }
    }
    return n;
  }

  void visit_units() {
    look_at_strips();
    next_key_ = s_.block->any_begin / kUnitKeys * kUnitKeys, cells_ = units_ = 0;
    Unit now{}, next{};
    Cell cells[2][kUnitRuns * kStrips];
    if (!next_unit(now)) return;
    int count = cells_of(now, cells[0]);
    multiply_scores(cells[0][0], 0, s_.score_steps.count);
    sums_.store();
    for (int side = 0;; side ^= 1) {
      const bool has_next = next_unit(next);
      const int next_count = has_next ? cells_of(next, cells[side ^ 1]) : 0;
      rescaled_ = false;
      for (int i = 0; i < count; ++i)
        softmax(now, cells[side][i], i + 1 < count ? &cells[side][i + 1] : has_next ? &cells[side ^ 1][0] : nullptr);
      if (rescaled_) Rows::lower_weights(now), rescale();
      if (now.masks) clear_hidden(now);
      multiply_values(now);
      if (left_out_) add_left_out(now);
      if (!has_next) break;
      now = next, count = next_count;
    }
  }

  // Cells that nobody sees anything of, between others.
  void clear_hidden(const Unit& u) {
    for (int strip = 0; strip < kStrips; ++strip) {
      for (int step = u.begin[strip]; step < u.end[strip]; ++step) {
        if (u.masks->kind[strip][step] != TileKind::none) continue;
        for (int plane = 0; plane < N; ++plane) {
          for (int row = 0; row < kStripRows; row += 16)
            std::memset(Rows::weights(strip, row, step, plane), 0, sizeof(HalfTile));
        }
      }
    }
  }

  bool all_seen(const Cell& cell) const {
    return cell.masks ? cell.kind() == TileKind::all
                      : all_[cell.strip].begin <= cell.first_key && cell.first_key + kRun <= all_[cell.strip].end;
  }

  // Products of a cell to scores; where they lie then.
  const float* finish_scores(const Cell& cell) {
    if (N > 1 && !finite_) Rows::repair(cell);
    const bool all = all_seen(cell);
    // Where bases may depend on scores that no exponent could be, these are kept as they are.
    const bool bases = Rows::unset_[cell.strip] != 0, plain = Rows::rule_.raw;
    if (!plain)
      Rows::modify(cell, all, bases || any_far_[cell.strip] ? Rows::hidden_ : Rows::floor_);
    else if (!all || !bounded_)
      Rows::hide(cell);
    if (bases) Rows::first_bases(cell);
    const bool settled = any_far_[cell.strip] || (bases && !plain);
    for (int row = 0; settled && row < kStripRows; ++row)
      Rows::settle(cell, row, s_.far[cell.strip * kStripRows + row]);
    return Rows::scores(settled ? Rows::kSettled : cell.buffer, 0);
  }

  // Scores of a cell to weights; meanwhile, those of the next one are made.
  void softmax(const Unit& u, const Cell& cell, const Cell* next) {
    const float* x = finish_scores(cell);
    const bool large = p_.dropout.rng_state ? weigh_cell<true>(cell, next, x) : weigh_cell<false>(cell, next, x);
    if (__builtin_expect(large, 0)) Rows::raise_bases(u, cell);
  }

  // Returns whether some sum is at least 2, or NaN, as of a far row that has no base yet.
  template <bool kDropped>
  bool weigh_cell(const Cell& cell, const Cell* next, const float* score) {
    const int first = cell.strip * kStripRows;
    const Weigher weigher(Rows::exponent_, sixteenths_);
    const Ahead bias = next ? Rows::bias_ahead_of(*next) : Ahead();
    __m512i large = _mm512_setzero_si512();
    auto weigh_rows = [&](int row) MHA_INLINE_LAMBDA {
      if constexpr (kDropped) {
        for (int i = 0; i < kRowsTogether; i += 2) kept_keys_.take(s_.kept + row + i, cell.first_key, first + row + i);
      }
      const float* x = score + row / 16 * 2 * kHalf + row % 16 * 16;
      bf16* to = Rows::weights(cell.strip, row, cell.step, 0);
      float *sum = s_.sum + (first + row) * 16, *base = s_.base + first + row;
      repeat<kRowsTogether>([&](int i) MHA_INLINE_LAMBDA {
        const __m512 after =
            Rows::template weigh<kDropped>(weigher, x + i * 16, to + i * 32, _mm512_set1_ps(base[i]),
                                           _mm512_load_ps(sum + i * 16), kDropped ? s_.kept[row + i] : nullptr);
        _mm512_store_ps(sum + i * 16, after);
        large = _mm512_or_si512(large, _mm512_castps_si512(after));
      });
    };
    // Early, so that sums are complete when they are stored, and stored well before they are read.
    const int steps = next ? s_.score_steps.count : 0;
    int step = 0;
    constexpr int kChunks = kStripRows / kRowsTogether;
    repeat<kChunks>([&](int chunk) MHA_INLINE_LAMBDA {
      const int until = chunk < 3 ? (steps * (chunk + 1) + 2) / 3 : steps;
      if (step < until) multiply_scores(*next, step, until), step = until;
      if (chunk == 4) sums_.template store_one<0>();
      if (chunk == 5) sums_.template store_one<1>();
      if (chunk == 6) sums_.template store_one<2>();
      if (chunk == 7) sums_.template store_one<3>();
      weigh_rows(chunk * kRowsTogether);
      fetch_ahead();
      for (int row = chunk * bias.rows / kChunks; row < (chunk + 1) * bias.rows / kChunks; ++row) bias.fetch(row);
    });
    return _mm512_test_epi32_mask(large, _mm512_set1_epi32(0x40000000)) != 0;
  }

  // The weights as output, of scores made once more, now that each row's base and sum are known.
  void store_weights() {
    Rows::clear_weights();
    if (s_.block->any_begin >= s_.block->any_end) return;
    next_key_ = s_.block->any_begin / kUnitKeys * kUnitKeys, cells_ = units_ = 0;
    Unit u{};
    Cell cells[kUnitRuns * kStrips];
    while (next_unit(u)) {
      const int count = cells_of(u, cells);
      multiply_scores(cells[0], 0, s_.score_steps.count);
      sums_.store();
      for (int i = 0; i < count; ++i) {
        if (i + 1 < count) multiply_scores(cells[i + 1], 0, s_.score_steps.count);
        const float* x = finish_scores(cells[i]);
        const int first = cells[i].strip * kStripRows;
        for (int row = 0; p_.dropout.rng_state && row < kStripRows; row += 2)
          kept_keys_.take(s_.kept + row, cells[i].first_key, first + row);
        Rows::put_weights(cells[i], x, all_seen(cells[i]));
        sums_.store();
      }
    }
  }

  void rescale() {
    for (int strip = 0; strip < kStrips; ++strip) {
      if (!started_[strip]) continue;
      for (int d = 0; d < dv_runs_; ++d) {
        for (int row = 0; row < rows_of(strip); ++row) {
          const __m512 factor = _mm512_set1_ps(s_.factor[strip * kStripRows + row]);
          for (int half = 0; half < 2; ++half) {
            float* x = Rows::outputs(strip, row, d) + half * kHalf;
            _mm512_store_ps(x, _mm512_mul_ps(_mm512_load_ps(x), factor));
          }
        }
      }
    }
  }

  // Values that are not finite, for the rows that see them.
  void add_left_out(const Unit& u) {
    for (int strip = 0; strip < kStrips; ++strip) {
      for (int step = u.begin[strip]; step < u.end[strip]; ++step) {
        for (uint32_t keys = head_.left_out[u.first_key / kRun + step]; keys; keys &= keys - 1)
          add_left_out(u, strip, step, __builtin_ctz(keys));
      }
    }
  }
  void add_left_out(const Unit& u, int strip, int step, int j) {
    const int64_t first = u.first_key + step * kRun;
    const void* v = kv_.value(first + j);
    for (int row = 0; row < rows_of(strip); ++row) {
      if (!(Rows::seen(u.masks, strip, step, row, first) >> j & 1)) continue;
      float weight = 0;
      for (int plane = 0; plane < N; ++plane)
        weight += widen(Rows::weights(strip, row, step, plane)[j % 16 * 2 + j / 16]);
      for (int d = 0; d < p_.Dv; d += 16) {
        float line[16], *x = Rows::outputs(strip, row, d / kRun) + d % kRun / 16 * kHalf;
        const int n = int(min64(16, p_.Dv - d));
        copy_rows(line, 16, element(v, p_.dtype, d), p_.dtype, 0, 1, n);
        for (int i = 0; i < n; ++i) x[i] += weight * line[i];
      }
    }
  }

  const AmxHead<N> head_;
  KeptKeys kept_keys_;
  AmxTiles tiles_;
  TileSums sums_;
  bool finite_ = false, bounded_ = false;  // all queries and keys; their products
  bool left_out_ = false;                  // some values are not finite
  bool started_[kStrips] = {};
  Interval some_[kStrips], all_[kStrips];  // keys that some rows of a strip see, and that all see
  Ahead ahead_[4];
  int ahead_row_ = 0, ahead_rows_ = 0, ahead_step_ = 0;
  int64_t next_key_ = 0;
  int cells_ = 0, units_ = 0;
};

MHA_ISA_END
