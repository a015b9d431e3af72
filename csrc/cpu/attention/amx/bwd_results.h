// Where a thread is in attention backward on AMX tiles, and how its sums of tiles become gradients.
#pragma once

#include "../bwd/operands.h"
#include "../bwd/sums.h"
#include "bwd_space.h"

MHA_ISA_BEGIN

template <int N>
class AmxBackwardResults : protected BackwardPlace<AmxBackwardHead<N>> {
  using Place = BackwardPlace<AmxBackwardHead<N>>;

 protected:
  using Place::p_, Place::plan_, Place::shared_, Place::at_, Place::head_, Place::b_, Place::hk_;
  using Scratch = AmxBackwardScratch<N>;

  AmxBackwardResults(const AttentionBackward& p, const BackwardPlan& plan,
                     const BackwardShared<AmxBackwardHead<N>>& shared, Arena arena)
      : Place(p, plan, shared, arena), s_(arena, p, plan) {}

  static void begin(SumTile* sums, int64_t pairs, bool begun) {
    if (!begun) std::memset(sums, 0, size_t(pairs) * 4 * sizeof(SumTile));
  }

  // 32 features of a row, or fewer: two vectors.
  template <class S>
  static MHA_INLINE void put_row(S* to, VecF low, VecF high, int width) {
    if constexpr (std::is_same_v<S, bf16>) {
      const __mmask32 lanes = width >= 32 ? ~__mmask32(0) : (__mmask32(1) << width) - 1;
      _mm512_mask_storeu_epi16(to, lanes, __m512i(_mm512_cvtne2ps_pbh(high.v, low.v)));
    } else {
      store_n(to, low, std::min(width, 16));
      if (width > 16) store_n(to + 16, high, width - 16);
    }
  }

  // Calls f(to, stride): where rows `first` on of a gradient go, or of this task's part of it, [B][heads][S][cols].
  template <class F>
  void with_rows(const Tensor4& out, int64_t head, int64_t first, float* parts, int64_t part, int64_t heads, int64_t S,
                 int64_t cols, F f) {
    if (parts) return f(parts + (((part * p_.B + b_) * heads + head) * S + first) * cols, cols);
    with_storage<float>(p_.dtype, [&](auto* s) {
      using S = std::remove_const_t<std::remove_pointer_t<decltype(s)>>;
      f(static_cast<S*>(out.data) + b_ * out.stride[0] + head * out.stride[1] + first * out.stride[2], out.stride[2]);
    });
  }

  void finish_queries(int64_t h, int64_t run) {
    const int64_t first = run * kRun, D = p_.D;
    const int rows = int(std::clamp<int64_t>(p_.Sq - first, 0, kRun));
    if (rows == 0) return;
    SumTile* sums = head_.dq + run * s_.d * 4;
    begin(sums, s_.d, head_.begun(run));
    const VecF scale = set1(float(p_.scale));
    float* const parts = plan_.copies() > 1 ? shared_.dq : nullptr;
    with_rows(p_.dq, h, first, parts, at_.chunk, p_.H, p_.Sq, D, [&](auto* to, int64_t stride) {
      for (int64_t m = 0; m < s_.d; ++m) {
        for (int half = 0; half < 2; ++half) {
          VecF low[16], high[16];
          for (int i = 0; i < 16; ++i) {
            low[i] = load(sums[m * 4 + half].x[i]) * scale;
            high[i] = load(sums[m * 4 + 2 + half].x[i]) * scale;
          }
          transpose_block(low);
          transpose_block(high);
          for (int i = 0; i < 16; ++i) {
            const int r = query_of_column(half, i);
            if (r < rows) put_row(to + r * stride + m * kRun, low[i], high[i], int(min64(kRun, D - m * kRun)));
          }
        }
      }
    });
  }

  // dK and dV of the span's keys, of this head or, with it, of all its group.
  void finish_keys(int64_t h, int64_t keys) {
    for (int64_t run = 0; run * kRun < keys; ++run) {
      begin(s_.dk + run * s_.d * 4, s_.d, keys_begun_[run]);
      begin(s_.dv + run * s_.dv_runs * 4, s_.dv_runs, keys_begun_[run]);
    }
    this->add_head(h, span_key_, [&](bool is_first, bool is_last, float* dk, float* dv) {
      put_keys(p_.dk, shared_.dk, s_.dk, dk, is_first, is_last, keys, p_.D, float(p_.scale));
      put_keys(p_.dv, shared_.dv, s_.dv, dv, is_first, is_last, keys, p_.Dv, 1.0f);
    });
  }

  void put_keys(const Tensor4& out, float* parts, const SumTile* sums, float* total, bool is_first, bool is_last,
                int64_t keys, int64_t cols, float scale) {
    const VecF factor = set1(scale);
    const int64_t n = runs(cols);
    if (plan_.partial_keys() <= 1) parts = nullptr;
    with_rows(out, hk_, span_key_, parts, at_.split, p_.Hk, p_.Sk, cols, [&](auto* to, int64_t stride) {
      for (int64_t j = 0; j < keys; ++j, to += stride, total += cols) {
        for (int64_t m = 0; m < n; ++m) {
          const SumTile* pair = sums + (j / kRun * n + m) * 4 + j % kRun / 16 * 2;
          const int width = int(min64(kRun, cols - m * kRun));
          VecF low = load(pair[0].x[j % 16]), high = load(pair[1].x[j % 16]);
          if (!is_first) {
            low = load_n(total + m * kRun, std::min(width, 16)) + low;
            if (width > 16) high = load_n(total + m * kRun + 16, width - 16) + high;
          }
          if (is_last)
            put_row(to + m * kRun, low * factor, high * factor, width);
          else
            put_row(total + m * kRun, low, high, width);
        }
      }
    });
  }

  Scratch s_;
  uint8_t keys_begun_[kKeyRuns];  // whether sums of a run of the span's keys hold anything yet
  int64_t span_key_ = 0;
};

MHA_ISA_END
