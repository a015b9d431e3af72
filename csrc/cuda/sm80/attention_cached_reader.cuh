// How attention_cached finds its tiles of keys and values, which of them its rows see, and how they are brought.
#pragma once
#include "../common/launch.h"
#include "../prim/cp_async.cuh"
#include "../prim/math.cuh"
#include "../prim/unroll.cuh"
#include "fragment.cuh"
#include "widen.cuh"

namespace mha::cuda {

// kStored: bf16 stands for the queries' type. kRows is 8 or 16.
template <class T_, DType kStored_, int kHead_, int kRows_>
struct CachedSm80 {
  using T = T_;
  static constexpr DType kStored = kStored_;
  static constexpr bool kNarrow = kStored == DType::i8 || kStored == DType::e4m3;
  // Values of 8 bits are exact in bf16, which has room for weights times any scale; fp16's accuracy takes two of them.
  using Weight = std::conditional_t<kNarrow, __nv_bfloat16, T>;
  static constexpr int kPlanes = std::is_same_v<T, Weight> ? 1 : 2;
  static constexpr int kHead = kHead_, kSize = kNarrow ? 1 : 2, kPiece = 16 / kSize;  // elements of 16 bytes
  static constexpr int kRows = kRows_, kHalves = kRows / 8, kKeys = 16, kWarps = 4, kThreads = 32 * kWarps;
  // Pieces of a key that a lane has, and of a value.
  static constexpr int kKeyPieces = kHead / (4 * kPiece), kValuePieces = kHead / (8 * kPiece);
  static constexpr int kPieces = 2 * kKeyPieces + 4 * kValuePieces, kStages = kNarrow ? 4 : 2;
  static constexpr int kStageBytes = kPieces * 512 + (kNarrow ? 2 * 512 : 0);  // of a warp, with the scales of keys
  static constexpr int kSums = kHead / 16;                                     // tiles of O^T for 8 rows
  static constexpr int kPitch = kHead + 4;
  static constexpr int kMergeBytes = kWarps * kRows * (kPitch + 2) * 4;
  static constexpr int kSharedBytes = kWarps * kStages * kStageBytes;
  static constexpr float kSlack = 8;
  static_assert(kValuePieces > 0 && kMergeBytes <= kSharedBytes && fits_everywhere(kSharedBytes, 0));
};

// The block's rows, of one sequence and one key/value head: row r is query r / group and the r % group-th of the query
// heads that share it.
struct CachedPlace {
  unsigned b, kv_head, group, row, rows, split;  // row: the first of `rows`

  __device__ unsigned query(unsigned r) const { return (row + r) / group; }
  __device__ unsigned head(unsigned r) const { return kv_head * group + (row + r) % group; }
};

// Of a tile of 16 keys a lane has, in S and in P^T, the scores of rows g (and g + 8) with keys 2t, 2t + 1, 2t + 8 and
// 2t + 9; bit j + 4 * half of its bits speaks of the j-th of these keys.
__device__ constexpr int cached_key(int j) { return j % 2 + j / 2 * 8; }

// Which keys the rows see.
template <class C>
class CachedView {
 public:
  __device__ CachedView(const AttentionForwardLaunch& p, const CachedPlace& at, unsigned lane)
      : p_(p), at_(at), lane_(lane) {
    int begin = kKeyMax, end = 0, full_begin = 0, full_end = kKeyMax;
#pragma unroll
    for (int half = 0; half < C::kHalves; ++half) {
      const unsigned r = lane / 4 + 8 * half;
      begin_[half] = end_[half] = 0;
      if (r >= at.rows) continue;
      rows_ |= 0xFu << 4 * half;
      const Interval interval = row_interval(p.mask, at.b, at.query(r), p.Sk);
      begin_[half] = int(interval.begin), end_[half] = int(interval.end);
      if (begin_[half] < end_[half]) begin = min(begin, begin_[half]), end = max(end, end_[half]);
      full_begin = max(full_begin, begin_[half]), full_end = min(full_end, end_[half]);
    }
    full_begin_ = __reduce_max_sync(~0u, full_begin), full_end_ = __reduce_min_sync(~0u, full_end);
    begin = __reduce_min_sync(~0u, begin), end = __reduce_max_sync(~0u, end);
    const int first = begin / C::kKeys, count = begin < end ? (end + C::kKeys - 1) / C::kKeys - first : 0,
              share = (count + p.splits - 1) / p.splits;
    first_tile_ = first + min(int(at.split) * share, count);
    last_tile_ = first + min((int(at.split) + 1) * share, count);
  }

  // The split's tiles.
  __device__ int first_tile() const { return first_tile_; }
  __device__ int last_tile() const { return last_tile_; }

  // Whether every row sees all keys of a tile, as far as intervals tell.
  __device__ bool plain(int tile) const {
    return !p_.mask.elementwise() && tile * C::kKeys >= full_begin_ && (tile + 1) * C::kKeys <= full_end_;
  }

  // The lane's pairs that the mask shows.
  __device__ uint32_t bits(int tile) const {
    uint32_t bits = 0;
    const int first = tile * C::kKeys + lane_ % 4 * 2;
#pragma unroll
    for (int half = 0; half < C::kHalves; ++half) {
      uint32_t seen = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        seen |= uint32_t(first + cached_key(j) >= begin_[half] && first + cached_key(j) < end_[half]) << j;
      if (seen && p_.mask.elementwise()) {
        const unsigned r = lane_ / 4 + 8 * half, h = at_.head(r), i = at_.query(r);
#pragma unroll 1
        for (int j = 0; j < 4; ++j)
          if (seen >> j & 1 && !visible_in_interval(p_.mask, at_.b, h, i, first + cached_key(j))) seen &= ~(1u << j);
      }
      bits |= seen << 4 * half;
    }
    return bits;
  }

  // The keys of a tile, one bit each, that some lane's bits have.
  __device__ uint32_t keys_of(uint32_t bits) const {
    const uint32_t own = (bits | bits >> 4) & 0xF, at = lane_ % 4 * 2;
    return __reduce_or_sync(~0u, (own & 3) << at | own >> 2 << (8 + at));
  }
  // Whether some row sees a key that another one does not.
  __device__ bool rows_differ(uint32_t bits) const { return keys_of(bits) & keys_of(rows_ & ~bits); }

  __device__ uint32_t rows() const { return rows_; }  // the bits of those that are

 private:
  const AttentionForwardLaunch& p_;
  const CachedPlace& at_;
  unsigned lane_;
  uint32_t rows_ = 0;
  int begin_[C::kHalves], end_[C::kHalves];  // the keys of the lane's rows
  int full_begin_, full_end_, first_tile_, last_tile_;
};

// Brings tiles to a warp's part of shared memory, and what a lane brought to its registers.
template <class C>
class CachedReader {
 public:
  __device__ CachedReader(const AttentionForwardLaunch& p, const CachedPlace& at, const CachedView<C>& view,
                          uint32_t shared, unsigned lane)
      : p_(p),
        at_(at),
        view_(view),
        shared_(shared + lane * 16),
        lane_(lane),
        one_row_((!p.store.table || p.store.page_size % C::kKeys == 0) && p.D == C::kHead && p.Dv == C::kHead),
        k_(static_cast<const char*>(p.k.data) + at.kv_head * p.k.stride[1] * C::kSize),
        v_(static_cast<const char*>(p.v.data) + at.kv_head * p.v.stride[1] * C::kSize),
        key_of_lane_(lane / 4 * p.k.stride[2] * C::kSize + lane % 4 * 16),
        value_of_lane_(lane % 4 * 2 * p.v.stride[2] * C::kSize + lane / 4 * 16) {}

  // Begins to bring a tile.
  __device__ void issue(int tile, int stage) {
    const int first = tile * C::kKeys;
    const uint32_t to = shared_ + stage * C::kStageBytes;
    const bool plain = view_.plain(tile);
    if (one_row_ && plain) {
      const Row row = row_of(first);
      if (row.there) return issue_whole(row, to);
    }
    issue_by_key(first, to, plain ? view_.rows() : view_.bits(tile));
  }

  __device__ uint4 key_piece(int stage, int n, int c) const {
    return load_shared_16(shared_ + stage * C::kStageBytes + (n * C::kKeyPieces + c) * 512);
  }
  __device__ uint4 value_piece(int stage, int n, int c) const {
    return load_shared_16(shared_ + stage * C::kStageBytes + (2 * C::kKeyPieces + n * C::kValuePieces + c) * 512);
  }
  // Of the lane's four keys; which: 0 for keys, 1 for values.
  __device__ float4 scales(int stage, int which) const {
    return __builtin_bit_cast(float4, load_shared_16(shared_ + stage * C::kStageBytes + (C::kPieces + which) * 512));
  }
  // The lane's pairs whose key is visible and lies in no page.
  __device__ uint32_t missing() const { return missing_; }

 private:
  struct Row {
    int64_t first = 0;  // sequence or page
    int index = 0;      // of the key in it
    bool there = false;
  };

  __device__ Row row_of(int key) const {
    if (!p_.store.table) return {at_.b, key, true};
    const unsigned page = unsigned(key) / unsigned(p_.store.page_size);  // in 64 bits this would be a call
    const int64_t first = p_.store.table[at_.b * p_.store.table_stride_b + page];
    return {first, key - int(page * unsigned(p_.store.page_size)), first >= 0 && first < p_.store.pages};
  }

  __device__ void issue_scales(uint32_t to, const Row& row, int n, int bytes) const {
    const int64_t at =
        bytes ? row.first * p_.store.scale_stride_b + at_.kv_head * p_.store.scale_stride_h + row.index : 0;
    cp_async_4(to + C::kPieces * 512 + n * 4, p_.store.k_scale + at, bytes);
    cp_async_4(to + (C::kPieces + 1) * 512 + n * 4, p_.store.v_scale + at, bytes);
  }

  // All keys are visible and lie one behind the other from row on, and their rows are kHead elements.
  __device__ void issue_whole(const Row& row, uint32_t to) const {
    const char* k = k_ + (row.first * p_.k.stride[0] + row.index * p_.k.stride[2]) * C::kSize + key_of_lane_;
    const char* v = v_ + (row.first * p_.v.stride[0] + row.index * p_.v.stride[2]) * C::kSize + value_of_lane_;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int c = 0; c < C::kKeyPieces; ++c)
        cp_async_16(to + (n * C::kKeyPieces + c) * 512, k + n * 8 * p_.k.stride[2] * C::kSize + c * 64, 16);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 0; c < C::kValuePieces; ++c)
        cp_async_16(to + (2 * C::kKeyPieces + n * C::kValuePieces + c) * 512,
                    v + cached_key(n) * p_.v.stride[2] * C::kSize + c * 128, 16);
      if (C::kNarrow && p_.store.scale_per_key)
        issue_scales(to, {row.first, row.index + int(lane_ % 4) * 2 + cached_key(n), true}, n, 4);
    }
  }

  // Keys that no row sees become zeros.
  __device__ void issue_by_key(int first, uint32_t to, uint32_t bits) {
    const uint32_t seen = view_.keys_of(bits);
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      const int i = int(lane_) / 4 + 8 * n;
      const Row row = seen >> i & 1 ? row_of(first + i) : Row{};
      const char* from = k_ + (row.first * p_.k.stride[0] + row.index * p_.k.stride[2]) * C::kSize;
#pragma unroll
      for (int c = 0; c < C::kKeyPieces; ++c)
        copy(to + (n * C::kKeyPieces + c) * 512, from, (c * 4 + lane_ % 4) * 16, row.there ? int(p_.D) * C::kSize : 0);
    }
#pragma unroll 1
    for (int n = 0; n < 4; ++n) {
      const int i = int(lane_) % 4 * 2 + cached_key(n);
      const Row row = seen >> i & 1 ? row_of(first + i) : Row{};
      if (!row.there) missing_ |= bits & 0x11u << n;
      const char* from = v_ + (row.first * p_.v.stride[0] + row.index * p_.v.stride[2]) * C::kSize;
#pragma unroll
      for (int c = 0; c < C::kValuePieces; ++c)
        copy(to + (2 * C::kKeyPieces + n * C::kValuePieces + c) * 512, from, (c * 8 + lane_ / 4) * 16,
             row.there ? int(p_.Dv) * C::kSize : 0);
      if (C::kNarrow && p_.store.scale_per_key) issue_scales(to, row, n, row.there ? 4 : 0);
    }
  }
  __device__ static void copy(uint32_t to, const char* from, int offset, int bytes) {
    const int rest = min(max(bytes - offset, 0), 16);
    cp_async_16(to, rest ? from + offset : from, rest);
  }

  const AttentionForwardLaunch& p_;
  const CachedPlace& at_;
  const CachedView<C>& view_;
  uint32_t shared_;
  unsigned lane_;
  bool one_row_;  // a tile's keys lie one behind the other, all of kHead elements
  uint32_t missing_ = 0;
  const char *k_, *v_;  // of the head
  int64_t key_of_lane_, value_of_lane_;
};

}  // namespace mha::cuda
