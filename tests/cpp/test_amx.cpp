// AMX: what its instructions compute, by hand-made examples; what they refuse; the product made of them; and what
// kernels leave behind. Where the processor has AMX, all this is about the processor; elsewhere it is about
// amx_emulator.
#include "../../csrc/cpu/isa/features.h"
#include "amx_emulator.h"
#include "amx_probe.h"
#include "harness.h"

#ifdef __x86_64__
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "../../csrc/cpu/isa/prelude.h"
#define MHA_ISA_NS amx_instructions
#include "../../csrc/cpu/product/amx.h"

using namespace harness;
using namespace mha::cpu::amx_instructions;

namespace {

struct Pairs {
  uint16_t x[16][32] = {};  // a tile of bf16
  void set(int row, int column, double value) { x[row][column] = naive::encode(value, naive::kBf16); }
  double get(int row, int column) const { return naive::decode(x[row][column], naive::kBf16); }
};
struct Sums {
  float x[16][16] = {};
};

// c += a * b, of whole tiles or of fewer rows of c and pairs.
void dot(Sums& c, const Pairs& a, const Pairs& b, int rows = 16, int pairs = 16, int columns = 16) {
  AmxShapes shapes;
  shapes.rows[1] = uint8_t(rows), shapes.row_bytes[1] = uint16_t(4 * columns);
  shapes.rows[2] = uint8_t(rows), shapes.row_bytes[2] = uint16_t(4 * pairs);
  shapes.rows[3] = uint8_t(pairs), shapes.row_bytes[3] = uint16_t(4 * columns);
  amx_configure(shapes);
  amx_load<1>(c.x, 64);
  amx_load<2>(a.x, 64);
  amx_load<3>(b.x, 64);
  amx_dot<1, 2, 3>();
  amx_store<1>(c.x, 64);
  amx_release();
}

// One element: the sum over k of a[2k] * b[2k] + a[2k+1] * b[2k+1], on top of c.
float one(float c, std::vector<double> a, std::vector<double> b) {
  Sums sums;
  Pairs x, y;
  sums.x[3][5] = c;
  for (int i = 0; i < int(a.size()); ++i) x.set(3, i, a[size_t(i)]), y.set(i / 2, 2 * 5 + i % 2, b[size_t(i)]);
  dot(sums, x, y);
  return sums.x[3][5];
}

void by_hand() {
  const double inf = std::numeric_limits<double>::infinity(), tiny = std::ldexp(1.0, -130);
  auto same = [](float got, double want, const char* what) {
    check(got == float(want) || (std::isnan(got) && std::isnan(want)),
          std::string(what) + ": " + std::to_string(got) + " instead of " + std::to_string(want));
  };
  same(one(0.5f, {1, 2, 3, 4}, {10, 20, 30, 40}), 300.5, "1*10 + 2*20 + 3*30 + 4*40 + 0.5");
  const double big = 1 << 24;
  same(one(0, {big, 1, 0, 1}, {1, 1, 0, 1}), big + 2, "odd elements are summed before they meet the even ones");
  same(one(0, {big, 0, 1, 0, 1, 0}, {1, 0, 1, 0, 1, 0}), big, "even elements are rounded one by one, to even");
  same(one(float(big), {1, 1}, {1, 1}), big + 2, "what is added comes last");
  const double half = std::ldexp(1.0, 64), top = std::ldexp(1.0, 127);
  same(one(0, {-top, 0, half, 0}, {1, 0, half, 0}), top, "a product is not rounded before it is added");
  same(one(0, {half, 0, -top, 0}, {half, 0, 1, 0}), inf, "a sum is rounded before more is added");
  same(one(0, {tiny, 0}, {top, 0}), 0, "a denormal of A is 0");
  same(one(0, {top, 0}, {tiny, 0}), 0, "a denormal of B is 0");
  same(one(1, {tiny, 0}, {inf, 0}), std::nan(""), "so its product with infinity is NaN");
  same(one(float(tiny), {0, 0}, {0, 0}), 0, "a denormal of C is 0");
  same(one(0, {std::ldexp(1.0, -64), 0, 0, 0}, {std::ldexp(1.0, -64), 0, 0, 0}), 0, "a denormal result is 0");
  same(one(0, {std::ldexp(1.0, -63), 0}, {std::ldexp(1.0, -63), 0}), std::ldexp(1.0, -126), "the least normal is not");
  same(one(0, {inf, 1}, {1, 1}), inf, "infinity");
  same(one(0, {inf, -inf}, {1, 1}), std::nan(""), "infinity less itself");
  same(one(0, {inf, 1}, {0, 1}), std::nan(""), "infinity times 0");
  same(one(float(std::nan("")), {1, 1}, {1, 1}), std::nan(""), "NaN of C");
}

// Small whole numbers everywhere, so that any order of sums is exact; what lies beyond a smaller tile stays.
void shapes() {
  Random random{11};
  constexpr int kSizes[][3] = {{16, 16, 16}, {5, 16, 16}, {16, 3, 16}, {16, 16, 7}, {1, 1, 1}};
  for (const auto& [rows, pairs, columns] : kSizes) {
    Pairs a, b;
    Sums c;
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 32; ++j) a.set(i, j, double(random.below(9) - 4)), b.set(i, j, double(random.below(9) - 4));
      for (float& x : c.x[i]) x = float(random.below(100));
    }
    const Sums before = c;
    dot(c, a, b, rows, pairs, columns);
    bool right = true;
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 16; ++n) {
        double want = double(before.x[m][n]);
        for (int k = 0; m < rows && n < columns && k < 2 * pairs; ++k)
          want += a.get(m, k) * b.get(k / 2, 2 * n + k % 2);
        right &= double(c.x[m][n]) == want;
      }
    check(right, "a product of " + std::to_string(rows) + " x " + std::to_string(pairs) + " pairs x " +
                     std::to_string(columns));
  }
}

// Whether f ends well in a process of its own.
template <class F>
bool succeeds(F f) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) _exit(f() ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// What the processor answers with #UD or #GP.
void refusals() {
  auto configuration = [](int rows, int row_bytes) {
    AmxShapes shapes;
    for (int tile = 1; tile <= 3; ++tile)
      shapes.rows[tile] = uint8_t(rows), shapes.row_bytes[tile] = uint16_t(row_bytes);
    return shapes;
  };
  static Sums memory;
  auto refused = [](const AmxShapes& shapes, auto use, const char* what) {
    check(!succeeds([&] {
      amx_configure(shapes);
      use();
      return true;
    }),
          what);
  };
  const auto nothing = [] {};
  const AmxShapes good = configuration(16, 64);
  check(succeeds([&] {
          amx_configure(good);
          amx_zero<1>(), amx_zero<2>(), amx_zero<3>();
          amx_dot<1, 2, 3>();
          return true;
        }),
        "what follows is refused for the reason given");
  refused({.palette = 0}, [] { amx_zero<1>(); }, "palette 0 leaves no tile");
  refused({.palette = 2}, nothing, "there is no palette 2");
  AmxShapes shapes = good;
  shapes.reserved[3] = 1;
  refused(shapes, nothing, "reserved bytes are 0");
  shapes = good, shapes.rows[8] = 16, shapes.row_bytes[8] = 64;
  refused(shapes, nothing, "there are 8 tiles");
  refused(configuration(17, 64), nothing, "a tile has up to 16 rows");
  refused(configuration(16, 68), nothing, "a row has up to 64 bytes");
  refused(configuration(16, 0), nothing, "a tile with rows has bytes in them");
  refused(configuration(0, 64), nothing, "a tile with bytes in its rows has rows");
  refused(good, [] { amx_zero<4>(); }, "a tile that is not configured cannot be zeroed");
  refused(good, [] { amx_load<0>(&memory, 64); }, "nor loaded");
  refused(good, [] { amx_store<7>(&memory, 64); }, "nor stored");
  refused(good, [] { amx_dot<1, 2, 4>(); }, "nor multiplied");
  refused(good, [] { amx_dot_bytes<1, 2, 4>(); }, "as bytes, too");
  shapes = good, shapes.rows[1] = 15;
  refused(shapes, [] { amx_dot<1, 2, 3>(); }, "C has A's rows");
  shapes = good, shapes.row_bytes[1] = 60;
  refused(shapes, [] { amx_dot<1, 2, 3>(); }, "C has B's columns");
  shapes = good, shapes.rows[3] = 15;
  refused(shapes, [] { amx_dot<1, 2, 3>(); }, "A has as many pairs as B has rows");
  refused(
      good,
      [] {
        amx_release();
        amx_zero<1>();
      },
      "released tiles are gone");
}

// Products of bytes with sign, all of them, on top of sums that wrap.
void bytes() {
  Random random{4};
  for (const int rows : {16, 5}) {
    for (const int columns : {16, 4, 1}) {
      int8_t a[16][64], b[16][64];
      uint32_t c[16][16], want[16][16];
      for (auto& row : a)
        for (int8_t& x : row) x = int8_t(random.below(256) - 128);
      for (auto& row : b)
        for (int8_t& x : row) x = int8_t(random.chance(20) ? -128 : random.below(256) - 128);
      for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n) {
          want[m][n] = c[m][n] = uint32_t(0x7FFFFFFF - random.below(1 << 20));
          for (int k = 0; k < 64 && m < rows && n < columns; ++k)
            want[m][n] += uint32_t(a[m][k] * b[k / 4][4 * n + k % 4]);
        }
      AmxShapes shapes;
      shapes.rows[1] = uint8_t(rows), shapes.row_bytes[1] = uint16_t(4 * columns);
      shapes.rows[2] = uint8_t(rows), shapes.row_bytes[2] = 64;
      shapes.rows[3] = 16, shapes.row_bytes[3] = uint16_t(4 * columns);
      amx_configure(shapes);
      amx_load<1>(c, 64);
      amx_load<2>(a, 64);
      amx_load<3>(b, 64);
      amx_dot_bytes<1, 2, 3>();
      amx_store<1>(c, 64);
      amx_release();
      check(std::memcmp(c, want, sizeof(c)) == 0, "bytes: " + std::to_string(rows) + " x " + std::to_string(columns));
    }
  }
}

// Any sizes, with NaN wherever an operand ends, and all ways to begin.
void products() {
  Random random{5};
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (int n = 0; n < 300; ++n) {
    auto size = [&] { return int(random.chance(30) ? 16 * (1 + random.below(5)) : 1 + random.below(70)); };
    AmxGemm g{};
    g.planes = 1;
    g.M = size(), g.N = size(), g.K = size();
    g.am = g.K + random.below(3), g.ldb = g.N + random.below(3), g.ldc = g.N + random.below(3);
    const int start = n % 3;
    Strided a(DType::bf16, 1, 1, g.M, 2 * g.K, {{0, 1, 2, 3}, 2 * (g.am - g.K), 1});
    Strided b(DType::bf16, 1, 1, g.K, 2 * g.N, {{0, 1, 2, 3}, 2 * (g.ldb - g.N), 1});
    Strided c(DType::f32, 1, 1, g.M, g.N, {{0, 1, 2, 3}, g.ldc - g.N, 1}), scale(DType::f32, 1, 1, 1, g.N);
    a.fill([&] { return random.normal(); });
    b.fill([&] { return random.normal(); });
    c.fill([&] { return start == 0 ? nan : random.normal(); });
    scale.fill([&] { return random.uniform(); });
    naive::Array4 x = a.read(), y = b.read(), want = c.read(), factor = scale.read(), terms = want;
    for (int m = 0; m < g.M; ++m)
      for (int j = 0; j < g.N; ++j) {
        double& sum = want(0, 0, m, j);
        sum = start == 0 ? 0 : start == 1 ? sum : sum * factor(0, 0, 0, j);
        double& total = terms(0, 0, m, j) = std::fabs(sum);
        for (int k = 0; k < 2 * g.K; ++k) {
          const double term = x(0, 0, m, k) * y(0, 0, k / 2, 2 * j + k % 2);
          sum += term, total += std::fabs(term);
        }
      }
    g.a = a.t.data, g.b = b.t.data, g.c = static_cast<float*>(c.t.data);
    g.add = start == 1, g.scale = start == 2 ? static_cast<const float*>(scale.t.data) : nullptr;
    amx_gemm(g);
    const naive::Array4 got = c.read();
    // A term goes through about K / 16 + 16 + 2 roundings.
    const double allowed = (g.K / 16 + 20) * 0x1p-24;
    double worst = 0;
    bool right = c.surroundings_untouched();
    for (size_t i = 0; i < got.values.size(); ++i) {
      const double share = std::fabs(got.values[i] - want.values[i]) / terms.values[i];
      right &= share <= allowed;  // NaN is not
      worst = std::max(worst, share);
    }
    check(right, "product of " + std::to_string(g.M) + " x " + std::to_string(g.K) + " pairs x " + std::to_string(g.N) +
                     ", start " + std::to_string(start) + ": relative error " + std::to_string(worst));
  }
}

// Products of fp16 numbers, each the sum of two bf16.
void products_of_planes() {
  Random random{6};
  for (int n = 0; n < 50; ++n) {
    auto size = [&] { return int(random.chance(30) ? 16 * (1 + random.below(5)) : 1 + random.below(70)); };
    AmxGemm g{};
    g.planes = 2, g.all = n % 2, g.M = size(), g.N = size(), g.K = size();
    g.am = g.K, g.ldb = g.ldc = g.N;
    auto planes = [&](int64_t rows, int64_t columns, std::vector<double>& numbers) {
      std::vector<uint16_t> bits(size_t(2 * rows * columns));
      for (int64_t i = 0; i < rows * columns; ++i) {
        const double x = naive::decode(naive::encode(random.normal(), naive::kF16), naive::kF16);
        const uint16_t rounded = naive::encode(x, naive::kBf16);
        const double rest = x - naive::decode(rounded, naive::kBf16);
        bits[size_t(i)] = rounded, bits[size_t(rows * columns + i)] = naive::encode(rest, naive::kBf16);
        check(naive::decode(naive::encode(rest, naive::kBf16), naive::kBf16) == rest, "the rest is a bf16");
        numbers.push_back(x);
      }
      return bits;
    };
    std::vector<double> x, y;
    const std::vector<uint16_t> a = planes(g.M, 2 * g.K, x), b = planes(g.K, 2 * g.N, y);
    std::vector<float> c(size_t(g.M * g.N));
    g.a = a.data(), g.b = b.data(), g.c = c.data();
    amx_gemm(g);
    double worst = 0;
    for (int m = 0; m < g.M; ++m)
      for (int j = 0; j < g.N; ++j) {
        double sum = 0, terms = 0;
        for (int k = 0; k < 2 * g.K; ++k) {
          const double term = x[size_t(m * 2 * g.K + k)] * y[size_t(k / 2 * 2 * g.N + 2 * j + k % 2)];
          sum += term, terms += std::fabs(term);
        }
        worst = std::max(worst, std::fabs(double(c[size_t(m * g.N + j)]) - sum) / terms);
      }
    check(worst <= (g.all ? 0 : 0x1p-16) + (4 * g.K / 16 + 20) * 0x1p-24,
          "product of planes: relative error " + std::to_string(worst));
  }
}

// The product of ones, 40 x 40 x 20 pairs, over and over.
bool product_of_ones() {
  std::vector<uint16_t> ones(40 * 40 * 2, naive::encode(1, naive::kBf16));
  std::vector<float> c(40 * 40);
  AmxGemm g{};
  g.planes = 1, g.M = g.N = 40, g.K = 20, g.a = g.b = ones.data(), g.c = c.data(), g.am = 20, g.ldb = g.ldc = 40;
  amx_gemm(g);
  for (float x : c) {
    if (x != 40) return false;
  }
  return true;
}

// A problem of equal numbers: forward, or that and backward, of the kernels on one thread.
struct EqualNumbers {
  static constexpr int64_t kRows = 70, kSize = 2 * kRows * 40;
  std::vector<uint16_t> in, out = std::vector<uint16_t>(4 * kSize), bias;
  std::vector<float> lse = std::vector<float>(2 * kRows), dbias = std::vector<float>(2 * kRows * kRows);
  mha::AttentionProblem p;
  const Kernels& kernels = mha::cpu::kernels_for("amx");

  EqualNumbers(DType dtype, naive::FloatFormat format)
      : in(kSize, naive::encode(0.5, format)), bias(2 * kRows * kRows, naive::encode(0.25, format)) {
    p.B = 1, p.H = p.Hk = 2, p.Sq = p.Sk = kRows, p.D = p.Dv = 40, p.dtype = dtype, p.scale = 0.1;
    p.rows_stride_b = 2 * kRows, p.rows_stride_h = kRows;
    p.q = p.k = p.v = tensor(in.data());
  }
  static mha::Tensor4 tensor(uint16_t* data) { return {data, {kSize, kRows * 40, 40, 1}}; }
  static mha::Tensor4 square(void* data) { return {data, {2 * kRows * kRows, kRows * kRows, kRows, 1}}; }
  void add_bias() { p.bias = square(bias.data()), p.bias_dtype = p.dtype; }

  void run_forward() {
    mha::AttentionForward forward;
    static_cast<mha::AttentionProblem&>(forward) = p;
    forward.out = tensor(out.data()), forward.lse = lse.data();
    Workspace space(kernels.attention_fwd_workspace(forward, 1));
    kernels.attention_fwd(forward, threads(1), space.data.get());
  }
  void run() {
    run_forward();
    mha::AttentionBackward backward;
    static_cast<mha::AttentionProblem&>(backward) = p;
    backward.out = tensor(out.data()), backward.dout = tensor(in.data()), backward.lse = lse.data();
    backward.dq = tensor(&out[kSize]), backward.dk = tensor(&out[2 * kSize]), backward.dv = tensor(&out[3 * kSize]);
    if (p.bias.data) backward.dbias = square(dbias.data());
    Workspace more(kernels.attention_bwd_workspace(backward, 1));
    kernels.attention_bwd(backward, threads(1), more.data.get());
  }
};

// Few rows of bf16 are multiplied on tiles, too, however few.
void tiles_of_few_rows() {
  for (int64_t rows = 1; rows <= 9; ++rows) {
    EqualNumbers numbers(DType::bf16, naive::kBf16);
    numbers.p.Sq = rows;
    const amx_emulator::Counts before = amx_emulator::counts();
    numbers.run_forward();
    const int64_t products = amx_emulator::counts().products - before.products;
    // Of two heads: 5 times 16 keys in 2 steps; 3 times 32 keys and 4 times 16 columns.
    if (amx_emulator::emulated() && rows <= 8) check(products == 2 * (5 * 2 + 3 * 4), "tiles of few rows");
    bool equal = true;
    for (int64_t i = 0; i < rows * 40; ++i) equal &= numbers.out[size_t(i)] == numbers.in[0];
    check(equal && numbers.out[size_t(rows * 40)] == 0, "the mean of equal values, for few rows");
  }
}

void run_kernels(DType dtype, naive::FloatFormat format) {
  EqualNumbers numbers(dtype, format);
  numbers.run();
  check(numbers.out[0] == numbers.in[0], "the mean of equal values");
}

// A bias, a soft cap and dropout take no tiles of their own.
void tiles_of_modifiers(DType dtype, naive::FloatFormat format) {
  if (!amx_emulator::emulated()) return;  // nobody counts
  const int64_t rng[2] = {1, 2};
  auto count = [&](auto change) {
    EqualNumbers numbers(dtype, format);
    change(numbers);
    const amx_emulator::Counts before = amx_emulator::counts();
    numbers.run();
    const amx_emulator::Counts after = amx_emulator::counts();
    return std::array{after.loads - before.loads, after.stores - before.stores, after.products - before.products};
  };
  const auto plain = count([](EqualNumbers&) {});
  check(plain[2] > 0, "tiles are at work");
  check(count([](EqualNumbers& n) { n.add_bias(); }) == plain, "a bias takes no tiles");
  check(count([](EqualNumbers& n) { n.p.softcap = 3; }) == plain, "a soft cap takes no tiles");
  check(count([&](EqualNumbers& n) { n.p.dropout = {0.5, rng}; }) == plain, "dropout takes no tiles");
}

void run_kernels() {
  run_kernels(DType::bf16, naive::kBf16);
  run_kernels(DType::f16, naive::kF16);
}

bool same(const AmxShapes& a, const AmxShapes& b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

// A thread's configuration is its own, and whose it was before has it again afterwards: a new thread, too, which on
// Linux begins with its creator's, elsewhere without.
void configurations() {
  const AmxShapes none = amx_configuration();
  check(none.palette == 0 && same(none, AmxShapes{.palette = 0}), "tiles are not configured at first");
  run_kernels();
  check(same(amx_configuration(), none), "kernels release tiles");
  auto with_rows = [](int rows) {
    AmxShapes shapes;
    shapes.rows[0] = uint8_t(rows), shapes.row_bytes[0] = uint16_t(4 * rows);
    shapes.rows[6] = 16, shapes.row_bytes[6] = 64;
    return shapes;
  };
  amx_configure(with_rows(9));
  run_kernels();
  check(same(amx_configuration(), with_rows(9)), "kernels give tiles back as they found them");
  bool right[4] = {};
  std::vector<std::thread> all;
  for (int t = 0; t < 4; ++t) {
    all.emplace_back([&, t] {
      const AmxShapes born = amx_configuration();
      right[t] = same(born, none) || same(born, with_rows(9));
      right[t] &= product_of_ones() && same(amx_configuration(), born);
      amx_configure(with_rows(t + 1));
      for (int n = 0; n < 20; ++n) right[t] &= product_of_ones() && same(amx_configuration(), with_rows(t + 1));
      amx_release();
    });
  }
  for (std::thread& thread : all) thread.join();
  check(right[0] && right[1] && right[2] && right[3], "each thread has tiles of its own");
  check(same(amx_configuration(), with_rows(9)), "which are not another's");
  check(succeeds([] { return product_of_ones(); }), "a forked process may use tiles, too");
  amx_release();
}

}  // namespace

int main() {
  if (!mha::cpu::detect_cpu_features().amx) {
    std::printf("skipped: not even the other instructions of the AMX kernels are here\n");
    return 77;
  }
  if (!mha::cpu::request_tiles()) {
    std::printf("skipped: the system refuses tiles\n");
    return 77;
  }
  std::printf("AMX: %s\n", amx_emulator::emulated() ? "emulated" : "of the processor");
  by_hand();
  bytes();
  shapes();
  refusals();
  products();
  products_of_planes();
  tiles_of_modifiers(DType::bf16, naive::kBf16);
  tiles_of_modifiers(DType::f16, naive::kF16);
  tiles_of_few_rows();
  configurations();
  return finish();
}
#else
int main() { return 77; }
#endif
