// The rows of a block in AMX forward: from scores to weights, what each row's weights are relative to, and its results.
#pragma once

#include "exp2.h"
#include "fwd_scores.h"

MHA_ISA_BEGIN

template <int N>
class AmxRows : protected AmxScores<N> {
  using Scores = AmxScores<N>;

 protected:
  using Scores::kInf, Scores::kHalf, Scores::kHalfTile, Scores::kSettled, Scores::scores, Scores::rows_of;
  using Scores::p_, Scores::rule_, Scores::s_, Scores::kv_, Scores::exponent_, Scores::natural_, Scores::hidden_,
      Scores::floor_;
  using typename Scores::Cell;
  using typename Scores::Unit;

  // Weights that are to be cut off to bf16 are raised by the half of a last bit that this takes on average.
  static constexpr float kRaised = 1 + 355.0f / 131072;
  static constexpr float kHeadroom = 16;  // of base above the greatest score of the first cell
  // A row with scores beyond this many powers of two is far: one of them is subtracted from all before anything else,
  // so that equal ones have equal weights.
  static constexpr float kFar = 1 << 20;
  static constexpr int kRowsTogether = 4;  // in registers

  AmxRows(const AttentionForward& p, void* scratch) : Scores(p, scratch), dv_runs_(int(runs(p.Dv))) {
    for (int i = 0; i < 16; ++i) sixteenths_[i] = float(std::exp2(i / 16.0) * double(N == 1 ? kRaised : 1.0f));
  }

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

  bf16* weights(int strip, int row, int step, int plane) const {
    return s_.weight[((strip * N + plane) * 2 + row / 16) * kUnitRuns + step].x[row % 16];
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
      const VecF base = fma(x[0], set1(exponent_), set1(kHeadroom));
      const VecMask<float> near = less(abs(base), set1(kFar)), seen = less(hidden, x[0]);
      float* to = s_.base + cell.strip * kStripRows + row;
      const VecMask<float> now{__mmask16(seen.m & (unset >> row))};
      store(to, select(now, select(near, base, none), load(to)));
      unset &= ~(uint32_t(now.m) << row);
    }
  }
  // Weights of a row of a cell, against base; adds them to sum. Those that are dropped are 0 afterwards.
  template <bool kDropped>
  static MHA_INLINE __m512 weigh(const Weigher& weigher, const float* x, bf16* to, __m512 base, __m512 sum,
                                 [[maybe_unused]] const __mmask16* kept) {
    __m512 low = weigher(_mm512_load_ps(x), base), high = weigher(_mm512_load_ps(x + kHalf), base);
    sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
    if constexpr (kDropped) low = _mm512_maskz_mov_ps(kept[0], low), high = _mm512_maskz_mov_ps(kept[1], high);
    store_weights(to, low, high);
    return sum;
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
      // Where a score is NaN or infinite, the row is NaN from here on; finite ones may be too great for an exponent.
      if (std::isnan(s_.base[r])) continue;
      if (s_.base[r] != -kInf && _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q) && !(greatest(cell, row) >= -floor_)) {
        s_.base[r] = std::numeric_limits<float>::quiet_NaN();
        continue;
      }
      if (!rescaled_) std::fill_n(s_.factor, kMaxRows, 1.0f), raised_[0] = raised_[1] = 0;
      rescaled_ = true;
      const bool finite = _mm512_cmp_ps_mask(sum, _mm512_set1_ps(kInf), _CMP_LT_OQ) == 0xFFFF;
      const int by = finite ? power_of(_mm512_reduce_max_ps(sum)) + int(kHeadroom) : 0;
      if (finite && float(by) + (s_.far[r] == 0 ? 0.0f : s_.base[r]) <= 64)
        raise_base(cell, row, r, by);
      else
        weigh_anew(u, cell, row, r);
    }
  }
  static_assert(kStrips == 2);
  // Of a normal number: floor(log2), and back.
  static int power_of(float x) {
    int bits;
    std::memcpy(&bits, &x, 4);
    return (bits >> 23) - 127;
  }
  static float to_power(int n) {
    const int bits = (n + 127) << 23;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }

  // By a power of two, so that everything is as if it had been so from the beginning. Weights of the unit follow when
  // all are made (lower_weights): where scores rise from key to key, bases do again and again.
  void raise_base(const Cell& cell, int row, int r, int by) {
    const float less = to_power(-by);
    const __m512 factor = _mm512_set1_ps(less);
    s_.base[r] += float(by), s_.factor[r] *= less;
    float *sum = s_.sum + r * 16, *steps = s_.step_factor + r * kUnitRuns;
    _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), factor));
    const __m512 one = _mm512_set1_ps(1.0f), before = raised_[cell.strip] >> row & 1 ? _mm512_load_ps(steps) : one;
    _mm512_store_ps(steps, _mm512_mask_mul_ps(before, __mmask16((2u << cell.step) - 1), before, factor));
    raised_[cell.strip] |= 1u << row;
  }
  static_assert(kUnitRuns == 16);
  void lower_weights(const Unit& u) {
    for (int strip = 0; strip < kStrips; ++strip) {
      for (uint32_t rows = raised_[strip]; rows; rows &= rows - 1) {
        const int row = __builtin_ctz(rows);
        const float* factor = s_.step_factor + (strip * kStripRows + row) * kUnitRuns;
        for (int step = u.begin[strip]; step < u.end[strip] && factor[step] != 1; ++step) {
          for (int plane = 0; plane < N; ++plane) {
            bf16* weight = weights(strip, row, step, plane);
            for (int j = 0; j < kRun; j += 16) store(weight + j, load(weight + j) * set1(factor[step]));
          }
        }
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
    s_.base[r] = top * exponent_ + kHeadroom, s_.far[r] = 0;
    if (std::fabs(s_.base[r]) >= kFar) {
      s_.far[r] = top, s_.base[r] = kHeadroom;
      any_far_[cell.strip] = true;
    }
    Scores::settle(cell, row, s_.far[r]);
    const Weigher weigher(exponent_, sixteenths_);
    auto all = [&]<bool kDropped>() {
      return weigh<kDropped>(weigher, scores(kSettled, row), weights(cell.strip, row, cell.step, 0),
                             _mm512_set1_ps(s_.base[r]), zero, kDropped ? s_.kept[row] : nullptr);
    };
    const __m512 sum = p_.dropout.rng_state ? all.template operator()<true>() : all.template operator()<false>();
    if (_mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q)) s_.base[r] = std::numeric_limits<float>::quiet_NaN();
    _mm512_store_ps(s_.sum + r * 16, sum);
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
      std::copy_n(inverse, 16, s_.factor + first);  // for put_weights
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
    const float sink = sinks ? sinks[head] : -kInf;
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
      if (sink == -kInf && (plain.m >> r & 1)) continue;  // one of -inf is none, to the bit
      const FinishedRow<float> finished = finish(first + r, one[r], sink);
      lse[r] = finished.lse, inverse[r] = finished.inverse;
      if (lse_rest) lse_rest[r] = finished.lse_rest;
    }
    if (p_.dropout.rng_state) store(inverse, load(inverse) * set1(kept_factor(p_.dropout)));
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
    FinishedRow<float> finished = finish_row(s_.far[r], sum * unit, natural_, sink);
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
      store_columns(out + d, low, high, int(min64(kRun, p_.Dv - d)));
    }
  }
  static MHA_INLINE void store_line(bf16* out, VecF low, VecF high) {
    _mm512_storeu_si512(out, __m512i(_mm512_cvtne2ps_pbh(high.v, low.v)));
  }
  static MHA_INLINE void store_line(f16* out, VecF low, VecF high) { store(out, low), store(out + 16, high); }

  // ---- weights as output; rows of a block are queries of one head

  void clear_weights() {
    for (int r = 0; r < s_.block->rows; ++r) std::memset(weights_of(r, 0), 0, size_t(p_.Sk) * size_of(p_.dtype));
  }
  void* weights_of(int r, int64_t key) const {
    return element(p_.weights.data, p_.dtype,
                   s_.block->b * p_.weights.stride[0] + s_.block->offset(p_.weights.stride, r) + key);
  }
  // Of a cell, from its scores, once rows are finished. `all`: every row sees every key.
  void put_weights(const Cell& cell, const float* score, bool all) {
    // Times 2^kHeadroom, which bases are too high by: else small weights would be 0.
    const float headroom = 1 << int(kHeadroom);
    alignas(64) float sixteenths[16];
    for (int i = 0; i < 16; ++i) sixteenths[i] = sixteenths_[i] * (N == 1 ? headroom / kRaised : headroom);
    const Weigher weigher(exponent_, sixteenths);
    // Known before the loop, as in modify.
    const int keys = int(min64(kRun, p_.Sk - cell.first_key)), rows = rows_of(cell.strip);
    const bool dropped = p_.dropout.rng_state;
    const int64_t stride = p_.weights.stride[2];
    const float *const base = s_.base + cell.strip * kStripRows, *const inverse = s_.factor + cell.strip * kStripRows;
    using S = std::conditional_t<N == 1, bf16, f16>;
    S* to = static_cast<S*>(weights_of(cell.strip * kStripRows, cell.first_key));
    for (int row = 0; row < rows; ++row, to += stride) {
      uint32_t kept = ~0u;
      // A row of NaN has none where it sees nothing.
      if (!all) kept = this->seen(cell.masks, cell.strip, cell.step, row, cell.first_key);
      if (dropped) kept &= s_.kept[row][0] | uint32_t(s_.kept[row][1]) << 16;
      const float* x = score + row / 16 * 2 * kHalf + row % 16 * 16;
      auto weight = [&](const float* at, uint32_t lanes) MHA_INLINE_LAMBDA {
        const __m512 relative = weigher(_mm512_load_ps(at), _mm512_set1_ps(base[row]));
        return VecF{_mm512_maskz_mul_ps(__mmask16(lanes), relative, _mm512_set1_ps(inverse[row] / headroom))};
      };
      store_columns(to, weight(x, kept), weight(x + kHalf, kept >> 16), keys);
    }
  }
  // 32 columns of a row of results, or n of them.
  template <class S>
  static MHA_INLINE void store_columns(S* to, VecF low, VecF high, int n) {
    if (n == kRun) return store_line(to, low, high);
    store_n(to, low, std::min(n, 16));
    if (n > 16) store_n(to + 16, high, n - 16);
  }

  const int dv_runs_;
  alignas(64) float sixteenths_[16];
  bool rescaled_ = false;
  bool any_far_[kStrips] = {};
  uint32_t unset_[kStrips] = {};   // rows without a base
  uint32_t raised_[kStrips] = {};  // rows whose base was raised in this unit; known where rescaled_
};

MHA_ISA_END
