"""masked_softmax against torch in fp64: masks, bias, scale, dropout, strides, row lengths."""

from __future__ import annotations

import cases
import oracle
import pytest
import torch

import mha_ext
from mha_ext import masks


def eager(scores, seen, bias, scale, keep, p, dtype):
    s = scores.to(dtype) * scale
    if bias is not None:
        s = s + bias.to(dtype)
    probabilities, _ = oracle.softmax(s, seen)
    return probabilities if keep is None else probabilities * keep * (1 / (1 - p))


def check(scores, *, mask=None, seen=None, bias=None, scale=1.0, p=0.0, rng_state=None):
    """Forward and the gradients of scores and bias."""
    keep = None
    if p:
        keep = mha_ext.dropout_mask(rng_state, p, *scores.shape, scores.device)
    leaves = [scores] + ([bias] if bias is not None else [])
    out = mha_ext.masked_softmax(scores, mask, bias=bias, scale=scale, dropout_p=p, rng_state=rng_state)
    assert out.dtype == scores.dtype and out.shape == scores.shape
    dout = cases.surrounded(cases.randn(cases.generator(9), *out.shape, dtype=out.dtype).to(out.device))
    grads = torch.autograd.grad(out, leaves, dout)

    def other(dtype):
        inner = [t.detach().to(dtype).requires_grad_() for t in leaves]
        result = eager(inner[0], seen, inner[1] if bias is not None else None, scale, keep, p, dtype)
        return result, torch.autograd.grad(result, inner, dout.to(dtype))

    exact, exact_grads = other(torch.float64)
    rival, rival_grads = other(scores.dtype)
    with torch.no_grad():
        row = 1 + abs(scale) * scores.double().abs().amax(-1, keepdim=True) if scores.shape[-1] else 1.0
        row = row + (bias.double().abs().max() if bias is not None else 0)
        terms = exact.abs() * dout.double().abs() * row
        dscores = terms + exact.abs() * terms.sum(-1, keepdim=True)
    truth = oracle.Truth(exact, rival, exact.detach() * row, out.dtype)
    oracle.within_rule("out", out, truth, oracle.FORWARD)
    magnitude = dscores * abs(scale)
    oracle.within_rule(
        "dscores", grads[0], oracle.Truth(exact_grads[0], rival_grads[0], magnitude, out.dtype), oracle.GRADIENT
    )
    if bias is not None:
        magnitude = dscores.sum_to_size((1,) * (4 - bias.dim()) + tuple(bias.shape)).view(bias.shape)
        oracle.within_rule(
            "dbias", grads[1], oracle.Truth(exact_grads[1], rival_grads[1], magnitude, bias.dtype), oracle.GRADIENT
        )
    return out, grads


@pytest.mark.parametrize("c", cases.SWEEP[::2], ids=lambda c: c.id)
def test_over_the_table(c, device):
    gen = cases.generator(c.id)
    scores = cases.randn(gen, c.B, c.H, c.Sq, c.Sk, dtype=c.dtype).to(device)
    order = [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)][len(c.id) % 3]
    scores = cases.surrounded(scores, order, 1 + len(c.id) % 2).requires_grad_()
    mask, seen = cases.build_mask(c.mask, c, gen, device)
    rng_state = torch.tensor([11, 4], device=device) if c.dropout_p else None
    bias = None if c.bias in cases.RELATIVE else cases.build_bias(c.bias, c, gen, device)
    check(scores, mask=mask, seen=seen, bias=bias, scale=c.scale or 1.0, p=c.dropout_p, rng_state=rng_state)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 17, 2047, 4097, 16385, 100001])
def test_row_lengths(length, dtype, device):
    scores = cases.randn(cases.generator(length), 1, 2, 2, length, dtype=dtype).mul(4).to(device).requires_grad_()
    check(scores, scale=0.7)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_any_stride(dtype, device):
    base = cases.randn(cases.generator(1), 2, 3, 34, 70, dtype=dtype).to(device)
    for view in (
        base.transpose(-1, -2),
        base[..., ::2],
        base[:, ::2, 1:, 1:],
        base[:1].expand(4, 3, 34, 70),
        base.permute(3, 1, 2, 0),
    ):
        plain = view.contiguous()
        out = mha_ext.masked_softmax(view, masks.Causal(), scale=0.5)
        assert torch.equal(out, mha_ext.masked_softmax(plain, masks.Causal(), scale=0.5))
        leaf = view.detach().requires_grad_()
        seen = masks.Causal().to_dense(*view.shape).to(device)
        check(leaf, mask=masks.Causal(), seen=seen, scale=0.5)


def test_large_scores_stay_finite(device):
    for dtype in cases.DTYPES:
        big = 60000.0 if dtype == torch.float16 else 1e5
        scores = torch.tensor(
            [[[[big, -big, big, 0.0], [-big, -big, -big, -big]]]], dtype=dtype, device=device
        ).requires_grad_()
        out = mha_ext.masked_softmax(scores, scale=3.0)
        (grad,) = torch.autograd.grad(out[..., 0].sum(), scores)
        expected = torch.tensor([[[[0.5, 0, 0.5, 0], [0.25, 0.25, 0.25, 0.25]]]], dtype=dtype, device=device)
        oracle.compare("out", out, expected, expected)
        assert torch.isfinite(grad).all()


def test_minus_infinity_in_scores_and_bias_hides_like_a_mask(device):
    scores = torch.randn(1, 1, 3, 4, device=device)
    hidden = torch.tensor([[True, False, False, True], [False] * 4, [True] * 4], device=device)
    expected, _ = oracle.softmax(scores.double(), ~hidden)
    for out in (
        mha_ext.masked_softmax(scores.masked_fill(hidden, -torch.inf)),
        mha_ext.masked_softmax(scores, bias=torch.zeros(3, 4, device=device).masked_fill(hidden, -torch.inf)),
    ):
        oracle.compare("out", out, expected, expected.float())
        assert torch.equal(out[0, 0, 2], torch.zeros(4, device=device))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)], ids=str)
def test_zero_sizes(shape, device):
    scores = torch.randn(shape, device=device, requires_grad=True)
    bias = torch.randn(shape[-2:], device=device, requires_grad=True)
    out = mha_ext.masked_softmax(scores, bias=bias)
    grads = torch.autograd.grad(out.sum(), [scores, bias])
    assert out.shape == shape and grads[0].shape == shape and grads[1].shape == bias.shape
    assert not grads[1].any()


def test_nan_in_hidden_scores_has_no_influence(device):
    scores = torch.randn(2, 2, 5, 40, device=device)
    seen = torch.rand(2, 2, 5, 40, device=device) < 0.5
    poisoned = scores.masked_fill(~seen, torch.nan).requires_grad_()
    clean = scores.clone().requires_grad_()
    dout = torch.randn_like(scores)
    results = []
    for s, g in ((poisoned, dout.masked_fill(~seen, torch.nan)), (clean, dout)):
        out = mha_ext.masked_softmax(s, seen)
        results.append((out, *torch.autograd.grad(out, s, g)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_visible_nan_shows(device):
    scores = torch.randn(1, 1, 3, 70, device=device)
    scores[0, 0, 1, 68] = torch.nan
    out = mha_ext.masked_softmax(scores)
    assert out[0, 0, 1].isnan().all() and not out[0, 0, 0].isnan().any() and not out[0, 0, 2].isnan().any()


def test_rank_two_scores(device):
    scores = torch.randn(5, 7, device=device)
    seen = torch.ones(5, 7, dtype=torch.bool, device=device).tril(1)
    assert torch.equal(mha_ext.masked_softmax(scores, seen), mha_ext.masked_softmax(scores[None, None], seen)[0, 0])


def test_output_is_contiguous_and_input_stays(device):
    scores = torch.randn(2, 3, 5, 7, device=device).transpose(-1, -2)
    before = scores.clone()
    assert mha_ext.masked_softmax(scores, masks.Causal()).is_contiguous() and torch.equal(scores, before)
