"""merge_partials: attention over all keys from attentions over parts of them."""

from __future__ import annotations

import itertools

import cases
import oracle
import pytest
import torch

import mha_ext
from mha_ext import masks

B, H, Sq, Sk, D = 2, 3, 17, 41, 8


def tensors(dtype, seed=1):
    gen = cases.generator(seed)
    shapes = (B, H, Sq, D), (B, H, Sk, D), (B, H, Sk, D)
    return [cases.surrounded(cases.randn(gen, *s, dtype=dtype)).requires_grad_() for s in shapes]


def parts_of(q, k, v, bounds, seen=None):
    outs, lses = [], []
    for a, b in itertools.pairwise(bounds):
        mask = None if seen is None else masks.Dense(seen[..., a:b])
        out, lse = mha_ext.attention(q, k[:, :, a:b], v[:, :, a:b], mask=mask, return_lse=True)
        outs.append(out), lses.append(lse)
    return outs, lses


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bounds", [(0, 41), (0, 1, 41), (0, 10, 10, 30, 41), tuple(range(42))], ids=len)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_parts_make_the_whole(dtype, bounds, masked):
    q, k, v = tensors(dtype)
    seen = torch.rand(B, H, Sq, Sk, generator=cases.generator(2)) < 0.3
    seen[:, :, 5] = False
    seen = seen if masked else None
    gen = cases.generator(3)
    dout = cases.randn(gen, B, H, Sq, D, dtype=dtype)
    dlse = cases.randn(gen, B, H, Sq, dtype=oracle.accumulate_dtype(dtype))
    out, lse = mha_ext.merge_partials(*parts_of(q, k, v, bounds, seen))
    assert out.dtype == dtype and lse.dtype == oracle.accumulate_dtype(dtype)
    truth = oracle.truths(q, k, v, dout=dout, dlse=dlse, seen=seen)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse.masked_fill(lse.isinf(), 0)))
    oracle.check({"out": out, "lse": lse, **dict(zip("qkv", grads))}, truth)
    if masked:
        assert (out[:, :, 5] == 0).all() and (lse[:, :, 5] == -torch.inf).all() and (grads[0][:, :, 5] == 0).all()


def test_one_part_is_returned_as_it_is():
    out, lse = torch.randn(2, 3, 5, 8, dtype=torch.bfloat16), torch.randn(2, 3, 5) * 1e9
    merged, merged_lse = mha_ext.merge_partials([out], [lse])
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse)


def test_stacked_parts_are_a_sequence_of_parts():
    outs, lses = torch.randn(4, 2, 5, 8), torch.randn(4, 2, 5)
    for a, b in zip(mha_ext.merge_partials(outs, lses), mha_ext.merge_partials(list(outs), tuple(lses))):
        assert torch.equal(a, b)


def test_huge_logsumexps_keep_their_weights():
    """At 1e9, float32 has steps of 64: exp(lse - merged lse) would be 1 or 0; the weights are still those of the differences."""
    step = 64.0
    lses = [torch.full((3,), 1e9), torch.full((3,), 1e9), torch.tensor([1e9 - step, 1e9, -torch.inf])]
    outs = [torch.full((3, 2), x) for x in (1.0, 2.0, 9.0)]
    out, lse = mha_ext.merge_partials(outs, lses)
    torch.testing.assert_close(out, torch.tensor([1.5, 4.0, 1.5])[:, None].expand(3, 2), rtol=1e-6, atol=0)
    assert (lse == 1e9).all()
    out, lse = mha_ext.merge_partials(outs, [-x if x.isfinite().all() else torch.full((3,), -2e9) for x in lses])
    torch.testing.assert_close(out, torch.full((3, 2), 1.5), rtol=1e-6, atol=0)


def test_rows_that_saw_nothing_are_zero_with_zero_gradients_whatever_they_hold():
    outs = [torch.full((2, 4), float("nan")), torch.ones(2, 4)]
    lses = [torch.full((2,), -torch.inf), torch.tensor([-torch.inf, 1.0])]
    outs[1][0] = torch.inf
    leaves = [x.requires_grad_() for x in outs + lses]
    out, lse = mha_ext.merge_partials(leaves[:2], leaves[2:])
    assert torch.equal(out, torch.tensor([[0.0] * 4, [1.0] * 4])) and lse.tolist() == [-torch.inf, 1.0]
    grads = torch.autograd.grad((out, lse), leaves, (torch.tensor([[float("nan")] * 4, [2.0] * 4]), torch.ones(2)))
    expected = [torch.zeros(2, 4), torch.tensor([[0.0] * 4, [2.0] * 4]), torch.zeros(2), torch.tensor([0.0, 1.0])]
    for grad, other in zip(grads, expected):
        assert torch.equal(grad, other)


def test_gradcheck_twice():
    gen = cases.generator(4)
    outs = [cases.randn(gen, 2, 3, 4, dtype=torch.float64).requires_grad_() for _ in range(3)]
    lses = [cases.randn(gen, 2, 3, dtype=torch.float64).requires_grad_() for _ in range(3)]

    def merged(*leaves):
        return mha_ext.merge_partials(leaves[:3], leaves[3:])

    assert torch.autograd.gradcheck(merged, outs + lses)
    assert torch.autograd.gradgradcheck(merged, outs + lses)


def test_compiled_with_gradients_as_eager(fresh_compiler):
    q, k, v = tensors(torch.float32)
    seen = torch.rand(B, H, Sq, Sk, generator=cases.generator(2)) < 0.3
    seen[:, :, 5] = False

    def loss(q, k, v):
        out, lse = mha_ext.merge_partials(*parts_of(q, k, v, (0, 9, 41), seen))
        return out, lse

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        out, lse = function(q, k, v)
        grads = torch.autograd.grad(out.sum() + lse.masked_fill(lse.isinf(), 0).sum(), (q, k, v))
        results.append((out, lse, *grads))
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager)


OUT, LSE = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 5)


@pytest.mark.parametrize(
    "outs, lses, error, message",
    [
        ([], [], TypeError, "outs hold no part; accepted: a sequence of at least one tensor"),
        (torch.tensor(1.0), LSE, TypeError, "outs hold no part"),
        ([OUT, OUT], [LSE], ValueError, "outs hold 2 parts and lses 1; accepted: one lse for each out"),
        ([OUT, OUT[..., :4]], [LSE, LSE], ValueError, r"an out of shape \[2,3,5,4\] .* accepted: outs \[...,Dv\]"),
        ([OUT], [LSE[..., None]], ValueError, r"an lse of shape \[2,3,5,1\]"),
        ([OUT.bfloat16()], [LSE.bfloat16()], TypeError, "an lse of bfloat16.*lses in float32"),
        ([OUT, OUT.double()], [LSE, LSE.double()], TypeError, "an out of float64"),
        ([OUT.to("meta")], [LSE], ValueError, "on meta and cpu.*one device"),
        ([OUT], ["lse"], TypeError, "lses hold a str"),
    ],
)  # fmt: skip
def test_refusals(outs, lses, error, message):
    with pytest.raises(error, match=message):
        mha_ext.merge_partials(outs, lses)


def test_infinite_logsumexps_mark_empty_rows():
    """-inf here, inf in flash-attention's results; what the output holds there has no influence."""
    outs, lses = torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5)
    lses[0, :, 1], lses[1, 0, 2], outs[1, 0, 2], lses[:, 1, 4] = torch.inf, torch.inf, torch.nan, torch.inf
    out, lse = mha_ext.merge_partials(outs, lses)
    expected = mha_ext.merge_partials(outs, torch.where(lses.isinf(), -torch.inf, lses))
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert (out[1, 4] == 0).all() and lse[1, 4] == -torch.inf and out.isfinite().all()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_rows_that_see_nan_are_nan(dtype):
    """Of the parts, and so of the whole, gradients too; the other rows keep every bit."""
    q, k, v = tensors(dtype)
    out, lse = mha_ext.merge_partials(*parts_of(q, k, v, (0, 20, 41)))
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    with torch.no_grad():
        q[0, 1, 3] = torch.nan
    merged, merged_lse = mha_ext.merge_partials(*parts_of(q, k, v, (0, 20, 41)))
    poisoned = torch.autograd.grad(merged.sum(), (q, k, v))
    assert merged[0, 1, 3].isnan().all() and merged_lse[0, 1, 3].isnan()
    assert poisoned[0][0, 1, 3].isnan().all() and poisoned[1][0, 1].isnan().all() and poisoned[2][0, 1].isnan().all()
    for x, clean, row in ((merged, out, True), (merged_lse, lse, True), (poisoned[0], grads[0], True), (poisoned[1], grads[1], False)):
        rest = torch.ones(x.shape[:3], dtype=torch.bool)
        rest[0, 1, 3 if row else slice(None)] = False
        assert torch.equal(x[rest], clean[rest])
