// The oracle of the C++ tests: the contract of attention.h as plain loops in fp64, over any strides and dtypes. Nothing
// here is fast, and nothing is shared with the kernels but the contract itself.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../../csrc/attention.h"

namespace naive {

using mha::DType;
using mha::Tensor4;

// ---- element types -------------------------------------------------------------------------------------------------

struct FloatFormat {
  int exponent_bits, mantissa_bits;
};
constexpr FloatFormat kBf16{8, 7}, kF16{5, 10};

inline double decode(uint16_t bits, FloatFormat f) {
  const int one = 1 << f.mantissa_bits, top = (1 << f.exponent_bits) - 1, bias = top / 2;
  const int mantissa = bits & (one - 1), exponent = (bits >> f.mantissa_bits) & top;
  double x;
  if (exponent == top)
    x = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  else if (exponent == 0)
    x = std::ldexp(mantissa, 1 - bias - f.mantissa_bits);
  else
    x = std::ldexp(one + mantissa, exponent - bias - f.mantissa_bits);
  return bits >> 15 ? -x : x;
}

// Rounds to nearest, ties to even.
inline uint16_t encode(double x, FloatFormat f) {
  const int one = 1 << f.mantissa_bits, top = (1 << f.exponent_bits) - 1, least = 1 - top / 2;
  const int sign = std::signbit(x) ? 1 << 15 : 0, infinity = top << f.mantissa_bits;
  if (std::isnan(x)) return uint16_t(sign | infinity | one / 2);
  x = std::fabs(x);
  if (x == 0) return uint16_t(sign);
  if (std::isinf(x)) return uint16_t(sign | infinity);
  const int exponent = std::max(std::ilogb(x), least);
  if (exponent > top / 2) return uint16_t(sign | infinity);
  // The hidden bit and a carry out of the mantissa both land in the exponent field.
  const int steps = int(std::nearbyint(std::ldexp(x, f.mantissa_bits - exponent)));
  return uint16_t(sign | (((exponent - least) << f.mantissa_bits) + steps));
}

inline double load(const void* data, DType type, int64_t i) {
  switch (type) {
    case DType::f64:
      return static_cast<const double*>(data)[i];
    case DType::f32:
      return static_cast<const float*>(data)[i];
    case DType::bf16:
      return decode(static_cast<const uint16_t*>(data)[i], kBf16);
    case DType::f16:
      return decode(static_cast<const uint16_t*>(data)[i], kF16);
    default:
      return 0;  // the tests here have no caches
  }
}

inline void store(void* data, DType type, int64_t i, double x) {
  switch (type) {
    case DType::f64:
      static_cast<double*>(data)[i] = x;
      break;
    case DType::f32:
      static_cast<float*>(data)[i] = float(x);
      break;
    case DType::bf16:
      static_cast<uint16_t*>(data)[i] = encode(x, kBf16);
      break;
    case DType::f16:
      static_cast<uint16_t*>(data)[i] = encode(x, kF16);
      break;
    default:
      break;
  }
}

// ---- dense fp64 copies of tensors ----------------------------------------------------------------------------------

struct Array4 {
  int64_t n0, n1, n2, n3;
  std::vector<double> values;

  Array4(int64_t a, int64_t b, int64_t c, int64_t d) : n0(a), n1(b), n2(c), n3(d), values(size_t(a * b * c * d), 0.0) {}
  double& operator()(int64_t a, int64_t b, int64_t c, int64_t d) {
    return values[size_t(((a * n1 + b) * n2 + c) * n3 + d)];
  }
};

template <class F>
void for_each(const Array4& x, F f) {
  for (int64_t a = 0; a < x.n0; ++a)
    for (int64_t b = 0; b < x.n1; ++b)
      for (int64_t c = 0; c < x.n2; ++c)
        for (int64_t d = 0; d < x.n3; ++d) f(a, b, c, d);
}

inline int64_t offset(const Tensor4& t, int64_t a, int64_t b, int64_t c, int64_t d) {
  return a * t.stride[0] + b * t.stride[1] + c * t.stride[2] + d * t.stride[3];
}

// Absent tensors read as zeros and are not written.
inline Array4 read(const Tensor4& t, DType type, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
  Array4 x(n0, n1, n2, n3);
  if (t.data) for_each(x, [&](auto... at) { x(at...) = load(t.data, type, offset(t, at...)); });
  return x;
}

inline void write(Array4& x, const Tensor4& t, DType type) {
  if (t.data) for_each(x, [&](auto... at) { store(t.data, type, offset(t, at...), x(at...)); });
}

// ---- mask, dropout, scores -----------------------------------------------------------------------------------------

inline bool visible(const mha::Mask& m, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (j - i < m.band_lo || j - i > m.band_hi || (m.top_left && j > i)) return false;
  if (m.begin && j < m.begin[b * m.begin_stride_b + i * m.begin_stride_q]) return false;
  if (m.end && j >= m.end[b * m.end_stride_b + i * m.end_stride_q]) return false;
  if (m.query_ids && m.query_ids[b * m.query_ids_stride_b + i] != m.key_ids[b * m.key_ids_stride_b + j]) return false;
  if (m.blocks) {
    const int64_t row = i / m.block_size, column = j / m.block_size;
    if (!m.blocks[b * m.blocks_stride_b + h * m.blocks_stride_h + row * m.blocks_stride_q + column * m.blocks_stride_k])
      return false;
  }
  if (m.dense && !m.dense[b * m.dense_stride_b + h * m.dense_stride_h + i * m.dense_stride_q + j * m.dense_stride_k])
    return false;
  return true;
}

inline bool kept(const mha::Dropout& d, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (!d.rng_state) return true;
  if (d.p >= 1) return false;
  const mha::Philox4 words =
      mha::dropout_words(mha::dropout_key(d), uint32_t(b), uint32_t(h), uint32_t(i), uint32_t(j / 4));
  return words.word[j % 4] >= mha::dropout_threshold(d.p);
}

// What dropout multiplies a weight with.
inline double dropout_factor(const mha::Dropout& d, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (!d.rng_state) return 1;
  return kept(d, b, h, i, j) ? 1 / (1 - d.p) : 0;
}

inline double softcapped(double x, double cap) { return cap == 0 ? x : cap * std::tanh(x / cap); }

inline double softcap_derivative(double x, double cap) {
  const double t = cap == 0 ? 0 : std::tanh(x / cap);
  return 1 - t * t;
}

inline double dot(Array4& x, int64_t b, int64_t h, int64_t i, Array4& y, int64_t hy, int64_t j) {
  double sum = 0;
  for (int64_t d = 0; d < x.n3; ++d) sum += x(b, h, i, d) * y(b, hy, j, d);
  return sum;
}

// log(sum(exp(scores[j]))) over the visible keys; -inf when there are none.
struct LogSumExp {
  double top = -std::numeric_limits<double>::infinity(), sum = 0;  // log(sum) + top; apart, as top may be huge

  explicit LogSumExp(const std::vector<double>& scores) {
    for (double s : scores) top = std::isnan(s) || s > top ? s : top;
    if (std::isinf(top) && top < 0) return;
    for (double s : scores) sum += std::exp(s - top);
  }
  double value() const { return sum == 0 ? top : top + std::log(sum); }
};

inline bool sees_nothing(double lse) { return std::isinf(lse) && lse < 0; }

// Sums to dbias: one element for each that bias does not broadcast.
struct BiasGradient {
  const Tensor4& t;
  Array4 sum;

  BiasGradient(const Tensor4& dbias, int64_t B, int64_t H, int64_t Sq, int64_t Sk)
      : t(dbias),
        sum(t.stride[0] ? B : std::min<int64_t>(B, 1), t.stride[1] ? H : std::min<int64_t>(H, 1),
            t.stride[2] ? Sq : std::min<int64_t>(Sq, 1), t.stride[3] ? Sk : std::min<int64_t>(Sk, 1)) {}
  void add(int64_t b, int64_t h, int64_t i, int64_t j, double x) {
    sum(t.stride[0] ? b : 0, t.stride[1] ? h : 0, t.stride[2] ? i : 0, t.stride[3] ? j : 0) += x;
  }
};

// ---- attention -----------------------------------------------------------------------------------------------------

inline void attention_fwd(const mha::AttentionForward& p) {
  const DType acc = mha::accumulate_type(p.dtype);
  Array4 q = read(p.q, p.dtype, p.B, p.H, p.Sq, p.D), k = read(p.k, p.dtype, p.B, p.Hk, p.Sk, p.D);
  Array4 v = read(p.v, p.dtype, p.B, p.Hk, p.Sk, p.Dv), bias = read(p.bias, p.bias_dtype, p.B, p.H, p.Sq, p.Sk);
  Array4 out(p.B, p.H, p.Sq, p.Dv), weights(p.B, p.H, p.Sq, p.Sk);
  for_each(Array4(p.B, p.H, p.Sq, 1), [&](int64_t b, int64_t h, int64_t i, int64_t) {
    const int64_t hk = h / (p.H / p.Hk);
    std::vector<int64_t> keys;
    std::vector<double> scores;
    for (int64_t j = 0; j < p.Sk; ++j)
      if (visible(p.mask, b, h, i, j)) {
        keys.push_back(j);
        scores.push_back(softcapped(p.scale * dot(q, b, h, i, k, hk, j), p.softcap) + bias(b, h, i, j));
      }
    const int64_t row = (b * p.H + h) * p.Sq + i;
    const LogSumExp lse(scores);
    store(p.lse, acc, row, lse.value());
    if (p.lse_rest) store(p.lse_rest, acc, row, lse.sum == 0 ? 0 : lse.top - load(p.lse, acc, row) + std::log(lse.sum));
    for (size_t n = 0; lse.sum != 0 && n < keys.size(); ++n) {
      const int64_t j = keys[n];
      const double w = std::exp(scores[n] - lse.top) / lse.sum * dropout_factor(p.dropout, b, h, i, j);
      weights(b, h, i, j) = w;
      for (int64_t d = 0; d < p.Dv; ++d) out(b, h, i, d) += w * v(b, hk, j, d);
    }
  });
  write(out, p.out, p.dtype);
  write(weights, p.weights, p.dtype);
}

// Takes out and lse as they are given, so that it shows a kernel's own error and not forward's.
inline void attention_bwd(const mha::AttentionBackward& p) {
  const DType acc = mha::accumulate_type(p.dtype);
  Array4 q = read(p.q, p.dtype, p.B, p.H, p.Sq, p.D), k = read(p.k, p.dtype, p.B, p.Hk, p.Sk, p.D);
  Array4 v = read(p.v, p.dtype, p.B, p.Hk, p.Sk, p.Dv), bias = read(p.bias, p.bias_dtype, p.B, p.H, p.Sq, p.Sk);
  Array4 dout = read(p.dout, p.dtype, p.B, p.H, p.Sq, p.Dv), out = read(p.out, p.dtype, p.B, p.H, p.Sq, p.Dv);
  Array4 dweights = read(p.dweights, p.dtype, p.B, p.H, p.Sq, p.Sk);
  Array4 dq(p.B, p.H, p.Sq, p.D), dk(p.B, p.Hk, p.Sk, p.D), dv(p.B, p.Hk, p.Sk, p.Dv);
  BiasGradient dbias(p.dbias, p.B, p.H, p.Sq, p.Sk);
  for_each(Array4(p.B, p.H, p.Sq, 1), [&](int64_t b, int64_t h, int64_t i, int64_t) {
    const int64_t hk = h / (p.H / p.Hk), row = (b * p.H + h) * p.Sq + i;
    const double lse = load(p.lse, acc, row), lse_rest = p.lse_rest ? load(p.lse_rest, acc, row) : 0;
    if (sees_nothing(lse)) return;
    const double delta = dot(dout, b, h, i, out, h, i) - (p.dlse ? load(p.dlse, acc, row) : 0);
    for (int64_t j = 0; j < p.Sk; ++j) {
      if (!visible(p.mask, b, h, i, j)) continue;
      const double x = p.scale * dot(q, b, h, i, k, hk, j), factor = dropout_factor(p.dropout, b, h, i, j);
      const double weight = std::exp(softcapped(x, p.softcap) + bias(b, h, i, j) - lse - lse_rest);
      const double dweight = (dot(dout, b, h, i, v, hk, j) + dweights(b, h, i, j)) * factor;
      const double dscore = weight * (dweight - delta);
      const double dqk = dscore * softcap_derivative(x, p.softcap) * p.scale;
      if (p.dbias.data) dbias.add(b, h, i, j, dscore);
      for (int64_t d = 0; d < p.D; ++d) {
        dq(b, h, i, d) += dqk * k(b, hk, j, d);
        dk(b, hk, j, d) += dqk * q(b, h, i, d);
      }
      for (int64_t d = 0; d < p.Dv; ++d) dv(b, hk, j, d) += weight * factor * dout(b, h, i, d);
    }
  });
  write(dq, p.dq, p.dtype);
  write(dk, p.dk, p.dtype);
  write(dv, p.dv, p.dtype);
  write(dbias.sum, p.dbias, acc);
}

// ---- masked softmax ------------------------------------------------------------------------------------------------

inline void masked_softmax_fwd(const mha::MaskedSoftmaxForward& p) {
  Array4 in = read(p.scores, p.dtype, p.B, p.H, p.Sq, p.Sk), bias = read(p.bias, p.bias_dtype, p.B, p.H, p.Sq, p.Sk);
  Array4 out(p.B, p.H, p.Sq, p.Sk);
  for_each(Array4(p.B, p.H, p.Sq, 1), [&](int64_t b, int64_t h, int64_t i, int64_t) {
    std::vector<double> scores;
    for (int64_t j = 0; j < p.Sk; ++j)
      if (visible(p.mask, b, h, i, j)) scores.push_back(p.scale * in(b, h, i, j) + bias(b, h, i, j));
    const double lse = LogSumExp(scores).value();
    store(p.lse, mha::accumulate_type(p.dtype), (b * p.H + h) * p.Sq + i, lse);
    if (sees_nothing(lse)) return;
    for (int64_t j = 0, n = 0; j < p.Sk; ++j)
      if (visible(p.mask, b, h, i, j))
        out(b, h, i, j) = std::exp(scores[size_t(n++)] - lse) * dropout_factor(p.dropout, b, h, i, j);
  });
  write(out, p.out, p.dtype);
}

inline void masked_softmax_bwd(const mha::MaskedSoftmaxBackward& p) {
  const DType acc = mha::accumulate_type(p.dtype);
  Array4 in = read(p.scores, p.dtype, p.B, p.H, p.Sq, p.Sk), bias = read(p.bias, p.bias_dtype, p.B, p.H, p.Sq, p.Sk);
  Array4 dout = read(p.dout, p.dtype, p.B, p.H, p.Sq, p.Sk), dscores(p.B, p.H, p.Sq, p.Sk);
  BiasGradient dbias(p.dbias, p.B, p.H, p.Sq, p.Sk);
  for_each(Array4(p.B, p.H, p.Sq, 1), [&](int64_t b, int64_t h, int64_t i, int64_t) {
    const double lse = load(p.lse, acc, (b * p.H + h) * p.Sq + i);
    if (sees_nothing(lse)) return;
    std::vector<double> weight(size_t(p.Sk), 0.0), dweight(size_t(p.Sk), 0.0);
    double delta = 0;
    for (int64_t j = 0; j < p.Sk; ++j) {
      if (!visible(p.mask, b, h, i, j)) continue;
      weight[size_t(j)] = std::exp(p.scale * in(b, h, i, j) + bias(b, h, i, j) - lse);
      dweight[size_t(j)] = dout(b, h, i, j) * dropout_factor(p.dropout, b, h, i, j);
      delta += weight[size_t(j)] * dweight[size_t(j)];
    }
    for (int64_t j = 0; j < p.Sk; ++j) {
      if (!visible(p.mask, b, h, i, j)) continue;
      const double dscore = weight[size_t(j)] * (dweight[size_t(j)] - delta);
      dscores(b, h, i, j) = dscore * p.scale;
      if (p.dbias.data) dbias.add(b, h, i, j, dscore);
    }
  });
  write(dscores, p.dscores, p.dtype);
  write(dbias.sum, p.dbias, acc);
}

// ---- heads, dropout mask -------------------------------------------------------------------------------------------

inline void split_heads(const mha::SplitHeads& p) {
  Array4 x = read(p.in, p.dtype, p.B, p.H, p.S, p.D);
  if (p.bias)
    for_each(x,
             [&](int64_t b, int64_t h, int64_t s, int64_t d) { x(b, h, s, d) += load(p.bias, p.dtype, h * p.D + d); });
  write(x, p.out, p.dtype);
}

inline void merge_heads(const mha::MergeHeads& p) {
  Array4 in = read(p.in, p.dtype, p.B, p.H, p.S, p.D), out(p.B, p.H, p.S, p.D);
  for_each(out, [&](int64_t b, int64_t g, int64_t s, int64_t d) {
    if (!p.mix) out(b, g, s, d) = in(b, g, s, d);
    for (int64_t h = 0; p.mix && h < p.H; ++h) out(b, g, s, d) += in(b, h, s, d) * load(p.mix, p.dtype, h * p.H + g);
  });
  write(out, p.out, p.dtype);
}

inline void dropout_mask(const mha::DropoutMask& p) {
  int64_t n = 0;
  for_each(Array4(p.B, p.H, p.Sq, p.Sk),
           [&](int64_t b, int64_t h, int64_t i, int64_t j) { p.out[n++] = kept(p.dropout, b, h, i, j); });
}

}  // namespace naive
