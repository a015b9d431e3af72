// The matrix product of gemm.h on AMX tiles, for Pairs of bf16 where those of a row of A are neighbours in memory. The
// rows of B are what a tile wants as they lie: pairs along k, one column after the other.
#pragma once

#include "amx.h"

MHA_ISA_BEGIN

constexpr int kAmx = 16;  // rows of a tile, and floats or pairs in a row
constexpr int kAmxRowBytes = 64;

// A thread has tiles while it has one of these. Whoever used the thread before, such as oneDNN between two products of
// the same shapes, may count on what it configured: that comes back in the end, though without what the tiles held,
// which no call needs to preserve.
class AmxTiles {
 public:
  AmxTiles() : AmxTiles(whole()) {}
  explicit AmxTiles(const AmxShapes& shapes) : before_(amx_configuration()) { amx_configure(shapes); }
  ~AmxTiles() { before_.palette ? amx_configure(before_) : amx_release(); }
  AmxTiles(const AmxTiles&) = delete;

  static AmxShapes whole() {
    AmxShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.row_bytes[tile] = kAmxRowBytes, shapes.rows[tile] = kAmx;
    return shapes;
  }

 private:
  const AmxShapes before_;
};

template <int N>
struct ProductState<Pairs<N>> {
  AmxTiles tiles;
};

// What tiles are filled with where an operand ends before the tile does.
struct alignas(64) AmxPad {
  char bytes[kAmx * kAmxRowBytes];
};

// Loads what there is of 16 x 16 elements of 4 bytes, through a copy among zeros if that is less: zeros add nothing to
// a product, what lies beyond an operand may be NaN.
template <int Tile>
MHA_INLINE void load_part(const void* src, int64_t ld, int rows, int cols, AmxPad& pad) {
  if (rows >= kAmx && cols >= kAmx) return amx_load<Tile>(src, ld * 4);
  const char* row = static_cast<const char*>(src);
  for (int r = 0; r < kAmx; ++r, row += ld * 4) {
    const int n = r < rows ? cols : 0;
    store(pad.bytes + r * kAmxRowBytes, Product<Pair>::load_b(reinterpret_cast<const Pair*>(n ? row : pad.bytes), n));
  }
  amx_load<Tile>(pad.bytes, kAmxRowBytes);
}

template <int Tile>
MHA_INLINE void store_part(float* dst, int64_t ld, int rows, int cols, AmxPad& pad) {
  if (rows >= kAmx && cols >= kAmx) return amx_store<Tile>(dst, ld * 4);
  amx_store<Tile>(pad.bytes, kAmxRowBytes);
  for (int r = 0; r < kAmx && r < rows; ++r) {
    store_n(dst + r * ld, load(reinterpret_cast<const float*>(pad.bytes + r * kAmxRowBytes)), cols);
  }
}

// Calls f(plane of A, plane of B) for the products of planes that are made, from the smallest on: all, or those whose
// planes' numbers add up to less than Planes.
template <int Planes, class F>
MHA_INLINE void for_each_product_of_planes(bool all, F f) {
  constexpr int kLast = Planes - 1;
  for (int both = all ? 2 * kLast : kLast; both >= 0; --both) {
    for (int a_plane = std::max(0, both - kLast); a_plane <= std::min(both, kLast); ++a_plane)
      f(a_plane, both - a_plane);
  }
}

// C's tiles are 0 to 3, two loads of A (4, 5) and two of B (6, 7) make four products. rows and cols are what is left of
// C from (m, n) on: more than 16 with two tiles down (Down == 2) and across.
template <int Planes, int Down, int Across>
inline void amx_block(const GemmArgs<Pairs<Planes>>& g, int m, int n, int rows, int cols) {
  AmxPad pad;
  float* c = g.c + m * g.ldc + n;
  auto for_each_tile = [&](auto f) {
    f.template operator()<0>(c, rows, cols);
    if constexpr (Across == 2) f.template operator()<1>(c + kAmx, rows, cols - kAmx);
    if constexpr (Down == 2) f.template operator()<2>(c + kAmx * g.ldc, rows - kAmx, cols);
    if constexpr (Down == 2 && Across == 2) f.template operator()<3>(c + kAmx * g.ldc + kAmx, rows - kAmx, cols - kAmx);
  };
  for_each_tile([&]<int Tile>(float* at, int down, int across) {
    g.start == Start::zero ? amx_zero<Tile>() : load_part<Tile>(at, g.ldc, down, across, pad);
  });
  auto add_product = [&](int a_plane, int b_plane) {
    const Pairs<Planes>*a = g.a + a_plane * g.plane.a + m * g.am, *b = g.b + b_plane * g.plane.b + n;
    for (int k = 0; k < g.K; k += kAmx, a += kAmx, b += kAmx * g.ldb) {
      load_part<4>(a, g.am, rows, g.K - k, pad);
      if constexpr (Down == 2) load_part<5>(a + kAmx * g.am, g.am, rows - kAmx, g.K - k, pad);
      load_part<6>(b, g.ldb, g.K - k, cols, pad);
      amx_dot<0, 4, 6>();
      if constexpr (Down == 2) amx_dot<2, 5, 6>();
      if constexpr (Across == 2) {
        load_part<7>(b + kAmx, g.ldb, g.K - k, cols - kAmx, pad);
        amx_dot<1, 4, 7>();
        if constexpr (Down == 2) amx_dot<3, 5, 7>();
      }
    }
  };
  for_each_product_of_planes<Planes>(g.plane.all, add_product);
  for_each_tile([&]<int Tile>(float* at, int down, int across) { store_part<Tile>(at, g.ldc, down, across, pad); });
}

// g.ak is 1, and the thread has AmxTiles.
template <int Planes>
inline void gemm_amx(const GemmArgs<Pairs<Planes>>& given, int M, int N) {
  GemmArgs<Pairs<Planes>> g = given;
  if (g.start == Start::scale) {
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < N; n += kAmx) {
        float* c = g.c + m * g.ldc + n;
        store_n(c, load_n(c, N - n) * load_n(g.scale + n, N - n), N - n);
      }
    }
    g.start = Start::add;
  }
  for (int n = 0; n < N; n += 2 * kAmx) {
    for (int m = 0; m < M; m += 2 * kAmx) {
      if (n == 0) g.ahead.fetch_share(m, std::min(m + 2 * kAmx, M), M);
      const bool down = M - m > kAmx, across = N - n > kAmx;
      const auto block = down ? (across ? amx_block<Planes, 2, 2> : amx_block<Planes, 2, 1>)
                              : (across ? amx_block<Planes, 1, 2> : amx_block<Planes, 1, 1>);
      block(g, m, n, M - m, N - n);
    }
  }
}

MHA_ISA_END
