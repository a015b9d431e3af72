// attention_fwd on every ISA against the oracle.
#include "harness.h"

using namespace harness;

namespace {

const double kInf = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int kNone = -1;

struct Case {
  int64_t B = 1, H = 2, Hk = 2, Sq = 33, Sk = 65, D = 17, Dv = 8;
  bool heads_inside = false;        // q, k, v lie as [B,S,H,D]
  int bias = kNone, dense = kNone;  // the axes they broadcast, as bits
  bool wide_bias = false, bias_transposed = false;
  int64_t band_lo = -mha::kNoLimit, band_hi = mha::kNoLimit;
  bool intervals = false, documents = false;
  double scale = 0.3, softcap = 0, dropout = -1;
  bool weights = false;
  double values = 1;        // what the values are multiplied by
  bool infinite = false;    // a key whose score is -inf for all, and infinite values
  bool great_bias = false;  // rows whose biases are the greatest there are, rise from key to key, or are -inf at first
};

struct Inputs {
  Strided q, k, v, bias;
  std::vector<int64_t> begin, end, query_ids, key_ids;
  std::vector<uint8_t> dense;
  int64_t rng[2] = {3, 5};
  mha::AttentionProblem p;
};

void make_mask(const Case& c, Random& random, Inputs& in) {
  mha::Mask& m = in.p.mask;
  m.band_lo = c.band_lo, m.band_hi = c.band_hi;
  if (c.intervals) {
    for (int64_t n = 0; n < c.B * c.Sq; ++n) {
      in.begin.push_back(random.below(c.Sk + 4) / 2 - 2);
      in.end.push_back(c.Sk + 2 - random.below(c.Sk + 4) / 2);
      if (random.chance(5)) in.end.back() = -1;
    }
    m.begin = in.begin.data(), m.begin_stride_b = c.Sq, m.begin_stride_q = 1;
    m.end = in.end.data(), m.end_stride_b = c.Sq, m.end_stride_q = random.chance(50);
  }
  if (c.documents) {
    for (int64_t n = 0; n < c.Sq; ++n) in.query_ids.push_back(n * 3 / c.Sq);
    for (int64_t n = 0; n < c.B * c.Sk; ++n) in.key_ids.push_back(n % c.Sk * 4 / c.Sk);
    m.query_ids = in.query_ids.data(), m.key_ids = in.key_ids.data(), m.key_ids_stride_b = c.Sk;
  }
  if (c.dense != kNone) {
    const int64_t sizes[4] = {c.B, c.H, c.Sq, c.Sk};
    int64_t* const strides[4] = {&m.dense_stride_b, &m.dense_stride_h, &m.dense_stride_q, &m.dense_stride_k};
    int64_t size = 1;
    for (int a = 3; a >= 0; --a) {
      *strides[a] = c.dense >> a & 1 ? 0 : size;
      if (*strides[a]) size *= sizes[a];
    }
    for (int64_t n = 0; n < size; ++n) in.dense.push_back(uint8_t(random.chance(60) * 2));
    m.dense = in.dense.data();
  }
}

void add_infinities(const Case& c, Inputs& in) {
  naive::for_each(naive::Array4(c.B, c.H, c.Sq, 1),
                  [&](int64_t b, int64_t h, int64_t i, int64_t) { in.q.set(b, h, i, 1, 0.25 + double(i % 3)); });
  naive::for_each(naive::Array4(c.B, c.Hk, 1, 1), [&](int64_t b, int64_t h, int64_t, int64_t) {
    in.k.set(b, h, 5, 1, -kInf);
    in.v.set(b, h, 3, 2, kInf);
    in.v.set(b, h, c.Sk - 2, 4, -kInf);
  });
}

// By rows: the least number for all keys; for the first keys alone; the least of all but one key, which has half of it;
// the greatest number for one key; -inf for the first keys; rising by 20 powers of two a tile, and falling; -1e30 for
// all.
void add_great_biases(const Case& c, Inputs& in) {
  const double most = double(std::numeric_limits<float>::max());
  naive::for_each(in.bias.read(), [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    const bool early = j < c.Sk / 2;
    double x = 0;
    switch (i % 9) {
      case 0:
        x = -most;
        break;
      case 1:
        x = early ? -most : 0;
        break;
      case 2:
        x = j == c.Sk / 2 ? -most / 2 : -most;
        break;
      case 3:
        x = j == c.Sk / 2 ? most : 0;
        break;
      case 4:
        x = early ? -kInf : 0;
        break;
      case 5:
        x = 0.45 * double(j);
        break;
      case 6:
        x = -0.45 * double(j);
        break;
      case 7:
        x = -1e30;
        break;
      case 8:
        return;
    }
    in.bias.set(b, h, i, j, x);
  });
}

// NaN and infinity in the keys and values that no query sees, and in the bias of hidden pairs.
void poison_hidden(const Case& c, Inputs& in) {
  naive::Array4 seen(c.B, c.Hk, c.Sk, 1);
  naive::for_each(naive::Array4(c.B, c.H, c.Sq, c.Sk), [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    if (naive::visible(in.p.mask, b, h, i, j))
      seen(b, h / (c.H / c.Hk), j, 0) = 1;
    else if (c.bias == 0)
      in.bias.set(b, h, i, j, (i + j) % 2 ? kNaN : kInf);
  });
  naive::for_each(seen, [&](int64_t b, int64_t h, int64_t j, int64_t) {
    if (seen(b, h, j, 0) != 0) return;
    for (int64_t d = 0; d < c.D; ++d) in.k.set(b, h, j, d, j % 2 ? kNaN : kInf);
    for (int64_t d = 0; d < c.Dv; ++d) in.v.set(b, h, j, d, j % 3 ? kNaN : -kInf);
  });
}

void make_inputs(const Case& c, DType t, uint64_t seed, Inputs& in) {
  Random random{seed};
  const Layout layout = c.heads_inside ? kHeadsInside : Layout{{0, 1, 2, 3}, 1, 1};
  in.q = random_tensor(t, c.B, c.H, c.Sq, c.D, random, layout);
  in.k = random_tensor(t, c.B, c.Hk, c.Sk, c.D, random, layout);
  in.v = Strided(t, c.B, c.Hk, c.Sk, c.Dv, layout);
  in.v.fill([&] { return c.values * random.uniform(); });
  mha::AttentionProblem& p = in.p;
  p.B = c.B, p.H = c.H, p.Hk = c.Hk, p.Sq = c.Sq, p.Sk = c.Sk, p.D = c.D, p.Dv = c.Dv, p.dtype = t;
  p.rows_stride_b = p.H * p.Sq, p.rows_stride_h = p.Sq;
  p.q = in.q.t, p.k = in.k.t, p.v = in.v.t, p.scale = c.scale, p.softcap = c.softcap;
  if (c.dropout >= 0) p.dropout = {c.dropout, in.rng};
  if (c.bias != kNone) {
    p.bias_dtype = c.wide_bias ? mha::accumulate_type(t) : t;
    in.bias = random_tensor(p.bias_dtype, c.B, c.H, c.Sq, c.Sk, random, c.bias_transposed ? kTransposed : kContiguous,
                            c.bias);
    p.bias = in.bias.t;
    if (c.great_bias) add_great_biases(c, in);
  }
  make_mask(c, random, in);
  if (c.infinite) add_infinities(c, in);
  poison_hidden(c, in);
}

struct Results {
  Strided out, lse, weights;
};

template <class Kernel>
Results run(const Case& c, const Inputs& in, Kernel kernel) {
  const DType t = in.p.dtype;
  Results r{Strided(t, c.B, c.H, c.Sq, c.Dv, {{0, 2, 1, 3}, 1, 1}), Strided(mha::accumulate_type(t), c.B, c.H, c.Sq, 1),
            Strided()};
  mha::AttentionForward p;
  static_cast<mha::AttentionProblem&>(p) = in.p;
  p.out = r.out.t, p.lse = r.lse.t.data;
  if (c.weights) {
    r.weights = Strided(t, c.B, c.H, c.Sq, c.Sk);
    p.weights = r.weights.t;
  }
  kernel(p);
  return r;
}

std::string text(const Kernels& k, const Case& c, DType t) {
  char s[400];
  std::snprintf(
      s, sizeof s,
      "%s attention_fwd %s B%d H%d/%d S%d/%d D%d/%d %s, bias %d%s%s, dense %d, band %lld..%lld, intervals %d, "
      "documents %d, scale %g, softcap %g, dropout %g: ",
      k.isa, name_of(t), int(c.B), int(c.H), int(c.Hk), int(c.Sq), int(c.Sk), int(c.D), int(c.Dv),
      c.heads_inside ? "[B,S,H,D]" : "[B,H,S,D]", c.bias, c.wide_bias ? " wide" : "",
      c.bias_transposed ? " transposed" : "", c.dense, static_cast<long long>(c.band_lo),
      static_cast<long long>(c.band_hi), c.intervals, c.documents, c.scale, c.softcap, c.dropout);
  return s;
}

void check_case(const Case& c, DType t, uint64_t seed) {
  if (left_out()) return;
  Inputs in;
  make_inputs(c, t, seed, in);
  const Results want = run(c, in, naive::attention_fwd);
  const double u = rounding(t), accumulate = rounding(mha::accumulate_type(t));
  // Products of inputs below 1: a score is below |scale| * D, its sum rounds D times; then a few more roundings of the
  // logit. exp makes of the logit's error the relative error of a weight; half types may also round the weight.
  const double logit = std::fabs(c.scale) * double(c.D) + 1;
  const double weight =
      (4 * logit + std::fabs(c.scale) * double(c.D * c.D) + 16) * accumulate + (u > accumulate ? u : 0);
  const double steep = c.great_bias ? 4 * 0.45 * double(c.Sk) * accumulate : 0;  // logits up to there
  const double kept = c.dropout > 0 && c.dropout < 1 ? 1 / (1 - c.dropout) : 1;
  const double sum = kept * (2 * weight + double(c.Sk) * accumulate);
  for (const Kernels* k : every_isa()) {
    auto with = [&](int count) {
      return run(c, in, [&](const mha::AttentionForward& p) {
        Workspace space(k->attention_fwd_workspace(p, count));
        k->attention_fwd(p, threads(count), space.data.get());
      });
    };
    const Results got = with(1);
    const std::string what = text(*k, c, t);
    compare(got.out, want.out, [&](double y) { return c.values * sum + 2 * u * y + least_step(t); }, what + "out");
    compare(got.lse, want.lse, [&](double y) { return weight + 2 * accumulate * (y + double(c.Sk)); }, what + "lse");
    if (c.weights)
      compare(
          got.weights, want.weights, [&](double y) { return y * (2 * (weight + steep) + 2 * u) + least_step(t); },
          what + "weights");
    for (const int count : {2, 3}) {
      const Results other = with(count);
      check(got.out.bytes() == other.out.bytes() && got.lse.bytes() == other.lse.bytes() &&
                got.weights.bytes() == other.weights.bytes(),
            what + "other bits with " + std::to_string(count) + " threads");
    }
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const int64_t sizes[][4] = {{1, 1, 1, 1},    {1, 300, 64, 64}, {31, 33, 3, 5},    {64, 64, 8, 10}, {65, 129, 32, 32},
                              {2, 63, 257, 1}, {127, 70, 59, 9}, {5, 1000, 16, 80}, {70, 6, 1, 33}};
  for (const auto& s : sizes)
    for (const bool inside : {false, true})
      all.push_back(
          {.B = 1 + inside, .Sq = s[0], .Sk = s[1], .D = s[2], .Dv = s[3], .heads_inside = inside, .weights = inside});
  for (int axes = 0; axes < 16; axes += 3) {
    all.push_back({.B = 2, .Sq = 20, .Sk = 40, .bias = axes, .wide_bias = axes % 2 == 0});
    all.push_back({.B = 2, .Sq = 20, .Sk = 70, .dense = axes, .weights = true});
  }
  all.push_back({.bias = 0, .bias_transposed = true});
  for (const int64_t shift : {-40, -3, 0, 32, 70}) all.push_back({.band_hi = shift, .weights = true});
  all.push_back({.Sq = 130, .Sk = 130, .band_lo = -20, .band_hi = 5});
  all.push_back({.B = 3, .intervals = true, .weights = true});
  all.push_back({.B = 2, .Sq = 100, .Sk = 90, .documents = true});
  Case everything{.B = 2, .H = 6};
  everything.bias = 1, everything.dense = 2, everything.band_hi = 40, everything.softcap = 2, everything.dropout = 0.2;
  everything.intervals = everything.documents = everything.weights = true;
  all.push_back(everything);
  all.push_back({.H = 4, .Hk = 1, .Sq = 1, .Sk = 200});
  // Of a list, the last block alone has few rows: after a head is packed for the others, and beside a group of them.
  for (const int64_t D : {17, 32}) all.push_back({.B = 9, .Sq = 69, .Sk = 130, .D = D, .band_hi = 61});
  for (const bool inside : {false, true})
    all.push_back({.B = 2, .Sq = 261, .Sk = 300, .D = 32, .heads_inside = inside});
  all.push_back({.H = 6, .Hk = 3, .Sq = 7, .bias = 0});
  // Whole blocks of queries, with all that may lie between products and weights.
  for (int axes = 0; axes < 16; axes += 5)
    all.push_back({.B = 2, .H = 4, .Sq = 70, .Sk = 131, .bias = axes, .wide_bias = axes % 2 == 0, .band_hi = 80});
  all.push_back({.Sq = 97, .Sk = 100, .bias = 0, .bias_transposed = true, .dropout = 0.3});
  for (const double dropout : {0.0, 0.4, 1.0}) all.push_back({.B = 2, .Sq = 130, .Sk = 140, .dropout = dropout});
  for (const double scale : {0.0, -0.5, 2.0})
    all.push_back({.Sq = 66, .Sk = 70, .scale = scale, .softcap = scale > 0 ? 1.5 : 0});
  everything.Hk = 3, everything.Sq = 100, everything.Sk = 90, everything.weights = false;
  all.push_back(everything);
  for (const bool first : {false, true})
    all.push_back({.Sq = 70, .Sk = first ? 100 : 600, .bias = 0, .wide_bias = true, .great_bias = true});
  all.push_back({.Sq = 70, .Sk = 100, .bias = 0, .wide_bias = true, .band_hi = 35, .dropout = 0.3, .great_bias = true});
  all.push_back({.Sq = 90, .Sk = 90, .bias = 0, .softcap = 3, .dropout = 0.3, .infinite = true});
  for (const double dropout : {0.0, 0.4, 1.0}) all.push_back({.Sk = 131, .dropout = dropout, .weights = true});
  for (const double scale : {0.0, -0.5, 3.0}) all.push_back({.scale = scale});
  all.push_back({.scale = 2, .softcap = 1.5});
  for (const int64_t shift : {0, 30, 200}) all.push_back({.Sq = 90, .Sk = 90, .band_hi = shift, .infinite = true});
  all.push_back({.H = 4, .Sq = 20, .Sk = 70, .D = 40, .softcap = 3, .infinite = true});
  // Denormal in float and bf16. The instructions for bf16 take such for 0, which is off by less than the least normal.
  all.push_back({.Sq = 70, .D = 32, .Dv = 32, .values = 0x1p-128});
  // Few rows, with all that may lie between products and weights, and several tiles and parts of keys.
  everything.H = 6, everything.Hk = 3, everything.Sk = 150, everything.weights = true;
  for (const int64_t Sq : {1, 2, 3, 4}) {
    everything.Sq = Sq, everything.D = 16 * Sq, everything.Dv = 8 + 24 * Sq;
    all.push_back(everything);
    all.push_back({.H = 4, .Hk = 2, .Sq = Sq, .Sk = 150, .D = 64, .Dv = 40, .intervals = Sq > 2, .infinite = true});
    all.push_back({.H = 2 + 2 * (Sq == 1),
                   .Sq = 2 * Sq,
                   .Sk = Sq == 1 ? 100 : 600,
                   .bias = 0,
                   .wide_bias = true,
                   .great_bias = true});
    all.push_back({.B = 2,
                   .H = 2,
                   .Hk = 1,
                   .Sq = Sq,
                   .Sk = 1100,
                   .D = 96,
                   .Dv = 96,
                   .heads_inside = true,
                   .band_lo = -700,
                   .band_hi = -200});
  }
  // Weights as output of whole blocks, too.
  for (const Case& c : std::vector<Case>(all)) {
    if (c.Sq < 64 || c.weights) continue;
    all.push_back(c);
    all.back().weights = true;
  }
  for (int d = 0; d < 6; ++d)
    all.push_back({.B = d != 0,
                   .H = d == 1 ? 0 : 2,
                   .Hk = d == 1 ? 0 : 2,
                   .Sq = d == 2 ? 0 : 3,
                   .Sk = d == 3 ? 0 : 4,
                   .D = d == 4 ? 0 : 8,
                   .Dv = d == 5 ? 0 : 8,
                   .weights = true});
  return all;
}

}  // namespace

int main() {
  uint64_t seed = 1;
  for (const Case& c : cases())
    for (const DType t : kDtypes) check_case(c, t, ++seed);
  return finish();
}
