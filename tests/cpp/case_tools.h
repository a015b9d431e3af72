// What the kernel tests share: random numbers, tensors that lie inside bigger NaN-filled buffers, threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "../../csrc/cpu/kernels.h"
#include "naive.h"

namespace tools {

struct Random {
  uint64_t state;
  uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(state >> 33);
  }
  int64_t below(int64_t n) { return int64_t(next() % uint64_t(n)); }
  bool chance(int percent) { return below(100) < percent; }
  double uniform() { return next() / 2147483648.0 * 2 - 1; }
  double normal() { return (uniform() + uniform() + uniform() + uniform()) * 0.87; }
};

// Axis order in memory, outermost first.
struct Layout {
  int order[4] = {0, 1, 2, 3};
  int64_t row_gap = 0;  // NaN elements after each innermost row
  int64_t step = 1;     // elements from one to the next along it
};

// A [n0,n1,n2,n3] tensor in a buffer of its own that is NaN all around and between the rows. Axes of `broadcast` have
// stride 0 and one copy.
class Strided {
 public:
  mha::Tensor4 t;

  Strided() = default;
  Strided(Strided&&) = default;
  Strided& operator=(Strided&&) = default;
  Strided(mha::DType type, int64_t n0, int64_t n1, int64_t n2, int64_t n3, Layout layout = {}, int broadcast = 0)
      : type_(type), n_{n0, n1, n2, n3} {
    int64_t size = layout.step;
    for (int axis = 3; axis >= 0; --axis) {
      const int a = layout.order[axis];
      if (broadcast >> a & 1) n_[a] = n_[a] < 1 ? n_[a] : 1;
      t.stride[a] = broadcast >> a & 1 ? 0 : size;
      size *= n_[a];
      if (axis == 3) size += layout.row_gap;
    }
    bytes_.assign(size_t(size + 2 * kMargin) * mha::size_of(type), 0xFF);
    t.data = bytes_.data() + kMargin * mha::size_of(type);
  }
  template <class F>
  void fill(F f) {
    naive::Array4 x = read();
    for (double& e : x.values) e = f();
    write(x);
  }
  // One element for every axis that is not broadcast.
  naive::Array4 read() const { return naive::read(t, type_, n_[0], n_[1], n_[2], n_[3]); }
  void write(naive::Array4& x) { naive::write(x, t, type_); }
  void set(int64_t a, int64_t b, int64_t c, int64_t d, double x) {
    naive::store(t.data, type_, naive::offset(t, a, b, c, d), x);
  }
  // The same values in fp64.
  Strided widened() const {
    Strided w;
    if (!t.data) return w;
    int broadcast = 0;
    for (int a = 0; a < 4; ++a) broadcast |= (t.stride[a] == 0) << a;
    w = Strided(mha::DType::f64, n_[0], n_[1], n_[2], n_[3], {}, broadcast);
    naive::Array4 x = read();
    w.write(x);
    return w;
  }
  const std::vector<unsigned char>& bytes() const { return bytes_; }
  // True when nothing but the tensor's own elements differs from the filling.
  bool surroundings_untouched() const {
    if (!t.data) return true;
    std::vector<unsigned char> blank = bytes_;
    const size_t size = mha::size_of(type_);
    naive::for_each(read(), [&](auto... at) {
      std::memset(blank.data() + size_t(kMargin + naive::offset(t, at...)) * size, 0xFF, size);
    });
    for (unsigned char byte : blank)
      if (byte != 0xFF) return false;
    return true;
  }

 private:
  static constexpr int64_t kMargin = 64;
  mha::DType type_ = mha::DType::f32;
  int64_t n_[4] = {0, 0, 0, 0};
  std::vector<unsigned char> bytes_;
};

// Whether to leave a case out: all but every n-th, where MHA_EXT_TEST_EVERY is n, as for emulated machines. An odd n:
// cases come once for each of the four types.
inline bool left_out() {
  static const char* const given = std::getenv("MHA_EXT_TEST_EVERY");
  static const int every = given ? std::max(1, std::atoi(given)) : 1;
  static int number = 0;
  return number++ % every != 0;
}

inline void run_on_threads(int count, void (*body)(void*, int), void* context) {
  std::vector<std::thread> others;
  for (int i = 1; i < count; ++i) others.emplace_back(body, context, i);
  body(context, 0);
  for (std::thread& t : others) t.join();
}

inline mha::cpu::Threads threads(int count) { return {count, run_on_threads}; }

// A kernel's workspace: exactly the bytes asked for, all NaN.
struct Workspace {
  std::unique_ptr<void, decltype(&std::free)> data;
  explicit Workspace(size_t bytes) : data(nullptr, &std::free) {
    void* p = nullptr;
    if (posix_memalign(&p, 64, bytes ? bytes : 1)) std::abort();
    std::memset(p, 0xFF, bytes);
    data.reset(p);
  }
};

}  // namespace tools
