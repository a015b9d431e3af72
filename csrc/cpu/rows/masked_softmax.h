// masked_softmax, forward and backward, one row at a time: memory is read and written once, the passes between work in
// the caches. A row's interval of keys is all that is read of it.
#pragma once

#include "dropout_mask.h"
#include "softmax_row.h"

MHA_ISA_BEGIN

constexpr int64_t kSoftmaxTaskElements = 16384;
constexpr int64_t kSoftmaxBiasGroups = 256;

// What one thread works in.
template <class A>
struct SoftmaxScratch {
  int64_t pitch;
  Scratch<A> rows;
  Scratch<uint8_t> bytes;

  SoftmaxScratch(int64_t Sk, int threads)
      : pitch((Sk + 127) / 64 * 64), rows(3 * pitch * threads), bytes(pitch * threads) {}
  A* row(int which, int thread) const { return rows.get() + (3 * thread + which) * pitch; }
  uint8_t* visible(int thread) const { return bytes.get() + thread * pitch; }
};

struct SoftmaxRow {
  int64_t b, h, i;
  Interval keys;
  const uint8_t* visible;  // of the keys in the interval; null: all of them
  int64_t length() const { return keys.end - keys.begin; }
};

inline SoftmaxRow softmax_row(const MaskedSoftmaxProblem& p, int64_t b, int64_t h, int64_t i, uint8_t* bytes) {
  const Interval keys = row_interval(p.mask, b, i, p.Sk);
  return {b, h, i, keys, visible_bytes(p.mask, b, h, i, keys, bytes)};
}

template <class T>
const T* row_start(const Tensor4& t, const SoftmaxRow& r) {
  return static_cast<const T*>(t.data) + r.b * t.stride[0] + r.h * t.stride[1] + r.i * t.stride[2] +
         r.keys.begin * t.stride[3];
}

// x[0..length) = scores * scale + bias, -inf where hidden.
template <class T>
void softmax_logits(const MaskedSoftmaxProblem& p, const SoftmaxRow& r, Acc<T>* x) {
  using A = Acc<T>;
  load_row(x, row_start<T>(p.scores, r), p.scores.stride[3], A(p.scale), r.length());
  if (p.bias.data && p.bias_dtype == p.dtype)
    add_bias(x, row_start<T>(p.bias, r), p.bias.stride[3], r.length());
  else if (p.bias.data)
    add_bias(x, row_start<A>(p.bias, r), p.bias.stride[3], r.length());
  if (r.visible) hide(x, r.visible, -std::numeric_limits<A>::infinity(), r.length());
}

// multiplier[0..length) = what dropout multiplies each weight with.
template <class A>
void dropout_factors(const MaskedSoftmaxProblem& p, const SoftmaxRow& r, A* multiplier) {
  dropout_row(multiplier, p.dropout, r.b, r.h, r.i, r.keys.begin, r.length(), A(1 / (1 - p.dropout.p)));
}

// Zeros all of a row but its interval.
template <class T>
void zero_outside(T* row, Interval keys, int64_t Sk) {
  std::memset(static_cast<void*>(row), 0, size_t(keys.begin) * sizeof(T));
  std::memset(static_cast<void*>(row + keys.end), 0, size_t(Sk - keys.end) * sizeof(T));
}

template <class T>
void softmax_row_fwd(const MaskedSoftmaxForward& p, const SoftmaxRow& r, const SoftmaxScratch<Acc<T>>& scratch,
                     int thread) {
  using A = Acc<T>;
  const int64_t n = r.length();
  T* out = static_cast<T*>(p.out.data) + r.b * p.out.stride[0] + r.h * p.out.stride[1] + r.i * p.out.stride[2];
  A* lse = static_cast<A*>(p.lse) + (r.b * p.H + r.h) * p.Sq + r.i;
  A* x;
  if constexpr (std::is_same_v<T, A>)
    x = out + r.keys.begin;
  else
    x = scratch.row(0, thread);
  zero_outside(out, r.keys, p.Sk);
  softmax_logits<T>(p, r, x);
  A top = row_max(x, n);
  if (top == -std::numeric_limits<A>::infinity()) top = 0;  // nothing seen, unless it is NaN: the sum tells
  const double sum = exp_row(x, top, n);
  *lse = A(top + std::log(sum));
  A factor = A(sum == 0 ? 0 : 1 / sum);
  if (p.dropout.rng_state) {
    dropout_factors(p, r, scratch.row(1, thread));
    multiply_row(x, scratch.row(1, thread), n);
  }
  if (r.visible && std::isnan(factor)) {  // a visible NaN fills the row, but hidden weights stay 0
    store_row<A>(x, x, factor, n);
    hide(x, r.visible, A(0), n);
    factor = 1;
  }
  store_row(out + r.keys.begin, x, factor, n);
}

// Calls f(b, h, i, thread) for each row, with neighbours one after the other on one thread.
template <class F>
void for_each_row(const MaskedSoftmaxProblem& p, const Threads& threads, F f) {
  const int64_t rows = p.B * p.H * p.Sq;
  const int64_t run = max64(1, min64(kSoftmaxTaskElements / max64(1, p.Sk), rows / (4 * threads.count)));
  for_each_task(threads, (rows + run - 1) / run, [&](int64_t task, int thread) {
    for (int64_t r = task * run; r < min64(rows, (task + 1) * run); ++r)
      f(r / p.Sq / p.H, r / p.Sq % p.H, r % p.Sq, thread);
  });
}

inline void masked_softmax_fwd(const MaskedSoftmaxForward& p, const Threads& threads) {
  with_dtype(p.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const SoftmaxScratch<Acc<T>> scratch(p.Sk, threads.count);
    for_each_row(p, threads, [&](int64_t b, int64_t h, int64_t i, int thread) {
      softmax_row_fwd<T>(p, softmax_row(p, b, h, i, scratch.visible(thread)), scratch, thread);
    });
  });
}

// Writes one row of dscores, and leaves the gradient of the row's logits in the scratch row returned; null when it is
// 0.
template <class T>
const Acc<T>* softmax_row_bwd(const MaskedSoftmaxBackward& p, const SoftmaxRow& r,
                              const SoftmaxScratch<Acc<T>>& scratch, int thread) {
  using A = Acc<T>;
  const int64_t n = r.length();
  T* dscores = static_cast<T*>(p.dscores.data) + r.b * p.dscores.stride[0] + r.h * p.dscores.stride[1] +
               r.i * p.dscores.stride[2];
  const A lse = static_cast<const A*>(p.lse)[(r.b * p.H + r.h) * p.Sq + r.i];
  if (lse == -std::numeric_limits<A>::infinity()) {
    zero_outside(dscores, {0, 0}, p.Sk);
    return nullptr;
  }
  zero_outside(dscores, r.keys, p.Sk);
  A *x = scratch.row(0, thread), *dweights = scratch.row(1, thread), *multiplier = scratch.row(2, thread);
  softmax_logits<T>(p, r, x);
  load_row(dweights, row_start<T>(p.dout, r), p.dout.stride[3], A(1), n);
  if (p.dropout.rng_state) {
    dropout_factors(p, r, multiplier);
    multiply_row(dweights, multiplier, n);
  }
  if (r.visible) hide(dweights, r.visible, A(0), n);
  // Dividing by the sum takes out the error of rounding lse.
  const double sum = exp_row(x, lse, n), delta = dot_row(x, dweights, n) / sum;
  softmax_gradient(x, dweights, A(1 / sum), A(delta), n);
  if (r.visible) hide(x, r.visible, A(0), n);
  store_row(dscores + r.keys.begin, x, A(p.scale), n);
  return x;
}

// dbias is summed over the rows that share it, in an order that does not depend on the number of threads. Rows are
// numbered (owner, sharer): an owner is a row of dbias, its sharers are the rows of scores that add to it. Without
// dbias each row is an owner.
struct BiasRows {
  int64_t kept[3], shared[3];  // sizes of B, H, Sq that number the owners, and the sharers of each
  int64_t owners, sharers;

  explicit BiasRows(const MaskedSoftmaxBackward& p) {
    const int64_t size[3] = {p.B, p.H, p.Sq};
    for (int d = 0; d < 3; ++d) {
      const bool keep = !p.dbias.data || p.dbias.stride[d] != 0;
      kept[d] = keep ? size[d] : 1;
      shared[d] = keep ? 1 : size[d];
    }
    owners = kept[0] * kept[1] * kept[2];
    sharers = shared[0] * shared[1] * shared[2];
  }
};

// Adds the gradient of a row's logits to the row of dbias that starts at sum.
template <class A>
void add_to_dbias(A* sum, bool one_for_all_keys, const A* dlogits, const SoftmaxRow& r) {
  if (one_for_all_keys)
    *sum += A(sum_row(dlogits, r.length()));
  else
    accumulate_row(sum + r.keys.begin, dlogits, r.length());
}

template <class T>
void softmax_bwd(const MaskedSoftmaxBackward& p, const Threads& threads) {
  using A = Acc<T>;
  const SoftmaxScratch<A> scratch(p.Sk, threads.count);
  const BiasRows rows(p);
  const bool one_for_all_keys = p.dbias.stride[3] == 0;
  const int64_t width = one_for_all_keys ? 1 : p.Sk;
  // Few owners would keep few threads busy: their sharers are then split into groups, each with a sum of its own, on
  // lines of its own.
  const int64_t groups = max64(1, min64(rows.sharers / 4, kSoftmaxBiasGroups / max64(1, rows.owners)));
  constexpr int64_t kLine = 64 / sizeof(A);
  const int64_t pitch = (width + kLine - 1) / kLine * kLine;
  const Scratch<A> group_sums(groups > 1 ? rows.owners * groups * pitch : 0);
  auto dbias_row = [&](int64_t owner) {
    return static_cast<A*>(p.dbias.data) + owner / rows.kept[2] / rows.kept[1] * p.dbias.stride[0] +
           owner / rows.kept[2] % rows.kept[1] * p.dbias.stride[1] + owner % rows.kept[2] * p.dbias.stride[2];
  };
  auto run_group = [&](int64_t owner, int64_t group, int thread) {
    A* sum = nullptr;
    if (groups > 1) {
      sum = group_sums.get() + (owner * groups + group) * pitch;
      std::memset(static_cast<void*>(sum), 0, size_t(width) * sizeof(A));
    } else if (p.dbias.data) {
      sum = dbias_row(owner);
    }
    for (int64_t s = rows.sharers * group / groups; s < rows.sharers * (group + 1) / groups; ++s) {
      // Of an owner's and a sharer's index along a dimension, one is 0.
      const int64_t i = owner % rows.kept[2] + s % rows.shared[2];
      const int64_t h = owner / rows.kept[2] % rows.kept[1] + s / rows.shared[2] % rows.shared[1];
      const int64_t b = owner / rows.kept[2] / rows.kept[1] + s / rows.shared[2] / rows.shared[1];
      const SoftmaxRow r = softmax_row(p, b, h, i, scratch.visible(thread));
      const A* dlogits = softmax_row_bwd<T>(p, r, scratch, thread);
      if (sum && dlogits) add_to_dbias(sum, one_for_all_keys, dlogits, r);
    }
  };
  const int64_t run =
      max64(1, min64(kSoftmaxTaskElements / max64(1, p.Sk * rows.sharers), rows.owners / (4 * threads.count)));
  for_each_task(threads, (rows.owners + run - 1) / run * groups, [&](int64_t task, int thread) {
    const int64_t first = task / groups * run;
    for (int64_t owner = first; owner < min64(rows.owners, first + run); ++owner)
      run_group(owner, task % groups, thread);
  });
  if (groups == 1) return;
  constexpr int64_t kColumns = 1024;
  const int64_t pieces = (width + kColumns - 1) / kColumns;
  for_each_task(threads, rows.owners * pieces, [&](int64_t task, int) {
    const int64_t owner = task / pieces, first = task % pieces * kColumns, n = min64(kColumns, width - first);
    for (int64_t g = 0; g < groups; ++g)
      accumulate_row(dbias_row(owner) + first, group_sums.get() + (owner * groups + g) * pitch + first, n);
  });
}

inline void masked_softmax_bwd(const MaskedSoftmaxBackward& p, const Threads& threads) {
  with_dtype(p.dtype, [&](auto* type) { softmax_bwd<std::remove_pointer_t<decltype(type)>>(p, threads); });
}

MHA_ISA_END
