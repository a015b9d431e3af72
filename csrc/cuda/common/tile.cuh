// Tiles of 16-bit elements in shared memory: rows of kHead elements, moved in from global memory by a whole block of
// threads, read by ldmatrix.
//
// A row is a series of 16-byte chunks. Chunk c of row r is stored at chunk position c ^ (r % 8) (or, where a row is not
// a multiple of 128 bytes, c ^ (r / 2 % 4)), so that the eight rows which ldmatrix reads at once, and the rows that
// neighbouring threads write, lie in different banks.
#pragma once
#include "../prim/convert.cuh"
#include "../prim/cp_async.cuh"
#include "../prim/ldmatrix.cuh"
#include "../prim/math.cuh"
#include "../prim/unroll.cuh"
#include "sequence.cuh"

namespace mha::cuda {

// One matrix of a 4-d tensor (fixed batch and head), as a tile loader sees it.
template <class T>
struct Matrix {
  const T* data;
  int64_t stride;  // between rows
  int rows, columns;
};

// Rows from `first` on.
template <class T>
__device__ inline Matrix<T> matrix(const Tensor4& t, int64_t b, int64_t h, int64_t rows, int64_t columns,
                                   int64_t first = 0) {
  return {static_cast<const T*>(t.data) + b * t.stride[0] + h * t.stride[1] + first * t.stride[2], t.stride[2],
          int(rows), int(columns)};
}

// The rows of queries (of q, out and their gradients), or of keys (of k, v and theirs), of a head.
template <class T>
__device__ inline Matrix<T> query_rows(const Tensor4& t, const Sequence& s, int64_t h, int64_t columns) {
  return matrix<T>(t, s.b, h, s.Sq, columns, s.first_query);
}

template <class T>
__device__ inline Matrix<T> key_rows(const Tensor4& t, const Sequence& s, int64_t h, int64_t columns) {
  return matrix<T>(t, s.b, h, s.Sk, columns, s.first_key);
}

template <class T, int kHead, int kThreads>
struct TileSm80 {
  static_assert(kHead % 32 == 0);
  static constexpr int kRowBytes = kHead * 2;
  static constexpr int kSwizzle = kHead % 64 == 0 ? 7 : 3;
  // Threads side by side on one row; with 8, so many would take more rows at once than a tile of 256 columns has.
  static constexpr int kLanes = kHead == 256 && kThreads > 128 ? 16 : kSwizzle + 1;
  static constexpr int kRowsPerPass = kThreads / kLanes;
  static constexpr int kChunksPerLane = kHead / 8 / kLanes;

  __device__ static uint32_t swizzle(uint32_t row) { return kSwizzle == 7 ? row & 7 : (row >> 1) & 3; }
  __device__ static uint32_t offset(uint32_t row, uint32_t chunk) {
    return row * kRowBytes + ((chunk ^ swizzle(row)) << 4);
  }

  // Where a lane's chunk of the 16-column step `step` is, given the address of its chunk of step 0. The tile is aligned
  // to 128 bytes, so the swizzled bits change by exclusive or and the rest by addition (an immediate).
  __device__ static uint32_t at_step(uint32_t step_0, int step) {
    return (step_0 ^ ((2 * step & kSwizzle) << 4)) + ((2 * step & ~kSwizzle) << 4);
  }

  // Addresses of step 0 for ldmatrix_x4, relative to the tile.
  // As operand A (16 rows): tiles (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
  __device__ static uint32_t lane_a(unsigned lane) { return offset(lane % 16, lane / 16); }
  // As operand B with the rows as B's columns (S = Q K^T: 16 keys): registers b0, b1 of rows 0-7, then of rows 8-15.
  __device__ static uint32_t lane_b(unsigned lane) { return offset(lane % 8 + lane / 16 * 8, lane / 8 % 2); }
  // As operand B, transposed on the way (O = P V: 16 keys): b0, b1 of columns 0-7, then of columns 8-15. Same as
  // lane_a.

  // A thread's part in loading consecutive tiles of kRows rows.
  template <int kRows>
  class Loader {
    static_assert(kRows % kRowsPerPass == 0);

   public:
    __device__ Loader(const Matrix<T>& m, int first, unsigned thread)
        : stride_(m.stride),
          from_(m.data + (first + thread / kLanes) * m.stride + thread % kLanes * 8),
          to_(offset(thread / kLanes, thread % kLanes)),
          columns_left_(m.columns - thread % kLanes * 8),
          row_(thread / kLanes) {}

    // Brings the next kRows rows into the tile, zeros beyond the matrix (rows_left from here): by cp.async (whose group
    // is the caller's to commit) or, where rows don't start at multiples of 16 bytes, element by element.
    __device__ void load(bool aligned, uint32_t tile, int rows_left) {
      if (!aligned)
        load_any(tile, rows_left);
      else if (rows_left >= kRows)  // most tiles need no look at each row
        load_async<false>(tile, rows_left);
      else
        load_async<true>(tile, rows_left);
      from_ += kRows * stride_;
    }

    // Leaves out some tiles.
    __device__ void skip(int tiles) { from_ += int64_t(tiles) * kRows * stride_; }

   private:
    template <bool kEdge>
    __device__ void load_async(uint32_t tile, int rows_left) const {
      const T* from = from_;
#pragma unroll
      for (int i = 0; i < kRows / kRowsPerPass; ++i, from += kRowsPerPass * stride_)
#pragma unroll
        for (int c = 0; c < kChunksPerLane; ++c) {
          int bytes = min(16, max(0, columns_left_ - c * kLanes * 8) * 2);
          if (kEdge && row_ + i * kRowsPerPass >= rows_left) bytes = 0;
          cp_async_16(tile + to_ + i * kRowsPerPass * kRowBytes + c * kLanes * 16, from + c * kLanes * 8, bytes);
        }
    }

    __device__ void load_any(uint32_t tile, int rows_left) const {
#pragma unroll 1
      for (int i = 0; i < kRows / kRowsPerPass; ++i)
#pragma unroll 1
        for (int c = 0; c < kChunksPerLane; ++c) {
          const T* from = from_ + i * kRowsPerPass * stride_ + c * kLanes * 8;
          uint32_t word[4] = {};
#pragma unroll
          for (int j = 0; j < 8; ++j)
            if (row_ + i * kRowsPerPass < rows_left && c * kLanes * 8 + j < columns_left_)
              word[j / 2] |= uint32_t(reinterpret_cast<const uint16_t*>(from)[j]) << j % 2 * 16;
          store_shared_16(tile + to_ + i * kRowsPerPass * kRowBytes + c * kLanes * 16,
                          make_uint4(word[0], word[1], word[2], word[3]));
        }
    }

    const int64_t stride_;
    const T* from_;
    const uint32_t to_;
    const int columns_left_, row_;
  };

  // Whether the chunks that this thread itself brought in (and waited for) hold NaN or Inf.
  template <int kRows>
  __device__ static bool any_nonfinite(uint32_t tile, unsigned thread) {
    uint32_t from = tile + offset(thread / kLanes, thread % kLanes), sum = 0;
#pragma unroll
    for (int i = 0; i < kRows / kRowsPerPass; ++i)
#pragma unroll
      for (int c = 0; c < kChunksPerLane; ++c) {
        uint4 v = load_shared_16(from + i * kRowsPerPass * kRowBytes + c * kLanes * 16);
        sum = collect_nonfinite<T>(sum, v.x);
        sum = collect_nonfinite<T>(sum, v.y);
        sum = collect_nonfinite<T>(sum, v.z);
        sum = collect_nonfinite<T>(sum, v.w);
      }
    return is_nonfinite(sum);
  }

  // Replaces NaN and Inf by zeros in this thread's chunks. specials[row * (kHead / 8) + chunk] remembers them: bit i
  // for +Inf or NaN in the chunk's element i, bit 8 + i for -Inf or NaN.
  template <int kRows>
  __device__ static void take_specials(uint32_t tile, uint16_t* specials, unsigned thread) {
    constexpr uint32_t e = Half16<T>::exponent;
#pragma unroll 1
    for (int i = 0; i < kRows / kRowsPerPass * kChunksPerLane; ++i) {
      unsigned row = thread / kLanes + i / kChunksPerLane * kRowsPerPass,
               chunk = thread % kLanes + i % kChunksPerLane * kLanes;
      uint4 v = load_shared_16(tile + offset(row, chunk));
      uint32_t word[4] = {v.x, v.y, v.z, v.w}, bits = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        uint32_t x = word[j / 2] >> j % 2 * 16 & 0xFFFF;
        if ((x & e) != e) continue;
        bits |= (x != (e | 0x8000)) << j | (x != e) << (8 + j);
        word[j / 2] &= j % 2 ? 0xFFFF : 0xFFFF0000;
      }
      specials[row * (kHead / 8) + chunk] = uint16_t(bits);
      if (bits) store_shared_16(tile + offset(row, chunk), make_uint4(word[0], word[1], word[2], word[3]));
    }
  }
};

// Fragments from the 16-column step kStep of a tile, kRow rows on; step_0 is the lane's address of step 0.
template <class Tile, int kStep, int kRow>
__device__ inline void load_fragment(uint32_t (&r)[4], uint32_t step_0) {
  constexpr int kChunk = 2 * kStep;
  ldmatrix_x4<((kChunk & ~Tile::kSwizzle) << 4) + kRow * Tile::kRowBytes>(r, step_0 ^ (kChunk & Tile::kSwizzle) << 4);
}

template <class Tile, int kStep, int kRow>
__device__ inline void load_fragment_transposed(uint32_t (&r)[4], uint32_t step_0) {
  constexpr int kChunk = 2 * kStep;
  ldmatrix_x4_transposed<((kChunk & ~Tile::kSwizzle) << 4) + kRow * Tile::kRowBytes>(
      r, step_0 ^ (kChunk & Tile::kSwizzle) << 4);
}

}  // namespace mha::cuda
