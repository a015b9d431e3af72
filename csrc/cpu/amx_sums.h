// What AMX forward is made of: a product of 2 x 2 tiles, and weights of scores.
#pragma once

#include "amx_forward_operands.h"

MHA_ISA_BEGIN

// Denormal results are 0 while a thread has one of these, as they are in tiles: making one takes hundreds of cycles.
class NoDenormals {
 public:
  NoDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8000); }
  ~NoDenormals() { _mm_setcsr(before_); }
  NoDenormals(const NoDenormals&) = delete;

 private:
  const unsigned before_;
};

// Scores to weights: 2^(score * exponent - base), by a table of sixteenths, which may be scaled; 4e-7 relative. Its
// constants stay in registers: the compiler would load each anew, as tile instructions seem to change memory.
struct Weigher {
  __m512 exponent, table, magic, square, linear;

  MHA_INLINE Weigher(float score_exponent, const float* sixteenths) {
    exponent = _mm512_set1_ps(score_exponent), table = _mm512_load_ps(sixteenths);
    magic = _mm512_set1_ps(786432.0f);  // 1.5 * 2^19: the last bit of a sum is a sixteenth
    square = _mm512_set1_ps(0.240226507f), linear = _mm512_set1_ps(0.693187833f);
    asm("" : "+v"(exponent), "+v"(table), "+v"(magic), "+v"(square), "+v"(linear));
  }
  // The score is not infinite.
  MHA_INLINE __m512 operator()(__m512 score, __m512 base) const {
    const __m512 x = _mm512_fmsub_ps(score, exponent, base);
    const __m512 shifted = _mm512_add_ps(x, magic), rounded = _mm512_sub_ps(shifted, magic);
    const __m512 rest = _mm512_sub_ps(x, rounded);
    const __m512 sixteenth = _mm512_permutexvar_ps(_mm512_castps_si512(shifted), table);
    const __m512 slope = _mm512_fmadd_ps(square, rest, linear);
    return _mm512_scalef_ps(_mm512_fmadd_ps(_mm512_mul_ps(rest, sixteenth), slope, sixteenth), rounded);
  }
};

enum class Sums : uint8_t { zero, load, keep };  // what a product begins with

// A product of 32 x 32 sums, tiles 0 to 3. Complete sums stay there until the tiles are needed: each is stored just
// before it is begun anew, or one by one, as tiles wait for nothing else while four of them are stored at once.
class TileSums {
 public:
  // A step: two tiles of A, a_next bytes apart, by two neighbouring ones of B. kOnce: they need no place in first-level
  // cache afterwards.
  template <Sums kBegin, bool kOnce>
  MHA_INLINE void multiply(const char* a, int64_t a_next, const char* b, const char* c = nullptr) {
    load<6, kOnce>(b);
    load<4, kOnce>(a);
    begin<0, kBegin>(c);
    amx_dot<0, 4, 6>();
    load<7, kOnce>(b + kTileBytes);
    begin<1, kBegin>(c);
    amx_dot<1, 4, 7>();
    load<5, kOnce>(a + a_next);
    begin<2, kBegin>(c);
    amx_dot<2, 5, 6>();
    begin<3, kBegin>(c);
    amx_dot<3, 5, 7>();
    if (kBegin != Sums::keep) complete_ = nullptr;
  }
  MHA_INLINE void complete(char* c) { complete_ = c; }
  template <int Tile>
  MHA_INLINE void store_one() {
    if (complete_) amx_store<Tile>(complete_ + Tile * kTileBytes, 64);
    if (Tile == 3) complete_ = nullptr;
  }
  MHA_INLINE void store() { store_one<0>(), store_one<1>(), store_one<2>(), store_one<3>(); }

 private:
  template <int Tile, bool kOnce>
  static MHA_INLINE void load(const char* tile) {
    kOnce ? amx_stream<Tile>(tile, 64) : amx_load<Tile>(tile, 64);
  }
  template <int Tile, Sums kBegin>
  MHA_INLINE void begin(const char* c) {
    if (kBegin == Sums::keep) return;
    if (complete_) amx_store<Tile>(complete_ + Tile * kTileBytes, 64);
    kBegin == Sums::zero ? amx_zero<Tile>() : amx_load<Tile>(c + Tile * kTileBytes, 64);
  }
  char* complete_ = nullptr;
};

template <int N, class F>
MHA_INLINE void in_order(F f) {
  if constexpr (N > 1) in_order<N - 1>(f);
  f(std::integral_constant<int, N - 1>());
}

MHA_ISA_END
