// The product by BFMMLA against the same product by BFDOT, pair after pair: equal to the bit, and nothing else is read
// or written.
#include <cstdio>
#include <vector>

#include "../../csrc/cpu/isa/features.h"
#include "../../csrc/cpu/isa/prelude.h"
#include "harness.h"

#ifdef __aarch64__
MHA_TARGET_BEGIN(MHA_NEON_BF16)
#define MHA_HAS_BF16_DOT 1
#define MHA_HAS_BFMMLA 1
#define MHA_ISA_NS mmla_test
#include "../../csrc/cpu/vector/neon.h"
//
#include "../../csrc/cpu/product/gemm.h"

namespace {

using namespace mha::cpu::mmla_test;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Of n pairs with NaN before and after.
std::vector<Pair> pairs(int n, harness::Random& random) {
  std::vector<Pair> x(size_t(n) + 16);
  for (Pair& pair : x) store_n(pair.x, set1(kNaN), 2);
  for (int i = 0; i < n; ++i) {
    for (mha::cpu::bf16& half : x[size_t(i) + 8].x) store_n(&half, set1(float(random.uniform())), 1);
  }
  return x;
}

float dot_of(const Pair* a, int64_t ak, const Pair* b, int64_t ldb, int K) {
  VecF sum = set1(0.0f);
  for (int k = 0; k < K; ++k) sum = dot(set1_pair(a + k * ak), set1_pair(b + k * ldb), sum);
  float lane[4];
  store(lane, sum);
  return lane[0];
}

void product(int M, int N, int K, bool along, Start start) {
  harness::Random random{uint64_t(M * 10007 + N * 101 + K)};
  const std::vector<Pair> a = pairs(M * K, random), b = pairs(K * N, random);
  const int64_t am = along ? K : 1, ak = along ? 1 : M, ldc = N + 3;
  std::vector<float> c(size_t(M * ldc), kNaN), scale(size_t(N), 0.5f);
  for (int m = 0; m < M; ++m) std::fill_n(&c[size_t(m * ldc)], N, float(m));
  gemm<Pair>(M, N, K, a.data() + 8, am, ak, b.data() + 8, N, c.data(), ldc, start, scale.data());
  int wrong = 0;
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < ldc; ++n) {
      const float got = c[size_t(m * ldc + n)];
      if (n >= N) {
        wrong += got == got;
        continue;
      }
      const float sum = dot_of(a.data() + 8 + m * am, ak, b.data() + 8 + n, N, K);
      const float old = start == Start::zero ? 0.0f : start == Start::add ? float(m) : float(m) * 0.5f;
      wrong += got != old + sum;
    }
  }
  char text[100];
  std::snprintf(text, sizeof text, "%d x %d x %d pairs, along %d, start %d: %d wrong", M, N, K, along, int(start),
                wrong);
  harness::check(wrong == 0, text);
}

void products() {
  for (const int M : {1, 2, 3, 7, 8, 9, 16, 23}) {
    for (const int N : {1, 3, 4, 5, 8, 11, 16}) {
      for (const int K : {1, 2, 3, 8, 13}) {
        for (const bool along : {true, false}) {
          for (const Start start : {Start::zero, Start::add, Start::scale}) product(M, N, K, along, start);
        }
      }
    }
  }
}

}  // namespace
MHA_TARGET_END

int main() {
  if (!mha::cpu::detect_cpu_features().neon_bf16) return 77;
  products();
  return harness::finish();
}
#else
int main() { return 77; }
#endif
