// mask.h against its own comments, element by element.
#include "harness.h"

using namespace harness;

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
  return finish();
}
