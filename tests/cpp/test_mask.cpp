// mask.h against its own comments, element by element; and the strips that the CPU kernels cut tiles into.
#include "../../csrc/cpu/isa/prelude.h"
#define MHA_ISA_NS scalar
#include "../../csrc/cpu/vector/scalar.h"
//
#include "../../csrc/cpu/tile/mask.h"
#include "harness.h"

using namespace harness;
using namespace mha::cpu::scalar;

namespace {

struct Case {
  int64_t B = 2, H = 2, Sq, Sk;
  mha::Mask mask;
  std::vector<int64_t> begin, end, query_ids, key_ids;
  std::vector<uint8_t> dense, blocks;
};

// Any mix of parts, with values far outside of [0, Sk] among them.
Case random_case(Random& random) {
  Case c;
  c.Sq = random.below(9), c.Sk = random.below(9);
  auto numbers = [&](int64_t n, int64_t low, int64_t high) {
    std::vector<int64_t> x;
    for (int64_t i = 0; i < n; ++i)
      x.push_back(random.below(10) ? low + random.below(high - low) : random.below(2) ? INT64_MAX : INT64_MIN);
    return x;
  };
  mha::Mask& m = c.mask;
  if (random.below(2)) m.band_lo = random.below(12) - 8;
  if (random.below(2)) m.band_hi = random.below(12) - 4;
  if (random.below(2)) {
    c.begin = numbers(c.B * c.Sq, -3, c.Sk + 3);
    m.begin = c.begin.data(), m.begin_stride_b = c.Sq, m.begin_stride_q = 1;
  }
  if (random.below(2)) {
    c.end = numbers(c.B, -3, c.Sk + 3);
    m.end = c.end.data(), m.end_stride_b = 1, m.end_stride_q = 0;
  }
  if (random.below(2)) {
    c.query_ids = numbers(c.Sq, 0, 2), c.key_ids = numbers(c.B * c.Sk, 0, 2);
    m.query_ids = c.query_ids.data(), m.query_ids_stride_b = 0;
    m.key_ids = c.key_ids.data(), m.key_ids_stride_b = c.Sk;
  }
  if (random.below(2)) {
    for (int64_t i = 0; i < c.B * c.Sk; ++i) c.dense.push_back(uint8_t(random.below(3)));
    m.dense = c.dense.data(), m.dense_stride_b = c.Sk, m.dense_stride_k = 1;
  }
  m.top_left = random.below(4) == 0;
  if (random.below(2)) {
    m.block_size = 1 + random.below(4);
    const int64_t rows = (c.Sq + m.block_size - 1) / m.block_size, columns = (c.Sk + m.block_size - 1) / m.block_size;
    for (int64_t i = 0; i < c.H * rows * columns; ++i) c.blocks.push_back(uint8_t(random.below(3)));
    m.blocks = c.blocks.data(), m.blocks_stride_h = rows * columns;
    m.blocks_stride_q = columns, m.blocks_stride_k = 1;
  }
  return c;
}

// How many pairs the strips of a tile hold, along keys or rows; -1 if one that is visible is in none, or any is in two.
template <int kSize>
int pairs_in_strips(const TileMask<float>& mask, int lanes, int keys, bool by_keys) {
  TileStrips<kSize> strips;
  strips.take(mask, lanes, keys);
  std::vector<int> found(size_t(kMaxKeys * kMaxRows));
  int rows = 0;
  auto mark = [&](const Strip& s) {
    rows += s.end - s.begin;
    for (int j = s.first; j < s.first + s.keys; ++j)
      for (int r = s.begin; r < s.end; ++r) ++found[size_t(j * kMaxRows + r)];
  };
  by_keys ? strips.for_each_by_keys(mark) : strips.for_each_by_rows(mark);
  if (!by_keys && rows != lanes) return -1;
  int pairs = 0;
  for (int j = 0; j < kMaxKeys; ++j)
    for (int r = 0; r < kMaxRows; ++r) {
      const int n = found[size_t(j * kMaxRows + r)];
      const bool visible = j < keys && r < lanes && mask.lo[r] <= float(j) && float(j) < mask.hi[r];
      if (n > 1 || (visible && n != 1) || (n && (j >= keys || r >= lanes))) return -1;
      pairs += n;
    }
  return pairs;
}

void check_strips(Random& random) {
  TileMask<float> mask{};
  for (int r = 0; r < kMaxRows; ++r) mask.hi[r] = float(r + 1);
  for (bool by_keys : {true, false}) {
    check(pairs_in_strips<16>(mask, 64, 64, by_keys) == 10 * 16 * 16, "strips along the diagonal");
    check(pairs_in_strips<32>(mask, 64, 64, by_keys) == 3 * 32 * 32, "wide strips along the diagonal");
  }
  for (int n = 0; n < 2000; ++n) {
    const int keys = 1 + int(random.below(64)), lanes = 4 * (1 + int(random.below(16)));
    for (int r = 0; r < kMaxRows; ++r) {
      const int a = int(random.below(keys + 1)), b = int(random.below(keys + 1));
      const bool none = r >= lanes || random.below(3) == 0;
      mask.lo[r] = none ? 0 : float(std::min(a, b)), mask.hi[r] = none ? 0 : float(std::max(a, b));
    }
    for (bool by_keys : {true, false}) {
      check(pairs_in_strips<16>(mask, lanes, keys, by_keys) >= 0, "strips of random intervals " + std::to_string(n));
      check(pairs_in_strips<32>(mask, lanes, keys, by_keys) >= 0,
            "wide strips of random intervals " + std::to_string(n));
    }
  }
}

}  // namespace

int main() {
  Random random{1};
  for (int n = 0; n < 3000; ++n) {
    const Case c = random_case(random);
    bool right = true, inside = true;
    for (int64_t b = 0; b < c.B; ++b)
      for (int64_t h = 0; h < c.H; ++h)
        for (int64_t i = 0; i < c.Sq; ++i) {
          const mha::Interval keys = mha::row_interval(c.mask, b, i, c.Sk);
          inside = inside && keys.begin >= 0 && keys.begin <= keys.end && keys.end <= c.Sk;
          for (int64_t j = 0; j < c.Sk; ++j) {
            const bool got = j >= keys.begin && j < keys.end && mha::visible_in_interval(c.mask, b, h, i, j);
            right = right && got == naive::visible(c.mask, b, h, i, j);
          }
        }
    check(right, "visibility of random mask " + std::to_string(n));
    check(inside, "row_interval lies inside the keys, random mask " + std::to_string(n));
  }
  check_strips(random);
  return finish();
}
