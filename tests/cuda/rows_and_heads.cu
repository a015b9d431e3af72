// Masked softmax (forward, backward), split and merge of heads and the dropout mask against the fp64 oracle, without
// torch.
#include "../../csrc/cuda/kernels.h"
#include "tools.h"

using namespace tools;

namespace {

int passed = 0, failed = 0;

void report(const char* what, DType type, double error) {
  const bool ok = error <= 1;
  ++(ok ? passed : failed);
  std::printf("%-4s %-36s %zu-byte type, %.2g of what is allowed\n", ok ? "ok" : "FAIL", what, size_of(type), error);
  std::fflush(stdout);
}

int64_t* rng() {
  auto* x = static_cast<int64_t*>(allocate(16));
  x[0] = 42, x[1] = 7;
  return x;
}

// features: c causal, m dense mask, B bias, b bias broadcast over all but keys, q bias broadcast over keys, r dropout,
// s strided
void softmax(const char* name, DType type, int64_t B, int64_t H, int64_t Sq, int64_t Sk, const char* features) {
  auto has = [&](char c) { return strchr(features, c) != nullptr; };
  mha::MaskedSoftmaxProblem p;
  p.B = B, p.H = H, p.Sq = Sq, p.Sk = Sk, p.dtype = type, p.scale = 0.7;
  auto scores_like = [&](double size) {
    Tensor4 t = has('s') ? tensor(type, B, H, Sk, Sq, false, 1, size) : tensor(type, B, H, Sq, Sk, false, 0, size);
    if (has('s')) std::swap(t.stride[2], t.stride[3]);
    return t;
  };
  p.scores = scores_like(4);
  if (has('c')) p.mask.band_hi = Sk - Sq;
  if (has('m')) {
    auto* dense = static_cast<uint8_t*>(allocate(std::size_t(Sq * Sk)));
    for (int64_t i = 0; i < Sq * Sk; ++i) dense[i] = uniform() > 0 && i / Sk != 1;
    p.mask.dense = dense, p.mask.dense_stride_q = Sk, p.mask.dense_stride_k = 1;
    // A hidden NaN stays out.
    for (int64_t j = 0; j < Sk; ++j)
      if (!dense[j]) naive::store(p.scores.data, type, naive::offset(p.scores, 0, 0, 0, j), NAN);
  }
  const DType acc = accumulate_type(type);
  p.bias_dtype = acc;
  const bool bias = has('B') || has('b') || has('q');
  auto bias_like = [&](bool zeros) {
    Tensor4 t = has('b')   ? tensor(acc, 1, 1, 1, Sk, false, 0, 2)
                : has('q') ? tensor(acc, B, 1, Sq, 1, false, 0, 2)
                           : tensor(acc, 1, H, Sq, Sk, false, 0, 2);
    if (has('b')) t.stride[1] = t.stride[2] = 0;
    if (has('q')) t.stride[1] = t.stride[3] = 0;
    if (!has('q')) t.stride[0] = 0;
    if (zeros) memset(t.data, 0, std::size_t(has('b') ? Sk : has('q') ? B * Sq : H * Sq * Sk) * size_of(acc));
    return t;
  };
  if (bias) p.bias = bias_like(false);
  if (has('r')) p.dropout = {0.4, rng()};

  mha::MaskedSoftmaxForward f, g;
  static_cast<mha::MaskedSoftmaxProblem&>(f) = p;
  f.out = tensor(type, B, H, Sq, Sk, false, 0, 0);
  f.lse = allocate(std::size_t(B * H * Sq) * size_of(acc));
  g = f;
  g.out = tensor(type, B, H, Sq, Sk, false, 0, 0);
  g.lse = allocate(std::size_t(B * H * Sq) * size_of(acc));
  mha::cuda::masked_softmax_fwd(f, nullptr);
  check(cudaDeviceSynchronize(), name);
  naive::masked_softmax_fwd(g);
  report(name, type, compare(f.out, g.out, type, type, B, H, Sq, Sk, 4 * unit(type)));
  const Tensor4 lse = {f.lse, {H * Sq, Sq, 1, 0}}, want = {g.lse, {H * Sq, Sq, 1, 0}};
  report("  lse", type, compare(lse, want, acc, acc, B, H, Sq, 1, 8 * unit(acc)));

  mha::MaskedSoftmaxBackward d, e;
  static_cast<mha::MaskedSoftmaxProblem&>(d) = p;
  d.dout = scores_like(1);
  d.lse = g.lse;
  d.dscores = tensor(type, B, H, Sq, Sk, false, 0, 0);
  if (bias) d.dbias = bias_like(true);
  e = d;
  e.dscores = tensor(type, B, H, Sq, Sk, false, 0, 0);
  if (bias) e.dbias = bias_like(true);
  mha::cuda::masked_softmax_bwd(d, nullptr);
  check(cudaDeviceSynchronize(), name);
  naive::masked_softmax_bwd(e);
  report("  dscores", type, compare(d.dscores, e.dscores, type, type, B, H, Sq, Sk, 4 * unit(type)));
  if (bias) {
    const int64_t nb = d.dbias.stride[0] ? B : 1, nh = d.dbias.stride[1] ? H : 1, nq = d.dbias.stride[2] ? Sq : 1,
                  nk = d.dbias.stride[3] ? Sk : 1;
    report("  dbias", type, compare(d.dbias, e.dbias, acc, acc, nb, nh, nq, nk, 50 * unit(acc)));
  }
}

void heads(const char* name, DType type, int64_t B, int64_t H, int64_t S, int64_t D, bool extra) {
  mha::SplitHeads s;
  s.B = B, s.H = H, s.S = S, s.D = D, s.dtype = type;
  s.in = tensor(type, B, H, S, D, true, 0, 3);
  if (extra) s.bias = tensor(type, 1, 1, 1, H * D, false, 0, 2).data;
  mha::SplitHeads t = s;
  s.out = tensor(type, B, H, S, D, false, 0, 0);
  t.out = tensor(type, B, H, S, D, false, 0, 0);
  mha::cuda::split_heads(s, nullptr);
  check(cudaDeviceSynchronize(), name);
  naive::split_heads(t);
  report((std::string("split ") + name).c_str(), type,
         compare(s.out, t.out, type, type, B, H, S, D, extra ? unit(type) : 1e-30));

  mha::MergeHeads m;
  m.B = B, m.H = H, m.S = S, m.D = D, m.dtype = type;
  m.in = tensor(type, B, H, S, D, false, extra ? 16 : 0, 3);
  if (extra) m.mix = tensor(type, 1, 1, H, H, false, 0, 1).data;
  mha::MergeHeads n = m;
  m.out = tensor(type, B, H, S, D, true, 0, 0);
  n.out = tensor(type, B, H, S, D, true, 0, 0);
  mha::cuda::merge_heads(m, nullptr);
  check(cudaDeviceSynchronize(), name);
  naive::merge_heads(n);
  report((std::string("merge ") + name).c_str(), type,
         compare(m.out, n.out, type, type, B, H, S, D, extra ? 8 * unit(type) : 1e-30));
}

void dropout(double p, int64_t Sk) {
  mha::DropoutMask d;
  d.B = 2, d.H = 3, d.Sq = 5, d.Sk = Sk, d.dropout = {p, rng()};
  const std::size_t n = std::size_t(d.B * d.H * d.Sq * Sk);
  d.out = static_cast<uint8_t*>(allocate(n));
  mha::cuda::dropout_mask(d, nullptr);
  check(cudaDeviceSynchronize(), "dropout_mask");
  double wrong = 0;
  for (std::size_t i = 0; i < n; ++i)
    wrong += d.out[i] != naive::kept(d.dropout, int64_t(i) / Sk / d.Sq, int64_t(i) / Sk % d.Sq, int64_t(i) % Sk);
  report("dropout mask", DType::f32, wrong * 1e30);
}

}  // namespace

int main() try {
  for (DType type : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    softmax("softmax 64 causal", type, 1, 2, 33, 64, "c");
    softmax("softmax 77 dense bias", type, 2, 2, 9, 77, "mBc");
    softmax("softmax 1", type, 2, 1, 3, 1, "");
    softmax("softmax strided dropout", type, 1, 2, 17, 120, "srb");
    softmax("softmax 2048 dropout", type, 1, 1, 3, 2048, "rq");
    softmax("softmax 9001", type, 1, 1, 2, 9001, "cb");
    softmax("softmax 16392", type, 1, 1, 2, 16392, "");
    heads("2x3x70x64", type, 2, 3, 70, 64, false);
    heads("2x3x70x64 extra", type, 2, 3, 70, 64, true);
    heads("3x2x5x17 extra", type, 3, 2, 5, 17, true);
    heads("1x2x3x1000", type, 1, 2, 3, 1000, false);
  }
  dropout(0.5, 64);
  dropout(0.1, 31);
  dropout(1, 8);
  dropout(0, 8);
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
} catch (const std::exception& e) {
  std::printf("FAIL %s\n%d passed, %d failed\n", e.what(), passed, failed + 1);
  return 1;
}
