// THE contract between the torch layer and the kernels: plain structs of pointers, sizes and strides (in elements).
// No torch, no CUDA. Letters: B batch, H query heads, Hk key/value heads (H % Hk == 0, query head h reads key/value
// head h / (H/Hk)), Sq/Sk query/key lengths, D query/key head size, Dv value head size. Any size may be 0.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "mask.h"
#include "philox.h"

namespace mha {

// A 4-d tensor read or written through strides. The last stride is 1 unless the comment at the member says otherwise.
struct Tensor4 {
  void* data = nullptr;  // null: absent
  int64_t stride[4] = {0, 0, 0, 0};
};

// Scores are softcap(scale * q.k) + bias, masked, then softmax, then dropout. softcap(x) = c * tanh(x / c); c == 0:
// none. With sinks, exp(sinks[h]) joins each softmax denominator of head h, so that its weights sum to less than 1. A
// row that sees no key: out 0, lse -inf (sinks[h] with sinks), weights 0, no contribution to any gradient but the
// sink's. A (query, key) pair that the mask hides contributes nothing anywhere, even when its key, value, query or
// output gradient holds NaN or Inf.
struct AttentionProblem {
  int64_t B = 0, H = 0, Hk = 0, Sq = 0, Sk = 0, D = 0, Dv = 0;
  DType dtype = DType::f32;       // of q, k, v, out, weights and their gradients
  Tensor4 q;                      // [B,H,Sq,D]
  Tensor4 k;                      // [B,Hk,Sk,D]
  Tensor4 v;                      // [B,Hk,Sk,Dv]
  Tensor4 bias;                   // [B,H,Sq,Sk], any strides, 0 broadcasts
  bool bias_relative = false;     // bias depends on j - i alone: stride[2] == -1, stride[3] == 1
  DType bias_dtype = DType::f32;  // dtype, or the accumulate type
  Mask mask;
  double scale = 1, softcap = 0;
  Dropout dropout;
  const void* sinks = nullptr;  // [H] contiguous, accumulate type; null: none

  // Packed sequences: q, out and their gradients are [1,H,T,..], k, v and theirs [1,Hk,T,..] with stride[0] == 0;
  // sequence b has the rows q_starts[b] <= t < q_starts[b+1] of q and k_starts[b] <= t < k_starts[b+1] of k. Sq and Sk
  // are the longest lengths (or more), and where mask and bias say Sq - Sk, a sequence's own lengths are meant: its
  // band moves by sequence_shift, and so does a relative bias. On the CPU, kernels see one sequence at a time as a
  // problem of B = 1 (csrc/cpu/tile/sequence.h).
  const int64_t* q_starts = nullptr;  // [B+1]; null: not packed
  const int64_t* k_starts = nullptr;  // [B+1]
  int64_t packed_keys = 0;            // the T of k and v; that of q is rows_stride_h
  // Strides of lse, lse_rest and dlse, [B,H,Sq] with last stride 1; packed: [H,T].
  int64_t rows_stride_b = 0, rows_stride_h = 0;
};

MHA_HD inline int64_t sequence_shift(const AttentionProblem& p, int64_t num_queries, int64_t num_keys) {
  return (num_keys - num_queries) - (p.Sk - p.Sq);
}

// How a cache holds keys and values. By default, as other tensors are held.
struct KeyValueStore {
  // Pages: k and v are [pages,Hk,page_size,D] and [pages,Hk,page_size,Dv]; key j of sequence b is row j % page_size of
  // page table[b * table_stride_b + j / page_size]. Sk is a multiple of page_size. Entries for keys that nothing sees
  // are not read.
  const int64_t* table = nullptr;  // null: not paged
  int64_t table_stride_b = 0, page_size = 0, pages = 0;
  // Quantised: elements of `type`, e4m3 or i8, times the head's scale, or times that of the head's key.
  bool quantised = false, scale_per_key = false;
  DType type = DType::i8;
  const float *k_scale = nullptr,
              *v_scale = nullptr;                  // [B,Hk], or [B,Hk,Sk] or [pages,Hk,page_size] with last stride 1
  int64_t scale_stride_b = 0, scale_stride_h = 0;  // of the first dimension and of the heads
};

struct AttentionForward : AttentionProblem {
  KeyValueStore store;
  DType kv_type() const { return store.quantised ? store.type : dtype; }

  Tensor4 out;  // [B,H,Sq,Dv]
  void* lse =
      nullptr;  // [B,H,Sq] by rows_stride, accumulate type: natural log of the softmax denominator (before dropout)
  // Like lse, or null: what rounding took from it, so that lse + lse_rest is exact. Backward needs it where scores are
  // huge (a bias of -1e9 or less on every visible key): there the rounded lse alone has lost the logarithm of the sum.
  void* lse_rest = nullptr;
  Tensor4 weights;  // [B,H,Sq,Sk] contiguous, after dropout; absent unless asked for. Every element is written
};

struct AttentionBackward : AttentionProblem {
  Tensor4 dout;                    // [B,H,Sq,Dv]
  Tensor4 out;                     // [B,H,Sq,Dv]
  const void* lse = nullptr;       // [B,H,Sq] by rows_stride, as forward wrote it
  const void* lse_rest = nullptr;  // likewise; null: 0
  const void* dlse = nullptr;  // [B,H,Sq] by rows_stride, accumulate type, or null: gradient of lse (the torch layer
                               // also folds -rowsum(weights * dweights) into it)
  Tensor4 dweights;            // [B,H,Sq,Sk] any strides, dtype; gradient of the weights, or absent
  Tensor4 dq;                  // [B,H,Sq,D]   every element is written
  Tensor4 dk;                  // [B,Hk,Sk,D]
  Tensor4 dv;                  // [B,Hk,Sk,Dv]
  bool deterministic = true;   // CUDA: no sums in a changing order. The CPU has none
  Tensor4 dbias;  // accumulate type, dense over the dimensions that bias does not broadcast, stride 0 over the
                  // others (sums over them, in a fixed order); relative where bias is. Absent unless asked for.
                  // Starts out zeroed
  void* dsinks = nullptr;  // [H] contiguous, accumulate type; null unless there are sinks. Starts out zeroed
};

// Talking heads: the heads are mixed before the softmax, new[g] = sum over h of old[h] * pre_mix[h][g], after the soft
// cap and before bias and mask, and after it, the same with post_mix and the weights, before dropout. From bias to
// sinks and lse, a head is then a mixed one; a (query, key) pair contributes nothing where it is hidden from all heads.
struct AttentionMixedForward : AttentionForward {
  const void *pre_mix = nullptr, *post_mix = nullptr;  // [H,H] contiguous, accumulate type; null: none
};

// out is not read, and delta is worked out from the keys: dlse is the gradient of lse alone.
struct AttentionMixedBackward : AttentionBackward {
  const void *pre_mix = nullptr, *post_mix = nullptr;
  void *dpre_mix = nullptr, *dpost_mix = nullptr;  // [H,H] contiguous, accumulate type; start out zeroed; null: none
};

// Softmax over the last dimension of scores * scale + bias, masked; then dropout.
struct MaskedSoftmaxProblem {
  int64_t B = 0, H = 0, Sq = 0, Sk = 0;
  DType dtype = DType::f32;  // of scores, out and their gradients
  Tensor4 scores;            // [B,H,Sq,Sk] any strides
  Tensor4 bias;              // [B,H,Sq,Sk] any strides, 0 broadcasts
  DType bias_dtype = DType::f32;
  Mask mask;
  double scale = 1;
  Dropout dropout;
};

struct MaskedSoftmaxForward : MaskedSoftmaxProblem {
  Tensor4 out;          // [B,H,Sq,Sk] last stride 1; every element is written
  void* lse = nullptr;  // [B,H,Sq] contiguous, accumulate type
};

struct MaskedSoftmaxBackward : MaskedSoftmaxProblem {
  Tensor4 dout;               // [B,H,Sq,Sk] any strides
  const void* lse = nullptr;  // as forward wrote it
  Tensor4 dscores;            // [B,H,Sq,Sk] last stride 1; every element is written
  Tensor4 dbias;              // as in AttentionBackward
};

// [B,S,H*D] -> [B,H,S,D]: out[b,h,s,d] = in[b,s,h*D+d] (+ bias[h*D+d])
struct SplitHeads {
  int64_t B = 0, H = 0, S = 0, D = 0;
  DType dtype = DType::f32;
  Tensor4 in;                  // viewed as [B,H,S,D]: in.stride[1] == D * in.stride[3]; any strides
  Tensor4 out;                 // [B,H,S,D] contiguous
  const void* bias = nullptr;  // [H*D] contiguous, or null
};

// [B,H,S,D] -> [B,S,H*D]: out[b,s,g*D+d] = sum_h in[b,h,s,d] * mix[h,g]; without mix, in[b,g,s,d]
struct MergeHeads {
  int64_t B = 0, H = 0, S = 0, D = 0;
  DType dtype = DType::f32;
  Tensor4 in;                 // [B,H,S,D] any strides
  Tensor4 out;                // [B,S,H*D] contiguous, viewed as [B,H,S,D]
  const void* mix = nullptr;  // [H,H] contiguous, or null
};

// out[b,h,i,j] = 1 where dropout keeps the weight
struct DropoutMask {
  int64_t B = 0, H = 0, Sq = 0, Sk = 0;
  Dropout dropout;
  uint8_t* out = nullptr;  // [B,H,Sq,Sk] contiguous
};

}  // namespace mha
