// split_heads and merge_heads on every ISA.
#include "harness.h"

using namespace harness;

namespace {

struct Size {
  int64_t B, H, S, D;
};
constexpr Size kSizes[] = {{1, 1, 1, 1},   {2, 3, 5, 1},    {2, 3, 33, 3}, {1, 12, 40, 64},
                           {3, 2, 7, 59},  {2, 5, 130, 17}, {2, 4, 9, 96}, {700, 1, 2, 2},
                           {1, 2, 3, 257}, {0, 2, 3, 4},    {2, 3, 0, 4},  {2, 3, 4, 0}};

std::string text(const Kernels& k, const char* op, DType t, Size n, const Layout& layout) {
  char s[200];
  std::snprintf(s, sizeof s, "%s %s %s [%d,%d,%d,%d], memory order %d%d%d%d, step %d", k.isa, op, name_of(t), int(n.B),
                int(n.H), int(n.S), int(n.D), layout.order[0], layout.order[1], layout.order[2], layout.order[3],
                int(layout.step));
  return s;
}

// x + bias in the accumulate type, rounded once more.
auto sum_bound(DType t) {
  return
      [t](double y) { return 2 * (y + 2) * rounding(mha::accumulate_type(t)) + 2 * y * rounding(t) + least_step(t); };
}

void split(const Kernels& k, DType t, Size n, const Layout& layout, bool with_bias) {
  Random random{uint64_t(n.S * 7 + n.D)};
  // [B,S,H*D] is a [B,H,S,D] view whose heads lie one after the other.
  Strided x = random_tensor(t, n.B, n.S, 1, n.H * n.D, random, layout);
  Strided bias = random_tensor(t, 1, 1, 1, n.H * n.D, random);
  Strided out(t, n.B, n.H, n.S, n.D), want(t, n.B, n.H, n.S, n.D);
  const int64_t step = x.t.stride[3];
  mha::SplitHeads p{n.B,    n.H,    n.S, n.D, t, {x.t.data, {x.t.stride[0], n.D * step, x.t.stride[1], step}},
                    want.t, nullptr};
  if (with_bias) p.bias = bias.t.data;
  naive::split_heads(p);
  p.out = out.t;
  k.split_heads(p, threads(2));
  const std::string what = text(k, with_bias ? "split_heads with bias" : "split_heads", t, n, layout);
  if (with_bias)
    compare(out, want, sum_bound(t), what);
  else
    check(out.bytes() == want.bytes(), what + ": bits differ");
}

void merge(const Kernels& k, DType t, Size n, const Layout& layout, bool with_mix) {
  Random random{uint64_t(n.S * 5 + n.D)};
  Strided x = random_tensor(t, n.B, n.H, n.S, n.D, random, layout), mix = random_tensor(t, 1, 1, n.H, n.H, random);
  Strided out(t, n.B, n.H, n.S, n.D, {{0, 2, 1, 3}, 0, 1}), want(t, n.B, n.H, n.S, n.D, {{0, 2, 1, 3}, 0, 1});
  mha::MergeHeads p{n.B, n.H, n.S, n.D, t, x.t, want.t, with_mix ? mix.t.data : nullptr};
  naive::merge_heads(p);
  p.out = out.t;
  k.merge_heads(p, threads(2));
  const std::string what = text(k, with_mix ? "merge_heads with mix" : "merge_heads", t, n, layout);
  if (!with_mix) {
    check(out.bytes() == want.bytes(), what + ": bits differ");
    return;
  }
  // H products of numbers below 1, each sum rounded; then one rounding to t (two, as the oracle rounds too).
  const double floor = double(n.H * n.H) * rounding(mha::accumulate_type(t));
  compare(out, want, [=](double y) { return floor + 2 * y * rounding(t) + least_step(t); }, what);
}

}  // namespace

int main() {
  for (const Kernels* k : every_isa())
    for (const DType t : kDtypes)
      for (const Size& n : kSizes)
        for (const bool extra : {false, true}) {
          for (const Layout& layout : {kContiguous, kEverySecond, Layout{{1, 0, 2, 3}, 5, 1}})
            split(*k, t, n, layout, extra);
          for (const Layout& layout : {kContiguous, kHeadsInside, kTransposed, kEverySecond})
            merge(*k, t, n, layout, extra);
        }
  return finish();
}
