// Causal attention of grouped heads, forward and backward, by the CPU kernels alone: cpu/kernels.h says what there is,
// attention.h what the fields mean. Compares with the definition, and fails where it differs.
#include <cpu/kernels.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr int64_t B = 2, H = 8, Hk = 2, S = 300, D = 64;  // Sq = Sk = S

using Buffer = std::vector<float>;

Buffer random_numbers(int64_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Buffer x(n);
  for (float& each : x) each = normal(generator);
  return x;
}

// [B,heads,S,D], contiguous; any strides would do, as long as the last is 1.
mha::Tensor4 tensor(Buffer& x, int64_t heads) { return {x.data(), {heads * S * D, S * D, D, 1}}; }

// Runs body on threads of its own. A program with a thread pool uses that.
void run_on_threads(int count, void (*body)(void* context, int thread), void* context) {
  std::vector<std::exception_ptr> errors(count);
  std::vector<std::thread> threads;
  for (int n = 0; n < count; ++n)
    threads.emplace_back([&, n] {
      try {
        body(context, n);
      } catch (...) {
        errors[n] = std::current_exception();
      }
    });
  for (std::thread& each : threads) each.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};

std::unique_ptr<void, Free> workspace_of(std::size_t bytes) {
  return std::unique_ptr<void, Free>(std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64));
}

// Row i of head h of batch entry b, by the definition, in double.
std::vector<double> by_definition(const Buffer& q, const Buffer& k, const Buffer& v, int64_t b, int64_t h, int64_t i) {
  const float* query = &q[((b * H + h) * S + i) * D];
  const int64_t head = (b * Hk + h / (H / Hk)) * S * D;
  std::vector<double> out(D, 0.0);
  double total = 0;
  for (int64_t j = 0; j <= i; ++j) {
    double score = 0;
    for (int64_t d = 0; d < D; ++d) score += double(query[d]) * k[head + j * D + d];
    const double weight = std::exp(score / std::sqrt(double(D)));
    total += weight;
    for (int64_t d = 0; d < D; ++d) out[d] += weight * v[head + j * D + d];
  }
  for (double& x : out) x /= total;
  return out;
}

}  // namespace

int main() {
  Buffer q = random_numbers(B * H * S * D, 1), k = random_numbers(B * Hk * S * D, 2),
         v = random_numbers(B * Hk * S * D, 3);
  Buffer out(q.size()), lse(B * H * S), lse_rest(lse.size());

  mha::AttentionForward forward;
  forward.B = B, forward.H = H, forward.Hk = Hk, forward.Sq = forward.Sk = S, forward.D = forward.Dv = D;
  forward.dtype = mha::DType::f32;
  forward.q = tensor(q, H), forward.k = tensor(k, Hk), forward.v = tensor(v, Hk), forward.out = tensor(out, H);
  forward.scale = 1 / std::sqrt(double(D));
  forward.mask.band_hi = 0;  // causal: j - i <= Sk - Sq
  forward.lse = lse.data(), forward.lse_rest = lse_rest.data();
  forward.rows_stride_b = H * S, forward.rows_stride_h = S;

  const mha::cpu::Kernels& kernels = mha::cpu::kernels();  // of the best instruction set that this machine has
  mha::cpu::Threads threads;
  threads.count = int(std::max(1u, std::thread::hardware_concurrency()));
  threads.run = run_on_threads;
  kernels.attention_fwd(forward, threads, workspace_of(kernels.attention_fwd_workspace(forward, threads.count)).get());

  double error = 0;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t i = 0; i < S; i += 37) {
        const std::vector<double> expected = by_definition(q, k, v, b, h, i);
        for (int64_t d = 0; d < D; ++d)
          error = std::max(error, std::abs(expected[d] - out[((b * H + h) * S + i) * D + d]));
      }

  // The gradients of the sum of all outputs. What every value v[j] adds is a weighted mean, so those of v sum to the
  // number of queries.
  Buffer ones(q.size(), 1.0f), dq(q.size()), dk(k.size()), dv(v.size());
  mha::AttentionBackward backward;
  static_cast<mha::AttentionProblem&>(backward) = forward;
  backward.dout = tensor(ones, H), backward.out = tensor(out, H);
  backward.lse = lse.data(), backward.lse_rest = lse_rest.data();
  backward.dq = tensor(dq, H), backward.dk = tensor(dk, Hk), backward.dv = tensor(dv, Hk);
  kernels.attention_bwd(backward, threads,
                        workspace_of(kernels.attention_bwd_workspace(backward, threads.count)).get());
  double sum = 0;
  for (float x : dv) sum += x;
  const double share = sum / double(B * H * S * D);

  std::printf("%s, %d threads: largest error %.1e, gradients of the values sum to %.6f of what they should\n",
              kernels.isa, threads.count, error, share);
  return error < 1e-5 && std::abs(share - 1) < 1e-5 ? 0 : 1;
}
