// The codes of mask_tiles.h. A warp works out one tile: each part of the mask on its own, so that tiles which only
// their combination hides or shows whole pass for mixed ones.
#include "error.h"
#include "mask_tiles.h"

namespace mha::cuda {
namespace {

constexpr int kWarps = 8;

__device__ inline uint32_t both_parts(uint32_t a, uint32_t b) { return (a & b & kShowsSome) | ((a | b) & kHidesSome); }

// shows(i, j) over a tile's rows and keys; stops when both have been seen.
template <class F>
__device__ inline uint32_t code_of(int rows, int keys, unsigned lane, F shows) {
  uint32_t code = 0;
  for (int i = 0; i < rows && code != (kShowsSome | kHidesSome); ++i) {
    for (int j = int(lane); j < keys; j += 32) code |= shows(i, j) ? kShowsSome : kHidesSome;
    code = __reduce_or_sync(~0u, code);
  }
  return code;
}

__global__ void __launch_bounds__(32 * kWarps)
    mask_tiles_kernel(const __grid_constant__ AttentionProblem p, const __grid_constant__ MaskTiles tiles,
                      int64_t count) {
  const int64_t index = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32, heads = tiles.stride_h ? unsigned(p.H) : 1;
  if (index >= count) return;
  const unsigned bh = unsigned(index / tiles.key_tiles / tiles.row_tiles), b = bh / heads, h = bh % heads;
  const int64_t row = index / tiles.key_tiles % tiles.row_tiles * kMaskTile, key = index % tiles.key_tiles * kMaskTile;
  const int rows = int(min64(kMaskTile, p.Sq - row)), keys = int(min64(kMaskTile, p.Sk - key));
  const Mask& m = p.mask;
  uint32_t code = kShowsSome;
  if (m.blocks) {
    const int64_t i = block_of(m, row), j = block_of(m, key);
    const uint8_t* from =
        m.blocks + b * m.blocks_stride_b + h * m.blocks_stride_h + i * m.blocks_stride_q + j * m.blocks_stride_k;
    code = both_parts(code,
                      code_of(int(block_of(m, row + rows - 1) - i) + 1, int(block_of(m, key + keys - 1) - j) + 1, lane,
                              [&](int x, int y) { return from[x * m.blocks_stride_q + y * m.blocks_stride_k] != 0; }));
  }
  if (m.query_ids) {
    const int64_t *query = m.query_ids + b * m.query_ids_stride_b + row,
                  *of_key = m.key_ids + b * m.key_ids_stride_b + key;
    code = both_parts(code, code_of(rows, keys, lane, [&](int i, int j) { return query[i] == of_key[j]; }));
  }
  if (m.dense) {
    const uint8_t* from =
        m.dense + b * m.dense_stride_b + h * m.dense_stride_h + row * m.dense_stride_q + key * m.dense_stride_k;
    code = both_parts(code, code_of(rows, keys, lane, [&](int i, int j) {
                        return from[i * m.dense_stride_q + j * m.dense_stride_k] != 0;
                      }));
  }
  if (lane == 0) tiles.code[index] = uint8_t(code);
}

}  // namespace

void mask_tiles(const AttentionProblem& p, const MaskTiles& tiles, cudaStream_t stream) {
  const char* name = "mask_tiles";
  const int64_t count =
      int64_t(tiles.row_tiles) * tiles.key_tiles * (tiles.stride_b ? p.B : 1) * (tiles.stride_h ? p.H : 1);
  if (!tiles.code || count == 0) return;
  mask_tiles_kernel<<<grid_size((count + kWarps - 1) / kWarps, name), 32 * kWarps, 0, stream>>>(p, tiles, count);
  check(cudaGetLastError(), name);
}

}  // namespace mha::cuda
