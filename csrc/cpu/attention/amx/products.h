// Products of operands that are packed as whole AMX tiles (operands.h), 32 x 32 sums at a time in tiles 0 to 3, by
// rows. Tiles 4 and 5 hold a pair of A, 6 and 7 one of B. The order of instructions is the one that was timed.
#pragma once

#include "../../product/gemm_amx.h"
#include "operands.h"

MHA_ISA_BEGIN

// The steps of a product: where a pair of tiles of each operand lies, from the first on.
struct ProductSteps {
  int64_t *a, *b;
  int count;
  // One step for each pair of tiles along k, for each product of planes.
  template <int N>
  void set(int64_t pairs, const TilePairs& a_pairs, const TilePairs& b_pairs, bool all_planes) {
    count = 0;
    for_each_product_of_planes<N>(all_planes, [&](int a_plane, int b_plane) {
      for (int64_t k = 0; k < pairs; ++k) {
        a[count] = a_plane * a_pairs.plane + k * a_pairs.step;
        b[count++] = b_plane * b_pairs.plane + k * b_pairs.step;
      }
    });
  }
};

// Whether an operand is wanted in first-level cache after it is loaded.
enum class Pass { stays, by };

template <int Tile, Pass kPass>
MHA_INLINE void load_operand(const HalfTile* tile) {
  kPass == Pass::by ? amx_stream<Tile>(tile, 64) : amx_load<Tile>(tile, 64);
}

enum class Begin : uint8_t { zero, load, keep };  // what a product begins with

// Sums that stay in their tiles, complete, until these are needed: each is stored just before it is begun anew, or one
// by one, as tiles wait for nothing else while four of them are stored at once.
class TileSums {
 public:
  // A step: two tiles of A, a_next tiles apart, by two neighbouring ones of B.
  template <Begin kBegin, Pass kPass>
  MHA_INLINE void multiply(const HalfTile* a, int64_t a_next, const HalfTile* b, const SumTile* c = nullptr) {
    load_operand<6, kPass>(b);
    load_operand<4, kPass>(a);
    begin<0, kBegin>(c);
    amx_dot<0, 4, 6>();
    load_operand<7, kPass>(b + 1);
    begin<1, kBegin>(c);
    amx_dot<1, 4, 7>();
    load_operand<5, kPass>(a + a_next);
    begin<2, kBegin>(c);
    amx_dot<2, 5, 6>();
    begin<3, kBegin>(c);
    amx_dot<3, 5, 7>();
    if (kBegin != Begin::keep) complete_ = nullptr;
  }
  MHA_INLINE void complete(SumTile* c) { complete_ = c; }
  template <int Tile>
  MHA_INLINE void store_one() {
    if (complete_) amx_store<Tile>(complete_ + Tile, 64);
    if (Tile == 3) complete_ = nullptr;
  }
  MHA_INLINE void store() { store_one<0>(), store_one<1>(), store_one<2>(), store_one<3>(); }

 private:
  template <int Tile, Begin kBegin>
  MHA_INLINE void begin(const SumTile* c) {
    if (kBegin == Begin::keep) return;
    if (complete_) amx_store<Tile>(complete_ + Tile, 64);
    kBegin == Begin::zero ? amx_zero<Tile>() : amx_load<Tile>(c + Tile, 64);
  }
  SumTile* complete_ = nullptr;
};

// c (+)= a * b along `pairs` pairs of tiles, where they are stored at once. B passes by the first-level cache.
struct TileProduct {
  SumTile* c;  // four, by rows
  bool from_zero;
  TilePairs a, b;
  int64_t pairs;
};

// run_by_run: all planes of a pair of tiles before the next pair, so that a sum has its bits wherever it is
// interrupted.
template <int N, bool kRunByRun = false>
MHA_INLINE void multiply(const TileProduct& p) {
  SumTile* const c = p.c;
  if (p.from_zero)
    amx_zero<0>(), amx_zero<1>(), amx_zero<2>(), amx_zero<3>();
  else
    amx_load<0>(c, 64), amx_load<1>(c + 1, 64), amx_load<2>(c + 2, 64), amx_load<3>(c + 3, 64);
  auto add = [&](int a_plane, int b_plane, int64_t first, int64_t last) MHA_INLINE_LAMBDA {
    const HalfTile *a = p.a.tiles + a_plane * p.a.plane + first * p.a.step,
                   *b = p.b.tiles + b_plane * p.b.plane + first * p.b.step;
    for (int64_t i = first; i < last; ++i, a += p.a.step, b += p.b.step) {
      load_operand<4, Pass::stays>(a);
      load_operand<6, Pass::by>(b);
      amx_dot<0, 4, 6>();
      load_operand<5, Pass::stays>(a + 1);
      amx_dot<2, 5, 6>();
      load_operand<7, Pass::by>(b + 1);
      amx_dot<1, 4, 7>();
      amx_dot<3, 5, 7>();
    }
  };
  for (int64_t first = 0; first < p.pairs;) {
    const int64_t last = kRunByRun && N > 1 ? first + 1 : p.pairs;
    for_each_product_of_planes<N>(
        false, [&](int a_plane, int b_plane) MHA_INLINE_LAMBDA { add(a_plane, b_plane, first, last); });
    first = last;
  }
  amx_store<0>(c, 64), amx_store<1>(c + 1, 64), amx_store<2>(c + 2, 64), amx_store<3>(c + 3, 64);
}

MHA_ISA_END
