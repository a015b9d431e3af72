// What documents, blocks and a dense mask leave of tiles of pairs. Worked out once for all kernels, so that tiles of
// which nothing is seen are not loaded, and the pairs of tiles that are seen whole are not tested.
#pragma once
#include <cuda_runtime.h>

#include "../../attention.h"

namespace mha::cuda {

constexpr int kMaskTile = 64;                       // rows and keys of a tile
constexpr uint32_t kShowsSome = 1, kHidesSome = 2;  // bits of a tile's code

struct MaskTiles {
  uint8_t* code = nullptr;             // [B,H,row_tiles,key_tiles]; null: the mask has no such part
  int64_t stride_b = 0, stride_h = 0;  // 0 where the mask is broadcast
  int row_tiles = 0, key_tiles = 0;
};

// All but `code`, and how many bytes that takes.
inline std::size_t plan_mask_tiles(const AttentionProblem& p, MaskTiles& tiles) {
  const Mask& m = p.mask;
  if (!m.elementwise()) return 0;
  const bool by_b = m.query_ids_stride_b || m.key_ids_stride_b || m.dense_stride_b || m.blocks_stride_b;
  const bool by_h = m.dense_stride_h || m.blocks_stride_h;
  tiles.row_tiles = int((p.Sq + kMaskTile - 1) / kMaskTile), tiles.key_tiles = int((p.Sk + kMaskTile - 1) / kMaskTile);
  const int64_t one = int64_t(tiles.row_tiles) * tiles.key_tiles, sample = by_h ? p.H * one : one;
  if (by_h) tiles.stride_h = one;
  if (by_b) tiles.stride_b = sample;
  return std::size_t(by_b ? p.B * sample : sample);
}

void mask_tiles(const AttentionProblem& p, const MaskTiles& tiles, cudaStream_t stream);

}  // namespace mha::cuda
