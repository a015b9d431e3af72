"""torch's nested (jagged) tensors in and out of attention and the modules: what packed sequences give, with gradients."""

from __future__ import annotations

import cases
import pytest
import torch
import torch.nn.functional as F
from test_refusals import refusal

import mha_ext
from mha_ext import biases, masks

LENGTHS_Q, LENGTHS_K = [3, 70, 1, 20], [5, 70, 2, 9]


def jagged(lengths, *rest, seed=0):
    gen = torch.Generator().manual_seed(seed)
    values = cases.randn(gen, sum(lengths), *rest).requires_grad_()
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return values, torch.nested.nested_tensor_from_jagged(values, offsets)


def qkv():
    shapes = (LENGTHS_Q, 4, 16), (LENGTHS_K, 2, 16), (LENGTHS_K, 2, 8)
    values, q = jagged(*shapes[0])
    k_values, k = jagged(*shapes[1], seed=1)
    v_values, _ = jagged(*shapes[2], seed=2)
    v = torch.nested.nested_tensor_from_jagged(v_values, k.offsets())
    return (values, k_values, v_values), (q, k, v)


@pytest.mark.parametrize("how", ["varlen", "attention", "sdpa"])
def test_is_what_packed_sequences_give(how):
    leaves, nested = qkv()
    starts = [t.offsets() for t in nested[:2]]
    mask = masks.Causal("top_left")
    if how == "varlen":
        out, lse = mha_ext.attention_varlen(*nested, mask=mask, return_lse=True)
        assert out.shape[0] == 4 and out.shape[1] == nested[0].shape[1] and out.shape[2:] == (4, 8)
        values, lse = out.values(), lse.values()
    elif how == "attention":
        out, lse = mha_ext.attention(*(t.transpose(1, 2) for t in nested), mask=mask, return_lse=True)
        assert out.shape[2] == nested[0].shape[1] and lse.shape[:2] == (4, 4)
        values, lse = out.transpose(1, 2).values(), lse.transpose(1, 2).values()
    else:
        out = mha_ext.scaled_dot_product_attention(*(t.transpose(1, 2) for t in nested), is_causal=True, enable_gqa=True)
        values, lse = out.transpose(1, 2).values(), None
    assert out.is_nested and out.layout == torch.jagged
    expected, expected_lse = mha_ext.attention_varlen(*leaves, *starts, mask=mask, return_lse=True)
    assert torch.equal(values, expected) and (lse is None or torch.equal(lse, expected_lse.t()))
    dout = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(x, leaves, dout) for x in (values, expected))):
        assert torch.equal(a, b)


def test_agrees_with_torch():
    _, q = jagged(LENGTHS_Q, 4, 16)
    x = q.detach().transpose(1, 2)
    for causal in (False, True):
        ours = mha_ext.scaled_dot_product_attention(x, x, x, is_causal=causal)
        theirs = [F.scaled_dot_product_attention(*[t.transpose(0, 1)] * 3, is_causal=causal) for t in q.detach().unbind()]
        for a, b in zip(ours.unbind(), theirs):
            torch.testing.assert_close(a, b)


def test_options_and_tensors_with_holes():
    leaves, nested = qkv()
    slopes, sinks = torch.rand(4), torch.randn(4)
    options = {"bias": biases.ALiBi(slopes), "sinks": sinks, "softcap": 4.0, "dropout_p": 0.2, "rng_state": torch.tensor([1, 2])}
    out = mha_ext.attention(*(t.transpose(1, 2) for t in nested), **options)
    expected = mha_ext.attention_varlen(*leaves, *(t.offsets() for t in nested[:2]), **options)
    assert torch.equal(out.transpose(1, 2).values(), expected)
    dense, lengths = torch.randn(3, 6, 2, 8), torch.tensor([2, 0, 6])
    dense[0, 2:] = dense[1] = torch.nan
    holes = torch.nested.narrow(dense, 1, torch.zeros(3, dtype=torch.int64), lengths, layout=torch.jagged)
    out = mha_ext.attention_varlen(holes, holes, holes)
    assert torch.isfinite(out.values()).all() and [len(t) for t in out.unbind()] == lengths.tolist()


@pytest.mark.parametrize("options", [{}, {"causal": True, "num_kv_heads": 2, "window": 9}, {"packed": False}, {"qk_norm": True}], ids=str)
def test_self_attention(options):
    """A nested batch gives what its sequences give alone."""
    module = mha_ext.nn.SelfAttention(32, 4, **options)
    values, x = jagged(LENGTHS_Q, 32)
    out = module(x)
    assert out.is_nested and out.shape == x.shape
    expected = torch.cat([module(t[None])[0] for t in values.split(LENGTHS_Q)])
    torch.testing.assert_close(out.values(), expected)
    leaves = [values, *module.parameters()]
    for a, b in zip(*(torch.autograd.grad(t.square().sum(), leaves) for t in (out.values(), expected))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_cross_attention():
    module = mha_ext.nn.CrossAttention(32, 4, context_dim=12)
    (values, x), (context_values, context) = jagged(LENGTHS_Q, 32), jagged(LENGTHS_K, 12)
    out = module(x, context)
    pairs = zip(values.split(LENGTHS_Q), context_values.split(LENGTHS_K))
    torch.testing.assert_close(out.values(), torch.cat([module(a[None], b[None])[0] for a, b in pairs]))


@pytest.mark.parametrize("need_weights", [False])
def test_multihead_attention(need_weights):
    torch.manual_seed(1)
    ours, theirs = mha_ext.nn.MultiheadAttention(32, 4, batch_first=True), torch.nn.MultiheadAttention(32, 4, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    (values, x), (key_values, key) = jagged(LENGTHS_Q, 32), jagged(LENGTHS_K, 32, seed=3)
    for query_and_keys, sequences in (((x, x, x), zip(*[values.split(LENGTHS_Q)] * 2)), ((x, key, key), zip(values.split(LENGTHS_Q), key_values.split(LENGTHS_K)))):
        out, weights = ours(*query_and_keys, need_weights=need_weights)
        assert weights is None and out.is_nested and out.layout == torch.jagged
        expected = torch.cat([theirs(a[None], b[None], b[None], need_weights=False)[0][0] for a, b in sequences])
        torch.testing.assert_close(out.values(), expected)
        (grad,), (expected_grad,) = (torch.autograd.grad(t.sum(), values) for t in (out.values(), expected))
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)


def test_refusals():
    _, (q, k, v) = qkv()
    a, b, c = (t.transpose(1, 2) for t in (q, k, v))
    refusal(lambda: mha_ext.attention(q, k, v), "nested tensor of shape", "transpose", kind=ValueError)
    refusal(lambda: mha_ext.attention_varlen(a, b, c), "nested tensor of shape", "[N,j,H,D]", kind=ValueError)
    refusal(lambda: mha_ext.attention_varlen(q, k, v, q.offsets(), k.offsets()), "cu_seqlens", kind=ValueError)
    refusal(lambda: mha_ext.attention_varlen(q, k.values(), v), "k is a float32 tensor of shape", "nested", kind=TypeError)
    refusal(lambda: mha_ext.attention(a, b, c, return_weights=True), "return_weights", kind=ValueError)
    refusal(lambda: mha_ext.attention_varlen(q, k, q), "k and v", "lengths", kind=ValueError)
    mask = torch.ones(70, 70, dtype=torch.bool)
    refusal(lambda: mha_ext.scaled_dot_product_attention(a, a, a, mask), "attn_mask", "is_causal", kind=ValueError)
    refusal(lambda: mha_ext.scaled_dot_product_attention(a, b, c), "4 heads", "enable_gqa", kind=ValueError)
    strided = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(2, 2, 8)])
    refusal(lambda: mha_ext.attention_varlen(strided, strided, strided), "torch.strided", "jagged", kind=TypeError)
    x = jagged(LENGTHS_Q, 32)[1]
    rotary = mha_ext.nn.SelfAttention(32, 4, rope=True)
    refusal(lambda: rotary(x), "nested", "rope", kind=ValueError)
    module = mha_ext.nn.MultiheadAttention(32, 4)
    refusal(lambda: module(x, x, x, need_weights=False), "nested", "batch_first", kind=ValueError)
    module, padded = mha_ext.nn.MultiheadAttention(32, 4, batch_first=True), x.to_padded_tensor(0.0)
    for given in (x, padded, torch.nested.as_nested_tensor([*padded])):
        hint = lambda given=given: module(given, given, given, need_weights=False, is_causal=True)
        refusal(hint, "is_causal was given without attn_mask", kind=RuntimeError)
