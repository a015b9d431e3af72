// Which keys a block of rows sees: the range of key tiles to visit, and for each tile whether none, all or some of its
// (row, key) pairs are visible, with a per-lane test for the last kind.
#pragma once

#include "tiles.h"

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

enum class TileKind { none, all, some };

template <class T>
struct TileMask {
  T lo[kMaxRows], hi[kMaxRows];  // row r sees the keys lo[r] <= j < hi[r], counted from the tile's first
  bool test_bytes;               // whether byte[j][r] != 0 is asked too
  uint8_t byte[kMaxKeys * kMaxRows];

  VecMask<T> visible(int j, int r) const {
    Vec<T> key = set1(T(j));
    VecMask<T> m = less_equal(load(lo + r), key) & less(key, load(hi + r));
    if (test_bytes) {
      VecMask<T> listed;
      nonzero_bytes(byte + j * kMaxRows + r, &listed);
      m = m & listed;
    }
    return m;
  }
  void show_all(int rows, int keys) {
    test_bytes = false;
    for (int r = 0; r < kMaxRows; ++r) lo[r] = T(0), hi[r] = T(r < rows ? keys : 0);
  }
  bool visible_pair(int j, int r) const {
    return lo[r] <= T(j) && T(j) < hi[r] && (!test_bytes || byte[j * kMaxRows + r]);
  }
};

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

struct IdRange {
  int64_t lo, hi;
};
inline IdRange id_range(const int64_t* id, int64_t n) {
  IdRange range{id[0], id[0]};
  for (int64_t i = 1; i < n; ++i) {
    range.lo = min64(range.lo, id[i]);
    range.hi = max64(range.hi, id[i]);
  }
  return range;
}

// Fills byte from the document ids.
template <class T>
inline TileKind mark_documents(TileMask<T>* tile, const Mask& m, const RowBlock& block, int64_t first, int keys) {
  const int64_t* key_id = m.key_ids + block.b * m.key_ids_stride_b + first;
  const int64_t* query_id = m.query_ids + block.b * m.query_ids_stride_b;
  int64_t id[kMaxRows];
  for (int r = 0; r < block.rows; ++r) id[r] = query_id[block.query[r]];
  IdRange q = id_range(id, block.rows), k = id_range(key_id, keys);
  if (q.hi < k.lo || k.hi < q.lo) return TileKind::none;
  if (q.lo == q.hi && k.lo == k.hi) return TileKind::all;
  for (int j = 0; j < keys; ++j) {
    for (int r = 0; r < block.rows; ++r) tile->byte[j * kMaxRows + r] = id[r] == key_id[j];
  }
  return TileKind::some;
}

// Fills byte from the dense mask, or takes elements out of it (keep_listed).
template <class T>
inline TileKind mark_dense(TileMask<T>* tile, const Mask& m, const RowBlock& block, int64_t first, int keys,
                           bool keep_listed) {
  const uint8_t* corner = m.dense + block.b * m.dense_stride_b + first * m.dense_stride_k;
  bool any = false, all = true;
  const uint8_t* previous = nullptr;
  for (int r = 0; r < block.rows; ++r) {
    const uint8_t* row = corner + block.head[r] * m.dense_stride_h + block.query[r] * m.dense_stride_q;
    if (row == previous) continue;  // broadcast over queries
    previous = row;
    uint8_t some = 0, every = 1;
    for (int j = 0; j < keys; ++j) {
      uint8_t seen = row[j * m.dense_stride_k] != 0;
      some |= seen;
      every &= seen;
    }
    any |= some;
    all &= every;
  }
  if (!any) return TileKind::none;
  if (all) return TileKind::all;
  for (int r = 0; r < block.rows; ++r) {
    const uint8_t* row = corner + block.head[r] * m.dense_stride_h + block.query[r] * m.dense_stride_q;
    uint8_t* column = tile->byte + r;
    if (keep_listed) {
      for (int j = 0; j < keys; ++j) column[j * kMaxRows] &= row[j * m.dense_stride_k] != 0;
    } else {
      for (int j = 0; j < keys; ++j) column[j * kMaxRows] = row[j * m.dense_stride_k] != 0;
    }
  }
  return TileKind::some;
}

// Takes the keys out of byte that blocks hide (after filling it, unless keep_listed).
template <class T>
inline TileKind mark_blocks(TileMask<T>* tile, const Mask& m, const RowBlock& block, int64_t first, int keys,
                            bool keep_listed) {
  const int64_t first_block = first / m.block_size, last_block = (first + keys - 1) / m.block_size;
  auto row_of = [&](int r) {
    return m.blocks + block.b * m.blocks_stride_b + block.head[r] * m.blocks_stride_h +
           block.query[r] / m.block_size * m.blocks_stride_q;
  };
  bool any = false, all = true;
  const uint8_t* previous = nullptr;
  for (int r = 0; r < block.rows; ++r) {
    const uint8_t* row = row_of(r);
    if (row == previous) continue;
    previous = row;
    for (int64_t n = first_block; n <= last_block; ++n) {
      const bool seen = row[n * m.blocks_stride_k] != 0;
      any |= seen;
      all &= seen;
    }
  }
  if (!any) return TileKind::none;
  if (all) return TileKind::all;
  if (!keep_listed) std::memset(tile->byte, 1, sizeof(tile->byte));
  for (int r = 0; r < block.rows; ++r) {
    const uint8_t* row = row_of(r);
    for (int j = 0; j < keys; ++j)
      if (!row[(first + j) / m.block_size * m.blocks_stride_k]) tile->byte[j * kMaxRows + r] = 0;
  }
  return TileKind::some;
}

// The keys first .. first + keys (at most kMaxKeys) against the block. For TileKind::some, tile is filled; lanes past
// block.rows see nothing.
template <class T>
inline TileKind classify(TileMask<T>* tile, const Mask& m, const RowBlock& block, int64_t first, int keys) {
  if (first >= block.any_end || first + keys <= block.any_begin) return TileKind::none;
  tile->test_bytes = false;
  if (m.query_ids) {
    TileKind kind = mark_documents(tile, m, block, first, keys);
    if (kind == TileKind::none) return kind;
    tile->test_bytes = kind == TileKind::some;
  }
  if (m.dense) {
    TileKind kind = mark_dense(tile, m, block, first, keys, tile->test_bytes);
    if (kind == TileKind::none) return kind;
    tile->test_bytes |= kind == TileKind::some;
  }
  if (m.blocks) {
    TileKind kind = mark_blocks(tile, m, block, first, keys, tile->test_bytes);
    if (kind == TileKind::none) return kind;
    tile->test_bytes |= kind == TileKind::some;
  }
  bool all = block.all_begin <= first && first + keys <= block.all_end;
  if (all && !tile->test_bytes) return TileKind::all;
  bool any = false;
  for (int r = 0; r < block.rows; ++r) {
    int64_t lo = min64(keys, max64(0, block.begin[r] - first)), hi = min64(keys, max64(0, block.end[r] - first));
    tile->lo[r] = T(lo);
    tile->hi[r] = T(hi);
    any |= lo < hi;
  }
  for (int r = block.rows; r < kMaxRows; ++r) tile->lo[r] = tile->hi[r] = T(0);
  return any ? TileKind::some : TileKind::none;
}

MHA_ISA_END
