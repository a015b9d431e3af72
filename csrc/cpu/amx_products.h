// Products of operands that are packed as whole AMX tiles (amx_operands.h), 32 x 32 sums at a time.
#pragma once

#include "amx_operands.h"
#include "gemm_amx.h"

MHA_ISA_BEGIN

// An operand of such a product: pairs of tiles along k, in planes. A pair makes up 32 rows of A or columns of B.
struct TilePairs {
  const HalfTile* tiles;
  int64_t step, plane;  // tiles from one pair to the next, to the next plane
  TilePairs from(int64_t pairs) const { return {tiles + pairs * step, step, plane}; }
};

// The sums lie in tiles 0 to 3, by rows.
MHA_INLINE void zero_sums() { amx_zero<0>(), amx_zero<1>(), amx_zero<2>(), amx_zero<3>(); }
MHA_INLINE void load_sums(const SumTile* c) {
  amx_load<0>(c, 64), amx_load<1>(c + 1, 64), amx_load<2>(c + 2, 64), amx_load<3>(c + 3, 64);
}
MHA_INLINE void store_sums(SumTile* c) {
  amx_store<0>(c, 64), amx_store<1>(c + 1, 64), amx_store<2>(c + 2, 64), amx_store<3>(c + 3, 64);
}

MHA_INLINE void add_pairs(const HalfTile* a, int64_t a_step, const HalfTile* b, int64_t b_step, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i, a += a_step, b += b_step) {
    amx_load<4>(a, 64);
    amx_stream<6>(b, 64);
    amx_dot<0, 4, 6>();
    amx_load<5>(a + 1, 64);
    amx_dot<2, 5, 6>();
    amx_stream<7>(b + 1, 64);
    amx_dot<1, 4, 7>();
    amx_dot<3, 5, 7>();
  }
}

// Adds a * b along `pairs` pairs: the products of planes that count, as in amx_block.
template <int N>
MHA_INLINE void add_product(const TilePairs& a, const TilePairs& b, int64_t pairs, bool all_planes = false) {
  for (int both = all_planes ? 2 * (N - 1) : N - 1; both >= 0; --both) {
    for (int i = std::max(0, both - (N - 1)); i <= std::min(both, N - 1); ++i)
      add_pairs(a.tiles + i * a.plane, a.step, b.tiles + (both - i) * b.plane, b.step, pairs);
  }
}

// c (+)= a * b along `pairs` pairs of tiles.
struct TileProduct {
  SumTile* c;  // four, by rows
  bool from_zero;
  TilePairs a, b;
  int64_t pairs;
  bool all_planes = false;
};

template <int N>
MHA_INLINE void multiply(const TileProduct& p) {
  p.from_zero ? zero_sums() : load_sums(p.c);
  add_product<N>(p.a, p.b, p.pairs, p.all_planes);
  store_sums(p.c);
}

MHA_ISA_END
