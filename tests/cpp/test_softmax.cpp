// masked_softmax, forward and backward, on every ISA.
#include "harness.h"

using namespace harness;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int kNoBias = -1;

struct Case {
  int64_t B = 2, H = 2, Sq = 5, Sk = 17;
  Layout layout{};         // of scores and dout
  int bias = kNoBias;      // the axes it broadcasts, as bits
  bool wide_bias = false;  // bias in the accumulate type
  Layout bias_layout{};
  int64_t band_lo = -mha::kNoLimit, band_hi = mha::kNoLimit;
  bool intervals = false, documents = false, dense = false, dense_strided = false;
  double scale = 0.7, dropout = -1;
  bool poison_seen = false;  // NaN and +-inf in scores that some rows see
};

struct Inputs {
  DType t;
  Strided scores, bias, dout;
  std::vector<int64_t> begin, end, query_ids, key_ids;
  std::vector<uint8_t> dense;
  int64_t rng[2] = {11, 22};
  mha::MaskedSoftmaxProblem p;
  double largest = 0;  // logit magnitude, for the bounds
};

void make_mask(const Case& c, Random& random, Inputs& in) {
  mha::Mask& m = in.p.mask;
  m.band_lo = c.band_lo, m.band_hi = c.band_hi;
  if (c.intervals) {
    for (int64_t n = 0; n < c.B * c.Sq; ++n) {
      in.begin.push_back(random.below(c.Sk + 4) / 2 - 2);
      in.end.push_back(c.Sk + 2 - random.below(c.Sk + 4) / 2);
    }
    m.begin = in.begin.data(), m.begin_stride_b = c.Sq, m.begin_stride_q = 1;
    m.end = in.end.data(), m.end_stride_b = c.Sq, m.end_stride_q = 0;
  }
  if (c.documents) {
    for (int64_t n = 0; n < c.B * c.Sq; ++n) in.query_ids.push_back(random.below(3));
    for (int64_t n = 0; n < c.Sk; ++n) in.key_ids.push_back(random.below(3));
    m.query_ids = in.query_ids.data(), m.query_ids_stride_b = c.Sq, m.key_ids = in.key_ids.data();
  }
  if (c.dense) {
    const int64_t step = c.dense_strided ? 3 : 1;
    for (int64_t n = 0; n < c.Sq * c.Sk * step; ++n) in.dense.push_back(uint8_t(random.below(3)));
    for (int64_t n = 0; n < c.Sk * step && c.Sq > 1; ++n) in.dense[size_t(n)] = 0;  // the first row sees nothing
    m.dense = in.dense.data(), m.dense_stride_q = c.Sk * step, m.dense_stride_k = step;
  }
}

void make_inputs(const Case& c, DType t, uint64_t seed, Inputs& in) {
  Random random{seed};
  in.t = t;
  in.scores = random_tensor(t, c.B, c.H, c.Sq, c.Sk, random, c.layout);
  in.dout = random_tensor(t, c.B, c.H, c.Sq, c.Sk, random, c.layout);
  in.p = {c.B, c.H, c.Sq, c.Sk, t, in.scores.t, {}, t, {}, c.scale, {}};
  if (c.dropout >= 0) in.p.dropout = {c.dropout, in.rng};
  if (c.bias != kNoBias) {
    in.p.bias_dtype = c.wide_bias ? mha::accumulate_type(t) : t;
    in.bias = random_tensor(in.p.bias_dtype, c.B, c.H, c.Sq, c.Sk, random, c.bias_layout, c.bias);
    in.p.bias = in.bias.t;
  }
  make_mask(c, random, in);
  in.largest = std::fabs(c.scale) + 1;
  naive::for_each(naive::Array4(c.B, c.H, c.Sq, c.Sk), [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    const bool seen = naive::visible(in.p.mask, b, h, i, j);
    if (!seen) {
      in.scores.set(b, h, i, j, j % 2 ? kNaN : kInf);
      in.dout.set(b, h, i, j, j % 3 ? kNaN : -kInf);
      if (c.bias == 0) in.bias.set(b, h, i, j, kNaN);
    } else if (c.poison_seen && (i + j) % 7 == 0) {
      in.scores.set(b, h, i, j, i % 3 == 0 ? kNaN : i % 3 == 1 ? kInf : -kInf);
    }
  });
}

// A logit's error is a few roundings of its size; exp makes of it the relative error of a weight; sums add less.
double weight_error(const Inputs& in) { return (8 * in.largest + 16) * rounding(mha::accumulate_type(in.t)); }

struct Results {
  Strided out, lse, dscores, dbias;
};

Strided lse_tensor(const Case& c, DType t) { return Strided(mha::accumulate_type(t), c.B, c.H, c.Sq, 1); }

template <class Forward, class Backward>
Results run(const Case& c, const Inputs& in, const Strided* lse, Forward forward, Backward backward) {
  Results r{Strided(in.t, c.B, c.H, c.Sq, c.Sk, {{0, 1, 2, 3}, 3, 1}), lse_tensor(c, in.t),
            Strided(in.t, c.B, c.H, c.Sq, c.Sk, {{0, 1, 2, 3}, 3, 1}), Strided()};
  mha::MaskedSoftmaxForward f;
  static_cast<mha::MaskedSoftmaxProblem&>(f) = in.p;
  f.out = r.out.t, f.lse = r.lse.t.data;
  forward(f);
  mha::MaskedSoftmaxBackward b;
  static_cast<mha::MaskedSoftmaxProblem&>(b) = in.p;
  b.dout = in.dout.t, b.lse = lse ? lse->t.data : r.lse.t.data, b.dscores = r.dscores.t;
  if (c.bias != kNoBias) {
    r.dbias = Strided(mha::accumulate_type(in.t), c.B, c.H, c.Sq, c.Sk, {}, c.bias);
    r.dbias.fill([] { return 0; });
    b.dbias = r.dbias.t;
  }
  backward(b);
  return r;
}

std::string text(const Kernels& k, const Case& c, DType t) {
  char s[300];
  std::snprintf(s, sizeof s,
                "%s masked_softmax %s [%d,%d,%d,%d], order ..%d%d, step %d, bias %d%s, band %lld..%lld, intervals %d, "
                "documents %d, dense %d%d, scale %g, dropout %g, poison %d: ",
                k.isa, name_of(t), int(c.B), int(c.H), int(c.Sq), int(c.Sk), c.layout.order[2], c.layout.order[3],
                int(c.layout.step), c.bias, c.wide_bias ? " wide" : "", static_cast<long long>(c.band_lo),
                static_cast<long long>(c.band_hi), c.intervals, c.documents, c.dense, c.dense_strided, c.scale,
                c.dropout, c.poison_seen);
  return s;
}

void check_case(const Case& c, DType t, uint64_t seed) {
  Inputs in;
  make_inputs(c, t, seed, in);
  const Results want = run(c, in, nullptr, naive::masked_softmax_fwd, naive::masked_softmax_bwd);
  const double weight = weight_error(in), u = rounding(t),
               kept = c.dropout > 0 && c.dropout < 1 ? 1 / (1 - c.dropout) : 1;
  // Rounding lse to fp32 is a relative error of the oracle's weights; the kernels take it out.
  const double lse_error = (in.largest + std::log(c.Sk + 1.0)) * rounding(mha::accumulate_type(t));
  const double rows = double(c.B * c.H * c.Sq), gradient = 4 * kept * (weight + lse_error);
  for (const Kernels* k : every_isa()) {
    auto with = [&](int count) {
      return run(
          c, in, &want.lse, [&](const auto& f) { k->masked_softmax_fwd(f, threads(count)); },
          [&](const auto& b) { k->masked_softmax_bwd(b, threads(count)); });
    };
    const Results got = with(2), other = with(3);
    const std::string what = text(*k, c, t);
    compare(got.out, want.out, [&](double y) { return y * (weight + 2 * u) + least_step(t); }, what + "out");
    compare(
        got.lse, want.lse, [&](double y) { return weight + y * 2 * rounding(mha::accumulate_type(t)); }, what + "lse");
    compare(
        got.dscores, want.dscores, [&](double y) { return gradient * std::fabs(c.scale) + 2 * u * y + least_step(t); },
        what + "dscores");
    if (c.bias != kNoBias)
      compare(
          got.dbias, want.dbias,
          [&](double y) { return (rows + double(c.bias & 8 ? c.Sk : 0)) * gradient / 4 + y * rows * weight; },
          what + "dbias");
    check(got.out.bytes() == other.out.bytes() && got.lse.bytes() == other.lse.bytes() &&
              got.dscores.bytes() == other.dscores.bytes() && got.dbias.bytes() == other.dbias.bytes(),
          what + "the number of threads changes the bits");
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int64_t Sk : {1, 2, 15, 16, 17, 31, 33, 64, 129, 1000}) all.push_back({.Sk = Sk, .intervals = Sk > 20});
  for (const Layout& layout : {kTransposed, kEverySecond, kHeadsInside, Layout{{3, 2, 1, 0}, 2, 1}})
    all.push_back({.Sk = 37, .layout = layout, .band_hi = 20, .dense = true});
  for (int bias = 0; bias < 16; ++bias)
    all.push_back({.B = 3, .Sq = 7, .Sk = 19, .bias = bias, .wide_bias = bias % 3 == 0, .band_lo = bias % 2 ? -1 : -9});
  all.push_back({.B = 1, .H = 1, .Sq = 70, .Sk = 9, .bias = 0, .bias_layout = kTransposed});
  all.push_back({.Sk = 21, .bias = 0, .bias_layout = kEverySecond, .dense = true, .dense_strided = true});
  all.push_back({.Sk = 40, .intervals = true, .documents = true});
  all.push_back({.Sk = 40,
                 .bias = 3,
                 .band_lo = -3,
                 .band_hi = 30,
                 .intervals = true,
                 .documents = true,
                 .dense = true,
                 .dropout = 0.3});
  for (const double dropout : {0.0, 0.5, 1.0}) all.push_back({.Sk = 150, .intervals = true, .dropout = dropout});
  for (const double scale : {0.0, -2.0, 30.0}) all.push_back({.Sk = 33, .scale = scale});
  for (const bool dense : {false, true})
    all.push_back({.Sq = 9, .Sk = 35, .band_hi = 12, .dense = dense, .poison_seen = true});
  all.push_back({.Sq = 3, .Sk = 20, .bias = 0, .band_lo = 25});  // nobody sees anything
  for (int d = 0; d < 4; ++d)
    for (const int bias : {kNoBias, 1, 4})
      all.push_back({.B = d != 0, .H = d != 1, .Sq = d == 2 ? 0 : 3, .Sk = d == 3 ? 0 : 4, .bias = bias});
  return all;
}

// A bias of -inf everywhere: visible, but without weight.
void minus_infinity() {
  Case c{.Sk = 20, .bias = 0};
  for (const Kernels* k : every_isa()) {
    Inputs in;
    make_inputs(c, DType::f32, 3, in);
    in.bias.fill([] { return -kInf; });
    const Results got = run(
        c, in, nullptr, [&](const auto& f) { k->masked_softmax_fwd(f, threads(1)); },
        [&](const auto& b) { k->masked_softmax_bwd(b, threads(1)); });
    bool zero = true;
    for (const Strided* x : {&got.out, &got.dscores, &got.dbias})
      for (const double y : x->read().values) zero = zero && y == 0;
    for (const double y : got.lse.read().values) zero = zero && y == -kInf;
    check(zero, std::string(k->isa) + " masked_softmax with a bias of -inf gives zeros");
  }
}

}  // namespace

int main() {
  uint64_t seed = 1;
  for (const Case& c : cases())
    for (const DType t : kDtypes) check_case(c, t, ++seed);
  for (const int64_t Sk : {2047, 4097, 16385, 100001})
    check_case({.B = 1, .H = 1, .Sq = 2, .Sk = Sk, .bias = 4, .dropout = 0.1}, Sk % 4 == 1 ? DType::f32 : DType::bf16,
               ++seed);
  minus_infinity();
  return finish();
}
