// Cases of attention backward for the tests of the CPU and CUDA kernels: inputs, what is right, and how far from it a
// kernel may be. The tolerance is three times the error of the textbook computation in the same dtype, plus a rounding
// floor.
#pragma once
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>

#include "case_tools.h"

namespace attention_bwd_cases {

using mha::DType;
using namespace tools;

constexpr int kNone = -1;

struct Case {
  int64_t B = 1, H = 1, Hk = 1, Sq = 1, Sk = 1, D = 1, Dv = 1;
  DType dtype = DType::f32;
  bool heads_inside = false;  // q, k, v lie as [B,S,H,D]
  int64_t row_gap = 0;
  int bias = kNone, dense = kNone;  // the axes they broadcast, as bits
  bool bias_acc = false, bias_swapped = false, dbias = false;
  int64_t band_lo = -mha::kNoLimit, band_hi = mha::kNoLimit;
  bool intervals = false, documents = false;
  double softcap = 0, scale = 0.5, dropout = -1;
  bool dlse = false, dweights = false;
  bool minus_inf_bias = false;  // some rows of the bias are -inf
  bool poison_hidden = false;   // NaN where nobody looks
  bool poison_seen = false;     // NaN in one key and one query that some others see
  uint64_t seed = 1;

  std::string text() const {
    char s[400];
    std::snprintf(
        s, sizeof s,
        "B%d H%d/%d Sq%d Sk%d D%d/%d dtype %d bshd %d gap %d bias %d acc %d swapped %d dbias %d dense %d band "
        "%lld..%lld intervals %d documents %d softcap %g scale %g dropout %g dlse %d dweights %d -inf %d poison "
        "%d%d seed %llu",
        int(B), int(H), int(Hk), int(Sq), int(Sk), int(D), int(Dv), int(dtype), heads_inside, int(row_gap), bias,
        bias_acc, bias_swapped, dbias, dense, static_cast<long long>(band_lo), static_cast<long long>(band_hi),
        intervals, documents, softcap, scale, dropout, dlse, dweights, minus_inf_bias, poison_hidden, poison_seen,
        static_cast<unsigned long long>(seed));
    return s;
  }
};

// Inputs of one case, and the struct over them. Outputs are made per run.
struct Inputs {
  Strided q, k, v, bias, dout, out, dweights;
  std::vector<double> lse, lse_rest, dlse;
  std::vector<float> lse32, lse_rest32, dlse32;
  std::vector<int64_t> begin, end, query_ids, key_ids;
  std::vector<uint8_t> dense;
  int64_t rng[2];
  mha::AttentionBackward p;
};

struct Outputs {
  Strided dq, dk, dv, dbias;
};

inline Layout layout_of(const Case& c) {
  Layout l;
  if (c.heads_inside) std::swap(l.order[1], l.order[2]);
  l.row_gap = c.row_gap;
  return l;
}

inline void make_mask(const Case& c, Random& r, Inputs& in) {
  mha::Mask& m = in.p.mask;
  m.band_lo = c.band_lo, m.band_hi = c.band_hi;
  if (c.intervals) {
    for (int64_t n = 0; n < c.B * c.Sq; ++n) {
      in.begin.push_back(r.below(c.Sk + 3) / 2 - 2);
      in.end.push_back(c.Sk + 2 - r.below(c.Sk + 3) / 2);
      if (r.chance(5)) in.end.back() = -1;
    }
    m.begin = in.begin.data(), m.begin_stride_b = c.Sq, m.begin_stride_q = 1;
    m.end = in.end.data(), m.end_stride_b = c.Sq, m.end_stride_q = r.chance(50);  // 0: as for padded keys
  }
  if (c.documents) {
    for (int64_t n = 0; n < c.B * c.Sq; ++n) in.query_ids.push_back((n % c.Sq) * 3 / c.Sq);
    for (int64_t n = 0; n < c.B * c.Sk; ++n) in.key_ids.push_back((n % c.Sk) * 4 / c.Sk);
    m.query_ids = in.query_ids.data(), m.query_ids_stride_b = c.Sq;
    m.key_ids = in.key_ids.data(), m.key_ids_stride_b = c.Sk;
  }
  if (c.dense != kNone) {
    int64_t size = 1, n[4] = {c.B, c.H, c.Sq, c.Sk}, stride[4];
    for (int a = 3; a >= 0; --a) {
      stride[a] = c.dense >> a & 1 ? 0 : size;
      if (stride[a]) size *= n[a];
    }
    for (int64_t e = 0; e < size; ++e) in.dense.push_back(r.chance(70));
    m.dense = in.dense.data();
    m.dense_stride_b = stride[0], m.dense_stride_h = stride[1], m.dense_stride_q = stride[2],
    m.dense_stride_k = stride[3];
  }
}

inline void poison(const Case& c, Inputs& in) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  const int64_t group = c.H / c.Hk;
  naive::Array4 key_seen(c.B, c.Hk, c.Sk, 1), row_sees(c.B, c.H, c.Sq, 1), row_lives(c.B, c.H, c.Sq, 1);
  naive::for_each(naive::Array4(c.B, c.H, c.Sq, c.Sk), [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    if (!naive::visible(in.p.mask, b, h, i, j)) return;
    key_seen(b, h / group, j, 0) = row_sees(b, h, i, 0) = 1;
    const mha::Tensor4& bias = in.bias.t;
    if (!bias.data || naive::load(bias.data, in.p.bias_dtype, naive::offset(bias, b, h, i, j)) > -inf)
      row_lives(b, h, i, 0) = 1;
  });
  naive::for_each(row_sees, [&](int64_t b, int64_t h, int64_t i, int64_t) {  // all its scores are -inf
    if (!c.poison_hidden || !row_sees(b, h, i, 0) || row_lives(b, h, i, 0)) return;
    for (int64_t d = 0; d < c.Dv; ++d) in.dout.set(b, h, i, d, nan);
  });
  naive::for_each(key_seen, [&](int64_t b, int64_t h, int64_t j, int64_t) {
    const bool seen = key_seen(b, h, j, 0) != 0;
    if (seen ? !(c.poison_seen && b == 0 && j == c.Sk / 2) : !c.poison_hidden) return;
    for (int64_t d = 0; d < c.D; ++d) in.k.set(b, h, j, d, j % 2 || seen ? nan : inf);
    for (int64_t d = 0; d < c.Dv; ++d) in.v.set(b, h, j, d, j % 3 || seen ? nan : -inf);
  });
  naive::for_each(row_sees, [&](int64_t b, int64_t h, int64_t i, int64_t) {
    const bool seen = row_sees(b, h, i, 0) != 0;
    if (seen ? !(c.poison_seen && b == 0 && i == c.Sq / 2) : !c.poison_hidden) return;
    for (int64_t d = 0; d < c.D; ++d) in.q.set(b, h, i, d, nan);
    for (int64_t d = 0; d < c.Dv; ++d) in.dout.set(b, h, i, d, seen ? nan : inf);
  });
}

// The forward that gives out and lse to a case's backward.
inline mha::AttentionForward forward_of(const Inputs& in) {
  mha::AttentionForward f;
  static_cast<mha::AttentionProblem&>(f) = in.p;
  f.out = in.out.t;
  f.lse = const_cast<void*>(in.p.lse), f.lse_rest = const_cast<void*>(in.p.lse_rest);
  return f;
}

// out and lse from the oracle's forward, rounded to the types that the kernel's forward would give.
inline void run_forward(Inputs& in) {
  mha::AttentionBackward& p = in.p;
  in.lse.resize(size_t(p.B * p.H * p.Sq));
  in.lse32.resize(in.lse.size()), in.lse_rest.resize(in.lse.size()), in.lse_rest32.resize(in.lse.size());
  p.lse = p.dtype == DType::f64 ? static_cast<void*>(in.lse.data()) : in.lse32.data();
  p.lse_rest = p.dtype == DType::f64 ? static_cast<void*>(in.lse_rest.data()) : in.lse_rest32.data();
  naive::attention_fwd(forward_of(in));
}

inline void make_inputs(const Case& c, Inputs& in) {
  Random r{c.seed * 977 + 5};
  auto normal = [&] { return r.normal(); };
  mha::AttentionBackward& p = in.p;
  p.B = c.B, p.H = c.H, p.Hk = c.Hk, p.Sq = c.Sq, p.Sk = c.Sk, p.D = c.D, p.Dv = c.Dv, p.dtype = c.dtype;
  p.rows_stride_b = p.H * p.Sq, p.rows_stride_h = p.Sq;
  p.scale = c.scale, p.softcap = c.softcap;
  const Layout l = layout_of(c);
  in.q = Strided(c.dtype, c.B, c.H, c.Sq, c.D, l);
  in.k = Strided(c.dtype, c.B, c.Hk, c.Sk, c.D, l);
  in.v = Strided(c.dtype, c.B, c.Hk, c.Sk, c.Dv, l);
  in.out = Strided(c.dtype, c.B, c.H, c.Sq, c.Dv, l);
  in.dout = Strided(c.dtype, c.B, c.H, c.Sq, c.Dv, l);
  for (Strided* x : {&in.q, &in.k, &in.v, &in.dout}) x->fill(normal);
  p.bias_dtype = c.bias_acc ? mha::accumulate_type(c.dtype) : c.dtype;
  if (c.bias != kNone) {
    Layout swapped;
    if (c.bias_swapped) swapped = {{0, 1, 3, 2}, 0};
    in.bias = Strided(p.bias_dtype, c.B, c.H, c.Sq, c.Sk, swapped, c.bias);
    in.bias.fill(
        [&] { return c.minus_inf_bias && r.chance(30) ? -std::numeric_limits<double>::infinity() : r.normal(); });
  }
  if (c.dweights) {
    in.dweights = Strided(c.dtype, c.B, c.H, c.Sq, c.Sk, {{0, 1, c.bias_swapped ? 3 : 2, c.bias_swapped ? 2 : 3}, 3});
    in.dweights.fill(normal);
  }
  in.rng[0] = r.next(), in.rng[1] = r.next();
  if (c.dropout >= 0) p.dropout = {c.dropout, in.rng};
  make_mask(c, r, in);
  if (c.poison_hidden || c.poison_seen) poison(c, in);
  p.q = in.q.t, p.k = in.k.t, p.v = in.v.t, p.bias = in.bias.t, p.dout = in.dout.t, p.out = in.out.t;
  p.dweights = in.dweights.t;
  run_forward(in);
  if (c.dlse) {
    for (size_t n = 0; n < in.lse.size(); ++n)
      in.dlse32.push_back(float(r.normal())), in.dlse.push_back(in.dlse32.back());
    p.dlse = c.dtype == DType::f64 ? static_cast<void*>(in.dlse.data()) : in.dlse32.data();
  }
}

inline Outputs make_outputs(const Case& c, DType dtype, mha::AttentionBackward& p) {
  Outputs o;
  const Layout l = layout_of(c);
  o.dq = Strided(dtype, c.B, c.H, c.Sq, c.D, l);
  o.dk = Strided(dtype, c.B, c.Hk, c.Sk, c.D, l);
  o.dv = Strided(dtype, c.B, c.Hk, c.Sk, c.Dv, l);
  if (c.dbias) {
    Layout swapped;
    if (c.bias_swapped) swapped = {{0, 1, 3, 2}, 0};
    o.dbias = Strided(mha::accumulate_type(dtype), c.B, c.H, c.Sq, c.Sk, swapped, c.bias);
    o.dbias.fill([] { return 0.0; });
  }
  p.dq = o.dq.t, p.dk = o.dk.t, p.dv = o.dv.t, p.dbias = o.dbias.t;
  return o;
}

// ---- what is right, and how far from it the textbook is -----------------------------------------------------------

constexpr int kGradients = 4;
const char* const kGradientNames[kGradients] = {"dq", "dk", "dv", "dbias"};

inline double unit_roundoff(DType t) {
  return t == DType::f64 ? 0x1p-53 : t == DType::f32 ? 0x1p-24 : t == DType::f16 ? 0x1p-11 : 0x1p-8;
}

// The same problem in fp64.
struct Wide {
  Strided q, k, v, bias, dout, out, dweights;
  mha::AttentionBackward p;

  Wide(Inputs& in) : p(in.p) {
    q = in.q.widened(), k = in.k.widened(), v = in.v.widened(), bias = in.bias.widened(), dout = in.dout.widened();
    out = in.out.widened(), dweights = in.dweights.widened();
    p.dtype = p.bias_dtype = DType::f64;
    p.q = q.t, p.k = k.t, p.v = v.t, p.bias = bias.t, p.dout = dout.t, p.out = out.t, p.dweights = dweights.t;
    if (in.p.dtype != DType::f64) {
      in.lse.assign(in.lse32.begin(), in.lse32.end());
      in.lse_rest.assign(in.lse_rest32.begin(), in.lse_rest32.end());
    }
    p.lse = in.lse.data(), p.lse_rest = in.lse_rest.data();
    if (p.dlse) p.dlse = in.dlse.data();
  }
};

// The textbook computation: whole matrices one after the other, each element rounded to the dtype, sums in T. Also, for
// each element, the sum of the magnitudes of all that went into it.
template <class T>
struct Textbook {
  naive::Array4 dq, dk, dv, dq_size, dk_size, dv_size;
  naive::BiasGradient dbias, dbias_size;

  Textbook(const mha::AttentionBackward& p, DType dtype)
      : dq(p.B, p.H, p.Sq, p.D),
        dk(p.B, p.Hk, p.Sk, p.D),
        dv(p.B, p.Hk, p.Sk, p.Dv),
        dq_size(dq),
        dk_size(dk),
        dv_size(dv),
        dbias(p.dbias, p.B, p.H, p.Sq, p.Sk),
        dbias_size(dbias) {
    auto rounded = [&](T x) {
      double y = 0;
      naive::store(&y, dtype, 0, double(x));
      return T(naive::load(&y, dtype, 0));
    };
    auto dot = [](naive::Array4& x, int64_t b, int64_t h, int64_t i, naive::Array4& y, int64_t hy, int64_t j, T* size) {
      T sum = 0;
      for (int64_t d = 0; d < x.n3; ++d) {
        const T term = T(x(b, h, i, d)) * T(y(b, hy, j, d));
        sum += term, *size += std::fabs(term);
      }
      return sum;
    };
    auto add = [](double& sum, double& size, T term, T term_size) {
      sum = double(T(sum) + term), size += double(term_size);
    };
    naive::Array4 q = naive::read(p.q, DType::f64, p.B, p.H, p.Sq, p.D);
    naive::Array4 k = naive::read(p.k, DType::f64, p.B, p.Hk, p.Sk, p.D);
    naive::Array4 v = naive::read(p.v, DType::f64, p.B, p.Hk, p.Sk, p.Dv);
    naive::Array4 dout = naive::read(p.dout, DType::f64, p.B, p.H, p.Sq, p.Dv);
    naive::Array4 out = naive::read(p.out, DType::f64, p.B, p.H, p.Sq, p.Dv);
    auto at = [&](const mha::Tensor4& t, auto... i) {
      return t.data ? T(naive::load(t.data, DType::f64, naive::offset(t, i...))) : T(0);
    };
    naive::for_each(naive::Array4(p.B, p.H, p.Sq, p.Sk), [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      const int64_t hk = h / (p.H / p.Hk), row = (b * p.H + h) * p.Sq + i;
      const T lse = T(naive::load(p.lse, DType::f64, row));
      if (!naive::visible(p.mask, b, h, i, j) || naive::sees_nothing(double(lse))) return;
      T x_size = 0, dp_size = 0, delta_size = 0;
      const T x = rounded(T(p.scale) * dot(q, b, h, i, k, hk, j, &x_size)), bias = at(p.bias, b, h, i, j);
      const T delta =
          dot(dout, b, h, i, out, h, i, &delta_size) - (p.dlse ? T(naive::load(p.dlse, DType::f64, row)) : 0);
      const T cap = T(p.softcap), t = cap == 0 ? 0 : std::tanh(x / cap);
      const T score = rounded((cap == 0 ? x : cap * t) + bias), weight = rounded(std::exp(score - lse));
      const T factor = T(naive::dropout_factor(p.dropout, b, h, i, j)), dweight = at(p.dweights, b, h, i, j);
      const T dp = rounded((dot(dout, b, h, i, v, hk, j, &dp_size) + dweight) * factor);
      const T ds = rounded(weight * (dp - delta)), dqk = rounded(ds * (1 - t * t) * T(p.scale));
      // Errors in the exponent are relative errors of the weight.
      const T weight_size =
          weight * (1 + std::fabs(T(p.scale)) * x_size + std::fabs(std::isfinite(bias) ? bias : 0) + std::fabs(lse));
      const T ds_size = weight_size * ((dp_size + std::fabs(dweight)) * factor + delta_size + std::fabs(delta));
      const T dqk_size = ds_size * std::fabs(T(p.scale));
      if (p.dbias.data) {
        dbias.add(b, h, i, j, double(ds));
        dbias_size.add(b, h, i, j, double(ds_size));
      }
      for (int64_t d = 0; d < p.D; ++d) {
        add(dq(b, h, i, d), dq_size(b, h, i, d), dqk * T(k(b, hk, j, d)), dqk_size * std::fabs(T(k(b, hk, j, d))));
        add(dk(b, hk, j, d), dk_size(b, hk, j, d), dqk * T(q(b, h, i, d)), dqk_size * std::fabs(T(q(b, h, i, d))));
      }
      for (int64_t d = 0; d < p.Dv; ++d) {
        const T g = T(dout(b, h, i, d));
        add(dv(b, hk, j, d), dv_size(b, hk, j, d), rounded(weight * factor) * g, weight_size * factor * std::fabs(g));
      }
    });
    for (naive::Array4* a : {&dq, &dk, &dv})
      for (double& e : a->values) e = double(rounded(T(e)));
  }
};

inline double largest(const naive::Array4& x) {
  double top = 0;
  for (double e : x.values) top = std::isfinite(e) ? std::max(top, std::fabs(e)) : top;
  return top;
}

inline double largest_difference(const naive::Array4& x, const naive::Array4& y) {
  double top = 0;
  for (size_t n = 0; n < x.values.size(); ++n)
    if (std::isfinite(y.values[n])) top = std::max(top, std::fabs(x.values[n] - y.values[n]));
  return top;
}

struct Expected {
  std::vector<naive::Array4> right;
  double tolerance[kGradients];

  Expected(const Case& c, Inputs& in) {
    Wide wide(in);
    Outputs o = make_outputs(c, DType::f64, wide.p);
    naive::attention_bwd(wide.p);
    for (Strided* x : {&o.dq, &o.dk, &o.dv, &o.dbias}) right.push_back(x->read());
    c.dtype == DType::f64 ? set_tolerance(Textbook<double>(wide.p, c.dtype), c.dtype)
                          : set_tolerance(Textbook<float>(wide.p, c.dtype), c.dtype);
  }
  template <class T>
  void set_tolerance(const Textbook<T>& book, DType dtype) {
    const naive::Array4* values[] = {&book.dq, &book.dk, &book.dv, &book.dbias.sum};
    const naive::Array4* sizes[] = {&book.dq_size, &book.dk_size, &book.dv_size, &book.dbias_size.sum};
    const DType acc = mha::accumulate_type(dtype);
    for (int g = 0; g < kGradients; ++g) {
      const double floor =
          unit_roundoff(g == 3 ? acc : dtype) * largest(right[size_t(g)]) + 4 * unit_roundoff(acc) * largest(*sizes[g]);
      tolerance[g] =
          floor + 3 * (right[size_t(g)].values.empty() ? 0 : largest_difference(*values[g], right[size_t(g)]));
    }
  }
};

// Empty when outputs are right and nothing else was written.
inline std::string mistake(Outputs& o, const Expected& expected) {
  Strided* outputs[] = {&o.dq, &o.dk, &o.dv, &o.dbias};
  for (int g = 0; g < kGradients; ++g) {
    const naive::Array4 got = outputs[g]->read();
    const naive::Array4& right = expected.right[size_t(g)];
    for (size_t n = 0; outputs[g]->t.data && n < got.values.size(); ++n) {
      const double x = got.values[n], y = right.values[n];
      if (std::isnan(y) ? std::isnan(x) : std::fabs(x - y) <= expected.tolerance[g]) continue;
      char what[200];
      std::snprintf(what, sizeof what, "%s[%zu] is %.9g, not %.9g (tolerance %.3g)", kGradientNames[g], n, x, y,
                    expected.tolerance[g]);
      return what;
    }
    if (!outputs[g]->surroundings_untouched()) return std::string("wrote outside of ") + kGradientNames[g];
  }
  return "";
}

// The name of a gradient whose bits differ, or empty.
inline std::string difference(const Outputs& a, const Outputs& b) {
  const Strided *x[] = {&a.dq, &a.dk, &a.dv, &a.dbias}, *y[] = {&b.dq, &b.dk, &b.dv, &b.dbias};
  for (int g = 0; g < kGradients; ++g)
    if (x[g]->bytes() != y[g]->bytes()) return kGradientNames[g];
  return "";
}

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16, DType::f64};

inline Case random_case(Random& r) {
  static const int64_t lengths[] = {1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 90, 127, 129, 150};
  static const int64_t head_sizes[] = {1, 3, 8, 15, 16, 17, 32, 40, 59, 64, 72};
  auto pick = [&](auto& list) { return list[r.below(int64_t(std::size(list)))]; };
  Case c;
  c.seed = r.next();
  c.dtype = kTypes[r.below(4)];
  c.B = 1 + r.below(3);
  c.Hk = 1 + r.below(3);
  c.H = c.Hk * (1 + r.below(3));
  c.Sq = pick(lengths), c.Sk = pick(lengths), c.D = pick(head_sizes), c.Dv = r.chance(50) ? c.D : pick(head_sizes);
  c.heads_inside = r.chance(50), c.row_gap = r.chance(50) ? r.below(5) : 0;
  if (r.chance(40)) {
    c.bias = int(r.below(16)), c.bias_acc = r.chance(50), c.bias_swapped = r.chance(30);
    c.dbias = r.chance(70), c.minus_inf_bias = r.chance(20);
  }
  if (r.chance(30)) c.dense = int(r.below(16));
  if (r.chance(50)) {
    const int64_t o = c.Sk - c.Sq;
    c.band_hi = r.chance(30) ? 0 : o + r.below(5);
    if (r.chance(50)) c.band_lo = o - r.below(40);
  }
  c.intervals = r.chance(25), c.documents = r.chance(20);
  c.scale = r.chance(10) ? -0.3 : 1 / std::sqrt(double(c.D));
  if (r.chance(25)) c.softcap = 1.5;
  if (r.chance(30)) c.dropout = r.chance(15) ? 1 : 0.3;
  c.dlse = r.chance(30), c.dweights = r.chance(20);
  c.poison_hidden = r.chance(40), c.poison_seen = !c.minus_inf_bias && r.chance(15);
  return c;
}

}  // namespace attention_bwd_cases
