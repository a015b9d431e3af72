// A C++ program that calls the ops through torch's dispatcher, without Python. Linking the ops library registers them;
// a program that does not link it can dlopen() it instead. Given the path of a package that AOTInductor made
// (tests/cpp/package.py), it runs that too.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cmath>
#include <cstdio>

// The textbook's causal attention and its logsumexp.
std::pair<at::Tensor, at::Tensor> textbook(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const at::Tensor future = at::ones({q.size(2), k.size(2)}, at::kBool).triu(1);
  const at::Tensor products = at::matmul(q, k.transpose(-2, -1)) / std::sqrt(double(q.size(3)));
  const at::Tensor scores = products.masked_fill(future, -INFINITY);
  return {at::matmul(scores.softmax(-1), v), scores.logsumexp(-1)};
}

double distance(const at::Tensor& a, const at::Tensor& b) { return (a - b).abs().max().item<double>(); }

int main(int argc, char** argv) {
  at::manual_seed(1);
  const int64_t B = 2, H = 3, S = 50, D = 16;
  const at::Tensor q = at::randn({B, H, S, D}), k = at::randn({B, H, S, D}), v = at::randn({B, H, S, D});
  const auto [expected_out, expected_lse] = textbook(q, k, v);

  // Every argument by its name in the schema; what is optional stays None, and other numbers and flags stay zero.
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("mha_ext::attention_fwd", "");
  torch::jit::Stack stack;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const std::string& name = argument.name();
    if (name == "q")
      stack.emplace_back(q);
    else if (name == "k")
      stack.emplace_back(k);
    else if (name == "v")
      stack.emplace_back(v);
    else if (name == "right")
      stack.emplace_back(int64_t(0));  // no key after the query's own place: causal
    else if (name == "scale")
      stack.emplace_back(1 / std::sqrt(double(D)));
    else if (argument.type()->kind() == c10::TypeKind::OptionalType)
      stack.emplace_back();
    else if (argument.type()->kind() == c10::TypeKind::FloatType)
      stack.emplace_back(0.0);
    else if (argument.type()->kind() == c10::TypeKind::BoolType)
      stack.emplace_back(false);
    else
      stack.emplace_back(int64_t(0));
  }
  op.callBoxed(stack);
  const double out_error = distance(stack[0].toTensor(), expected_out);
  const double lse_error = distance(stack[1].toTensor(), expected_lse);
  std::printf("causal attention: differs from the textbook by %.2g, its logsumexp by %.2g\n", out_error, lse_error);
  if (!(out_error < 1e-5 && lse_error < 1e-5)) return 1;
  if (argc < 2) return 0;

  torch::inductor::AOTIModelPackageLoader package(argv[1]);
  const double package_error = distance(package.run({q, k, v}).at(0), expected_out);
  std::printf("the package's causal attention: differs from the textbook by %.2g\n", package_error);
  return package_error < 1e-5 ? 0 : 1;
}
