"""return_weights of the modules: the weights that made the output, or one sentence."""

from __future__ import annotations

import pytest
import torch
from test_refusals import refusal

from mha_ext import masks, nn

B, S, E, H = 2, 9, 32, 4
KINDS = {
    "packed": {},
    "unpacked": {"packed": False},
    "grouped, causal": {"num_kv_heads": 2, "causal": True, "window": 3},
    "rope": {"rope": True, "qk_norm": True},
    "dropout": {"dropout": 0.5},
    "talking heads": {"talking_heads": True, "head_communication": True},
    "sinks": {"sinks": True},
}


def made_by(layer, weights, values):
    """The output that weights [B,H,Sq,Sk] make of values [B,Hk,Sk,D]."""
    out = weights @ values.repeat_interleave(H // values.shape[1], 1)
    if layer.head_mix is not None:
        out = torch.einsum("bhsd,hg->bgsd", out, layer.head_mix)
    return layer.out_proj(out.transpose(1, 2).flatten(2))


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_self_attention(kind):
    layer = nn.SelfAttention(E, H, **KINDS[kind])
    for name in ("pre_mix", "post_mix", "head_mix", "sinks"):
        if getattr(layer, name) is not None:
            torch.nn.init.normal_(getattr(layer, name))
    x = torch.randn(B, S, E)
    mask = masks.Padding(torch.tensor([S, 4]))
    out, weights = layer(x, mask, return_weights=True)
    assert weights.shape == (B, H, S, S) and not weights[1, ..., 4:].any()
    close(out, made_by(layer, weights, layer._project(x)[2]))
    if kind == "dropout":
        assert 0.3 < (weights[0] == 0).float().mean() < 0.7
        layer.eval()
        out, weights = layer(x, mask, return_weights=True)
    close(layer(x, mask), out)
    assert isinstance(layer(x, mask, return_weights=False), torch.Tensor)
    if kind not in ("sinks", "talking heads"):
        close(weights.sum(-1), weights.any(-1).float())
        assert weights[0].any(-1).all()
    grads = torch.autograd.grad(weights.square().sum(), [p for n, p in layer.named_parameters() if "q" in n])
    assert all(g.isfinite().all() for g in grads) and any(g.any() for g in grads)


def test_cross_attention():
    layer = nn.CrossAttention(E, H, num_kv_heads=2, window=(4, 2))
    x, context, positions = torch.randn(B, S, E), torch.randn(B, 12, E), torch.arange(S) + 1
    out, weights = layer(x, context, return_weights=True)
    assert weights.shape == (B, H, S, 12)
    projected = layer.project(context)
    close(out, made_by(layer, weights, projected.v))
    at, weights_at = layer(x, projected, positions=positions, return_weights=True)
    close(at, made_by(layer, weights_at, projected.v))
    close(at, layer(x, projected, positions=positions))
    seen = (torch.arange(12) >= positions[:, None] - 4) & (torch.arange(12) <= positions[:, None] + 2)
    assert torch.equal(weights_at != 0, seen.expand(B, H, S, 12)) and not torch.equal(weights != 0, weights_at != 0)
    plain = nn.CrossAttention(E, H)
    out, weights = plain(x, plain.project(context), return_weights=True)
    close(out, made_by(plain, weights, plain.project(context).v))


@torch.no_grad()
def test_refusals():
    layer, x = nn.SelfAttention(E, H, causal=True).eval(), torch.randn(B, S, E)
    for options in ({}, {"page_size": 8}, {"dtype": torch.int8}):
        cache = layer.make_cache(B, 16, **options)
        refusal(lambda cache=cache: layer(x, cache=cache, return_weights=True), "return_weights", "without a cache", kind=ValueError)
        assert cache.lengths.tolist() == [0, 0]
    jagged = torch.nested.nested_tensor([torch.randn(3, E), torch.randn(2, E)], layout=torch.jagged)
    refusal(lambda: layer(jagged, return_weights=True), "return_weights", "nested", kind=ValueError)
    cross = nn.CrossAttention(E, H)
    refusal(lambda: cross(jagged, jagged, return_weights=True), "return_weights", "nested", kind=ValueError)
    for call in (lambda: layer(x, return_weights=1), lambda: cross(x, x, return_weights="yes")):
        refusal(call, "return_weights", "True or False", kind=TypeError)
