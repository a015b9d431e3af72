"""What a type checker says of the public functions. Checked by tests/package/test_typing.py, never run."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import mha_ext
from mha_ext import masks, nn
from mha_ext.distributed import ring_attention


def functions(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, wanted: bool) -> None:
    assert_type(mha_ext.attention(q, k, v, mask=masks.Causal() & masks.Window(3, 0), dropout_p=0.1), Tensor)
    assert_type(mha_ext.attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    assert_type(mha_ext.attention(q, k, v, return_weights=True), tuple[Tensor, Tensor])
    assert_type(mha_ext.attention(q, k, v, return_lse=True, return_weights=True), tuple[Tensor, Tensor, Tensor])
    assert_type(mha_ext.attention(q, k, v, return_lse=wanted), Tensor | tuple[Tensor, ...])
    assert_type(mha_ext.attention_varlen(q, k, v, starts, starts, max_seqlen_q=4), Tensor)
    assert_type(mha_ext.attention_varlen(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    assert_type(mha_ext.attention_qkvpacked(q, 4, sinks=k), Tensor)
    assert_type(mha_ext.attention_qkvpacked(q, return_lse=True, return_weights=True), tuple[Tensor, Tensor, Tensor])
    assert_type(mha_ext.attention_cached(q, k, v, block_table=starts), Tensor)
    assert_type(mha_ext.attention_cached(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    assert_type(mha_ext.reference.attention(q, k, v, bias=mha_ext.biases.ALiBi(q)), Tensor)
    assert_type(ring_attention(q, k, v, layout="zigzag"), Tensor)
    assert_type(ring_attention(q, k, v, None, return_lse=True), tuple[Tensor, Tensor])
    assert_type(mha_ext.scaled_dot_product_attention(q, k, v, is_causal=True), Tensor)
    assert_type(mha_ext.masked_softmax(q), Tensor)
    assert_type(mha_ext.merge_heads(mha_ext.split_heads(q, 4)), Tensor)
    assert_type(mha_ext.merge_partials([q], [k]), tuple[Tensor, Tensor])
    assert_type(mha_ext.dropout_mask(starts, 0.1, 1, 1, 4, 4, "cpu"), Tensor)
    assert_type(mha_ext.explain(q, k, v).flops, int)


def modules(x: Tensor) -> None:
    layer = nn.SelfAttention(64, 4, num_kv_heads=2, rope=True, window=(8, None), dtype=torch.bfloat16)
    assert_type(layer.forward(x, masks.Padding(x)), Tensor)
    assert_type(layer.forward(x, return_weights=True), tuple[Tensor, Tensor])
    assert_type(layer.make_cache(2, 128), nn.KVCache)
    assert_type(nn.MultiheadAttention(64, 4).forward(x, x, x), tuple[Tensor, Tensor | None])
    report = mha_ext.swap_attention(layer)
    assert_type(report.replaced, dict[str, str])
    kept: dict[str, Any] = report.kept
    assert kept is not None


def refused(q: Tensor, k: Tensor, v: Tensor) -> None:
    mha_ext.attention(q, k, v, dropout=0.1)  # wrong
    mha_ext.attention(q, k, v, mask="causal")  # wrong
    mha_ext.attention(q, k, v, 0.5)  # wrong
    mha_ext.attention_varlen(q, k, v, return_weights=True)  # wrong
    mha_ext.attention_cached(q, k, v, dropout_p=0.1)  # wrong
    masks.Causal() & "padding"  # wrong
    nn.SelfAttention(64, heads=4)  # wrong
