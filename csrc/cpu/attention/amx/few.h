// Attention forward of a block of few rows of bf16 on AMX tiles, as in decoding. Keys and values may be of 8 bits.
//
//   S^T = K Q^T: 16 keys are rows of A, as they lie in memory; all rows of the block are columns. Keys of int8 are
//                multiplied as they are, exactly, with three planes of the queries; those of e4m3 become bf16
//   O = P V:     two rows of values are interleaved to pairs; weights are two planes of bf16, as rows of A, of which
//                there are enough: so their rounding is no more than a float's products make
//
// Scores are turned to [row][key] on the way, so that no lane of the softmax is idle, and a row's mask is 64 bits. What
// tiles make of a value that is not finite shows in the sums: these are made again.
#pragma once

#include "few_operands.h"

MHA_ISA_BEGIN

template <int Degree>
struct FewRowsOnTiles : FewRowsBlock<float, Degree> {
  using Base = FewRowsBlock<float, Degree>;
  using Base::p, Base::s, Base::kv, Base::rule, Base::kInf;

  FewRowsOnTiles(const AttentionForward& problem, const ForwardPlan& plan, void* scratch)
      : Base(problem, plan, scratch),
        rows_(int(plan.rows_per_list)),
        columns_(rows_ > 4   ? 8
                 : rows_ > 2 ? 4
                             : rows_),
        tiles_(shapes()) {
    const int64_t lines = (p.D + 63) / 64;
    q_ = reinterpret_cast<HalfTile*>(s.few_tiles);
    copied_k_ = q_ + 3 * lines;
    v_ = copied_k_ + 2 * 2 * lines;
    nothing_ = reinterpret_cast<char*>(v_ + 2 * 4 * ((p.Dv + 63) / 64));
    std::memset(nothing_, 0, std::size_t(s.few_tiles + few_tiles_bytes(p) - nothing_));
  }

  bool visit_keys(int64_t first_key, int64_t last_key) {
    load_rows();
    const int64_t end = min64(last_key, s.block->any_end);
    bool any = false;
    for (int64_t j = max64(s.block->any_begin, first_key); j < end; j += kMaxKeys)
      any = visit(j, int(min64(kMaxKeys, end - j)), !any) || any;
    return any;
  }

  void finish(bool any) {
    if (!any) std::fill_n(s.out, p.Dv * rows_, 0.0f);
    Base::store_rows();
    if (p.weights.data) this->store_weights([&](int64_t first, int keys) { return scores_by_key(first, keys); });
  }

  void load_rows() {
    int64_t offset[kMaxRows];
    this->row_offsets(offset, p.q.stride);
    const int n = steps();
    std::memset(static_cast<void*>(q_), 0, std::size_t(n * (bytes() ? 3 : 1)) * sizeof(HalfTile));
    for (int r = 0; r < rows_; ++r) {
      const bf16* row = static_cast<const bf16*>(element(p.q.data, p.dtype, offset[r]));
      query_[r] = row;
      if (bytes()) query_unit_[r] = query_to_bytes(q_, n, columns_, r, row, int(p.D));
      for (int d = 0; !bytes() && d < p.D; d += 2) {
        const PairPlace at = pair_place(d / 2, eight_bits());
        std::memcpy(q_[at.step].x[0] + 2 * (at.line * columns_ + r), row + d, d + 1 < p.D ? 4 : 2);
      }
    }
    this->start_rows();
  }

 private:
  bool eight_bits() const { return p.store.quantised; }
  bool bytes() const { return p.store.quantised && p.store.type == DType::i8; }  // multiplied as they are
  int steps() const { return int(!eight_bits() ? runs(p.D) : (p.D + 63) / 64 * (bytes() ? 1 : 2)); }

  // Sums of scores are tiles 0 and 1, queries 2, keys and values 3 and 4, weights 5, sums of values 6 and 7.
  AmxShapes shapes() const {
    AmxShapes shapes = AmxTiles::whole();
    for (int tile : {0, 1, 2}) shapes.row_bytes[tile] = uint16_t(4 * columns_);
    for (int tile : {5, 6, 7}) shapes.rows[tile] = uint8_t(2 * rows_);
    return shapes;
  }

  bool visit(int64_t first, int keys, bool first_tile) {
    const TileKind kind = scores(first, keys);
    if (kind == TileKind::none) return false;
    softmax(first, keys);
    with_quantised_or_bf16([&](auto* type) { multiply_values(type, keys, first_tile); });
    return true;
  }

  template <class F>
  void with_quantised_or_bf16(F f) {
    if (eight_bits()) return with_quantised(kv.type, f);
    f(static_cast<const bf16*>(nullptr));
  }

  // ---- a tile's keys and values

  // Where its rows lie; rows that are not there, or have no page, are zeros.
  template <class F>
  void find_rows(const char** to, int64_t first, int keys, int64_t stride, F row) const {
    int n = 0;
    for (int j = 0; j < keys; j += n) {
      n = kv.tile_keys(first + j, first + keys);
      const bool there = kv.has_key(first + j);
      const char* at = there ? static_cast<const char*>(row(first + j)) : nothing_;
      for (int i = 0; i < n; ++i, at += there ? stride : 0) to[j + i] = at;
    }
    std::fill(to + keys, to + kMaxKeys, nothing_);
  }
  void find_rows(int64_t first, int keys) {
    uint64_t some = 0;
    for (int r = 0; r < rows_; ++r) some |= seen_[r];
    for (int j = 0, n = 0; p.store.table && j < keys; j += n) {
      n = kv.tile_keys(first + j, first + keys);
      if (some >> j & first_bits(n)) kv.key(first + j);  // which must be there
    }
    find_rows(key_, first, keys, this->keys_in_memory(nullptr).stride, [&](int64_t j) { return kv.key(j); });
    find_rows(value_, first, keys, this->values_in_memory(nullptr).stride, [&](int64_t j) { return kv.value(j); });
    next_key_ = static_cast<const char*>(kv.likely_key(first + keys));
  }

  // Each line is asked for twice, a tile and half a tile ahead, between the work on others (ReadAhead).
  using Lines = ReadAhead::Lines;
  MHA_INLINE Lines beside_key(int j) const { return {value_[j], j < kRun ? key_[j + kRun] : value_[j - kRun]}; }
  MHA_INLINE Lines beside_value(int j) const {
    const int64_t stride = this->keys_in_memory(nullptr).stride;
    return {next_key_ + j * stride, j < kRun ? value_[j + kRun] : next_key_ + (j - kRun) * stride};
  }

  // The scales of a tile's keys or values; null where one is the head's.
  template <class F>
  const float* find_scales(float* to, int64_t first, int keys, F scales) const {
    if (!p.store.scale_per_key) return nullptr;
    std::fill_n(to, kMaxKeys, 0.0f);
    int n = 0;
    for (int j = 0; j < keys; j += n) {
      n = kv.tile_keys(first + j, first + keys);
      if (kv.has_key(first + j)) std::copy_n(scales(first + j), n, to + j);
    }
    return to;
  }

  // 16 keys as rows of A.
  struct Keys {
    const void* first;
    int64_t row, step;  // bytes
  };
  Keys keys_at(int64_t first, int j, int keys, HalfTile* copy) const {
    const bool together = keys - j >= kAmx && kv.tile_keys(first + j, first + keys) >= kAmx && kv.has_key(first + j);
    const bool as_they_lie = bytes() ? p.D % 64 == 0 : !eight_bits() && p.D % kRun == 0;
    if (together && as_they_lie) return {key_[j], this->keys_in_memory(nullptr).stride, 64};
    auto copy_all = [&](auto* type) {
      for (int i = 0; i < kAmx; ++i)
        copy_key(copy, i, reinterpret_cast<decltype(type)>(key_[j + i]), int(p.D), beside_key(j + i));
    };
    eight_bits() ? with_quantised(kv.type, copy_all) : copy_all(static_cast<const bf16*>(nullptr));
    return {copy, 64, sizeof(HalfTile)};
  }

  // ---- scores

  // Of a tile, to score_[row][key]; hidden ones -inf.
  TileKind scores(int64_t first, int keys) {
    const TileKind kind = classify(s.mask, p.mask, *s.block, first, keys);
    if (kind == TileKind::none) return kind;
    for (int r = 0; r < rows_; ++r) seen_[r] = kind == TileKind::all ? first_bits(keys) : s.mask->row(r);
    find_rows(first, keys);
    multiply_keys(first, keys);
    alignas(64) float of_keys[kMaxKeys];
    const float* scales = find_scales(of_keys, first, keys, [&](int64_t j) { return kv.key_scales(j); });
    for (int r = 0; r < rows_; ++r) products_to_scores(r, first, keys, scales);
    return kind;
  }

  void multiply_keys(int64_t first, int keys) {
    alignas(64) float product[3][kMaxKeys * kFewRows];  // [plane][key][columns]; of bytes, int32
    const int planes = bytes() ? 3 : 1;
    for (int j = 0; j < keys; j += kRun) {
      const bool two = keys - j > kAmx;
      const Keys a = keys_at(first, j, keys, copied_k_);
      const Keys b = two ? keys_at(first, j + kAmx, keys, copied_k_ + steps()) : a;
      Lines lines[kRun];
      for (int i = 0; i < kRun; ++i) lines[i] = beside_key(j + i);
      for (int plane = 0; plane < planes; ++plane) {
        auto multiply = [&](auto dot) MHA_INLINE_LAMBDA {
          multiply_run(plane, two, a, b, lines, product[plane] + j * columns_, dot);
        };
        if (bytes())
          multiply([]<int C>() MHA_INLINE_LAMBDA { amx_dot_bytes<C, 3 + C, 2>(); });
        else
          multiply([]<int C>() MHA_INLINE_LAMBDA { amx_dot<C, 3 + C, 2>(); });
      }
    }
    auto turn = [&]<int kColumns>() {
      for (int j = 0; j < keys; j += kAmx) {
        VecF sum[kColumns];
        for (int plane = planes; plane-- > 0;) {
          VecF x[kColumns];
          repeat<kColumns>([&](int i) MHA_INLINE_LAMBDA { x[i] = load(product[plane] + j * kColumns + i * 16); });
          turn_columns<kColumns>(x);
          repeat<kColumns>([&](int r) MHA_INLINE_LAMBDA {
            if (planes > 1) x[r].v = _mm512_cvtepi32_ps(_mm512_castps_si512(x[r].v));
            sum[r] = plane == planes - 1 ? x[r] : fma(sum[r], set1(256.0f), x[r]);
          });
        }
        repeat<kColumns>([&](int r) MHA_INLINE_LAMBDA {
          store(score_[r] + j, planes > 1 ? sum[r] * set1(query_unit_[r]) : sum[r]);
        });
      }
    };
    if (columns_ == 1)
      turn.template operator()<1>();
    else if (columns_ == 2)
      turn.template operator()<2>();
    else if (columns_ == 4)
      turn.template operator()<4>();
    else
      turn.template operator()<8>();
    for (int r = 0; bytes() && r < rows_; ++r) {
      for (int j = 0; std::isnan(query_unit_[r]) && j < keys; ++j)
        score_[r][j] = dot_product(query_[r], reinterpret_cast<const int8_t*>(key_[j]), int(p.D));
    }
  }

  // 16 or 32 keys, a and b.
  template <class Dot>
  MHA_INLINE void multiply_run(int plane, bool two, const Keys& a, const Keys& b, const Lines* lines, float* to,
                               Dot dot) {
    const int count = steps();
    const int64_t line = 4 * columns_;
    const HalfTile* q = q_ + plane * count;
    const char *at = static_cast<const char*>(a.first), *bt = static_cast<const char*>(b.first);
    const bool fetch_a = plane == 0 && a.step == 64, fetch_b = plane == 0 && b.step == 64;
    amx_zero<0>(), amx_zero<1>();
    for (int n = 0; n < count; ++n, at += a.step, bt += b.step) {
      amx_load<2>(q + n, line);
      amx_load<3>(at, a.row);
      dot.template operator()<0>();
      if (fetch_a) repeat<kAmx>([&](int i) MHA_INLINE_LAMBDA { lines[i].fetch(n * 64); });
      if (!two) continue;
      amx_load<4>(bt, b.row);
      dot.template operator()<1>();
      if (fetch_b) repeat<kAmx>([&](int i) MHA_INLINE_LAMBDA { lines[kAmx + i].fetch(n * 64); });
    }
    amx_store<0>(to, line);
    if (two) amx_store<1>(to + kAmx * columns_, line);
  }

  void products_to_scores(int r, int64_t first, int keys, const float* scales) {
    float* const x = score_[r];
    const uint64_t seen = seen_[r];
    VecF top = set1(-kInf);
    if (rule.raw && !scales && seen == ~uint64_t(0)) {
      repeat<4>([&](int i) MHA_INLINE_LAMBDA { top = max(load(x + 16 * i), top); });
    } else {
      alignas(64) float more[kMaxKeys] = {};
      if (p.bias.data) {
        const int64_t* stride = p.bias.stride;
        const int64_t at = s.block->b * stride[0] + s.block->offset(stride, r) + first * stride[3];
        const void* bias = element(p.bias.data, p.bias_dtype, at);
        if (stride[3] == 1)
          copy_rows(more, kMaxKeys, bias, p.bias_dtype, 0, 1, keys);
        else
          copy_rows(more, 1, bias, p.bias_dtype, stride[3], keys, 1);
      }
      const CappedScores<float> capped(rule);
      for (int i = 0; i < kMaxKeys; i += 16) {
        VecF y = load(x + i);
        if (scales) y = y * load(scales + i);
        if (!rule.raw) y = capped(y);
        if (p.bias.data) y = y + load(more + i);
        y = select({__mmask16(seen >> i)}, y, set1(-kInf));
        store(x + i, y);
        top = max(y, top);
      }
    }
    top_[r] = reduce_max(top);  // NaN passed over
  }

  // Scores of a tile as ForwardRows has them.
  TileKind scores_by_key(int64_t first, int keys) {
    const TileKind kind = scores(first, keys);
    std::fill_n(s.score, kMaxKeys * kMaxRows, 0.0f);
    for (int r = 0; kind != TileKind::none && r < rows_; ++r) {
      for (int j = 0; j < keys; ++j) s.score[j * kMaxRows + r] = score_[r][j];
    }
    return kind;
  }

  // ---- weights

  // To unnormalised weights, in place and as planes of bf16, and on to the running maximum and sum.
  void softmax(int64_t first, int keys) {
    this->fetch_ahead();
    alignas(64) float of_values[kMaxKeys];
    const float* scales = find_scales(of_values, first, keys, [&](int64_t j) { return kv.value_scales(j); });
    if (p.dropout.rng_state) {
      dropout_multipliers(s.multiplier, kMaxRows, p.dropout, s.block->b, s.head, s.query, 16, first, keys);
    }
    const VecF exponent = set1(rule.exponent), lowest = set1(-kInf), zero = set1(0.0f);
    const VecF old = load(s.row_max), top = max(load(top_), old);
    // A row that has seen nothing keeps -inf; subtracting 0 then gives weights of 0, not NaN.
    const VecF base = select(equal(top, lowest), zero, top), factor = exp2<Degree>((old - base) * exponent);
    alignas(64) float of_row[16], sums[16] = {};
    store(of_row, base);
    for (int r = 0; r < rows_; ++r) {
      float* const x = score_[r];
      VecF sum = zero, w[4];
      repeat<4>([&](int i) MHA_INLINE_LAMBDA {
        w[i] = exp2<Degree>((load(x + 16 * i) - set1(of_row[r])) * exponent);
        sum = sum + w[i];
      });
      sums[r] = reduce_add(sum);
      if (scales || p.dropout.rng_state) multiply_weights(r, keys, scales, w);
      repeat<4>([&](int i) MHA_INLINE_LAMBDA { store(x + 16 * i, w[i]); });
      store_planes(weight_[r], weight_[rows_ + r], w[0], w[1]);
      store_planes(weight_[r] + kRun, weight_[rows_ + r] + kRun, w[2], w[3]);
    }
    store(s.row_max, top);
    store(s.row_sum, fma(load(s.row_sum), factor, load(sums)));
    store(s.rescale, factor);
  }

  void multiply_weights(int r, int keys, const float* scales, VecF* w) const {
    float kept[kMaxKeys] = {};
    for (int j = 0; p.dropout.rng_state && j < keys; ++j) kept[j] = s.multiplier[j * kMaxRows + r];
    for (int i = 0; i < 4; ++i) {
      if (scales) w[i] = w[i] * load(scales + 16 * i);
      if (p.dropout.rng_state) w[i] = w[i] * load(kept + 16 * i);
      w[i] = select({__mmask16(seen_[r] >> 16 * i)}, w[i], set1(0.0f));  // 0 times NaN
    }
  }

  // ---- values

  template <class Value>
  void multiply_values(const Value*, int keys, bool first_tile) {
    constexpr int kTiles = kValueTiles<Value>, kCols = 16 * kTiles;
    const int count = keys > kRun ? 2 : 1, lines = int((p.Dv + kCols - 1) / kCols);
    const int cols = int(p.Dv);
    for (int run = 0; run < count; ++run) {
      HalfTile* const to = v_ + run * kTiles;
      for (int i = 0; i < 16; ++i) {
        // What is stored could change anything else, as far as the compiler knows.
        const int j = run * kRun + i;
        const auto *row = reinterpret_cast<const Value*>(value_[j]),
                   *next = reinterpret_cast<const Value*>(value_[j + 16]);
        const Lines beside = beside_value(j), beside_next = beside_value(j + 16);
        for (int c = 0; c < lines; ++c) {
          beside.fetch(c * 64), beside_next.fetch(c * 64);
          pair_values(to + c * 2 * kTiles, i, row + c * kCols, next + c * kCols, cols - c * kCols);
        }
      }
    }
    for (int c = 0; c < lines; ++c) {
      HalfTile* const value = v_ + c * 2 * kTiles;
      multiply_line<kTiles>(value, count);
      bool repaired = false;
      for (int r = 0; r < rows_; ++r) {
        VecF x[kTiles];
        auto take_row = [&] {
          repeat<kTiles>([&](int i) MHA_INLINE_LAMBDA { x[i] = load(sum_[i].x[r]) + load(sum_[i].x[rows_ + r]); });
        };
        take_row();
        if (__builtin_expect(!repaired && !finite<kTiles>(x), 0)) {
          repair_line<kTiles>(value, count);
          take_row();
          repaired = true;
        }
        in_order<kTiles>(x);
        add_row<kTiles>(s.out + r * p.Dv + c * kCols, x, s.rescale[r], int(p.Dv) - c * kCols, first_tile);
      }
    }
  }

  template <int kTiles>
  void multiply_line(const HalfTile* value, int count) {
    for (int n = 0; n < kTiles; n += 2) {
      amx_zero<6>(), amx_zero<7>();
      for (int run = 0; run < count; ++run) {
        amx_load<5>(weight_[0] + run * kRun, kMaxKeys * 2);
        amx_load<3>(value + run * kTiles + n, 64);
        amx_dot<6, 5, 3>();
        amx_load<4>(value + run * kTiles + n + 1, 64);
        amx_dot<7, 5, 4>();
      }
      amx_store<6>(sum_ + n, 64), amx_store<7>(sum_ + n + 1, 64);
    }
  }

  template <int kTiles>
  static MHA_INLINE void add_row(float* out, const VecF* x, float factor, int left, bool first_tile) {
    repeat<kTiles>([&](int i) MHA_INLINE_LAMBDA {
      const int n = left - 16 * i;
      if (n >= 16)
        store(out + 16 * i, first_tile ? x[i] : fma(load(out + 16 * i), set1(factor), x[i]));
      else if (n > 0)
        store_n(out + 16 * i, first_tile ? x[i] : fma(load_n(out + 16 * i, n), set1(factor), x[i]), n);
    });
  }

  // Sums once more, without what is not finite: such values are then added to the rows that see them, one by one. Nor
  // does a weight that is infinite leave anything for its second plane.
  template <int kTiles>
  void repair_line(HalfTile* value, int count) {
    for (int r = 0; r < rows_; ++r) {
      for (int j = 0; j < kMaxKeys; ++j) {
        if (!std::isfinite(score_[r][j])) weight_[rows_ + r][j / kRun * kRun + j % 16 * 2 + j / 16 % 2] = bf16{};
      }
    }
    float more[kTiles][kFewRows][16] = {};
    for (int n = 0; n < count * kTiles; ++n) {
      bf16* const all = value[n].x[0];
      for (int i = 0; i < 16 * kRun; ++i) {
        bf16& x = all[i];
        if ((x.bits & 0x7F80) != 0x7F80) continue;
        const int j = n / kTiles * kRun + i / 32 + i % 2 * 16;
        float one[16];
        store(one, load_n(&x, 1));
        x = bf16{};
        for (int r = 0; r < rows_; ++r) {
          if (seen_[r] >> j & 1) more[n % kTiles][r][i % 32 / 2] += score_[r][j] * one[0];
        }
      }
    }
    multiply_line<kTiles>(value, count);
    for (int n = 0; n < kTiles; ++n) {
      for (int r = 0; r < rows_; ++r) store(sum_[n].x[r], load(sum_[n].x[r]) + load(more[n][r]));
    }
  }

  const int rows_, columns_;  // columns: of scores in tiles, a power of two
  const bf16* query_[kFewRows];
  float query_unit_[kFewRows] = {};  // of planes of bytes
  HalfTile *q_, *copied_k_, *v_;
  char* nothing_;  // zeros
  alignas(64) float score_[kFewRows][kMaxKeys];
  alignas(64) bf16 weight_[2 * kFewRows][kMaxKeys];  // [plane][row], pairs along keys from the halves of 32
  SumTile sum_[4];
  alignas(64) float top_[16] = {-kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf,
                                -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf};
  uint64_t seen_[kFewRows];  // a bit for each key of the tile
  const char *key_[kMaxKeys], *value_[kMaxKeys];
  const char* next_key_ = nullptr;
  const AmxTiles tiles_;
};

MHA_ISA_END
