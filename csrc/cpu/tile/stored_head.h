// Where the keys and values of one key/value head lie: one after the other, or in the pages of a cache.
#pragma once

#include "../product/pack.h"
#include "../tiles.h"

MHA_ISA_BEGIN

class StoredHead {
 public:
  StoredHead() = default;
  StoredHead(const AttentionForward& p, int64_t b, int64_t head)
      : index(b * p.Hk + head), type(p.kv_type()), p_(&p), table_(p.store.table) {
    const KeyValueStore& store = p.store;
    if (table_) table_ += b * store.table_stride_b;
    const int64_t first = table_ ? 0 : b;
    scales_ = first * store.scale_stride_b + head * store.scale_stride_h;
    k_ = element(p.k.data, type, first * p.k.stride[0] + head * p.k.stride[1]);
    v_ = element(p.v.data, type, first * p.v.stride[0] + head * p.v.stride[1]);
    if (!store.quantised || store.scale_per_key) return;
    const int64_t scale = b * store.scale_stride_b + head * store.scale_stride_h;
    k_scale = store.k_scale[scale], v_scale = store.v_scale[scale];
  }

  int64_t index = 0;  // b * Hk + head
  DType type = DType::f32;
  float k_scale = 1, v_scale = 1;  // of the head

  // How many keys from j on, before end, make a tile: they lie one stride apart.
  int tile_keys(int64_t j, int64_t end) const {
    int64_t keys = min64(kMaxKeys, end - j);
    if (table_) keys = min64(keys, p_->store.page_size - j % p_->store.page_size);
    return int(keys);
  }
  const void* key(int64_t j) const { return row(k_, p_->k.stride, j); }
  const void* value(int64_t j) const { return row(v_, p_->v.stride, j); }
  bool has_key(int64_t j) const { return !table_ || is_page(table_[j / p_->store.page_size]); }
  // The scales of a tile's keys or values, from key j on; null where one is the head's. Its key(j) has been asked for.
  const float* key_scales(int64_t j) const { return scales(p_->store.k_scale, j); }
  const float* value_scales(int64_t j) const { return scales(p_->store.v_scale, j); }
  // Where a key that may be there would lie: to be fetched, not read.
  const void* likely_key(int64_t j) const {
    if (table_ && j >= p_->Sk) return k_;
    if (!has_key(j)) return k_;
    return key(j);
  }

 private:
  bool is_page(int64_t page) const { return page >= 0 && page < p_->store.pages; }
  const void* row(const void* base, const int64_t* stride, int64_t j) const {
    if (!table_) return element(base, type, j * stride[2]);
    const int64_t page = table_[j / p_->store.page_size];
    if (!is_page(page))
      throw std::runtime_error(
          "block_table has an entry that is no page, for keys that are visible; accepted: 0 to the number of pages - "
          "1.");
    return element(base, type, page * stride[0] + j % p_->store.page_size * stride[2]);
  }

  const float* scales(const float* base, int64_t j) const {
    const KeyValueStore& store = p_->store;
    if (!store.scale_per_key) return nullptr;
    if (!table_) return base + scales_ + j;
    return base + scales_ + table_[j / store.page_size] * store.scale_stride_b + j % store.page_size;
  }

  const AttentionForward* p_ = nullptr;
  const int64_t* table_ = nullptr;
  const void *k_ = nullptr, *v_ = nullptr;
  int64_t scales_ = 0;
};

MHA_ISA_END
