// Attention backward on the GPU against the fp64 oracle, without torch: the cases of the CPU test, and more sizes. Each
// tensor is an allocation of its own, as short as it can be. Usage: attention_bwd [random cases [seed]]
#include <cuda_runtime.h>

#include <map>

#include "../../csrc/cuda/common/error.h"
#include "../../csrc/cuda/kernels.h"
#include "../cpp/attention_bwd_cases.h"

namespace {

using namespace attention_bwd_cases;
using mha::Tensor4;
using mha::cuda::check;

int failures = 0;
std::map<std::string, int> kernels;  // how often each ran

struct Sizes {
  int64_t n[4];
};

// Memory on the GPU, and what of it is to be copied back.
class Device {
 public:
  ~Device() {
    for (void* p : all_) cudaFree(p);
  }
  void* upload(const void* host, size_t bytes) {
    void* p = nullptr;
    check(cudaMalloc(&p, bytes ? bytes : 1), "cudaMalloc");
    all_.push_back(p);
    if (host && bytes) check(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    return p;
  }
  template <class V>
  const V* upload(const std::vector<V>& v) {
    return static_cast<const V*>(upload(v.data(), v.size() * sizeof(V)));
  }
  void upload(Tensor4& t, Sizes s, DType type, bool output = false) {
    if (!t.data) return;
    int64_t elements = 1;
    for (int i = 0; i < 4; ++i) elements += (s.n[i] - 1) * t.stride[i];
    for (int64_t n : s.n) elements = n ? elements : 0;
    const size_t bytes = size_t(elements) * size_of(type);
    void* host = t.data;
    t.data = upload(host, bytes);
    if (output) outputs_.push_back({host, t.data, bytes});
  }
  void download() {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (const Output& o : outputs_) check(cudaMemcpy(o.host, o.device, o.bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }

 private:
  struct Output {
    void *host, *device;
    size_t bytes;
  };
  std::vector<void*> all_;
  std::vector<Output> outputs_;
};

Outputs run(const Case& c, Inputs& in) {
  Outputs o = make_outputs(c, c.dtype, in.p);
  mha::AttentionBackward p = in.p;
  Device device;
  const DType acc = mha::accumulate_type(c.dtype);
  const Sizes q{{c.B, c.H, c.Sq, c.D}}, k{{c.B, c.Hk, c.Sk, c.D}}, v{{c.B, c.Hk, c.Sk, c.Dv}},
      out{{c.B, c.H, c.Sq, c.Dv}};
  const Sizes scores{{c.B, c.H, c.Sq, c.Sk}};
  device.upload(p.q, q, c.dtype), device.upload(p.k, k, c.dtype), device.upload(p.v, v, c.dtype);
  device.upload(p.out, out, c.dtype), device.upload(p.dout, out, c.dtype);
  device.upload(p.bias, scores, p.bias_dtype), device.upload(p.dweights, scores, c.dtype);
  device.upload(p.dq, q, c.dtype, true), device.upload(p.dk, k, c.dtype, true), device.upload(p.dv, v, c.dtype, true);
  device.upload(p.dbias, scores, acc, true);
  for (const void** rows : {&p.lse, &p.lse_rest, &p.dlse})
    if (*rows) *rows = device.upload(*rows, size_t(c.B * c.H * c.Sq) * size_of(acc));
  mha::Mask& m = p.mask;
  if (m.begin) m.begin = device.upload(in.begin), m.end = device.upload(in.end);
  if (m.query_ids) m.query_ids = device.upload(in.query_ids), m.key_ids = device.upload(in.key_ids);
  if (m.dense) m.dense = device.upload(in.dense);
  if (p.dropout.rng_state) p.dropout.rng_state = static_cast<const int64_t*>(device.upload(in.rng, sizeof in.rng));
  const size_t bytes = mha::cuda::attention_bwd_workspace(p);
  void* workspace = device.upload(nullptr, bytes);
  check(cudaMemset(workspace, 0xFF, bytes), "cudaMemset");
  mha::cuda::attention_bwd(p, workspace, nullptr);
  device.download();
  return o;
}

void test(const Case& c) {
  Inputs in;
  make_inputs(c, in);
  const Expected expected(c, in);
  for (bool deterministic : {true, false}) {
    in.p.deterministic = deterministic;
    const char* kernel = mha::cuda::attention_bwd_kernel(in.p).name;
    ++kernels[kernel];
    Outputs o = run(c, in);
    std::string what = mistake(o, expected);
    if (what.empty() && deterministic) {
      what = difference(o, run(c, in));
      if (!what.empty()) what += " differs between runs";
    }
    if (what.empty()) continue;
    std::printf("FAILED %s: %s\n  %s\n", kernel, what.c_str(), c.text().c_str());
    ++failures;
  }
}

void test_sizes() {
  for (int64_t size : {64, 128, 32, 96, 256})
    for (int64_t length : {1, 31, 65, 129, 200})
      for (bool causal : {false, true}) {
        Case c;
        c.dtype = causal ? DType::f16 : DType::bf16, c.Sq = length, c.Sk = causal ? length : 140, c.D = c.Dv = size,
        c.H = 2;
        c.scale = 1 / std::sqrt(double(size));
        if (causal) c.band_hi = 0;
        test(c);
      }
  for (DType dtype : kTypes) {
    for (int64_t size : {1, 3, 8, 17, 59, 64, 80, 111, 160, 257}) {
      Case c;
      c.dtype = dtype, c.Sq = 70, c.Sk = 45, c.D = c.Dv = size, c.H = 2, c.band_hi = 3, c.dropout = 0.1;
      c.scale = 1 / std::sqrt(double(size));
      test(c);
      c.dropout = -1, c.D = 24;
      test(c);
    }
    for (int empty = 0; empty < 6; ++empty) {
      Case c;
      c.dtype = dtype, c.B = 2, c.H = 2, c.Hk = 2, c.Sq = 5, c.Sk = 6, c.D = 7, c.Dv = 8, c.bias = 4, c.dbias = true;
      int64_t* sizes[] = {&c.B, &c.H, &c.Sq, &c.Sk, &c.D, &c.Dv};
      *sizes[empty] = 0;
      if (empty == 1) c.Hk = 0;
      test(c);
    }
  }
}

void test_bias_broadcasts() {
  for (int broadcast = 0; broadcast < 16; ++broadcast)
    for (bool half : {false, true}) {
      Case c;
      c.bias = broadcast, c.dbias = true, c.Sq = 70, c.Sk = 90, c.D = c.Dv = 16, c.B = 2, c.H = 2;
      c.seed = uint64_t(broadcast + 1), c.bias_acc = broadcast % 2,
      c.dtype = half ? DType::bf16 : kTypes[broadcast % 4];
      if (half) c.band_hi = 20;
      test(c);
    }
}

Case random_cuda_case(Random& r) {
  static const int64_t head_sizes[] = {1, 3, 8, 16, 17, 32, 40, 59, 64, 64, 72, 96, 111, 128, 128, 160, 192, 256, 257};
  static const int64_t lengths[] = {1, 7, 16, 31, 33, 63, 64, 65, 90, 127, 129, 150, 200};
  auto pick = [&](auto& list) { return list[r.below(int64_t(std::size(list)))]; };
  Case c = random_case(r);
  c.dtype = r.chance(25) ? c.dtype : r.chance(50) ? DType::bf16 : DType::f16;
  c.D = pick(head_sizes), c.Dv = r.chance(60) ? c.D : pick(head_sizes), c.Sq = pick(lengths), c.Sk = pick(lengths);
  c.B = 1 + r.below(2), c.Hk = 1 + r.below(2), c.H = c.Hk * (1 + r.below(2));
  c.scale = (r.chance(10) ? -0.3 : 1) / std::sqrt(double(c.D));
  c.row_gap = r.chance(50) ? 0 : r.chance(50) ? 8 : r.below(5);
  return c;
}

}  // namespace

int main(int argc, char** argv) {
  const int random_cases = argc > 1 ? std::atoi(argv[1]) : 100;
  test_sizes();
  test_bias_broadcasts();
  Random r{argc > 2 ? uint64_t(std::atoll(argv[2])) : 7};
  for (int n = 0; n < random_cases; ++n) test(random_cuda_case(r));
  for (const auto& [name, count] : kernels) std::printf("%5d runs of %s\n", count, name.c_str());
  std::printf(failures ? "%d cases failed\n" : "attention_bwd: all cases passed\n", failures);
  return failures != 0;
}
