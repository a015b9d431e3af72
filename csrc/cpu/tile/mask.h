// Which keys a block of rows sees: the range of key tiles to visit, and for each tile whether none, all or some of its
// (row, key) pairs are visible, with a per-lane test for the last kind.
#pragma once

#include "../tiles.h"

MHA_ISA_BEGIN

// Up to kMaxRows rows, each a query of a head; the rows of a block share a key/value head, not always a query head.
struct RowBlock {
  int64_t b;
  int rows;
  int64_t head[kMaxRows], query[kMaxRows];
  int64_t begin[kMaxRows], end[kMaxRows];  // row_interval
  int64_t any_begin, any_end;              // smallest range that holds every row's interval; empty when all are
  int64_t all_begin, all_end;              // keys inside every row's interval; may be empty (begin >= end)

  int64_t offset(const int64_t* stride, int r) const { return head[r] * stride[1] + query[r] * stride[2]; }
};

// The rows first .. first + rows of the flat list (head, query) that starts at first_head.
inline void set_rows(RowBlock* block, const Mask& mask, int64_t b, int64_t first_head, int64_t first, int rows,
                     int64_t Sq, int64_t Sk) {
  block->b = b;
  block->rows = rows;
  block->any_begin = Sk, block->any_end = 0;
  block->all_begin = 0, block->all_end = Sk;
  int64_t head = first_head + first / Sq, query = first % Sq;
  for (int r = 0; r < rows; ++r) {
    block->head[r] = head;
    block->query[r] = query;
    Interval keys = row_interval(mask, b, query, Sk);
    block->begin[r] = keys.begin;
    block->end[r] = keys.end;
    block->all_begin = max64(block->all_begin, keys.begin);
    block->all_end = min64(block->all_end, keys.end);
    if (keys.begin < keys.end) {
      block->any_begin = min64(block->any_begin, keys.begin);
      block->any_end = max64(block->any_end, keys.end);
    }
    if (++query == Sq) query = 0, ++head;
  }
}

// The rows first .. first + rows of a block; rows may be 0.
inline void take_rows(RowBlock* to, const RowBlock& from, int first, int rows) {
  *to = from;
  to->rows = rows;
  for (int64_t* of : {to->head, to->query, to->begin, to->end}) std::copy_n(of + first, rows, of);
}

enum class TileKind { none, all, some };

// The first n of 64 bits.
MHA_INLINE uint64_t first_bits(int64_t n) { return n <= 0 ? 0 : n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1; }

template <class T>
struct TileMask {
  T lo[kMaxRows], hi[kMaxRows];  // row r sees the keys lo[r] <= j < hi[r], counted from the tile's first
  bool listed;                   // whether it sees no others than these, but only where bits say so
  uint32_t bits[kMaxKeys / 32][kMaxRows];

  VecMask<T> visible(int j, int r) const {
    VecMask<T> m;
    if (listed) {
      has_bit(bits[j / 32] + r, j % 32, &m);
    } else {
      const Vec<T> key = set1(T(j));
      m = less_equal(load(lo + r), key) & less(key, load(hi + r));
    }
    return m;
  }
  void show_all(int rows, int keys) {
    listed = false;
    for (int r = 0; r < kMaxRows; ++r) lo[r] = T(0), hi[r] = T(r < rows ? keys : 0);
  }
  bool visible_pair(int j, int r) const {
    return listed ? bits[j / 32][r] >> (j % 32) & 1 : lo[r] <= T(j) && T(j) < hi[r];
  }
  uint64_t row(int r) const {
    if (!listed) return first_bits(int64_t(hi[r])) & ~first_bits(int64_t(lo[r]));
    return uint64_t(bits[1][r]) << 32 | bits[0][r];
  }
  void set_row(int r, uint64_t seen) { bits[0][r] = uint32_t(seen), bits[1][r] = uint32_t(seen >> 32); }
};
static_assert(kMaxKeys == 64);

// Whether the ends of the queries' intervals only grow from query to query: a band's do, and what is the same for all
// queries may cut it.
inline bool intervals_only_grow(const Mask& mask) {
  return (!mask.begin || mask.begin_stride_q == 0) && (!mask.end || mask.end_stride_q == 0);
}

// All keys that lie in the interval of one of these queries, and those in between; begin >= end if there are none.
inline Interval keys_of_rows(const Mask& mask, int64_t b, int64_t first_query, int64_t rows, int64_t Sk) {
  Interval keys{Sk, 0};
  const bool grow = intervals_only_grow(mask);
  const int64_t step = grow ? max64(1, rows - 1) : 1;
  for (int64_t r = 0; r < rows; r += step) {
    const Interval row = row_interval(mask, b, first_query + r, Sk);
    if (grow || row.begin < row.end) keys = {min64(keys.begin, row.begin), max64(keys.end, row.end)};
  }
  if (grow && mask.end) keys.end = min64(keys.end, mask.end[b * mask.end_stride_b]);
  return keys;
}

// A part of a tile: the keys first .. first + keys, the rows begin .. end (whole vectors).
struct Strip {
  int first, keys, begin, end;
};

// A tile cut along its keys, and along its rows, where it hides whole corners: along a causal diagonal, 10 products of
// 16 are made. A sum over keys is made for runs of rows, one over rows for runs of keys, and so in one piece: it has
// the bits that it has with all the zeros that are left out.
template <int kSize>
struct TileStrips {
  int key_runs = 0, row_runs = 0;
  Strip by_keys[kMaxKeys / kSize];  // each with the rows that see some of its keys; keys that nobody sees are in none
  Strip by_rows[kMaxRows / kSize];  // all rows, each with the keys that some of its rows see, or none

  void take_whole(int lanes, int keys) {
    key_runs = row_runs = 1;
    by_keys[0] = by_rows[0] = {0, keys, 0, lanes};
  }

  // Where mask says that pairs are hidden; of that, the intervals alone.
  template <class T>
  void take(const TileMask<T>& mask, int lanes, int keys) {
    key_runs = row_runs = 0;
    for (int first = 0; first < keys; first += kSize) {
      Strip next{first, std::min(kSize, keys - first), lanes, 0};
      for (int r = 0; r < lanes; ++r) {
        if (mask.lo[r] >= T(first + next.keys) || mask.hi[r] <= T(first)) continue;
        next.begin = std::min(next.begin, r / kSize * kSize);
        next.end = std::min(lanes, (r / kSize + 1) * kSize);
      }
      if (next.begin >= next.end) continue;
      Strip* last = key_runs > 0 ? &by_keys[key_runs - 1] : nullptr;
      if (last && last->first + last->keys == first && last->begin == next.begin && last->end == next.end)
        last->keys += next.keys;
      else
        by_keys[key_runs++] = next;
    }
    for (int begin = 0; begin < lanes; begin += kSize) {
      int first = keys, end = 0;
      const int last_row = std::min(lanes, begin + kSize);
      for (int r = begin; r < last_row; ++r) {
        if (mask.lo[r] >= mask.hi[r]) continue;
        first = std::min(first, int(mask.lo[r]) / kSize * kSize);
        end = std::max(end, int(mask.hi[r]));
      }
      const Strip next{end > 0 ? first : 0, end > 0 ? end - first : 0, begin, last_row};
      Strip* last = row_runs > 0 ? &by_rows[row_runs - 1] : nullptr;
      if (last && last->first == next.first && last->keys == next.keys)
        last->end = next.end;
      else
        by_rows[row_runs++] = next;
    }
  }

  template <class F>
  MHA_INLINE void for_each_by_keys(F f) const {
    for (int n = 0; n < key_runs; ++n) f(by_keys[n]);
  }
  template <class F>
  MHA_INLINE void for_each_by_rows(F f) const {
    for (int n = 0; n < row_runs; ++n) f(by_rows[n]);
  }
};

// The dense mask of row r of the block, and bit j: whether it shows key first + j, of n <= 64.
MHA_INLINE const uint8_t* dense_row(const Mask& m, const RowBlock& block, int r) {
  return m.dense + block.b * m.dense_stride_b + block.head[r] * m.dense_stride_h + block.query[r] * m.dense_stride_q;
}
MHA_INLINE uint64_t dense_bits(const uint8_t* row, int64_t stride, int64_t first, int n) {
  if (stride == 1) return nonzero_bits(row + first, n);
  uint8_t bytes[64];
  for (int j = 0; j < n; ++j) bytes[j] = row[(first + j) * stride];
  return nonzero_bits(bytes, n);
}

// Takes the keys out of seen[row] that are of other documents.
inline void keep_documents(uint64_t* seen, const Mask& m, const RowBlock& block, int64_t first, int keys) {
  const int64_t* key_id = m.key_ids + block.b * m.key_ids_stride_b + first;
  const int64_t* query_id = m.query_ids + block.b * m.query_ids_stride_b;
  uint64_t bits = 0;
  for (int r = 0; r < block.rows; ++r) {
    const int64_t id = query_id[block.query[r]];
    if (r == 0 || id != query_id[block.query[r - 1]]) {
      uint8_t same[64];
      for (int j = 0; j < keys; ++j) same[j] = key_id[j] == id;
      bits = nonzero_bits(same, keys);
    }
    seen[r] &= bits;
  }
}

inline void keep_dense(uint64_t* seen, const Mask& m, const RowBlock& block, int64_t first, int keys) {
  uint64_t bits = 0;
  for (int r = 0; r < block.rows; ++r) {
    const bool same = r > 0 && m.dense_stride_q == 0 && (m.dense_stride_h == 0 || block.head[r] == block.head[r - 1]);
    if (!same) bits = dense_bits(dense_row(m, block, r), m.dense_stride_k, first, keys);
    seen[r] &= bits;
  }
}

inline void keep_blocks(uint64_t* seen, const Mask& m, const RowBlock& block, int64_t first, int keys) {
  uint64_t bits = 0;
  const uint8_t* previous = nullptr;
  for (int r = 0; r < block.rows; ++r) {
    const uint8_t* row = m.blocks + block.b * m.blocks_stride_b + block.head[r] * m.blocks_stride_h +
                         block.query[r] / m.block_size * m.blocks_stride_q;
    if (row != previous) {
      bits = 0;
      for (int64_t n = first / m.block_size; n * m.block_size < first + keys; ++n) {
        if (row[n * m.blocks_stride_k])
          bits |= first_bits((n + 1) * m.block_size - first) & ~first_bits(n * m.block_size - first);
      }
      previous = row;
    }
    seen[r] &= bits;
  }
}

// Takes the keys out of seen[row] that anything but intervals hides.
inline void keep_listed(uint64_t* seen, const Mask& m, const RowBlock& block, int64_t first, int keys) {
  if (m.query_ids) keep_documents(seen, m, block, first, keys);
  if (m.dense) keep_dense(seen, m, block, first, keys);
  if (m.blocks) keep_blocks(seen, m, block, first, keys);
}

// The keys first .. first + keys (at most kMaxKeys) against the block. For TileKind::some, tile is filled; lanes past
// block.rows see nothing.
template <class T>
inline TileKind classify(TileMask<T>* tile, const Mask& m, const RowBlock& block, int64_t first, int keys) {
  if (first >= block.any_end || first + keys <= block.any_begin) return TileKind::none;
  const bool all = block.all_begin <= first && first + keys <= block.all_end;
  if (all && !m.elementwise()) return TileKind::all;
  bool any = false;
  for (int r = 0; r < block.rows; ++r) {
    int64_t lo = min64(keys, max64(0, block.begin[r] - first)), hi = min64(keys, max64(0, block.end[r] - first));
    tile->lo[r] = T(lo);
    tile->hi[r] = T(hi);
    any |= lo < hi;
  }
  for (int r = block.rows; r < kMaxRows; ++r) tile->lo[r] = tile->hi[r] = T(0);
  tile->listed = false;
  if (!any || !m.elementwise()) return any ? TileKind::some : TileKind::none;
  uint64_t seen[kMaxRows] = {}, some = 0, every = first_bits(keys);
  for (int r = 0; r < block.rows; ++r) seen[r] = tile->row(r);
  keep_listed(seen, m, block, first, keys);
  for (int r = 0; r < block.rows; ++r) some |= seen[r], every &= seen[r];
  if (some == 0) return TileKind::none;
  if (every == first_bits(keys)) return TileKind::all;
  tile->listed = true;
  for (int r = 0; r < kMaxRows; ++r) tile->set_row(r, seen[r]);
  return TileKind::some;
}

MHA_ISA_END
