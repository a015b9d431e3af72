// What attention_bwd adds up when its tasks are done: their parts of a gradient, and the gradient of the sinks.
#pragma once

#include "../../threads/parallel.h"
#include "operands.h"
#include "plan.h"

MHA_ISA_BEGIN

// out = the sum of the parts, each [B,H,S,cols] contiguous, rounded
template <class T>
void sum_parts(const Threads& threads, const Tensor4& out, DType type, int64_t B, int64_t H, int64_t S, int64_t cols,
               const T* parts, int64_t count) {
  constexpr int L = Vec<T>::lanes;
  const int64_t size = B * H * S * cols, blocks = ceil_div(S, kMaxRows);
  for_each_task(threads, B * H * blocks, [&](int64_t task, int) {
    const int64_t bh = task / blocks, first = task % blocks * kMaxRows;
    with_storage<T>(type, [&](auto* s) {
      using Out = std::remove_const_t<std::remove_pointer_t<decltype(s)>>;
      Out* head = static_cast<Out*>(out.data) + bh / H * out.stride[0] + bh % H * out.stride[1];
      for (int64_t i = first; i < min64(S, first + kMaxRows); ++i) {
        for (int64_t c = 0; c < cols; c += L) {
          const int lanes = int(min64(L, cols - c));
          const T* from = parts + (bh * S + i) * cols + c;
          Vec<T> sum = load_n(from, lanes);
          for (int64_t n = 1; n < count; ++n) sum = sum + load_n(from + n * size, lanes);
          store_n(head + i * out.stride[2] + c, sum, lanes);
        }
      }
    });
  });
}

// dsinks[h] -= sum over b and i of (the sink's weight) * delta: the sink is a key whose value is 0.
template <class T>
void add_sink_gradients(const AttentionBackward& p, const Threads& threads) {
  for_each_task(threads, p.H, [&](int64_t h, int) {
    const T sink = static_cast<const T*>(p.sinks)[h];
    if (sink == -std::numeric_limits<T>::infinity()) return;
    double sum = 0;
    RowBlock block;
    T delta[kMaxRows];
    for (int64_t b = 0; b < p.B; ++b) {
      for (int64_t first = 0; first < p.Sq; first += kMaxRows) {
        const int rows = int(min64(kMaxRows, p.Sq - first));
        set_rows(&block, p.mask, b, h, first, rows, p.Sq, p.Sk);
        row_dots(p, block, delta);
        const int64_t at = b * p.rows_stride_b + h * p.rows_stride_h + first;
        const T *lse = static_cast<const T*>(p.lse) + at, *rest = static_cast<const T*>(p.lse_rest),
                *dlse = static_cast<const T*>(p.dlse);
        for (int r = 0; r < rows; ++r) {
          const T over = sink - lse[r], after = rest ? rest[at + r] : T(0);
          // A row that sees nothing has out 0, whatever its dout holds.
          if (over == 0 && after == 0 && !std::isfinite(delta[r])) delta[r] = 0;
          sum -= double(std::exp(over - after) * (delta[r] - (dlse ? dlse[at + r] : T(0))));
        }
      }
    }
    static_cast<T*>(p.dsinks)[h] += T(sum);
  });
}

MHA_ISA_END
