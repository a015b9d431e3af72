// Loads of quantised keys and values; the scale is applied later.
#pragma once

MHA_ISA_BEGIN

MHA_INLINE VecF load(const e4m3* p) {
  const VecF x = load_256th(p) * set1(256.0f);
  return select(equal(abs(x), set1(480.0f)), set1(std::numeric_limits<float>::quiet_NaN()), x);
}
template <class Byte, class = std::enable_if_t<sizeof(Byte) == 1>, class = void>
MHA_INLINE VecF load_n(const Byte* p, int n) {
  Byte bytes[VecF::lanes] = {};
  std::memcpy(bytes, p, std::size_t(std::min(n, VecF::lanes)));
  return load(bytes);
}

MHA_ISA_END
