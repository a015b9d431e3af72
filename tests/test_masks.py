"""Mask objects: what each shows, by a naive definition, alone and joined by &."""

from __future__ import annotations

import itertools

import cases
import oracle
import pytest
import torch

import mha_ext
from mha_ext import masks

SHAPES = [(2, 3, 5, 5), (2, 1, 2, 5), (1, 2, 5, 2), (3, 1, 1, 4), (2, 2, 4, 1)]


def by_definition(shape, visible):
    """bool [B,H,Sq,Sk] from visible(b, h, i, j), one element at a time."""
    seen = torch.zeros(shape, dtype=torch.bool)
    for b, h, i, j in itertools.product(*map(range, shape)):
        seen[b, h, i, j] = visible(b, h, i, j)
    return seen


def zoo(B, H, Sq, Sk):
    """(name, mask, visible(b,h,i,j)) of every kind that fits the shape."""
    o = Sk - Sq
    lengths = [(7 * b + 3) % (Sk + 2) for b in range(B)]  # 0 and more than Sk among them
    starts = [(5 * b + 1) % (Sk + 1) for b in range(B)]
    t = torch.tensor
    yield "causal", masks.Causal(), lambda b, h, i, j: j <= i + o
    yield "causal bottom right", masks.Causal("bottom_right"), lambda b, h, i, j: j <= i + o
    yield "causal top left", masks.Causal(align="top_left"), lambda b, h, i, j: j <= i
    for left, right in [(1, 0), (0, 0), (2, 1), (None, 1), (1, None), (None, None)]:
        yield (
            f"window {left} {right}",
            masks.Window(left, right),
            lambda b, h, i, j, left=left, right=right: (
                (left is None or i + o - left <= j) and (right is None or j <= i + o + right)
            ),
        )
    yield "padding", masks.Padding(t(lengths)), lambda b, h, i, j: j < lengths[b]
    yield "left padding", masks.LeftPadding(t(starts)), lambda b, h, i, j: j >= starts[b]
    yield "prefix", masks.Prefix(t(lengths)), lambda b, h, i, j: j < lengths[b] or j <= i + o
    begin = [[(3 * b + i) % (Sk + 1) for i in range(Sq)] for b in range(B)]
    end = [[(5 * b + 2 * i) % (Sk + 2) for i in range(Sq)] for b in range(B)]  # also before begin, and beyond the keys
    yield "intervals", masks.Intervals(t(begin), t(end)), lambda b, h, i, j: begin[b][i] <= j < end[b][i]
    yield "intervals for all", masks.Intervals(t(begin[:1]), t([[Sk - 1]])), lambda b, h, i, j: begin[0][i] <= j < Sk - 1
    if Sq == Sk:
        ids = [[(s * (b + 2)) // 3 % 3 for s in range(Sk)] for b in range(B)]
        yield "documents", masks.Documents(t(ids)), lambda b, h, i, j: ids[b][i] == ids[b][j]
        other = [[s % 2 for s in range(Sk)] for b in range(B)]
        yield "documents 2", masks.Documents(t(other)), lambda b, h, i, j: other[b][i] == other[b][j]
    for sizes in {(Sq, Sk), (B, 1, Sq, Sk), (1, H, Sq, Sk), (B, H, Sq, Sk), (1, 1, 1, Sk), (B, 1, Sq, 1), (1, 1, 1, 1)}:
        dense = torch.rand(sizes, generator=cases.generator(sum(sizes))) < 0.6
        full = dense.expand(B, H, Sq, Sk)
        yield f"dense {sizes}", masks.Dense(dense), lambda b, h, i, j, full=full: bool(full[b, h, i, j])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_mask_by_its_definition(shape):
    for name, mask, visible in zoo(*shape):
        expected = by_definition(shape, visible)
        got = mask.to_dense(*shape)
        assert got.dtype == torch.bool and got.shape == shape, name
        assert torch.equal(got, expected), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_and_of_every_pair_is_the_and_of_the_dense_forms(shape):
    kinds = list(zoo(*shape))
    for (name, mask, _), (other_name, other, _) in itertools.product(kinds, kinds):
        expected = mask.to_dense(*shape) & other.to_dense(*shape)
        assert torch.equal((mask & other).to_dense(*shape), expected), f"{name} & {other_name}"


def test_and_of_three_and_more_and_its_algebra():
    shape = (2, 3, 5, 5)
    kinds = list(zoo(*shape))
    gen = cases.generator(0)
    for _ in range(60):
        chosen = [kinds[n] for n in torch.randint(0, len(kinds), (4,), generator=gen).tolist()]
        (_, a, _), (_, b, _), (_, c, _), (_, d, _) = chosen
        expected = a.to_dense(*shape) & b.to_dense(*shape) & c.to_dense(*shape) & d.to_dense(*shape)
        for joined in (a & b & c & d, (a & b) & (c & d), d & (c & (b & a))):
            assert torch.equal(joined.to_dense(*shape), expected), [name for name, *_ in chosen]


def test_and_leaves_its_operands_alone():
    shape = (2, 1, 5, 5)
    causal, padding = masks.Causal(), masks.Padding(torch.tensor([2, 4]))
    before = causal.to_dense(*shape), padding.to_dense(*shape)
    _ = causal & padding & masks.Window(1, 0)
    assert torch.equal(causal.to_dense(*shape), before[0]) and torch.equal(padding.to_dense(*shape), before[1])


@pytest.mark.parametrize("shape", [(2, 2, 5, 5), (2, 2, 3, 7), (2, 2, 7, 3)], ids=str)
def test_kernels_see_what_to_dense_says(shape):
    """Weights are nonzero exactly where to_dense is True, for each mask and each pair of them."""
    B, H, Sq, Sk = shape
    q, k, v = torch.randn(B, H, Sq, 4), torch.randn(B, H, Sk, 4), torch.randn(B, H, Sk, 4)
    kinds = list(zoo(*shape))
    for (name, mask, _), (other_name, other, _) in itertools.product(kinds, kinds):
        joined = mask & other
        _, weights = mha_ext.attention(q, k, v, mask=joined, return_weights=True)
        assert torch.equal(weights > 0, joined.to_dense(B, H, Sq, Sk)), f"{name} & {other_name}"


@pytest.mark.parametrize("name", [m for m in cases.MASKS if m != "none"])
def test_long_masks_in_kernel_equal_their_dense_form(name, device):
    """At lengths of several tiles, a structured mask gives bit for bit what its dense form gives where no row is cut by tiles differently."""
    c = cases.Case(2, 2, 2, 200, 200, 16, 16, torch.float64, name)
    x = cases.build(c, device)
    out = mha_ext.attention(x.q, x.k, x.v, mask=x.mask)
    grads = torch.autograd.grad(out, [x.q, x.k, x.v], x.dout)
    dense_out = mha_ext.attention(x.q, x.k, x.v, mask=x.seen)
    dense_grads = torch.autograd.grad(dense_out, [x.q, x.k, x.v], x.dout)
    truth = oracle.truths(x.q, x.k, x.v, dout=x.dout, seen=x.seen)
    oracle.check({"out": out, **dict(zip("qkv", grads))}, truth)
    oracle.check({"out": dense_out, **dict(zip("qkv", dense_grads))}, truth)


def test_integer_types_and_strides_of_lengths(device):
    """Lengths and ids may be int32 and strided."""
    q, k, v = (torch.randn(4, 2, 9, 8, device=device) for _ in range(3))
    lengths = torch.tensor([3, 9, 0, 5], device=device)
    ids = torch.arange(9, device=device).div(4, rounding_mode="floor").expand(4, 9)
    for make, values in (
        (masks.Padding, lengths),
        (masks.LeftPadding, lengths),
        (masks.Prefix, lengths),
        (masks.Documents, ids),
    ):
        expected = mha_ext.attention(q, k, v, mask=make(values.contiguous()))
        for same in (
            values.int(),
            torch.stack([values, values + 1], -1)[..., 0],
            cases.surrounded(values.contiguous()),
        ):
            assert torch.equal(mha_ext.attention(q, k, v, mask=make(same)), expected), make


def test_lengths_outside_the_keys_are_clamped(device):
    q, k, v = (torch.randn(3, 1, 4, 8, device=device) for _ in range(3))
    far = torch.tensor([100, -3, 4], device=device)
    expected = mha_ext.attention(q, k, v, mask=masks.Padding(far.clamp(0, 4)))
    assert torch.equal(mha_ext.attention(q, k, v, mask=masks.Padding(far)), expected)
    expected = mha_ext.attention(q, k, v, mask=masks.LeftPadding(far.clamp(0, 4)))
    assert torch.equal(mha_ext.attention(q, k, v, mask=masks.LeftPadding(far)), expected)


def test_huge_windows_do_not_overflow():
    q = torch.randn(1, 1, 5, 4)
    full = mha_ext.attention(q, q, q)
    for left, right in [(2**62, 2**62), (2**31, None), (None, 2**62)]:
        assert torch.equal(mha_ext.attention(q, q, q, mask=masks.Window(left, right)), full)


def test_mask_prints_what_it_is():
    text = repr(masks.Causal() & masks.Window(3, 0))
    assert "Causal" in text and "Window" in text


@pytest.mark.parametrize("limits", [(1, 2**63 - 1), (2**63 - 1, 1), (2**64, 0)])
def test_a_huge_window_limit_is_none(limits):
    small = masks.Window(*(None if n > 10 else n for n in limits))
    for Sq, Sk in ((3, 5), (5, 3)):
        assert masks.Window(*limits).to_dense(1, 1, Sq, Sk).equal(small.to_dense(1, 1, Sq, Sk))
    q = torch.randn(1, 1, 5, 4)
    assert mha_ext.attention(q, q, q, mask=masks.Window(*limits)).equal(mha_ext.attention(q, q, q, mask=small))
    assert mha_ext.explain(q, q, q, mask=masks.Window(*limits)).flops == mha_ext.explain(q, q, q, mask=small).flops
