// Attention backward with talking heads. With C the scores before pre_mix, S after it, P the softmax and W = mix(P):
//
//   dW = dropout(V dO^T)   dP = mix^T(dW)   delta = sum over keys of P * dP   dS = P * (dP - delta)   dC = mix^T(dS)
//   dQ^T += K^T dC   dK += dC^T Q   dV += W^T dO   dpre_mix += C . dS   dpost_mix += P . dW
//
// A block of queries with all heads visits its tiles of keys twice: for delta, then for the gradients. C and dW of a
// tile are kept from the first visit where memory allows. A task sums dK and dV over the blocks of its chunk of the
// queries; these partial sums are then added up in order.
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
                      const MixedBackwardParts<T>& parts, Arena arena)
      : p_(p), plan_(plan), parts_(parts), s_(arena, p), scores_(s_.scores), group_(p.H / max64(1, p.Hk)) {}

  void run(int64_t run) {
    const int64_t HH = p_.H * p_.H;
    dbias_ = p_.dbias;
    if (plan_.bias_parts && run > 0) {
      T* part = parts_.dbias + (run - 1) * plan_.bias_elements;
      std::fill_n(part, plan_.bias_elements, T(0));
      dbias_.data = part + plan_.bias_origin;
    }
    if (p_.pre_mix) std::fill_n(dpre_ = parts_.dpre + run * HH, HH, 0.0);
    if (p_.post_mix) std::fill_n(dpost_ = parts_.dpost + run * HH, HH, 0.0);
    if (p_.dsinks) std::fill_n(dsinks_ = parts_.dsinks + run * p_.H, p_.H, 0.0);
    for (int64_t task = plan_.tasks * run / plan_.runs; task < plan_.tasks * (run + 1) / plan_.runs; ++task) {
      const int64_t b = task / plan_.chunks, chunk = task % plan_.chunks, head_rows = p_.Hk * p_.Sk;
      dk_ = parts_.dk + (chunk * p_.B + b) * head_rows * p_.D;
      dv_ = parts_.dv + (chunk * p_.B + b) * head_rows * p_.Dv;
      std::fill_n(dk_, head_rows * p_.D, T(0));
      std::fill_n(dv_, head_rows * p_.Dv, T(0));
      for (int64_t n = chunk; n < plan_.blocks; n += plan_.chunks) run_block(b, n * kMaxRows);
    }
  }

 private:
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
    compute_weights(n, first_key, keys);
    add_dv(first_key, keys);
    if (p_.post_mix) add_head_products(dpost_, s_.weights, dweights(n), p_.H, scores_.lanes, keys);
    T* ds = dprobabilities(n, keys);
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
    T* dc = ds;
    if (p_.pre_mix) {
      add_head_products(dpre_, capped(n), ds, p_.H, scores_.lanes, keys);
      mix_heads(dc = s_.weights, ds, static_cast<const T*>(p_.pre_mix), Mix::transposed, p_.H, scores_.lanes, keys);
    }
    for (int64_t h = 0; h < p_.H; ++h) add_dq_dk(h, dc + h * kHeadTile, capped(n) + h * kHeadTile, first_key, keys);
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
    for (int64_t g = 0; g < p_.H; ++g) {
      if (scores_.masks.kind(g, p_.post_mix) == TileKind::none) continue;
      T* dv = dv_ + (g / group_ * p_.Sk + first_key) * p_.Dv;
      add_rows(dv, weights + g * kHeadTile, p_.dout, g, s_.dout_rows, p_.Dv, product_mask(g, p_.post_mix), keys);
    }
  }

  void add_dq_dk(int64_t h, T* dc, const T* capped, int64_t first_key, int keys) {
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
    T* dk = dk_ + (h / group_ * p_.Sk + first_key) * p_.D;
    add_rows(dk, dc, p_.q, h, s_.q_rows, p_.D, mask, keys);
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
  const MixedBackwardParts<T>& parts_;
  MixedBackwardScratch<T> s_;
  MixedScores<T>& scores_;
  const int64_t group_;
  Tensor4 dbias_;
  double *dpre_ = nullptr, *dpost_ = nullptr, *dsinks_ = nullptr;
  T *dk_ = nullptr, *dv_ = nullptr;
  bool all_finite_ = true;
  bool any_nan_ = false;  // in a logsumexp of the block
};

template <class T>
std::size_t mixed_backward_workspace(const AttentionMixedBackward& p, int threads) {
  Arena shared(nullptr), own(nullptr);
  MixedBackwardParts<T>(shared, p, MixedBackwardPlan(p));
  MixedBackwardScratch<T>(own, p);
  return shared.used() + std::size_t(threads) * own.used();
}

template <class T, int Degree>
void run_mixed_backward(const AttentionMixedBackward& p, const Threads& threads, void* workspace) {
  const MixedBackwardPlan plan(p);
  Arena shared(workspace), own(nullptr);
  const MixedBackwardParts<T> parts(shared, p, plan);
  MixedBackwardScratch<T>(own, p);
  char* scratch = static_cast<char*>(workspace) + shared.used();
  for_each_task(threads, plan.runs, [&](int64_t n, int thread) {
    MixedBackwardWorker<T, Degree>(p, plan, parts, Arena(scratch + std::size_t(thread) * own.used())).run(n);
  });
  sum_parts(threads, p.dk, p.dtype, p.B, p.Hk, p.Sk, p.D, parts.dk, plan.chunks);
  sum_parts(threads, p.dv, p.dtype, p.B, p.Hk, p.Sk, p.Dv, parts.dv, plan.chunks);
  auto add = [&](void* to, const auto* part, int64_t elements, int64_t count) {
    for (int64_t n = 0; to && n < count; ++n, part += elements) {
      for (int64_t i = 0; i < elements; ++i) static_cast<T*>(to)[i] += T(part[i]);
    }
  };
  if (p.pre_mix) add(p.dpre_mix, parts.dpre, p.H * p.H, plan.runs);
  if (p.post_mix) add(p.dpost_mix, parts.dpost, p.H * p.H, plan.runs);
  add(p.dsinks, parts.dsinks, p.H, plan.runs);
  if (plan.bias_parts) {
    T* dbias = static_cast<T*>(p.dbias.data) - plan.bias_origin;
    add(dbias, parts.dbias, plan.bias_elements, plan.runs - 1);
  }
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
