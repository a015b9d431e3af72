// gemm's product of pairs of bf16 by BFMMLA, an instruction for 2 x 2 sums of two pairs each: twice the products of
// BFDOT. Its sums are, to the bit, those of two BFDOT one after the other, so they don't depend on the register tile.
#pragma once

MHA_ISA_BEGIN

// sum: (row 0, column 0), (0, 1), (1, 0), (1, 1). a: two pairs of row 0, two of row 1; b: likewise of columns.
MHA_INLINE void mmla(float32x4_t* sum, uint32x4_t a, uint32x4_t b) {
  asm("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(*sum) : "w"(a), "w"(b));
}

template <class Bits>
MHA_INLINE Bits bits_of(const Pair* p) {
  Bits bits;
  std::memcpy(&bits, p, sizeof(bits));
  return bits;
}

// Pairs k and k + 1 of rows m and m + 1 of A; without kBoth, the second of each is 0; with `single`, row m twice.
template <bool kBoth>
MHA_INLINE uint32x4_t mmla_rows(const Pair* a, int64_t am, int64_t ak, bool single) {
  if (kBoth && ak == 1) {
    const uint64x2_t rows = vcombine_u64(vcreate_u64(bits_of<uint64_t>(a)), vcreate_u64(0));
    return vreinterpretq_u32_u64(vsetq_lane_u64(bits_of<uint64_t>(single ? a : a + am), rows, 1));
  }
  const Pair* next = single ? a : a + am;
  uint32x4_t rows = vsetq_lane_u32(bits_of<uint32_t>(next), vsetq_lane_u32(bits_of<uint32_t>(a), vdupq_n_u32(0), 0), 2);
  if (kBoth) {
    rows = vsetq_lane_u32(bits_of<uint32_t>(a + ak), rows, 1);
    rows = vsetq_lane_u32(bits_of<uint32_t>(next + ak), rows, 3);
  }
  return rows;
}

// The same for rows m to m + 7 that are neighbours (am = 1), two by two.
template <bool kBoth>
MHA_INLINE void mmla_neighbours(const Pair* a, int64_t ak, uint32x4_t* rows) {
  repeat<2>([&](int i) MHA_INLINE_LAMBDA {
    const uint32x4_t first = load_pairs(a + 4 * i).v, second = kBoth ? load_pairs(a + 4 * i + ak).v : vdupq_n_u32(0);
    rows[2 * i] = vzip1q_u32(first, second), rows[2 * i + 1] = vzip2q_u32(first, second);
  });
}

// 2 * RowPairs rows from m on (one, with `single`) and Vecs vectors of columns from n on. Tail as in gemm_tile.
template <int RowPairs, int Vecs, bool HasTail, bool kNeighbours = false>
inline void mmla_tile(const GemmArgs<Pair>& g, int m, int n, int tail, bool single) {
  constexpr int L = VecF::lanes;
  static_assert(!HasTail || Vecs == 1);
  float32x4_t sum[RowPairs * Vecs * 2];
  repeat<RowPairs * Vecs * 2>([&](int i) MHA_INLINE_LAMBDA { sum[i] = vdupq_n_f32(0); });
  const Pair* a = g.a + m * g.am;
  const Pair* b = g.b + n;
  const int64_t am = g.am, ak = g.ak, ldb = g.ldb;
  auto step = [&](auto both) MHA_INLINE_LAMBDA {
    uint32x4_t columns[Vecs * 2];
    repeat<Vecs>([&](int v) MHA_INLINE_LAMBDA {
      auto load = [&](const Pair* p) MHA_INLINE_LAMBDA { return (HasTail ? load_pairs(p, tail) : load_pairs(p)).v; };
      const uint32x4_t first = load(b + v * L), second = both.value ? load(b + ldb + v * L) : vdupq_n_u32(0);
      columns[2 * v] = vzip1q_u32(first, second), columns[2 * v + 1] = vzip2q_u32(first, second);
    });
    uint32x4_t rows[RowPairs];
    if constexpr (kNeighbours) {
      static_assert(RowPairs == 4);
      mmla_neighbours<both.value>(a, ak, rows);
    } else {
      repeat<RowPairs>([&](int r)
                           MHA_INLINE_LAMBDA { rows[r] = mmla_rows<both.value>(a + 2 * r * am, am, ak, single); });
    }
    repeat<RowPairs * Vecs * 2>(
        [&](int i) MHA_INLINE_LAMBDA { mmla(&sum[i], rows[i / (Vecs * 2)], columns[i % (Vecs * 2)]); });
  };
  int k = 0;
  for (; k + 2 <= g.K; k += 2, a += 2 * ak, b += 2 * ldb) step(std::true_type());
  if (k < g.K) step(std::false_type());
  repeat<RowPairs * 2 * Vecs>([&](int i) MHA_INLINE_LAMBDA {
    const int row = i / Vecs, v = i % Vecs;
    if (single && row == 1) return;
    const float32x4_t* half = &sum[(row / 2 * Vecs + v) * 2];
    const float64x2_t first = vreinterpretq_f64_f32(half[0]), second = vreinterpretq_f64_f32(half[1]);
    VecF x = {vreinterpretq_f32_f64(row % 2 ? vzip2q_f64(first, second) : vzip1q_f64(first, second))};
    float* to = g.c + (m + row) * g.ldc + n + v * L;
    auto load_c = [&](const float* p) MHA_INLINE_LAMBDA { return HasTail ? load_n(p, tail) : load(p); };
    if (g.start == Start::add) x = load_c(to) + x;
    if (g.start == Start::scale) x = fma(load_c(to), load_c(g.scale + n + v * L), x);
    HasTail ? store_n(to, x, tail) : store(to, x);
  });
}

template <int Vecs, bool HasTail>
inline void mmla_columns(const GemmArgs<Pair>& g, int M, int n, int tail) {
  int m = 0;
  for (; m + 8 <= M; m += 8) {
    if (n == 0) g.ahead.fetch_share(m, m + 8, M);
    if (g.am == 1)
      mmla_tile<4, Vecs, HasTail, true>(g, m, n, tail, false);
    else
      mmla_tile<4, Vecs, HasTail>(g, m, n, tail, false);
  }
  for (; m < M; m += 2) mmla_tile<1, Vecs, HasTail>(g, m, n, tail, m + 1 == M);
}

inline void gemm_mmla(const GemmArgs<Pair>& g, int M, int N) {
  constexpr int L = VecF::lanes;
  int n = 0;
  for (; n + 2 * L <= N; n += 2 * L) mmla_columns<2, false>(g, M, n, 0);
  for (; n + L <= N; n += L) mmla_columns<1, false>(g, M, n, 0);
  if (n < N) mmla_columns<1, true>(g, M, n, N - n);
}

MHA_ISA_END
