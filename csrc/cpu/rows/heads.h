// split_heads and merge_heads: memory traffic, and for merge a small product over the heads.
#pragma once

MHA_ISA_BEGIN

constexpr int64_t kHeadsTaskBytes = 64 << 10;

// Calls f(b, s, n, thread) for the positions s .. s + n of a batch element, n at most `most`, until all are done. All
// heads of a position belong together: walked that way, one side of the copy is read or written front to back. Each
// thread gets one long run: shorter ones, handed out in turn, measured 1.3 times slower when everything lies in the
// caches.
template <class F>
void for_each_positions(int64_t B, int64_t S, int64_t bytes_each, int64_t most, const Threads& threads, F f) {
  const int64_t positions = B * S, least = kHeadsTaskBytes / max64(1, bytes_each);
  const int64_t run = max64(max64(1, least), (positions + threads.count - 1) / threads.count);
  for_each_task(threads, (positions + run - 1) / run, [&](int64_t task, int thread) {
    const int64_t last = min64(positions, (task + 1) * run);
    for (int64_t n = task * run; n < last;) {
      const int64_t s = n % S, count = min64(most, min64(last - n, S - s));
      f(n / S, s, count, thread);
      n += count;
    }
  });
}

template <class F>
void for_each_position(int64_t B, int64_t S, int64_t bytes_each, const Threads& threads, F f) {
  for_each_positions(B, S, bytes_each, 1, threads, [&](int64_t b, int64_t s, int64_t, int thread) { f(b, s, thread); });
}

MHA_INLINE void copy_bytes(char* to, const char* from, int64_t n) {
  if (n >= 64) {
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) std::memcpy(to + i, from + i, 64);
    if (i < n) std::memcpy(to + n - 64, from + n - 64, 64);
    return;
  }
  for (; n >= 8; n -= 8, to += 8, from += 8) std::memcpy(to, from, 8);
  for (; n >= 2; n -= 2, to += 2, from += 2) std::memcpy(to, from, 2);
}

template <class T>
MHA_INLINE void copy_row(T* to, const T* from, int64_t from_stride, int64_t n) {
  if (from_stride == 1)
    copy_bytes(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), n * int64_t(sizeof(T)));
  else
    for (int64_t d = 0; d < n; ++d) to[d] = from[d * from_stride];
}

template <class T>
T* at(const Tensor4& t, int64_t b, int64_t h, int64_t s) {
  return static_cast<T*>(t.data) + b * t.stride[0] + h * t.stride[1] + s * t.stride[2];
}

// Copies rows of `Bytes`, known to the compiler: for rows of one or two cache lines the loop around a copy of any
// length takes as long as the copy.
template <int64_t Bytes, class T>
MHA_INLINE void copy_rows_of(T* to, const T* from, int64_t rows, int64_t to_step, int64_t from_step) {
  for (int64_t r = 0; r < rows; ++r, to += to_step, from += from_step) std::memcpy(to, from, Bytes);
}

template <class T>
void copy_heads(const Tensor4& out, const Tensor4& in, int64_t B, int64_t H, int64_t S, int64_t D,
                const Threads& threads) {
  const int64_t bytes = D * int64_t(sizeof(T));
  auto copy = [&](T* to, const T* from, int64_t rows, int64_t to_step, int64_t from_step) {
    switch (in.stride[3] == 1 ? bytes : 0) {
      case 64:
        return copy_rows_of<64>(to, from, rows, to_step, from_step);
      case 128:
        return copy_rows_of<128>(to, from, rows, to_step, from_step);
      case 256:
        return copy_rows_of<256>(to, from, rows, to_step, from_step);
      case 512:
        return copy_rows_of<512>(to, from, rows, to_step, from_step);
      default:
        for (int64_t r = 0; r < rows; ++r) copy_row(to + r * to_step, from + r * from_step, in.stride[3], D);
    }
  };
  // Short rows are written several at a time: one row of 128 bytes to each of many heads, which may lie a power of two
  // apart, measured 0.6 of memcpy's speed, four of them 0.9; of 256 bytes, one measured 0.95 and four 0.75.
  const bool scattered = out.stride[2] == D && bytes > 0 && bytes < 256;
  for_each_positions(B, S, H * bytes, scattered ? 512 / bytes : 1, threads, [&](int64_t b, int64_t s, int64_t n, int) {
    if (!scattered) return copy(at<T>(out, b, 0, s), at<T>(in, b, 0, s), H, out.stride[1], in.stride[1]);
    for (int64_t h = 0; h < H; ++h) copy(at<T>(out, b, h, s), at<T>(in, b, h, s), n, out.stride[2], in.stride[2]);
  });
}

// to[d] = from[d] + bias[d]
template <class T>
void add_row(T* to, const T* from, int64_t from_stride, const T* bias, int64_t n) {
  constexpr int kLanes = Vec<Acc<T>>::lanes;
  T gathered[kLanes];
  for (int64_t d = 0; d < n; d += kLanes) {
    const int lanes = int(min64(kLanes, n - d));
    const T* x = from + d * from_stride;
    if (from_stride != 1) {
      copy_row(gathered, x, from_stride, lanes);
      x = gathered;
    }
    store_n(to + d, load_n(x, lanes) + load_n(bias + d, lanes), lanes);
  }
}

inline void split_heads(const SplitHeads& p, const Threads& threads) {
  with_dtype(p.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (!p.bias) return copy_heads<T>(p.out, p.in, p.B, p.H, p.S, p.D, threads);
    const T* bias = static_cast<const T*>(p.bias);
    for_each_position(p.B, p.S, p.H * p.D * int64_t(sizeof(T)), threads, [&](int64_t b, int64_t s, int) {
      for (int64_t h = 0; h < p.H; ++h)
        add_row(at<T>(p.out, b, h, s), at<T>(p.in, b, h, s), p.in.stride[3], bias + h * p.D, p.D);
    });
  });
}

// out[n][0..Columns) of `Outputs` heads from head g on: sum_h in[h * pitch + ...] * mix[h * H + g + n]
template <class T, int Outputs, int Columns>
MHA_INLINE void mix_block(const Acc<T>* in, int64_t pitch, const Acc<T>* mix, int64_t H, T* out, int64_t out_stride,
                          int64_t columns) {
  using V = Vec<Acc<T>>;
  V sum[Outputs][Columns];
  for (auto& row : sum)
    for (V& x : row) x = set1(Acc<T>(0));
  for (int64_t h = 0; h < H; ++h, in += pitch, mix += H)
    for (int c = 0; c < Columns; ++c) {
      const V x = load(in + c * V::lanes);
      for (int n = 0; n < Outputs; ++n) sum[n][c] = fma(x, set1(mix[n]), sum[n][c]);
    }
  for (int n = 0; n < Outputs; ++n)
    for (int c = 0; c < Columns; ++c) {
      const int64_t left = columns - c * V::lanes;
      if (left > 0) store_n(out + n * out_stride + c * V::lanes, sum[n][c], int(min64(left, V::lanes)));
    }
}

template <class T>
void mix_heads(const MergeHeads& p, const Threads& threads) {
  using A = Acc<T>;
  constexpr int kLanes = Vec<A>::lanes, kColumns = kVecRegisters == 32 ? 4 : 2;
  const int64_t H = p.H, block = kLanes * kColumns, pitch = (p.D + block - 1) / block * block;
  Scratch<A> mix(H * H), wide_heads(int64_t(threads.count) * H * pitch);
  for (int64_t i = 0; i < H * H; ++i) mix.get()[i] = widen(static_cast<const T*>(p.mix)[i]);
  for_each_position(p.B, p.S, H * p.D * int64_t(sizeof(T)), threads, [&](int64_t b, int64_t s, int thread) {
    A* wide = wide_heads.get() + thread * H * pitch;
    for (int64_t h = 0; h < H; ++h) {
      const T* x = at<T>(p.in, b, h, s);
      T gathered[kLanes];
      for (int64_t d = 0; d < pitch; d += kLanes) {
        const int lanes = int(max64(0, min64(kLanes, p.D - d)));
        const T* from = x + d;
        if (p.in.stride[3] != 1) {
          copy_row(gathered, x + d * p.in.stride[3], p.in.stride[3], lanes);
          from = gathered;
        }
        store(wide + h * pitch + d, load_n(from, lanes));
      }
    }
    for (int64_t d = 0; d < p.D; d += block) {
      int64_t g = 0;
      for (; g + 4 <= H; g += 4)
        mix_block<T, 4, kColumns>(wide + d, pitch, mix.get() + g, H, at<T>(p.out, b, g, s) + d, p.out.stride[1],
                                  p.D - d);
      for (; g < H; ++g)
        mix_block<T, 1, kColumns>(wide + d, pitch, mix.get() + g, H, at<T>(p.out, b, g, s) + d, p.out.stride[1],
                                  p.D - d);
    }
  });
}

inline void merge_heads(const MergeHeads& p, const Threads& threads) {
  with_dtype(p.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (p.mix)
      mix_heads<T>(p, threads);
    else
      copy_heads<T>(p.out, p.in, p.B, p.H, p.S, p.D, threads);
  });
}

MHA_ISA_END
