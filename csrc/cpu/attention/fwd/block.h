// Attention forward of one block of queries, which lie in vector lanes. It visits its key tiles. Per tile:
//   S^T[j][q] = sum_d K[j][d] Q^T[d][q];   softmax down the columns;   O^T[d][q] += sum_j V[j][d] P^T[j][q]
//
// This room includes vector, threads, tile.
#pragma once

#include "../../tile/finite_rows.h"
#include "rows.h"

MHA_ISA_BEGIN

template <class Unit, int Degree>
struct ForwardBlock : ForwardRows<Unit, Degree> {
  using Rows = ForwardRows<Unit, Degree>;
  using Rows::L, Rows::p, Rows::s, Rows::kv, Rows::lanes;
  using typename Rows::T, typename Rows::V;
  static constexpr bool kPlanar = kPlanes<Unit> > 1;

  bool finite_q = false;     // known of more planes than one
  Strips<Unit> strips;       // of the tile
  bool in_group = false;     // of one head
  bool tile_packed = false;  // s.k and s.v hold the tile
  ProductState<Unit> products;

  using Rows::Rows;

  // Visits the keys first_key .. last_key that some row sees. Returns whether there are any.
  bool visit_keys(int64_t first_key, int64_t last_key) {
    load_rows();
    if (s.whole_head) pack_head();
    return this->for_each_tile(first_key, last_key,
                               [&](int64_t j, int keys, bool first) { return visit(j, keys, first); });
  }

  // Copies a tile, for all blocks of a group, where it is not an operand as it lies. Returns whether it did.
  bool pack_tile(int64_t first_key, int keys) {
    if (sizeof(Unit) == size_of(kv.type) && p.k.stride[2] == p.D && p.v.stride[2] == p.Dv) return false;
    copy_rows(s.k, p.D, kv.key(first_key), kv.type, p.k.stride[2], keys, int(p.D));
    copy_rows(s.v, p.Dv, kv.value(first_key), kv.type, p.v.stride[2], keys, int(p.Dv));
    return true;
  }

  void finish(bool any) {
    if (!any) std::fill_n(s.out, p.Dv * kMaxRows, T(0));
    store_rows();
    if (p.weights.data) this->store_weights([&](int64_t first, int keys) { return compute_scores(first, keys); });
  }

  void pack_head() {
    if (s.packed->head == kv.index) return;
    s.packed->head = kv.index;
    s.packed->k = rows_operand(kv.key(0), kv.type, p.k.stride[2], int(p.Sk), int(p.D), s.k);
    s.packed->v = columns_operand(kv.value(0), kv.type, p.v.stride[2], int(p.Sk), int(p.Dv), s.v);
    if constexpr (kPlanar) {
      s.packed->finite_k = all_finite<T>(kv.key(0), kv.type, p.k.stride[2], int(p.Sk), int(p.D));
      s.packed->finite_v = all_finite<T>(kv.value(0), kv.type, p.v.stride[2], int(p.Sk), int(p.Dv));
    }
  }

  Broadcast<Unit> key_operand(int64_t first_key, int keys) {
    if (s.whole_head) {
      const Broadcast<Unit>& whole = s.packed->k;
      return {whole.a + first_key * whole.am, whole.am, whole.ak, whole.plane};
    }
    if (tile_packed) return {s.k, p.D, 1};
    return rows_operand(kv.key(first_key), kv.type, p.k.stride[2], keys, int(p.D), s.k);
  }

  Broadcast<Unit> value_operand(const void* v, int64_t first_key, int keys) {
    if (s.whole_head) {
      const Broadcast<Unit>& whole = s.packed->v;
      return {whole.a + first_key / kUnitK<Unit> * whole.ak, whole.am, whole.ak, whole.plane};
    }
    if (tile_packed) return {s.v, 1, p.Dv};
    return columns_operand(v, kv.type, p.v.stride[2], keys, int(p.Dv), s.v);
  }

  const void* query(int r) const {
    return element(p.q.data, p.dtype, s.block->b * p.q.stride[0] + s.block->offset(p.q.stride, r));
  }

  void load_rows() {
    int64_t offset[kMaxRows];
    this->row_offsets(offset, p.q.stride);
    if constexpr (kPlanar) {
      finite_q = true;
      for (int r = 0; r < s.block->rows; ++r) finite_q &= all_finite<T>(query(r), p.dtype, 0, 1, int(p.D));
    }
    transposed_operand(s.q, kMaxRows, p.q.data, p.dtype, offset, s.block->rows, int(p.D));
    this->start_rows();
  }

  void multiply_scores(int64_t first_key, int keys) {
    const int D = int(p.D), n = units<Unit>(D);
    const Broadcast<Unit> key = key_operand(first_key, keys);
    const Ahead bias = bias_ahead(p.bias, p.bias_dtype, *s.block, first_key, keys);
    strips.for_each_by_keys([&](const Strip& t) {
      gemm<Unit>(t.keys, t.end - t.begin, n, key.a + t.first * key.am, key.am, key.ak, s.q + t.begin, kMaxRows,
                 s.score + t.first * kMaxRows + t.begin, kMaxRows, Start::zero, nullptr,
                 {key.plane, n * kMaxRows, true},  // an error here is multiplied by the scale, in lse as it is
                 t.first == strips.by_keys[0].first ? bias : Ahead());
    });
    if constexpr (kPlanar) {
      const void* k = kv.key(first_key);
      const bool finite_k = (s.whole_head && s.packed->finite_k) || all_finite<T>(k, kv.type, p.k.stride[2], keys, D);
      if (finite_k && finite_q) return;
      repair_products(
          s.score, [&](int j) { return element(k, kv.type, j * p.k.stride[2]); }, keys, [&](int r) { return query(r); },
          s.block->rows, kv.type, p.dtype, D);
    }
  }

  // Scores of a tile, hidden ones -inf.
  TileKind compute_scores(int64_t first_key, int keys) {
    const TileKind kind = classify(s.mask, p.mask, *s.block, first_key, keys);
    if (kind == TileKind::none) return kind;
    if (kind == TileKind::some)
      strips.take(*s.mask, lanes, keys);
    else
      strips.take_whole(lanes, keys);
    multiply_scores(first_key, keys);
    this->products_to_scores(first_key, keys, kind);
    return kind;
  }

  // Whether the product may take all values of a tile as they are.
  bool finite_values(const void* v, int keys, TileKind kind) {
    const bool whole_head = kPlanar && s.whole_head && s.packed->finite_v;
    if (whole_head || (!kPlanar && kind == TileKind::all)) return true;
    bool finite;
    if constexpr (!kPairs<Unit>)
      finite = tile_packed ? all_finite<T>(s.v, p.Dv, keys, int(p.Dv))
                           : all_finite<T>(v, kv.type, p.v.stride[2], keys, int(p.Dv));
    else
      finite = all_finite<T>(v, kv.type, p.v.stride[2], keys, int(p.Dv));
    if (!finite && kind == TileKind::all) s.mask->show_all(s.block->rows, keys);
    return finite;
  }

  // Adds a tile to the running softmax and output. Returns whether it did (some pair is visible).
  bool visit(int64_t first_key, int keys, bool first) {
    const TileKind kind = compute_scores(first_key, keys);
    if (kind == TileKind::none) return false;
    const void* v = kv.value(first_key);
    const bool clean = finite_values(v, keys, kind);
    // Where nobody else asks for the weights, they go straight into the operand of the product.
    const bool direct = kPairs<Unit> && clean && !p.dropout.rng_state && !kv.value_scales(first_key);
    const bool moved = this->softmax(keys, direct);
    this->multiply_weights(first_key, keys, kind);
    FiniteRows<Unit> finite;
    const Unit* weight = direct ? s.weight : lanes_operand<Unit>(s.score, keys, lanes, s.weight);
    const Broadcast<Unit> value =
        clean ? value_operand(v, first_key, keys) : finite.take(v, kv.type, p.v.stride[2], keys, int(p.Dv), s.finite_v);
    const Start start = first ? Start::zero : moved ? Start::scale : Start::add;
    strips.for_each_by_rows([&](const Strip& t) {
      const int64_t first_unit = t.first / kUnitK<Unit>;
      gemm<Unit>(int(p.Dv), t.end - t.begin, units<Unit>(t.keys), value.a + first_unit * value.ak, value.am, value.ak,
                 weight + first_unit * kMaxRows + t.begin, kMaxRows, s.out + t.begin, kMaxRows, start,
                 s.rescale + t.begin, {value.plane, kLanesPlane<Unit>});
    });
    finite.add_keys(s.out, s.score, *s.mask, lanes);
    return true;
  }

  // Adds what other keys have come to; the first replaces what there is.
  void add(const Partial<T>& part, bool first) {
    if (first) return this->take_sums(part, p.Dv * kMaxRows);
    const T* other = this->add_sums(part);
    for (int64_t d = 0; d < p.Dv; ++d) {
      for (int r = 0; r < lanes; r += L) {
        T* out = s.out + d * kMaxRows + r;
        store(out, fma(load(out), load(s.rescale + r), load(part.out + d * kMaxRows + r) * load(other + r)));
      }
    }
  }

  void store_rows() {
    if (in_group) {
      Ahead rows = this->rows_in_memory(p.out, s.block->b, s.block->head[0], s.block->query[0], p.Dv);
      rows.to_write = true;
      for (int r = 0; r < s.block->rows; ++r) rows.fetch(r);
    }
    T factor[kMaxRows];
    this->finish_rows(factor);
    const V zero = set1(T(0));
    for (int r = 0; r < lanes; r += L) {
      V inverse = load(factor + r);
      VecMask<T> empty = equal(load(s.row_sum + r), zero);
      for (int64_t d = 0; d < p.Dv; ++d) {
        T* out = s.out + d * kMaxRows + r;
        store(out, select(empty, zero, load(out) * inverse));
      }
    }
    int64_t offset[kMaxRows];
    this->row_offsets(offset, p.out.stride);
    untranspose_rows(p.out.data, p.dtype, offset, s.out, kMaxRows, s.block->rows, int(p.Dv));
  }
};

MHA_ISA_END
