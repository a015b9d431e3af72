// attention_cached: forward over keys and values as a cache holds them, in pages or quantised. For inference: it has no
// gradient.
#pragma once
#include "ops.h"

namespace mha::torch_layer {

inline DType stored_type(const Tensor& t, const Tensor& q) {
  if (t.scalar_type() == ScalarType::Char) return DType::i8;
  if (t.scalar_type() == ScalarType::Float8_e4m3fn) return DType::e4m3;
  MHA_CHECK(t.scalar_type() == q.scalar_type(), "k has dtype ", torch::headeronly::toString(t.scalar_type()), " and q ",
            torch::headeronly::toString(q.scalar_type()), "; the op accepts q's dtype, int8 or float8_e4m3fn.");
  return dtype_of(t, "k");
}

// The scales of k or v: of the heads, [1 or B, Hk], or of each of their keys, as k without its last dimension.
inline const float* fill_scale(const OptionalTensor& t, const char* name, const AttentionForward& p, const Tensor& like,
                               const Tensor& k, std::vector<Tensor>& keep) {
  MHA_CHECK(t.has_value(), name, " is missing; quantised keys and values need k_scale and v_scale.");
  if (t->dim() == 3)
    check_shape(*t, name, {k.size(0), p.Hk, k.size(2)});
  else
    check_shape(*t, name, {kOneOr + p.B, p.Hk});
  check_device(*t, name, like, "q");
  MHA_CHECK(t->scalar_type() == ScalarType::Float, name, " has dtype ", torch::headeronly::toString(t->scalar_type()),
            "; the op accepts float32.");
  keep.push_back(torch::stable::contiguous(*t));
  return static_cast<const float*>(keep.back().const_data_ptr());
}

inline void fill_store(AttentionForward& p, AttentionInputs& in, const OptionalTensor& block_table,
                       const OptionalTensor& k_scale, const OptionalTensor& v_scale, int64_t page_size) {
  KeyValueStore& store = p.store;
  const DType type = stored_type(in.k, in.q);
  MHA_CHECK(in.v.scalar_type() == in.k.scalar_type(), "k and v have different dtypes; the op accepts one.");
  store.quantised = type == DType::i8 || type == DType::e4m3;
  if (store.quantised) {
    MHA_CHECK(p.dtype != DType::f64, "q is float64 with quantised keys; the op accepts float32, bfloat16 or float16.");
    store.type = type;
    store.k_scale = fill_scale(k_scale, "k_scale", p, in.q, in.k, in.keep);
    store.v_scale = fill_scale(v_scale, "v_scale", p, in.q, in.k, in.keep);
    MHA_CHECK(k_scale->dim() == v_scale->dim() && k_scale->size(0) == v_scale->size(0),
              "k_scale and v_scale have shapes ", shape_text(*k_scale), " and ", shape_text(*v_scale),
              "; the op accepts one shape.");
    store.scale_per_key = k_scale->dim() == 3;
    store.scale_stride_h = store.scale_per_key ? in.k.size(2) : 1;
    store.scale_stride_b = !store.scale_per_key && k_scale->size(0) == 1 ? 0 : p.Hk * store.scale_stride_h;
  } else {
    MHA_CHECK(!k_scale && !v_scale, "k_scale or v_scale is given for keys and values that are not quantised.");
  }
  if (!block_table) return;
  in.keep.push_back(unit_last_stride(*block_table));
  store.table = int64_data(in.keep.back(), "block_table", in.q);
  store.table_stride_b = in.keep.back().stride(0);
  store.page_size = page_size, store.pages = in.k.size(0);
}

template <class Backend>
std::tuple<Tensor, Tensor> attention_cached(Tensor q, Tensor k, Tensor v, OptionalTensor block_table,
                                            OptionalTensor k_scale, OptionalTensor v_scale, int64_t page_size,
                                            BiasAndMask mask, Scores scores) {
  MHA_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k, v have shapes ", shape_text(q), ", ", shape_text(k),
            ", ", shape_text(v), "; the op accepts [B,H,Sq,D], and [B,Hk,Sk,D] or [pages,Hk,page_size,D].");
  check_device(k, "k", q, "q");
  check_device(v, "v", q, "q");
  const int64_t B = q.size(0), H = q.size(1), Hk = k.size(1);
  MHA_CHECK(Hk > 0 ? H % Hk == 0 : H == 0, "q has ", H, " heads and k has ", Hk,
            "; the number of query heads must be a multiple of the number of key/value heads.");
  AttentionForward p;
  AttentionInputs in{unit_last_stride(q), unit_last_stride(k), unit_last_stride(v), {}};
  p.B = B, p.H = H, p.Hk = Hk, p.Sq = q.size(2), p.Sk = k.size(2), p.D = q.size(3), p.Dv = v.size(3);
  if (block_table) {
    check_shape(*block_table, "block_table", {B, -1});
    MHA_CHECK(page_size > 0, "page_size is ", page_size, "; it must be positive where there is a block_table.");
    check_shape(k, "k", {-1, Hk, page_size, p.D});
    p.Sk = block_table->size(1) * page_size;
  } else {
    check_shape(k, "k", {B, Hk, -1, p.D});
  }
  check_shape(v, "v", {k.size(0), Hk, k.size(2), -1});
  p.dtype = dtype_of(q, "q");
  p.q = view4(in.q), p.k = view4(in.k), p.v = view4(in.v);
  fill_store(p, in, block_table, k_scale, v_scale, page_size);
  fill_sequences(p, in, {});
  fill_scores(p, in, scores);
  p.bias_relative = mask.bias && is_relative(*mask.bias);
  fill_bias_and_mask(p, mask, {p.B, p.H, p.Sq, p.Sk}, in.q, in.keep);
  Tensor out = empty_in_order_of(q, p.Dv), lse = empty_lse(q);
  p.out = view4(out);
  p.lse = lse.data_ptr();
  Backend::attention_fwd(p, q);
  return {out, lse};
}

}  // namespace mha::torch_layer
