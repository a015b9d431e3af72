// The one table of tile sizes.
#pragma once

MHA_ISA_BEGIN

// Rows (queries) of a block lie in vector lanes. 64 floats are four 512-bit vectors, the width of the widest gemm tile,
// so that each key or value element is broadcast once per block.
constexpr int kMaxRows = 64;

// Keys of a tile. The scores of one tile (64 x 64 floats = 16 KB) stay in the first-level cache between the two
// products, while each visit of the output (rescale, load, store) is spread over 64 keys.
constexpr int kMaxKeys = 64;

// A block of queries of which a head has few is cut into parts of at least so many keys for each of its blocks, so that
// threads share it: a part costs as much as 3 keys or so more. At most kMaxParts, as their results take memory.
constexpr int64_t kPartKeys = 512, kMaxParts = 32;

// From so many queries and keys on, rows that lie apart in memory are copied before their many products.
constexpr int64_t kCopiedRows = 4 * kMaxRows;

// Where keys and values must be packed or widened, a whole head of up to this many bytes, as it lies in a second-level
// cache, is packed once for all its query blocks; a longer one tile by tile for each.
constexpr int64_t kPackedHeadBytes = 1 << 20;

// The register tile of gemm: kTileRows x kTileVecs accumulators, kTileVecs vectors of B and a broadcast of A must fit
// the registers (6 * 4 + 4 + 1 <= 32, 6 * 2 + 2 + 1 <= 16), and enough sums must be in flight to hide the latency of
// fma.
constexpr int kTileVecs = kVecRegisters >= 32 ? 4 : 2;
constexpr int kTileRows = 6;

MHA_ISA_END
