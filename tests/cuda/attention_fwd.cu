// Attention forward against the fp64 oracle, without torch: feature by feature on odd sizes. Tensors lie in NaN-filled
// buffers. Usage: attention_fwd [first-case [last-case]]
#include <cstdio>
#include <string>

#include "../../csrc/cuda/kernels.h"
#include "tools.h"

using namespace tools;

namespace {

struct Case {
  const char* name;
  DType dtype;
  int64_t B, H, Hk, Sq, Sk, D, Dv;
  std::string features;  // letters, see below
  bool has(char c) const { return features.find(c) != std::string::npos; }
};

// c causal bottom-right, w window, e ends (padding), b begins per row, d documents, m dense mask, B bias fp32, h bias
// of the dtype broadcast over heads, s softcap, r dropout, W weights, u unaligned rows, t [B,S,H,D] layout, n NaN in
// what is hidden, x negative scale, l large scores
const Case kCases[] = {
    {"plain 64", DType::bf16, 1, 1, 1, 128, 64, 64, 64, ""},
    {"plain 64 ragged", DType::f16, 2, 2, 1, 97, 131, 64, 64, "t"},
    {"causal 64", DType::bf16, 1, 2, 2, 200, 200, 64, 64, "c"},
    {"causal 64 nan", DType::bf16, 1, 2, 2, 130, 257, 64, 64, "cn"},
    {"causal 64 fewer keys", DType::f16, 1, 2, 1, 200, 70, 64, 64, "cl"},
    {"causal 128", DType::bf16, 1, 2, 1, 150, 150, 128, 128, "ct"},
    {"causal 256", DType::bf16, 1, 1, 1, 100, 100, 256, 256, "cn"},
    {"plain 32", DType::f16, 1, 3, 3, 65, 129, 32, 32, "cn"},
    {"plain 96", DType::bf16, 1, 2, 2, 129, 65, 96, 96, "cn"},
    {"80 in 96", DType::bf16, 1, 1, 1, 63, 65, 80, 80, "wt"},
    {"odd sizes", DType::bf16, 1, 2, 1, 33, 70, 59, 17, "cu"},
    {"D 3", DType::f16, 2, 2, 2, 31, 33, 3, 8, "u"},
    {"192 128", DType::f16, 1, 1, 1, 70, 70, 192, 128, "c"},
    {"padding nan", DType::bf16, 3, 2, 2, 65, 100, 64, 64, "en"},
    {"begins and ends", DType::f16, 3, 2, 2, 65, 100, 64, 64, "ebn"},
    {"documents", DType::bf16, 2, 2, 1, 129, 129, 64, 64, "dcn"},
    {"dense", DType::f16, 2, 2, 1, 65, 130, 64, 64, "mn"},
    {"bias", DType::bf16, 2, 2, 1, 65, 77, 64, 64, "B"},
    {"bias half softcap", DType::f16, 2, 2, 1, 65, 77, 64, 64, "hs"},
    {"softcap 128 causal", DType::bf16, 1, 2, 1, 65, 77, 128, 128, "sc"},
    {"dropout", DType::bf16, 2, 2, 1, 65, 77, 64, 64, "r"},
    {"dropout causal 128", DType::f16, 2, 2, 1, 65, 77, 128, 128, "rct"},
    {"all 128", DType::bf16, 2, 2, 1, 65, 77, 128, 111, "cedmBsrnt"},
    {"all 256", DType::bf16, 2, 2, 1, 65, 77, 256, 160, "cedmhsrn"},
    {"all 96", DType::f16, 2, 2, 1, 65, 77, 96, 96, "cedmBsrn"},
    {"all 32", DType::f16, 2, 2, 1, 65, 77, 17, 32, "cedmBsrnu"},
    {"negative scale", DType::f16, 1, 2, 1, 65, 77, 64, 64, "xc"},
    {"weights", DType::f16, 2, 2, 1, 65, 77, 64, 64, "Wcm"},
    {"weights 128 dropout", DType::bf16, 1, 2, 1, 65, 77, 128, 128, "WcrB"},
    {"weights 256 causal", DType::bf16, 1, 2, 1, 65, 77, 256, 256, "Wcu"},
    {"no keys", DType::bf16, 1, 2, 1, 5, 0, 64, 64, ""},
    {"split", DType::bf16, 1, 2, 1, 1, 1100, 64, 64, ""},
    {"split causal", DType::f16, 1, 2, 1, 9, 1100, 128, 128, "en"},
    {"fp32", DType::f32, 2, 2, 1, 65, 77, 64, 64, "cnW"},
    {"fp32 all", DType::f32, 2, 2, 1, 65, 77, 59, 111, "cedmBsrnuW"},
    {"fp64 all", DType::f64, 2, 2, 1, 65, 77, 59, 40, "cedmBsrnuW"},
    {"fp64", DType::f64, 1, 1, 1, 33, 65, 257, 257, ""},
    {"bf16 257", DType::bf16, 1, 2, 1, 65, 77, 257, 300, "cnWhr"},
};

struct Problem : mha::AttentionForward {
  std::size_t acc() const { return size_of(accumulate_type(dtype)); }
};

Problem make(const Case& c) {
  Problem p;
  p.B = c.B, p.H = c.H, p.Hk = c.Hk, p.Sq = c.Sq, p.Sk = c.Sk, p.D = c.D, p.Dv = c.Dv, p.dtype = c.dtype;
  p.rows_stride_b = p.H * p.Sq, p.rows_stride_h = p.Sq;
  const int64_t gap = c.has('u') ? 1 : (-c.D & 7) + 8;
  const double size = c.has('l') ? 30 : 2;
  p.q = tensor(c.dtype, c.B, c.H, c.Sq, c.D, c.has('t'), gap, size);
  p.k = tensor(c.dtype, c.B, c.Hk, c.Sk, c.D, c.has('t'), gap, size);
  p.v = tensor(c.dtype, c.B, c.Hk, c.Sk, c.Dv, c.has('t'), c.has('u') ? 1 : (-c.Dv & 7) + 8, 1);
  p.out = tensor(c.dtype, c.B, c.H, c.Sq, c.Dv, c.has('t'), 0, 0);
  p.lse = allocate(std::size_t(c.B * c.H * c.Sq) * p.acc());
  if (c.has('W')) p.weights = tensor(c.dtype, c.B, c.H, c.Sq, c.Sk, false, 0, 0);
  p.scale = (c.has('x') ? -1 : 1) / std::sqrt(double(c.D));
  if (c.has('s')) p.softcap = 1.5;
  if (c.has('c')) p.mask.band_hi = c.Sk - c.Sq;
  if (c.has('w')) p.mask.band_lo = c.Sk - c.Sq - 20, p.mask.band_hi = c.Sk - c.Sq + 5;
  auto ints = [](int64_t n, auto f) {
    auto* x = static_cast<int64_t*>(allocate(std::size_t(n) * 8));
    for (int64_t i = 0; i < n; ++i) x[i] = f(i);
    return x;
  };
  if (c.has('e')) {
    p.mask.end = ints(c.B, [&](int64_t b) { return c.B == 1 ? c.Sk * 2 / 3 : b == 0 ? 0 : c.Sk * b / c.B + 3; });
    p.mask.end_stride_b = 1;
  }
  if (c.has('b')) {
    p.mask.begin = ints(c.B * c.Sq, [&](int64_t i) { return i * 7 % (c.Sk + 9) - 5; });
    p.mask.begin_stride_b = c.Sq, p.mask.begin_stride_q = 1;
  }
  if (c.has('d')) {
    p.mask.query_ids = ints(c.Sq, [&](int64_t i) { return i / 40; });
    p.mask.key_ids = ints(c.Sk, [&](int64_t i) { return i / 40; });
  }
  if (c.has('m')) {
    auto* dense = static_cast<uint8_t*>(allocate(std::size_t(c.B * c.Sq * c.Sk)));
    for (int64_t i = 0; i < c.B * c.Sq * c.Sk; ++i) dense[i] = uniform() > 0 && i / c.Sk != 3;
    p.mask.dense = dense, p.mask.dense_stride_b = c.Sq * c.Sk, p.mask.dense_stride_q = c.Sk, p.mask.dense_stride_k = 1;
  }
  p.bias_dtype = c.has('h') ? c.dtype : accumulate_type(c.dtype);
  if (c.has('B')) p.bias = tensor(p.bias_dtype, c.B, c.H, c.Sq, c.Sk, false, 0, 2);
  if (c.has('h')) p.bias = tensor(p.bias_dtype, c.B, 1, c.Sq, c.Sk, false, 3, 2), p.bias.stride[1] = 0;
  if (c.has('r')) p.dropout = {0.3, ints(2, [](int64_t i) { return 123456789 + (i << 40); })};
  if (c.has('n'))  // keys that no query sees
    for (int64_t b = 0; b < c.B; ++b)
      for (int64_t j = 0; j < c.Sk; ++j) {
        bool seen = false;
        for (int64_t h = 0; h < c.H; ++h)
          for (int64_t i = 0; i < c.Sq; ++i) seen = seen || naive::visible(p.mask, b, h, i, j);
        // The last quarter is NaN or Inf though some queries may see it: these, and only these, turn NaN or Inf.
        for (int64_t h = 0; h < c.Hk && (!seen || j > c.Sk * 3 / 4); ++h) {
          double x = j % 3 == 0 ? INFINITY : j % 3 == 1 ? -INFINITY : NAN;
          if (!seen)
            for (int64_t d = 0; d < c.D; ++d) naive::store(p.k.data, c.dtype, naive::offset(p.k, b, h, j, d), x);
          for (int64_t d = j % 5; d < c.Dv; d += 3) naive::store(p.v.data, c.dtype, naive::offset(p.v, b, h, j, d), x);
        }
      }
  return p;
}

bool run(const Case& c) {
  Problem p = make(c), wide = p;
  const DType acc = accumulate_type(c.dtype);
  const std::size_t bytes = mha::cuda::attention_fwd_workspace(p);
  void* workspace = nullptr;
  if (bytes) check(cudaMalloc(&workspace, bytes), "cudaMalloc");
  mha::cuda::attention_fwd(p, workspace, nullptr);
  check(cudaDeviceSynchronize(), c.name);
  // The oracle writes out and weights in the same dtype; the rounding is part of the bound.
  wide.out = tensor(c.dtype, c.B, c.H, c.Sq, c.Dv, false, 0, 0);
  wide.lse = allocate(std::size_t(c.B * c.H * c.Sq) * p.acc());
  if (c.has('W')) wide.weights = tensor(c.dtype, c.B, c.H, c.Sq, c.Sk, false, 0, 0);
  naive::attention_fwd(wide);
  double out = compare(p.out, wide.out, c.dtype, c.dtype, c.B, c.H, c.Sq, c.Dv, 3 * unit(c.dtype));
  Tensor4 lse = {p.lse, {c.H * c.Sq, c.Sq, 1, 0}}, want = {wide.lse, {c.H * c.Sq, c.Sq, 1, 0}};
  double lse_error =
      compare(lse, want, acc, acc, c.B, c.H, c.Sq, 1, c.dtype == DType::f64 ? 1e-14 : 1e-6 * (c.has('l') ? 10 : 2));
  double weights =
      c.has('W') ? compare(p.weights, wide.weights, c.dtype, c.dtype, c.B, c.H, c.Sq, c.Sk, 3 * unit(c.dtype)) : 0;
  bool ok = out <= 1 && lse_error <= 1 && weights <= 1;
  std::printf("%-4s %-24s %-36s out %.2g lse %.2g weights %.2g (of what is allowed)\n", ok ? "ok" : "FAIL", c.name,
              mha::cuda::attention_fwd_kernel(p).name, out, lse_error, weights);
  std::fflush(stdout);
  return ok;
}

}  // namespace

int main(int argc, char** argv) {
  const int count = sizeof(kCases) / sizeof(kCases[0]);
  const int first = argc > 1 ? std::atoi(argv[1]) : 0, last = argc > 2   ? std::atoi(argv[2])
                                                              : argc > 1 ? first
                                                                         : count - 1;
  int failed = 0, passed = 0;
  for (int i = first; i <= last; ++i) try {
      ++(run(kCases[i]) ? passed : failed);
    } catch (const std::exception& e) {
      std::printf("FAIL %s: %s\n", kCases[i].name, e.what()), ++failed;
    }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
