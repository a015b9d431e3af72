"""SelfAttention and CrossAttention against plain torch code."""

from __future__ import annotations

import warnings

import cases
import oracle
import pytest
import torch
import torch.nn.functional as F

from mha_ext import masks, nn


def randn(*shape, dtype=torch.float64, seed=0, grad=False):
    return cases.randn(cases.generator(seed), *shape, dtype=dtype).requires_grad_(grad)

def rotate(x, positions, base):
    """Rotary embedding, half-split, one pair of features at a time."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for d in range(half):
        angle = positions.to(x.dtype) * base ** (-2 * d / x.shape[-1])
        a, b = x[..., d], x[..., d + half]
        out[..., d] = a * torch.cos(angle) - b * torch.sin(angle)
        out[..., d + half] = b * torch.cos(angle) + a * torch.sin(angle)
    return out


def plain(module, x, context=None, *, causal=False, window=None, rope_base=None, mask=None, bias=None):
    """What the module's documentation says, in plain torch code and with its parameters."""
    D, H, Hk = module.head_dim, module.num_heads, module.num_kv_heads
    B, Sq = x.shape[:2]
    if context is None:
        rows = F.linear(x, module.qkv_proj.weight, module.qkv_proj.bias).view(B, Sq, H + 2 * Hk, D).transpose(1, 2)
        q, k, v = rows[:, :H], rows[:, H : H + Hk], rows[:, H + Hk :]
    else:
        q = F.linear(x, module.q_proj.weight, module.q_proj.bias).view(B, Sq, H, D).transpose(1, 2)
        rows = F.linear(context, module.kv_proj.weight, module.kv_proj.bias).view(B, -1, 2 * Hk, D).transpose(1, 2)
        k, v = rows[:, :Hk], rows[:, Hk:]
    if module.q_norm is not None:
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + torch.finfo(q.dtype).eps) * module.q_norm.weight
        k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + torch.finfo(k.dtype).eps) * module.k_norm.weight
    if rope_base is not None:
        q, k = rotate(q, torch.arange(Sq), rope_base), rotate(k, torch.arange(Sq), rope_base)
    Sk = k.shape[2]
    i, j = torch.arange(Sq)[:, None] + Sk - Sq, torch.arange(Sk)
    seen = torch.ones(Sq, Sk, dtype=torch.bool)
    if causal:
        seen &= j <= i
    if window is not None:
        left, right = window
        seen &= (j >= i - left if left is not None else True) & (j <= i + right if right is not None else True)
    seen = seen if mask is None else seen & mask
    out, _, _ = oracle.attention(q, k, v, seen=seen, bias=bias, softcap=module.softcap)
    return F.linear(out.transpose(1, 2).reshape(B, Sq, H * D), module.out_proj.weight, module.out_proj.bias)


SELF = [
    ({}, {}),
    ({"num_kv_heads": 2}, {}),
    ({"num_kv_heads": 1, "bias": False}, {}),
    ({"head_dim": 10}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window": 2}, {"window": (2, 2)}),
    ({"window": (3, 1)}, {"window": (3, 1)}),
    ({"window": (3, None)}, {"window": (3, None)}),
    ({"window": 2, "causal": True}, {"window": (2, None), "causal": True}),
    ({"rope": True}, {"rope_base": 10000.0}),
    ({"rope": True, "rope_base": 100.0, "causal": True, "head_dim": 8}, {"rope_base": 100.0, "causal": True}),
    ({"qk_norm": True}, {}),
    ({"qk_norm": True, "rope": True, "num_kv_heads": 2, "causal": True, "window": 4, "softcap": 3.0}, {"rope_base": 10000.0, "causal": True, "window": (4, None)}),
]  # fmt: skip


def compare_with_plain(module, inputs, **says):
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    leaves = [t.requires_grad_() for t in inputs] + list(module.parameters())
    options = {name: says.pop(name) for name in ("mask", "bias") if name in says}
    actual, expected = module(*inputs, **options), plain(module, *inputs, **says, **options)
    torch.testing.assert_close(actual, expected)
    weight = torch.randn_like(actual)
    for a, b in zip(torch.autograd.grad(actual, leaves, weight), torch.autograd.grad(expected, leaves, weight)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options,says", SELF, ids=lambda o: str(o))
def test_self_attention(options, says):
    torch.manual_seed(0)
    module = nn.SelfAttention(16, 4, dtype=torch.float64, **options)
    compare_with_plain(module, [randn(2, 9, 16)], **says)
    compare_with_plain(
        module, [randn(2, 9, 16)], mask=torch.rand(2, 1, 9, 9) < 0.7, bias=randn(1, 4, 9, 9, seed=2), **says
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"context_dim": 10}, {"num_kv_heads": 2, "qk_norm": True}, {"head_dim": 6, "bias": False}, {"softcap": 2.0}],
    ids=str,
)
def test_cross_attention(options):
    torch.manual_seed(0)
    module = nn.CrossAttention(16, 4, dtype=torch.float64, **options)
    x, context = randn(2, 5, 16), randn(2, 9, options.get("context_dim", 16), seed=1)
    compare_with_plain(module, [x, context])
    compare_with_plain(module, [x, context], mask=torch.rand(2, 1, 5, 9) < 0.7)


def test_self_attention_takes_mask_objects():
    module = nn.SelfAttention(16, 4, causal=True, dtype=torch.float64)
    x, lengths = randn(2, 9, 16), torch.tensor([9, 4])
    dense = (torch.arange(9) < lengths[:, None])[:, None, None]
    torch.testing.assert_close(module(x, masks.Padding(lengths)), module(x, dense))
    torch.testing.assert_close(module(x, masks.Padding(lengths)), plain(module, x, causal=True, mask=dense))


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_modules_in_training_with_dropout_and_under_autocast(kind):
    module = (nn.SelfAttention if kind == "self" else nn.CrossAttention)(16, 4, dropout=0.5, qk_norm=True)
    inputs = [torch.randn(2, 9, 16) for _ in range(1 + (kind == "cross"))]
    torch.manual_seed(0)
    a = module(*inputs)
    assert not torch.equal(a, module(*inputs))
    torch.manual_seed(0)
    assert torch.equal(a, module(*inputs))
    module.eval()
    assert torch.equal(module(*inputs), module(*inputs))
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.set_warn_always(True)  # else some come once in a process
        out = module(*inputs)
        out.float().sum().backward()
        torch.set_warn_always(False)
    assert out.dtype == torch.bfloat16 and all(
        p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters()
    )
