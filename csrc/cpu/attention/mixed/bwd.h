// Attention backward with talking heads. With C the scores before pre_mix, S after it, P the softmax and W = mix(P):
//
//   dW = dropout(V dO^T)   dP = mix^T(dW)   delta = sum over keys of P * dP   dS = P * (dP - delta)   dC = mix^T(dS)
//   dQ^T += K^T dC   dK += dC^T Q   dV += W^T dO   dpre_mix += C . dS   dpost_mix += P . dW
//
// A block of queries with all heads visits its tiles of keys twice: for delta, then for the gradients. C and dW of a
// tile are kept from the first visit where memory allows. Blocks add to dK and dV by turns, tile of keys by tile of
// keys: each waits for the block before it just before it adds.
#pragma once

#include "../bwd.h"
#include "bwd_space.h"

MHA_ISA_BEGIN

// sum[m][n] += a[m] . b[n] over the pairs of a tile
template <class T>
inline void add_head_products(double* sum, const T* a, const T* b, int64_t H, int lanes, int keys) {
  constexpr int M = 4, N = kVecRegisters >= 32 ? 4 : 2;
  for (int64_t m = 0; m < H; m += M) {
    for (int64_t n = 0; n < H; n += N) {
      const T *left[M], *right[N];  // past the last head: the last one, for nothing
      for (int i = 0; i < M; ++i) left[i] = a + min64(m + i, H - 1) * kHeadTile;
      for (int i = 0; i < N; ++i) right[i] = b + min64(n + i, H - 1) * kHeadTile;
      Vec<T> dot[M][N];
      for (auto& row : dot)
        for (Vec<T>& x : row) x = set1(T(0));
      for_each_vector<T>(lanes, keys, [&](int at) {
        Vec<T> y[N];
        for (int i = 0; i < N; ++i) y[i] = load(right[i] + at);
        for (int j = 0; j < M; ++j) {
          const Vec<T> x = load(left[j] + at);
          for (int i = 0; i < N; ++i) dot[j][i] = fma(x, y[i], dot[j][i]);
        }
      });
      for (int j = 0; j < M && m + j < H; ++j) {
        for (int i = 0; i < N && n + i < H; ++i) sum[(m + j) * H + n + i] += double(reduce_add(dot[j][i]));
      }
    }
  }
}

template <class T, int Degree>
class MixedBackwardWorker {
  using V = Vec<T>;
  static constexpr int L = V::lanes;
  static constexpr T kInf = std::numeric_limits<T>::infinity();

 public:
  MixedBackwardWorker(const AttentionMixedBackward& p, const MixedBackwardPlan& plan,
                      const MixedBackwardShared<T>& shared, Arena arena)
      : p_(p), plan_(plan), shared_(shared), s_(arena, p, plan), scores_(s_.scores), group_(p.H / max64(1, p.Hk)) {}

  void run(int64_t task, const std::atomic<bool>& stopped) {
    const int64_t b = task % p_.B, block = plan_.blocks - 1 - task / p_.B, head_rows = p_.Hk * p_.Sk;
    if (p_.pre_mix) std::fill_n(dpre_ = shared_.dpre + task * shared_.mix, shared_.mix, 0.0);
    if (p_.post_mix) std::fill_n(dpost_ = shared_.dpost + task * shared_.mix, shared_.mix, 0.0);
    if (p_.dsinks) std::fill_n(dsinks_ = shared_.dsinks + task * shared_.heads, shared_.heads, 0.0);
    dk_ = shared_.dk + b * head_rows * p_.D;
    dv_ = shared_.dv + b * head_rows * p_.Dv;
    dk_turn_ = KeyTurn(shared_.dk_turns, task, p_.B, 0, stopped);
    dv_turn_ = KeyTurn(shared_.dv_turns, task, p_.B, 0, stopped);
    bias_turn_ = KeyTurn(shared_.bias_turns, task, plan_.bias_step, plan_.bias_across_blocks ? 0 : task - b, stopped);
    dbias_ = p_.dbias;
    if (plan_.bias_diagonals) begin_diagonals(block * kMaxRows);
    run_block(b, block * kMaxRows);
    for (KeyTurn* turn : {&dk_turn_, &dv_turn_, &bias_turn_}) turn->finish();
    if (plan_.bias_diagonals) finish_diagonals(task, b, block * kMaxRows, stopped);
  }

 private:
  // dbias_ becomes what this task sums for itself: of each head, by the key less the query.
  void begin_diagonals(int64_t first) {
    const int64_t width = p_.Sk + kMaxRows;
    std::fill_n(s_.diagonals, p_.H * width, T(0));
    dbias_.data = s_.diagonals + first + kMaxRows - 1;
    dbias_.stride[0] = 0, dbias_.stride[1] = width;
  }
  void finish_diagonals(int64_t task, int64_t b, int64_t first, const std::atomic<bool>& stopped) {
    const int64_t last = min64(first + kMaxRows, p_.Sq) - 1, begin = first + kMaxRows - 1 - last;
    wait_for(*shared_.diagonals_turn, task, stopped);
    for (int64_t h = 0; h < p_.H; ++h) {
      const T* from = s_.diagonals + h * (p_.Sk + kMaxRows) + begin;
      T* to = static_cast<T*>(p_.dbias.data) + b * p_.dbias.stride[0] + h * p_.dbias.stride[1] - last;
      for (int64_t n = 0; n < p_.Sk + last - first; ++n) to[n] += from[n];
    }
    pass_on(*shared_.diagonals_turn, task + 1);
  }

  void run_block(int64_t b, int64_t first) {
    load_block(b, first);
    for_each_tile([&](int64_t n, int64_t first_key, int keys) {
      compute(n, first_key, keys);
      add_delta(n, first_key, keys);
    });
    finish_delta();
    for_each_tile([&](int64_t n, int64_t first_key, int keys) {
      if (n >= s_.kept) compute(n, first_key, keys);
      add_gradients(n, first_key, keys);
    });
    finish_queries();
  }

  // Calls f(number, first key, keys) for each tile of which some head sees something.
  template <class F>
  void for_each_tile(F f) {
    const RowBlock& block = *scores_.block;
    for (int64_t first = block.any_begin, n = 0; first < block.any_end; first += kMixKeys, ++n) {
      const int keys = int(min64(kMixKeys, block.any_end - first));
      if (scores_.look(first, keys) != TileKind::none) f(n, first, keys);
    }
  }

  void load_block(int64_t b, int64_t first) {
    scores_.load_queries(b, first, int(min64(kMaxRows, p_.Sq - first)));
    scores_.load_lanes(s_.dout, p_.dout, p_.Dv);
    std::fill_n(s_.dq, p_.H * p_.D * kMaxRows, T(0));
    std::fill_n(s_.delta, p_.H * kMaxRows, T(0));
    RowBlock& block = *scores_.block;
    bool seeing[kMaxRows] = {};
    any_nan_ = false;
    for (int64_t g = 0; g < p_.H; ++g) {
      const int64_t place = statistics_of(g);
      const T* lse = static_cast<const T*>(p_.lse) + place;
      const T* rest = p_.lse_rest ? static_cast<const T*>(p_.lse_rest) + place : nullptr;
      for (int r = 0; r < kMaxRows; ++r) {
        const bool sees = r < block.rows && lse[r] != -kInf;
        s_.lse[g * kMaxRows + r] = sees ? lse[r] : kInf;
        any_nan_ |= sees && std::isnan(lse[r]);
        s_.lse_rest[g * kMaxRows + r] = sees && rest ? rest[r] : T(0);
        seeing[r] |= sees;
      }
    }
    for (int r = 0; r < block.rows; ++r) {  // all its scores may be -inf: then it is hidden as a masked one is
      if (!seeing[r]) block.begin[r] = block.end[r] = block.all_end = 0;
    }
    all_finite_ = true;
    for (int64_t h = 0; h < p_.H && all_finite_; ++h) {
      all_finite_ = all_finite<T>(row_of(p_.q, h), p_.dtype, p_.q.stride[2], block.rows, int(p_.D)) &&
                    all_finite<T>(row_of(p_.dout, h), p_.dtype, p_.dout.stride[2], block.rows, int(p_.Dv));
    }
    for (int64_t h = 0; h < p_.H && !in_place<T>(p_.dtype); ++h) {
      copy_rows(s_.q_rows + h * kMaxRows * p_.D, p_.D, row_of(p_.q, h), p_.dtype, p_.q.stride[2], block.rows,
                int(p_.D));
      copy_rows(s_.dout_rows + h * kMaxRows * p_.Dv, p_.Dv, row_of(p_.dout, h), p_.dtype, p_.dout.stride[2], block.rows,
                int(p_.Dv));
    }
  }

  int64_t statistics_of(int64_t g) const {
    const RowBlock& block = *scores_.block;
    return block.b * p_.rows_stride_b + g * p_.rows_stride_h + block.query[0];
  }

  // The block's first row of head h.
  const void* row_of(const Tensor4& x, int64_t h) const {
    const RowBlock& block = *scores_.block;
    return element(x.data, p_.dtype, block.b * x.stride[0] + h * x.stride[1] + block.query[0] * x.stride[2]);
  }

  T* capped(int64_t n) const { return s_.capped + min64(n, s_.kept) * p_.H * kHeadTile; }
  T* dweights(int64_t n) const { return s_.dweights + min64(n, s_.kept) * p_.H * kHeadTile; }

  // C and dW.
  void compute(int64_t n, int64_t first_key, int keys) {
    scores_.capped(capped(n), first_key, keys);
    T* dw = dweights(n);
    scores_.products(dw, p_.v, p_.Dv, s_.dout, s_.values, first_key, keys);
    if (p_.dweights.data) {
      for (int64_t g = 0; g < p_.H; ++g) {
        std::fill_n(scores_.block->head, scores_.block->rows, g);
        load_tile(scores_.bias, p_.dweights, p_.dtype, *scores_.block, first_key, keys);
        T* tile = dw + g * kHeadTile;
        for_each_vector<T>(scores_.lanes, keys,
                           [&](int at) { store(tile + at, load(tile + at) + load(scores_.bias + at)); });
        if (scores_.masks.some_head == TileKind::some)
          hide(tile, kMaxRows, *scores_.masks.union_mask, scores_.lanes, keys, T(0));
      }
    }
    scores_.apply_dropout(dw, first_key, keys);
  }

  // P, in `weights`.
  void compute_weights(int64_t n, int64_t first_key, int keys) {
    scores_.mix(s_.weights, capped(n), first_key, keys);
    const V log2e = set1(T(kLog2e));
    for (int64_t g = 0; g < p_.H; ++g) {
      for (int r = 0; r < scores_.lanes; r += L) {
        const V lse = load(s_.lse + g * kMaxRows + r), rest = load(s_.lse_rest + g * kMaxRows + r);
        T* x = s_.weights + g * kHeadTile + r;
        // The difference comes first: log2(e) times the smallest floats, a common bias, would be -inf.
        for (int j = 0; j < keys; ++j, x += kMaxRows) store(x, exp2<Degree>(((load(x) - lse) - rest) * log2e));
      }
    }
    if (any_nan_) scores_.hide_weights(s_.weights, keys);
  }

  // dP, which may overwrite `work`.
  T* dprobabilities(int64_t n, int keys) {
    if (!p_.post_mix) return dweights(n);
    mix_heads(s_.work, dweights(n), static_cast<const T*>(p_.post_mix), Mix::transposed, p_.H, scores_.lanes, keys);
    return s_.work;
  }

  void add_delta(int64_t n, int64_t first_key, int keys) {
    compute_weights(n, first_key, keys);
    const T* dp = dprobabilities(n, keys);
    const V zero = set1(T(0));
    for (int64_t g = 0; g < p_.H; ++g) {
      for (int r = 0; r < scores_.lanes; r += L) {
        T* delta = s_.delta + g * kMaxRows + r;
        V sum = load(delta);
        for (int j = 0; j < keys; ++j) {
          const int64_t at = g * kHeadTile + j * kMaxRows + r;
          const V weight = load(s_.weights + at);
          sum = select(equal(weight, zero), sum, fma(weight, load(dp + at), sum));
        }
        store(delta, sum);
      }
    }
  }

  // delta less the gradient of lse; and the sinks, keys whose value is 0.
  void finish_delta() {
    for (int64_t g = 0; g < p_.H; ++g) {
      T* delta = s_.delta + g * kMaxRows;
      const int64_t place = statistics_of(g);
      if (p_.dlse) {
        for (int r = 0; r < scores_.block->rows; ++r) delta[r] -= static_cast<const T*>(p_.dlse)[place + r];
      }
      if (!p_.dsinks) continue;
      const T sink = static_cast<const T*>(p_.sinks)[g], *lse = s_.lse + g * kMaxRows;
      if (sink == -kInf) continue;
      for (int r = 0; r < scores_.block->rows; ++r)
        dsinks_[g] -= double(std::exp((sink - lse[r]) - s_.lse_rest[g * kMaxRows + r]) * delta[r]);
    }
  }

  void add_gradients(int64_t n, int64_t first_key, int keys) {
    const int64_t end = first_key + keys;
    compute_weights(n, first_key, keys);
    add_dv(first_key, keys);
    if (p_.post_mix) add_head_products(dpost_, s_.weights, dweights(n), p_.H, scores_.lanes, keys);
    T* ds = dprobabilities(n, keys);
    if (dbias_.data) bias_turn_.wait(plan_.bias_by_keys ? end : KeyTurn::kAll);
    const V zero = set1(T(0));
    for (int64_t g = 0; g < p_.H; ++g) {
      for (int r = 0; r < scores_.lanes; r += L) {
        const V delta = load(s_.delta + g * kMaxRows + r);
        for (int j = 0; j < keys; ++j) {
          const int64_t at = g * kHeadTile + j * kMaxRows + r;
          const V weight = load(s_.weights + at);
          store(ds + at, select(equal(weight, zero), zero, weight * (load(ds + at) - delta)));
        }
      }
      if (dbias_.data) add_dbias(g, ds + g * kHeadTile, first_key, keys);
    }
    if (plan_.bias_by_keys) bias_turn_.pass(end);
    T* dc = ds;
    if (p_.pre_mix) {
      add_head_products(dpre_, capped(n), ds, p_.H, scores_.lanes, keys);
      mix_heads(dc = s_.weights, ds, static_cast<const T*>(p_.pre_mix), Mix::transposed, p_.H, scores_.lanes, keys);
    }
    for (int64_t h = 0; h < p_.H; ++h) add_dq(h, dc + h * kHeadTile, capped(n) + h * kHeadTile, first_key, keys);
    dk_turn_.wait(end);
    for (int64_t h = 0; h < p_.H; ++h) {
      if (scores_.masks.kind(h, p_.pre_mix) == TileKind::none) continue;
      T* dk = dk_ + (h / group_ * p_.Sk + first_key) * p_.D;
      add_rows(dk, dc + h * kHeadTile, p_.q, h, s_.q_rows, p_.D, product_mask(h, p_.pre_mix), keys);
    }
    dk_turn_.pass(end);
  }

  void add_dbias(int64_t g, const T* ds, int64_t first_key, int keys) {
    RowBlock& block = *scores_.block;
    std::fill_n(block.head, block.rows, g);
    std::memcpy(s_.dbias, ds, size_t(keys) * kMaxRows * sizeof(T));  // add_tile sums in place
    add_tile(dbias_, s_.dbias, block, first_key, keys);
  }

  // sum[key][column] += tile[key][row] * x[row][column]
  void add_rows(T* sum, const T* tile, const Tensor4& x, int64_t h, const T* widened, int64_t cols,
                const TileMask<T>* mask, int keys) {
    const int rows = scores_.block->rows;
    const void* first = row_of(x, h);
    FiniteRows<T> finite;
    RowsOperand<T> operand{static_cast<const T*>(first), x.stride[2]};
    if (mask && !all_finite_)
      operand = {finite.take(first, p_.dtype, x.stride[2], rows, int(cols), s_.finite).a, cols};
    else if (!in_place<T>(p_.dtype))
      operand = {widened + h * kMaxRows * cols, cols};
    gemm<T>(keys, int(cols), rows, tile, kMaxRows, 1, operand.b, operand.ld, sum, cols, Start::add);
    if (mask) finite.add_queries(sum, tile, *mask, keys);
  }

  // The mask of the products of head h: null where they hide nothing.
  const TileMask<T>* product_mask(int64_t h, bool mixed) const {
    return scores_.masks.kind(h, mixed) == TileKind::all ? nullptr : &scores_.masks.mask(h, mixed);
  }

  void add_dv(int64_t first_key, int keys) {
    T* weights = s_.work;
    if (p_.post_mix) {
      mix_heads(weights, s_.weights, static_cast<const T*>(p_.post_mix), Mix::plain, p_.H, scores_.lanes, keys);
      for (int64_t g = 0; g < p_.H; ++g) scores_.hide_from_all(weights + g * kHeadTile, keys);
    } else if (p_.dropout.rng_state) {
      std::memcpy(weights, s_.weights, size_t(p_.H * kHeadTile) * sizeof(T));
    } else {
      weights = s_.weights;
    }
    scores_.apply_dropout(weights, first_key, keys);
    dv_turn_.wait(first_key + keys);
    for (int64_t g = 0; g < p_.H; ++g) {
      if (scores_.masks.kind(g, p_.post_mix) == TileKind::none) continue;
      T* dv = dv_ + (g / group_ * p_.Sk + first_key) * p_.Dv;
      add_rows(dv, weights + g * kHeadTile, p_.dout, g, s_.dout_rows, p_.Dv, product_mask(g, p_.post_mix), keys);
    }
    dv_turn_.pass(first_key + keys);
  }

  // Leaves in dc what dK, too, is made of.
  void add_dq(int64_t h, T* dc, const T* capped, int64_t first_key, int keys) {
    if (scores_.masks.kind(h, p_.pre_mix) == TileKind::none) return;
    const int D = int(p_.D), lanes = scores_.lanes;
    const V scale = set1(T(p_.scale)), zero = set1(T(0)), one = set1(T(1)),
            per_cap = set1(T(p_.softcap ? 1 / p_.softcap : 0));
    for_each_vector<T>(lanes, keys, [&](int at) {
      const V y = p_.softcap ? load(capped + at) * per_cap : zero;  // tanh(scale * q.k / softcap)
      store(dc + at, load(dc + at) * (scale * (one - y * y)));
    });
    const TileMask<T>* mask = product_mask(h, p_.pre_mix);
    if (mask) hide(dc, kMaxRows, *mask, lanes, keys, T(0));  // NaN of a mix, or of another head's pair
    const void* k = scores_.key_row(p_.k, h / group_, first_key);
    FiniteRows<T> finite;
    const bool clean = !mask || all_finite<T>(k, p_.dtype, p_.k.stride[2], keys, D);
    const Broadcast<T> features = clean ? columns_operand(k, p_.dtype, p_.k.stride[2], keys, D, s_.keys)
                                        : finite.take(k, p_.dtype, p_.k.stride[2], keys, D, s_.keys);
    T* dq = s_.dq + h * p_.D * kMaxRows;
    gemm<T>(D, lanes, keys, features.a, features.am, features.ak, dc, kMaxRows, dq, kMaxRows, Start::add);
    if (mask) finite.add_keys(dq, dc, *mask, lanes);
  }

  void finish_queries() {
    const RowBlock& block = *scores_.block;
    const Tensor4& dq = p_.dq;
    int64_t offset[kMaxRows];
    for (int64_t h = 0; h < p_.H; ++h) {
      for (int r = 0; r < block.rows; ++r)
        offset[r] = block.b * dq.stride[0] + h * dq.stride[1] + block.query[r] * dq.stride[2];
      const T* sum = s_.dq + h * p_.D * kMaxRows;
      untranspose_rows(dq.data, p_.dtype, offset, sum, kMaxRows, block.rows, int(p_.D));
    }
  }

  const AttentionMixedBackward& p_;
  const MixedBackwardPlan& plan_;
  const MixedBackwardShared<T>& shared_;
  MixedBackwardScratch<T> s_;
  MixedScores<T>& scores_;
  const int64_t group_;
  Tensor4 dbias_;
  KeyTurn dk_turn_, dv_turn_, bias_turn_;
  double *dpre_ = nullptr, *dpost_ = nullptr, *dsinks_ = nullptr;
  T *dk_ = nullptr, *dv_ = nullptr;
  bool all_finite_ = true;
  bool any_nan_ = false;  // in a logsumexp of the block
};

template <class T>
std::size_t mixed_backward_workspace(const AttentionMixedBackward& p, int threads) {
  const MixedBackwardPlan plan(p);
  Arena shared(nullptr), own(nullptr);
  MixedBackwardShared<T>(shared, p, plan);
  MixedBackwardScratch<T>(own, p, plan);
  return shared.used() + std::size_t(threads) * own.used();
}

// to[i] += the parts' elements i, each part after the one before it.
template <class T>
void add_parts(const Threads& threads, void* to, const double* parts, int64_t stride, int64_t elements, int64_t count) {
  constexpr int64_t kRun = 256;
  if (!to) return;
  for_each_task(threads, ceil_div(elements, kRun), [&](int64_t task, int) {
    for (int64_t n = 0; n < count; ++n) {
      for (int64_t i = task * kRun; i < min64(elements, (task + 1) * kRun); ++i)
        static_cast<T*>(to)[i] += T(parts[n * stride + i]);
    }
  });
}

template <class T, int Degree>
void run_mixed_backward(const AttentionMixedBackward& p, const Threads& threads, void* workspace) {
  const MixedBackwardPlan plan(p);
  Arena all(workspace), own(nullptr);
  const MixedBackwardShared<T> shared(all, p, plan);
  MixedBackwardScratch<T>(own, p, plan);
  char* scratch = static_cast<char*>(workspace) + all.used();
  shared.begin(threads, p, plan);
  std::atomic<bool> stopped(false);
  for_each_task_by_turns(threads, plan.tasks, stopped, [&](int64_t n, int thread) {
    MixedBackwardWorker<T, Degree>(p, plan, shared, Arena(scratch + std::size_t(thread) * own.used())).run(n, stopped);
  });
  sum_parts(threads, p.dk, p.dtype, p.B, p.Hk, p.Sk, p.D, shared.dk, 1);
  sum_parts(threads, p.dv, p.dtype, p.B, p.Hk, p.Sk, p.Dv, shared.dv, 1);
  add_parts<T>(threads, p.pre_mix ? p.dpre_mix : nullptr, shared.dpre, shared.mix, p.H * p.H, plan.tasks);
  add_parts<T>(threads, p.post_mix ? p.dpost_mix : nullptr, shared.dpost, shared.mix, p.H * p.H, plan.tasks);
  add_parts<T>(threads, p.dsinks, shared.dsinks, shared.heads, p.H, plan.tasks);
}

inline void attention_mixed_bwd(const AttentionMixedBackward& p, const Threads& threads, void* workspace) {
  for_each_sequence(p, [&](const AttentionMixedBackward& s) {
    if (p.dtype == DType::f64) return run_mixed_backward<double, 5>(s, threads, workspace);
    if (p.dtype == DType::f32) return run_mixed_backward<float, 5>(s, threads, workspace);
    run_mixed_backward<float, 4>(s, threads, workspace);
  });
}

inline std::size_t attention_mixed_bwd_workspace(const AttentionMixedBackward& p, int threads) {
  std::size_t bytes = 0;
  for_each_sequence(p, [&](const AttentionMixedBackward& s) {
    bytes = std::max(bytes, p.dtype == DType::f64 ? mixed_backward_workspace<double>(s, threads)
                                                  : mixed_backward_workspace<float>(s, threads));
  });
  return bytes;
}

MHA_ISA_END
