// Philox4x32-10 against the known answers that its authors publish, and the dropout that is made of it on every ISA.
#include "harness.h"

using namespace harness;

namespace {

void known_answers() {
  const struct {
    uint32_t counter[4], key[2], want[4];
  } cases[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const auto& c : cases) {
    const mha::Philox4 got =
        mha::philox4x32_10(c.counter[0], c.counter[1], c.counter[2], c.counter[3], c.key[0], c.key[1]);
    check(std::equal(got.word, got.word + 4, c.want), "philox4x32_10, counter " + std::to_string(c.counter[0]));
  }
}

void thresholds() {
  check(mha::dropout_threshold(0) == 0, "p = 0 keeps everything");
  check(mha::dropout_threshold(0.5) == 0x80000000u, "p = 0.5 drops half of the words");
  check(mha::dropout_threshold(1 - 0x1p-53) == 0xffffffffu, "p just below 1 does not overflow");
}

void dropout_masks() {
  const int64_t B = 2, H = 3, Sq = 5;
  const int64_t states[][2] = {{0, 0}, {1234567890123, 77}, {-1, -1}, {42, int64_t(1) << 40}};
  for (const Kernels* k : every_isa())
    for (const auto& state : states)
      for (const double p : {0.0, 0.1, 0.5, 0.999, 1.0})
        for (const int64_t Sk : {0, 1, 3, 4, 17, 64, 131}) {
          const size_t n = size_t(B * H * Sq * Sk);
          std::vector<uint8_t> got(n + 2, 77), want(n);
          mha::DropoutMask problem{B, H, Sq, Sk, {p, state}, want.data()};
          naive::dropout_mask(problem);
          problem.out = got.data() + 1;
          k->dropout_mask(problem, threads(2));
          check(std::equal(want.begin(), want.end(), got.begin() + 1) && got.front() == 77 && got.back() == 77,
                std::string(k->isa) + " dropout_mask, p " + std::to_string(p) + ", Sk " + std::to_string(Sk));
        }
}

// Few and many rows, so that work is split within and across heads; the share of kept weights is near 1 - p.
void share_kept() {
  const int64_t state[2] = {7, 9};
  const double p = 0.3;
  for (const Kernels* k : every_isa()) {
    std::vector<uint8_t> mask(2 * 300 * 1001);
    k->dropout_mask({1, 2, 300, 1001, {p, state}, mask.data()}, threads(3));
    double kept = 0;
    for (const uint8_t m : mask) kept += m;
    const double n = double(mask.size()), deviation = std::sqrt(n * p * (1 - p));
    check(std::fabs(kept - n * (1 - p)) < 5 * deviation, std::string(k->isa) + " dropout_mask keeps 1 - p");
  }
}

}  // namespace

int main() {
  known_answers();
  thresholds();
  dropout_masks();
  share_kept();
  return finish();
}
