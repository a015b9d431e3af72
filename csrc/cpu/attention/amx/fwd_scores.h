// The scores of a block in AMX forward: what its rows see, and what becomes of products before they are weights.
#pragma once

#include "../../tile/finite_rows.h"
#include "../../tile/stored_head.h"
#include "fwd_space.h"
#include "kept_keys.h"

MHA_ISA_BEGIN

template <int N>
class AmxScores {
 protected:
  static constexpr float kInf = std::numeric_limits<float>::infinity();
  static constexpr int kHalf = sizeof(SumTile) / sizeof(float);  // from 16 columns of sums to the next 16
  static constexpr int kHalfTile = sizeof(HalfTile) / sizeof(bf16);
  // Scores that are not plain products are kept in quarters: so the greatest negative bias is still more than what is
  // hidden.
  static constexpr float kPart = 0.25f;
  static constexpr int kSettled = 2;  // the buffer of settled scores

  struct Unit {
    int64_t first_key;
    int begin[kStrips], end[kStrips];  // steps of 32 keys that some row of a strip sees
    const CellMasks* masks = nullptr;
  };
  struct Cell {
    int strip, step, buffer;
    int64_t first_key;
    const CellMasks* masks = nullptr;
    TileKind kind() const { return masks ? masks->kind[strip][step] : TileKind::some; }
  };

  AmxScores(const AttentionForward& p, void* scratch)
      : p_(p),
        rule_(p),
        s_(p, scratch),
        exponent_(rule_.raw ? rule_.exponent : rule_.exponent / kPart),
        natural_(rule_.raw ? rule_.natural : rule_.natural / kPart),
        hidden_(rule_.raw ? -8e37f / std::max(1.0f, exponent_) : -1.2e38f),
        floor_(rule_.raw ? hidden_ : -1e37f) {}

  int rows_of(int strip) const { return std::min(kStripRows, s_.block->rows - strip * kStripRows); }
  float* scores(int buffer, int row) const { return s_.score[buffer * 4 + row / 16 * 2].x[row % 16]; }
  float* scores(const Cell& cell, int row) const { return scores(cell.buffer, row); }

  // Bit j: whether row r of the block, one of the strip, sees key first + j, in that step.
  uint32_t seen(const CellMasks* masks, int strip, int step, int row, int64_t first) const {
    if (masks) return uint32_t(masks->seen[strip][row][step / 2] >> step % 2 * 32);
    return uint32_t(near(strip * kStripRows + row, first));
  }
  // The same of 64 keys, as far as intervals go.
  uint64_t near(int r, int64_t first) const {
    return first_bits(s_.block->end[r] - first) & ~first_bits(s_.block->begin[r] - first);
  }

  // What a unit's rows see of the steps begin .. end, which are cut down to those of which some see something.
  void look_at_cells(CellMasks* masks, Unit& u) const {
    constexpr int kWords = kUnitRuns / 2;
    const Mask& m = p_.mask;
    const int begin_step =
        std::min(u.begin[0] < u.end[0] ? u.begin[0] : kUnitRuns, u.begin[1] < u.end[1] ? u.begin[1] : kUnitRuns);
    const int first_word = begin_step / 2, last_word = (std::max(u.end[0], u.end[1]) + 1) / 2;
    static_assert(kStrips == 2);
    auto seen_by = [&](int r) { return masks->seen[r / kStripRows][r % kStripRows]; };
    auto keys_of = [&](int w) { return int(min64(64, p_.Sk - u.first_key - w * 64)); };
    // Rows of a dense mask are read along memory.
    for (int r = 0; r < s_.block->rows; ++r) {
      uint64_t* seen = seen_by(r);
      const uint8_t* dense = m.dense ? dense_row(m, *s_.block, r) : nullptr;
      for (int w = first_word; w < last_word; ++w) {
        const int64_t first = u.first_key + w * 64;
        uint64_t bits = ~uint64_t(0);
        if (dense) bits = dense_bits(dense, m.dense_stride_k, first, keys_of(w));
        if (s_.block->begin[r] > first || s_.block->end[r] < first + 64) bits &= near(r, first);
        seen[w] = bits;
      }
    }
    for (int w = first_word; w < last_word && (m.query_ids || m.blocks); ++w) {
      uint64_t seen[kMaxRows];
      for (int r = 0; r < s_.block->rows; ++r) seen[r] = seen_by(r)[w];
      if (m.query_ids) keep_documents(seen, m, *s_.block, u.first_key + w * 64, keys_of(w));
      if (m.blocks) keep_blocks(seen, m, *s_.block, u.first_key + w * 64, keys_of(w));
      for (int r = 0; r < s_.block->rows; ++r) seen_by(r)[w] = seen[r];
    }
    uint64_t some[kStrips][kWords] = {}, every[kStrips][kWords];
    std::fill_n(every[0], kStrips * kWords, ~uint64_t(0));
    for (int r = 0; r < s_.block->rows; ++r) {
      for (int w = first_word; w < last_word; ++w)
        some[r / kStripRows][w] |= seen_by(r)[w], every[r / kStripRows][w] &= seen_by(r)[w];
    }
    auto of_step = [](const uint64_t* word, int step) { return uint32_t(word[step / 2] >> step % 2 * 32); };
    for (int strip = 0; strip < kStrips; ++strip) {
      int &begin = u.begin[strip], &end = u.end[strip];
      TileKind* kind = masks->kind[strip];
      for (int step = begin; step < end; ++step) {
        kind[step] = of_step(some[strip], step) == 0      ? TileKind::none
                     : of_step(every[strip], step) == ~0u ? TileKind::all
                                                          : TileKind::some;
      }
      while (begin < end && kind[begin] == TileKind::none) ++begin;
      while (begin < end && kind[end - 1] == TileKind::none) --end;
    }
    u.masks = masks;
  }

  void hide(const Cell& cell) {
    const __m512 hidden = _mm512_set1_ps(hidden_);
    for (int row = 0; row < rows_of(cell.strip); ++row) {
      const uint32_t bits = seen(cell.masks, cell.strip, cell.step, row, cell.first_key);
      for (int half = 0; half < 2; ++half) {
        float* x = scores(cell, row) + half * kHalf;
        // What is seen keeps NaN, and comes up from -inf.
        _mm512_store_ps(x, _mm512_mask_max_ps(hidden, __mmask16(bits >> 16 * half), hidden, _mm512_load_ps(x)));
      }
    }
  }

  // Products to scores where more than a scale lies between, and hides. `all`: every row sees every key. No weight
  // comes of what is below `lowest`.
  void modify(const Cell& cell, bool all, float lowest) {
    if (!p_.bias.data) return modify(cell, all, lowest, static_cast<const float*>(nullptr));
    with_storage<float>(p_.bias_dtype, [&](auto* s) {
      const auto* bias = static_cast<decltype(s)>(p_.bias.data);
      modify(cell, all, lowest, bias + s_.block->b * p_.bias.stride[0] + cell.first_key * p_.bias.stride[3]);
    });
  }
  template <class S>
  void modify(const Cell& cell, bool all, float lowest, const S* bias) {
    const CappedScores<float> capped(rule_, kPart);
    const VecF least = set1(lowest), part = set1(kPart);
    // Known before the loop, whose stores could change anything as far as the compiler knows.
    const int keys = int(min64(kRun, p_.Sk - cell.first_key)), rows = rows_of(cell.strip);
    const int64_t by_query = p_.bias.stride[2], by_key = p_.bias.stride[3];
    float* const score = scores(cell, 0);
    if (bias) bias += s_.block->offset(p_.bias.stride, cell.strip * kStripRows);  // of queries of one head
    for (int row = 0; row < rows; ++row) {
      const uint32_t bits = all ? ~0u : seen(cell.masks, cell.strip, cell.step, row, cell.first_key);
      VecF more[2];
      if (bias) bias_row(more, bias + row * by_query, by_key, keys);
      for (int half = 0; half < 2; ++half) {
        float* x = score + (row / 16 * 2 + half) * kHalf + row % 16 * 16;
        VecF y = capped(load(x));
        if (bias) y = fma(more[half], part, y);
        _mm512_store_ps(x, _mm512_mask_max_ps(least.v, __mmask16(bits >> 16 * half), least.v, y.v));
      }
    }
  }
  template <class S>
  static MHA_INLINE void bias_row(VecF* to, const S* row, int64_t stride, int keys) {
    if (stride == 1 && keys == kRun) {
      to[0] = load(row), to[1] = load(row + 16);
    } else if (stride == 1) {
      to[0] = load_n(row, std::min(keys, 16)), to[1] = load_n(row + 16, std::max(keys - 16, 0));
    } else if (stride == 0) {
      float one[16];
      store(one, load_n(row, 1));
      to[0] = to[1] = set1(one[0]);
    } else {
      float x[kRun] = {};
      for (int j = 0; j < keys; ++j) store_n(x + j, load_n(row + j * stride, 1), 1);
      to[0] = load(x), to[1] = load(x + 16);
    }
  }

  // The part of the bias that a cell meets, where it lies in rows of its own.
  Ahead bias_ahead_of(const Cell& cell) const {
    const int keys = int(min64(kRun, p_.Sk - cell.first_key));
    Ahead rows = bias_ahead(p_.bias, p_.bias_dtype, *s_.block, cell.first_key, keys);
    if (!rows.rows) return rows;
    rows.first = static_cast<const char*>(rows.first) + cell.strip * kStripRows * rows.stride;
    rows.rows = rows_of(cell.strip);
    return rows;
  }

  // A row's scores as its weights take them, in a buffer of their own, as its base may change: less what a far one has
  // subtracted, and within what an exponent can be.
  void settle(const Cell& cell, int row, float far) {
    const VecF least = set1(floor_), most = set1(-floor_);
    for (int half = 0; half < 2; ++half) {
      const VecF x = load(scores(cell, row) + half * kHalf), y = min(most, max(least, x - set1(far)));
      store(scores(kSettled, row) + half * kHalf, select(less_equal(x, set1(hidden_)), least, y));
    }
  }

  // Products of planes make NaN of an infinite number times a plane that is 0. (Keys without a page nobody sees.)
  void repair(const Cell& cell) {
    const int keys = int(min64(kRun, p_.Sk - cell.first_key));
    uint32_t there = 0, finite_k = 0;  // a bit for each key
    for (int j = 0; j < keys; ++j) {
      if (!kv_.has_key(cell.first_key + j)) continue;
      there |= 1u << j;
      finite_k |= uint32_t(all_finite<float>(kv_.key(cell.first_key + j), p_.dtype, 0, 1, int(p_.D))) << j;
    }
    for (int row = 0; row < rows_of(cell.strip); ++row) {
      const int r = cell.strip * kStripRows + row;
      const void* q = element(p_.q.data, p_.dtype, s_.block->b * p_.q.stride[0] + s_.block->offset(p_.q.stride, r));
      const bool finite_q = all_finite<float>(q, p_.dtype, 0, 1, int(p_.D));
      for (uint32_t left = finite_q ? there & ~finite_k : there; left; left &= left - 1) {
        const int j = __builtin_ctz(left);
        scores(cell, row)[j / 16 * kHalf + j % 16] = dot_product(q, kv_.key(cell.first_key + j));
      }
    }
  }
  float dot_product(const void* q, const void* k) const {
    VecF sum = set1(0.0f);
    for (int d = 0; d < p_.D; d += 16) {
      float a[16] = {}, b[16] = {};
      copy_rows(a, 16, element(q, p_.dtype, d), p_.dtype, 0, 1, int(min64(16, p_.D - d)));
      copy_rows(b, 16, element(k, p_.dtype, d), p_.dtype, 0, 1, int(min64(16, p_.D - d)));
      sum = fma(load(a), load(b), sum);
    }
    return reduce_add(sum);
  }

  const AttentionForward& p_;
  const ScoreRule<float> rule_;
  AmxForwardScratch<N> s_;
  const float exponent_, natural_;  // of rule_, for scores as they are kept
  const float hidden_;              // less than scores are
  const float floor_;               // no less than hidden_; finite as an exponent, too
  StoredHead kv_;
};

MHA_ISA_END
