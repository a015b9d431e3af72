// The rows of a block in AMX forward: from scores to weights, what each row's weights are relative to, and its results.
#pragma once

#include "../../tile/finite_rows.h"
#include "../../tile/stored_head.h"
#include "exp2.h"
#include "fwd_space.h"

MHA_ISA_BEGIN

template <int N>
class AmxRows {
 protected:
  static constexpr float kInf = std::numeric_limits<float>::infinity();
  // Weights that are to be cut off to bf16 are raised by the half of a last bit that this takes on average.
  static constexpr float kRaised = 1 + 355.0f / 131072;
  static constexpr float kHeadroom = 16;  // of base above the greatest score of the first cell
  // A row with scores beyond this many powers of two is far: one of them is subtracted from all before anything else,
  // so that equal ones have equal weights.
  static constexpr float kFar = 1 << 20;
  static constexpr int kRowsTogether = 4;                        // in registers
  static constexpr int kHalf = sizeof(SumTile) / sizeof(float);  // from 16 columns of sums to the next 16
  static constexpr int kHalfTile = sizeof(HalfTile) / sizeof(bf16);

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

  AmxRows(const AttentionForward& p, void* scratch)
      : p_(p), rule_(p), s_(p, scratch), dv_runs_(int(runs(p.Dv))), hidden_(-8e37f / std::max(1.0f, rule_.exponent)) {
    for (int i = 0; i < 16; ++i) sixteenths_[i] = float(std::exp2(i / 16.0) * double(N == 1 ? kRaised : 1.0f));
  }

  int rows_of(int strip) const { return std::min(kStripRows, s_.block->rows - strip * kStripRows); }

  void begin_rows() {
    // Lanes beyond the rows get weights that stay small.
    std::fill_n(s_.base, kMaxRows, 64.0f);
    for (int strip = 0; strip < kStrips; ++strip) {
      const int rows = std::max(0, rows_of(strip));
      unset_[strip] = rows >= kStripRows ? ~0u : (1u << rows) - 1;
    }
    std::fill_n(s_.far, kMaxRows, 0.0f);
    std::fill_n(s_.sum, kMaxRows * 16, 0.0f);
    for (bool& far : any_far_) far = false;
  }

  // ---- scores

  float* scores(const Cell& cell, int row) const { return s_.score[cell.buffer * 4 + row / 16 * 2].x[row % 16]; }
  bf16* weights(int strip, int row, int step, int plane) const {
    return s_.weight[((strip * N + plane) * 2 + row / 16) * kUnitRuns + step].x[row % 16];
  }

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

  // The greatest score of a row in a cell, or NaN where there is one.
  float greatest(const Cell& cell, int row) const {
    const float* x = scores(cell, row);
    const __m512 low = _mm512_load_ps(x), high = _mm512_load_ps(x + kHalf);
    if (_mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q)) return std::numeric_limits<float>::quiet_NaN();
    return std::max(hidden_, _mm512_reduce_max_ps(_mm512_max_ps(low, high)));
  }
  // Bases of rows that have seen nothing before this cell. Those that see nothing in it either have weights of 0.
  void first_bases(const Cell& cell) {
    const VecF hidden = set1(hidden_), none = set1(-kInf);
    uint32_t& unset = unset_[cell.strip];
    for (int row = 0; row < kStripRows; row += 16) {
      if (!(unset >> row & 0xFFFF)) continue;
      VecF x[16];
      for (int i = 0; i < 16; ++i) {
        const float* score = scores(cell, row + i);
        x[i] = max(load(score), load(score + kHalf));
      }
      transpose_block(x);
      for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) x[i] = max(x[i], x[i + half]);
      }
      // Far and infinite ones begin without, and get theirs when their sums are NaN.
      const VecF base = fma(x[0], set1(rule_.exponent), set1(kHeadroom));
      const VecMask<float> near = less(abs(base), set1(kFar)), seen = less(hidden, x[0]);
      float* to = s_.base + cell.strip * kStripRows + row;
      const VecMask<float> now{__mmask16(seen.m & (unset >> row))};
      store(to, select(now, select(near, base, none), load(to)));
      unset &= ~(uint32_t(now.m) << row);
    }
  }
  void subtract(const Cell& cell, int row, float far) {
    if (far == 0) return;
    for (int half = 0; half < 2; ++half) {
      float* x = scores(cell, row) + half * kHalf;
      const VecF old = load(x);  // what is hidden stays so
      store(x, select(less_equal(old, set1(hidden_)), old, max(set1(hidden_), old - set1(far))));
    }
  }

  // Weights of a row of a cell, against base; adds them to sum.
  static MHA_INLINE __m512 weigh(const Weigher& weigher, const float* x, bf16* to, __m512 base, __m512 sum) {
    const __m512 low = weigher(_mm512_load_ps(x), base), high = weigher(_mm512_load_ps(x + kHalf), base);
    store_weights(to, low, high);
    return _mm512_add_ps(sum, _mm512_add_ps(low, high));
  }
  static MHA_INLINE void store_weights(bf16* to, __m512 low, __m512 high) {
    __m512i a = _mm512_castps_si512(low), b = _mm512_castps_si512(high);
    _mm512_store_si512(to, _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(a, 16), b));
    if constexpr (N > 1) {
      const __m512i top = _mm512_set1_epi32(int(0xFFFF0000)), half = _mm512_set1_epi32(0x8000);
      auto rest = [&](__m512 x, __m512i bits) MHA_INLINE_LAMBDA {
        const __m512 left = _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(bits, top)));
        return _mm512_add_epi32(_mm512_castps_si512(left), half);
      };
      a = rest(low, a), b = rest(high, b);
      _mm512_store_si512(to + 2 * kUnitRuns * kHalfTile,
                         _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(a, 16), b));
    }
  }

  // ---- bases

  void raise_bases(const Unit& u, const Cell& cell) {
    for (int row = 0; row < rows_of(cell.strip); ++row) {
      const int r = cell.strip * kStripRows + row;
      const __m512 sum = _mm512_load_ps(s_.sum + r * 16);
      if (!_mm512_test_epi32_mask(_mm512_castps_si512(sum), _mm512_set1_epi32(0x40000000))) continue;
      // Where a score is NaN or infinite, so is the row from here on.
      if (s_.base[r] != -kInf && _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q)) continue;
      if (!rescaled_) std::fill_n(s_.factor, kMaxRows, 1.0f);
      rescaled_ = true;
      const bool finite = _mm512_cmp_ps_mask(sum, _mm512_set1_ps(kInf), _CMP_LT_OQ) == 0xFFFF;
      const int by = finite ? std::ilogb(_mm512_reduce_max_ps(sum)) + int(kHeadroom) : 0;
      if (finite && float(by) + (s_.far[r] == 0 ? 0.0f : s_.base[r]) <= 64)
        raise_base(u, cell, row, r, by);
      else
        weigh_anew(u, cell, row, r);
    }
  }

  // By a power of two, so that everything is as if it had been so from the beginning.
  void raise_base(const Unit& u, const Cell& cell, int row, int r, int by) {
    const __m512 factor = _mm512_set1_ps(std::ldexp(1.0f, -by));
    s_.base[r] += float(by), s_.factor[r] *= std::ldexp(1.0f, -by);
    float* sum = s_.sum + r * 16;
    _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), factor));
    for (int step = u.begin[cell.strip]; step <= cell.step; ++step) {
      for (int plane = 0; plane < N; ++plane) {
        bf16* weight = weights(cell.strip, row, step, plane);
        for (int j = 0; j < kRun; j += 16) store(weight + j, {_mm512_mul_ps(load(weight + j).v, factor)});
      }
    }
  }

  // A first base, or one that leaves nothing of what was weighed before.
  void weigh_anew(const Unit& u, const Cell& cell, int row, int r) {
    const __m512 zero = _mm512_setzero_ps();
    for (int step = u.begin[cell.strip]; step <= cell.step; ++step) {
      for (int plane = 0; plane < N; ++plane) _mm512_store_ps(weights(cell.strip, row, step, plane), zero);
    }
    s_.factor[r] = 0, s_.base[r] = -kInf;
    _mm512_store_ps(s_.sum + r * 16, zero);
    const float top = greatest(cell, row);
    if (top <= hidden_) return;
    s_.base[r] = top * rule_.exponent + kHeadroom;
    if (s_.far[r] != 0 || std::fabs(s_.base[r]) >= kFar) {
      subtract(cell, row, top);
      s_.far[r] += top, s_.base[r] = kHeadroom;
      any_far_[cell.strip] = true;
    }
    const Weigher weigher(rule_.exponent, sixteenths_);
    _mm512_store_ps(s_.sum + r * 16, weigh(weigher, scores(cell, row), weights(cell.strip, row, cell.step, 0),
                                           _mm512_set1_ps(s_.base[r]), zero));
  }

  // ---- results

  float* outputs(int strip, int row, int d) const {
    return s_.out[(strip * dv_runs_ + d) * 4 + row / 16 * 2].x[row % 16];
  }

  void store_rows() {
    for (int first = 0; first < s_.block->rows; first += 16) {
      VecF x[16];
      for (int i = 0; i < 16; ++i) x[i] = load(s_.sum + (first + i) * 16);
      const VecF sum = reduce_block(x) * set1(N == 1 ? 1 / kRaised : 1.0f);
      float inverse[16];
      finish_rows(first, sum, inverse);
      const VecMask<float> empty = equal(sum, set1(0.0f));
      for (int r = first; r < std::min(first + 16, s_.block->rows); ++r) {
        void* out = element(p_.out.data, p_.dtype, s_.block->b * p_.out.stride[0] + s_.block->offset(p_.out.stride, r));
        const bool none = empty.m >> (r - first) & 1;
        N == 1 ? store_row(static_cast<bf16*>(out), r, inverse[r - first], none)
               : store_row(static_cast<f16*>(out), r, inverse[r - first], none);
      }
    }
  }

  // finish_row for 16 rows, which are queries of one head.
  void finish_rows(int first, VecF sum, float* inverse) {
    const float* sinks = static_cast<const float*>(p_.sinks);
    const int rows = std::min(16, s_.block->rows - first);
    const int64_t head = s_.block->head[first];
    const int64_t at = s_.block->b * p_.rows_stride_b + head * p_.rows_stride_h + s_.block->query[first];
    float* const lse = static_cast<float*>(p_.lse) + at;
    float* const lse_rest = p_.lse_rest ? static_cast<float*>(p_.lse_rest) + at : nullptr;
    const VecF base = load(s_.base + first), zero = set1(0.0f), ln2 = set1(float(kLn2));
    // Row by row the same, whatever the others are.
    const VecMask<float> plain = less(zero, sum) & less(sum, set1(kInf)) & equal(load(s_.far + first), zero);
    const VecF log_sum = log(select(plain, sum, set1(1.0f))), total = fma(base, ln2, log_sum);
    store_n(lse, total, rows);
    if (lse_rest) store_n(lse_rest, fma(base, ln2, zero - total) + log_sum, rows);
    store(inverse, set1(1.0f) / sum);
    float one[16];
    store(one, sum);
    for (int r = 0; r < rows; ++r) {
      if (!sinks && (plain.m >> r & 1)) continue;
      const FinishedRow<float> finished = finish(first + r, one[r], sinks ? sinks[head] : -kInf);
      lse[r] = finished.lse, inverse[r] = finished.inverse;
      if (lse_rest) lse_rest[r] = finished.lse_rest;
    }
  }
  // Of positive, finite numbers: log(2^n * m) with m near 1 = n * log(2) + 2 * artanh((m - 1) / (m + 1)).
  static MHA_INLINE VecF log(VecF x) {
    VecF n{_mm512_getexp_ps(x.v)}, m{_mm512_getmant_ps(x.v, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero)};
    const VecMask<float> large = less(set1(1.41421356f), m);
    m = select(large, m * set1(0.5f), m), n = select(large, n + set1(1.0f), n);
    const VecF s = (m - set1(1.0f)) / (m + set1(1.0f)), z = s * s;
    VecF q = fma(set1(0.23606177f), z, set1(0.28535474f));
    q = fma(fma(q, z, set1(0.40000377f)), z, set1(0.66666665f));
    return fma(n, set1(float(kLn2)), fma(s * z, q, s + s));
  }
  FinishedRow<float> finish(int r, float sum, float sink) const {
    if (s_.far[r] == 0) return finish_row(s_.base[r], sum, float(kLn2), sink);
    const float unit = std::exp2(s_.base[r]);
    FinishedRow<float> finished = finish_row(s_.far[r], sum * unit, rule_.natural, sink);
    finished.inverse *= unit;
    return finished;
  }
  template <class S>
  void store_row(S* out, int r, float inverse, bool empty) {
    const float* x = outputs(r / kStripRows, r % kStripRows, 0);
    const VecF factor = set1(inverse);
    const VecMask<float> keep{__mmask16(empty ? 0 : 0xFFFF)};
    for (int d = 0; d < p_.Dv; d += kRun, x += 4 * kHalf) {
      VecF low, high;
      low.v = _mm512_maskz_mul_ps(keep.m, load(x).v, factor.v);
      high.v = _mm512_maskz_mul_ps(keep.m, load(x + kHalf).v, factor.v);
      const int n = int(min64(kRun, p_.Dv - d));
      if (n == kRun) {
        store_line(out + d, low, high);
      } else {
        store_n(out + d, low, n);
        if (n > 16) store_n(out + d + 16, high, n - 16);
      }
    }
  }
  static MHA_INLINE void store_line(bf16* out, VecF low, VecF high) {
    _mm512_storeu_si512(out, __m512i(_mm512_cvtne2ps_pbh(high.v, low.v)));
  }
  static MHA_INLINE void store_line(f16* out, VecF low, VecF high) { store(out, low), store(out + 16, high); }

  const AttentionForward& p_;
  const ScoreRule<float> rule_;
  AmxForwardScratch<N> s_;
  const int dv_runs_;
  const float hidden_;  // less than scores are; finite as an exponent, too
  alignas(64) float sixteenths_[16];
  StoredHead kv_;
  bool rescaled_ = false;
  bool any_far_[kStrips] = {};
  uint32_t unset_[kStrips] = {};  // rows without a base
};

MHA_ISA_END
