// A C++ program that calls the ops through torch's dispatcher, without Python. Linking the ops library registers them;
// a program that does not link it can dlopen() it instead.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cmath>
#include <cstdio>

int main() {
  at::manual_seed(1);
  const int64_t B = 2, H = 3, S = 50, D = 16;
  const at::Tensor q = at::randn({B, H, S, D}), k = at::randn({B, H, S, D}), v = at::randn({B, H, S, D});
  const double scale = 1 / std::sqrt(double(D));

  // The arguments in the order of the schema. right = 0 is causal.
  const c10::IValue none;
  torch::jit::Stack stack{q,    k,          v,     none,  none, none, none, none,  none,
                          none, int64_t(0), false, scale, 0.0,  0.0,  none, false, false};
  c10::Dispatcher::singleton().findSchemaOrThrow("mha_ext::attention_fwd", "").callBoxed(stack);
  const at::Tensor out = stack[0].toTensor(), lse = stack[1].toTensor();

  const at::Tensor future = at::ones({S, S}, at::kBool).triu(1);
  const at::Tensor scores = (at::matmul(q, k.transpose(-2, -1)) * scale).masked_fill(future, -INFINITY);
  const double out_error = (out - at::matmul(scores.softmax(-1), v)).abs().max().item<double>();
  const double lse_error = (lse - scores.logsumexp(-1)).abs().max().item<double>();
  std::printf("causal attention: differs from the textbook by %.2g, its logsumexp by %.2g\n", out_error, lse_error);
  return out_error < 1e-5 && lse_error < 1e-5 ? 0 : 1;
}
