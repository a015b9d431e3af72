"""split_heads and merge_heads: bit by bit what reshape and transpose give; with bias and head mix against fp64."""

from __future__ import annotations

import cases
import oracle
import pytest
import torch

import mha_ext

SIZES = [
    (2, 5, 3, 8),
    (1, 1, 1, 1),
    (3, 33, 4, 17),
    (2, 64, 12, 64),
    (1, 129, 2, 59),
    (2, 7, 1, 257),
    (70000, 1, 1, 2),
]  # B,S,H,D


def variants(x):
    """The same values in several memory layouts."""
    yield x.contiguous()
    yield cases.surrounded(x)
    yield cases.surrounded(x, tuple(reversed(range(x.dim()))))
    yield cases.surrounded(x, last_step=2)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("B,S,H,D", SIZES)
def test_split_is_reshape_and_transpose(B, S, H, D, dtype, device):
    x = cases.randn(cases.generator(1), B, S, H * D, dtype=dtype).to(device)
    expected = x.view(B, S, H, D).transpose(1, 2)
    for view in variants(x):
        leaf = view.detach().requires_grad_()
        out = mha_ext.split_heads(leaf, H)
        assert out.is_contiguous() and torch.equal(out, expected)
        g = cases.surrounded(cases.randn(cases.generator(2), *out.shape, dtype=dtype).to(device), (0, 2, 1, 3))
        (grad,) = torch.autograd.grad(out, leaf, g)
        assert torch.equal(grad, g.transpose(1, 2).reshape(B, S, H * D))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("B,S,H,D", SIZES)
def test_merge_is_transpose_and_reshape(B, S, H, D, dtype, device):
    x = cases.randn(cases.generator(1), B, H, S, D, dtype=dtype).to(device)
    expected = x.transpose(1, 2).reshape(B, S, H * D)
    for view in variants(x):
        leaf = view.detach().requires_grad_()
        out = mha_ext.merge_heads(leaf)
        assert out.is_contiguous() and torch.equal(out, expected)
        g = cases.surrounded(cases.randn(cases.generator(2), *out.shape, dtype=dtype).to(device))
        (grad,) = torch.autograd.grad(out, leaf, g)
        assert torch.equal(grad, g.reshape(B, S, H, D).transpose(1, 2))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("B,S,H,D", SIZES)
def test_split_with_bias(B, S, H, D, dtype, device):
    gen = cases.generator(3)
    x = cases.randn(gen, B, S, H * D, dtype=dtype).to(device).requires_grad_()
    bias = cases.randn(gen, H * D, dtype=dtype).to(device).requires_grad_()
    g = cases.randn(gen, B, H, S, D, dtype=dtype).to(device)
    out = mha_ext.split_heads(x, H, bias)
    grads = torch.autograd.grad(out, [x, bias], g)

    def other(kind):
        lx, lb = (t.detach().to(kind).requires_grad_() for t in (x, bias))
        y = (lx + lb).view(B, S, H, D).transpose(1, 2)
        return y, torch.autograd.grad(y, [lx, lb], g.to(kind))

    exact, exact_grads = other(torch.float64)
    rival, rival_grads = other(dtype)
    oracle.compare("out", out, exact, rival)
    assert torch.equal(grads[0], rival_grads[0])
    terms = g.double().abs().transpose(1, 2).reshape(B * S, H * D).sum(0)
    oracle.compare("dbias", grads[1], exact_grads[1], rival_grads[1], oracle.GRADIENT, terms)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("B,S,H,D", SIZES)
def test_merge_with_head_mix(B, S, H, D, dtype, device):
    """new[g] = sum_h old[h] * mix[h, g]: the mix here is not symmetric, so that its transpose would show."""
    gen = cases.generator(4)
    x = cases.surrounded(cases.randn(gen, B, H, S, D, dtype=dtype).to(device), (0, 2, 1, 3)).requires_grad_()
    mix = cases.surrounded(cases.randn(gen, H, H, dtype=dtype).to(device), (1, 0)).requires_grad_()
    g = cases.randn(gen, B, S, H * D, dtype=dtype).to(device)
    out = mha_ext.merge_heads(x, mix)
    grads = torch.autograd.grad(out, [x, mix], g)

    def other(kind):
        lx, lm = (t.detach().to(kind).requires_grad_() for t in (x, mix))
        y = torch.einsum("bhsd,hg->bsgd", lx, lm).reshape(B, S, H * D)
        return y, torch.autograd.grad(y, [lx, lm], g.to(kind))

    exact, exact_grads = other(torch.float64)
    rival, rival_grads = other(dtype)
    a, m, dg = x.detach().double().abs(), mix.detach().double().abs(), g.double().abs().view(B, S, H, D)
    oracle.compare("out", out, exact, rival, magnitude=torch.einsum("bhsd,hg->bsgd", a, m).reshape(B, S, H * D))
    oracle.compare(
        "dx", grads[0], exact_grads[0], rival_grads[0], oracle.GRADIENT, torch.einsum("bsgd,hg->bhsd", dg, m)
    )
    oracle.compare(
        "dmix", grads[1], exact_grads[1], rival_grads[1], oracle.GRADIENT, torch.einsum("bhsd,bsgd->hg", a, dg)
    )


def test_round_trip(device):
    x = torch.randn(2, 9, 12, device=device)
    assert torch.equal(mha_ext.merge_heads(mha_ext.split_heads(x, 3)), x)


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0)], ids=str)
def test_zero_sizes(shape, device):
    B, S, C = shape
    x = torch.randn(shape, device=device, requires_grad=True)
    bias = torch.randn(C, device=device, requires_grad=True)
    out = mha_ext.split_heads(x, 2, bias)
    assert out.shape == (B, 2, S, C // 2)
    grads = torch.autograd.grad(out.sum(), [x, bias])
    assert grads[0].shape == shape and grads[1].shape == (C,) and not grads[1].any()
    y = torch.randn(B, 2, S, C // 2, device=device, requires_grad=True)
    mix = torch.randn(2, 2, device=device, requires_grad=True)
    merged = mha_ext.merge_heads(y, mix)
    assert merged.shape == shape
    grads = torch.autograd.grad(merged.sum(), [y, mix])
    assert grads[0].shape == y.shape and not grads[1].any()
