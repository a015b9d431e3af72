"""Mask objects: what each shows, by a naive definition, alone and joined by &."""

from __future__ import annotations

import functools
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
    t = functools.partial(torch.tensor, dtype=torch.int64)
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
    yield "intervals", masks.Intervals(t(begin).view(B, Sq), t(end).view(B, Sq)), lambda b, h, i, j: begin[b][i] <= j < end[b][i]
    yield "intervals for all", masks.Intervals(t(begin).view(B, Sq)[:1], t([[Sk - 1]])), lambda b, h, i, j: begin[0][i] <= j < Sk - 1
    if Sq == Sk:
        ids = [[(s * (b + 2)) // 3 % 3 for s in range(Sk)] for b in range(B)]
        yield "documents", masks.Documents(t(ids).view(B, Sk)), lambda b, h, i, j: ids[b][i] == ids[b][j]
        other = [[s % 2 for s in range(Sk)] for b in range(B)]
        yield "documents 2", masks.Documents(t(other).view(B, Sk)), lambda b, h, i, j: other[b][i] == other[b][j]
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


@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
def test_or_and_not_are_those_of_the_dense_forms(shape):
    kinds = list(zoo(*shape))
    for name, mask, visible in kinds:
        assert torch.equal((~mask).to_dense(*shape), ~by_definition(shape, visible)), f"~ {name}"
        assert (~~mask) is mask
    for (name, mask, _), (other_name, other, _) in itertools.product(kinds, kinds):
        a, b = mask.to_dense(*shape), other.to_dense(*shape)
        assert torch.equal((mask | other).to_dense(*shape), a | b), f"{name} | {other_name}"
        assert torch.equal((~(mask & other) & (mask | ~other)).to_dense(*shape), ~(a & b) & (a | ~b)), f"{name}, {other_name}"


def test_bool_tensors_are_parts():
    seen = torch.rand(5, 5, generator=cases.generator(0)) < 0.5
    causal = masks.Causal().to_dense(5, 5)[0, 0]
    for mask, expected in (
        (masks.Causal() & seen, causal & seen), (seen & masks.Causal(), causal & seen), (masks.Causal() | seen, causal | seen),
        (seen | masks.Causal(), causal | seen), (~masks.Causal() & seen & ~masks.Window(3, 0), seen & ~causal & ~masks.Window(3, 0).to_dense(5, 5)[0, 0]),
    ):  # fmt: skip
        assert torch.equal(mask.to_dense(5, 5)[0, 0], expected), mask


@pytest.mark.parametrize("packed", [False, True])
def test_or_and_not_in_the_kernels(packed, device):
    """As the same dense mask, forward and backward; each packed sequence with an offset of its own."""
    starts, lengths = torch.tensor([0, 5, 12], device=device), torch.tensor([4, 6], device=device)
    ids = torch.arange(7, device=device).div(3, rounding_mode="floor")[None]

    def shown(mask, n):
        """Of n queries and keys of the 7; documents are given for 7, and these masks have no offset."""
        return mask.to_dense(2, 1, 7, 7)[:, :, :n, :n]

    for mask in (
        masks.Causal() | masks.Padding(lengths - 2), ~masks.Window(1, 1), ~masks.Padding(lengths - 2) & masks.Causal(),
        ~(masks.Causal() | masks.LeftPadding(lengths)) | masks.Documents(ids), ~masks.Window(None, None), masks.Window(None, None) | masks.Causal(),
    ):  # fmt: skip
        leaves = [torch.randn(2, 2, 7, 8, device=device, dtype=torch.float64).requires_grad_() for _ in range(3)]
        if packed:
            rows = [torch.cat([x[0, :, :5], x[1]], 1).transpose(0, 1) for x in leaves]  # sequences of 5 and of 7
            got = mha_ext.attention_varlen(*rows, starts, starts, max_seqlen_q=7, max_seqlen_k=7, mask=mask)
            alone = [
                mha_ext.attention(*(x[b : b + 1, :, :n] for x in leaves), mask=shown(mask, n)[b : b + 1])
                for b, n in ((0, 5), (1, 7))
            ]
            expected = torch.cat([x[0].transpose(0, 1) for x in alone])
        else:
            got = mha_ext.attention(*leaves, mask=mask)
            expected = mha_ext.attention(*leaves, mask=mask.to_dense(2, 1, 7, 7))
        torch.testing.assert_close(got, expected, msg=repr(mask))
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (got, expected))):
            torch.testing.assert_close(a, b, msg=repr(mask))


def test_to_dense_of_two_sizes_has_the_masks_own_batch_and_heads():
    padding, heads = masks.Padding(torch.tensor([1, 2, 3])), masks.Dense(torch.ones(1, 4, 5, 5, dtype=torch.bool))
    assert masks.Causal().to_dense(5, 7).shape == (1, 1, 5, 7)
    assert padding.to_dense(5, 7).shape == (3, 1, 5, 7)
    assert torch.equal((padding & heads | masks.Causal()).to_dense(5, 5), (padding & heads | masks.Causal()).to_dense(3, 4, 5, 5))
    for shape in ((2, 3, 2, 2), (1, 1, 2, 2), (2, 2)):
        expected = (*shape[:-2], 5, 5) if len(shape) == 4 else (1, 1, 5, 5)
        assert masks.BlockSparse(torch.ones(shape, dtype=torch.bool), 4).to_dense(5, 5).shape == expected
    begin, end = torch.zeros(1, 4, dtype=torch.int64), torch.full((3, 4), 2)
    for mask in (masks.Intervals(begin, end), masks.Intervals(begin.expand(3, 4), end[:1]), masks.Intervals(begin, end) & masks.Causal()):
        assert mask.to_dense(4, 5).shape == (3, 1, 4, 5)
    with pytest.raises(TypeError, match="a mask was combined with int; & accepts mask objects and bool tensors"):
        masks.Causal() & 3
    with pytest.raises(TypeError, match="3 sizes; accepted: Sq, Sk, or B, H, Sq, Sk"):
        masks.Causal().to_dense(1, 5, 7)


EMPTY = [(2, 2, 0, 7), (2, 2, 7, 0), (2, 2, 0, 0), (0, 2, 7, 7), (2, 0, 7, 7)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_sizes_of_zero(shape):
    """Right shapes and zeros from every mask, alone, negated and joined, in every function."""
    B, H, Sq, Sk = shape
    for name, mask, _ in every_kind(*shape):
        assert mask.to_dense(*shape).shape == shape, name
        q, k, v = (torch.randn(B, H, n, 4).requires_grad_() for n in (Sq, Sk, Sk))
        out, lse, weights = mha_ext.attention(q, k, v, mask=mask, return_lse=True, return_weights=True)
        assert out.shape == q.shape and lse.shape == shape[:3] and weights.shape == shape, name
        if Sk == 0:
            assert not out.any() and (lse == -torch.inf).all(), name
        if 0 in (Sq, Sk):
            assert all(g.shape == x.shape and not g.any() for g, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v))), name
        scores = torch.randn(shape).requires_grad_()
        soft = mha_ext.masked_softmax(scores, mask)
        assert soft.shape == shape and torch.autograd.grad(soft.sum(), scores)[0].shape == shape, name
        with torch.no_grad():
            if H > 0:
                assert mha_ext.attention_cached(q, k, v, mask=mask).shape == q.shape, name
            starts_q, starts_k = (torch.arange(B + 1) * n for n in (Sq, Sk))
            packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
            found = mha_ext.attention_varlen(*packed, starts_q, starts_k, max_seqlen_q=Sq, max_seqlen_k=Sk, mask=mask)
            assert found.shape == packed[0].shape, name
            if Sq == Sk:
                qkv = torch.randn(B, Sq, 3, H, 4)
                assert mha_ext.attention_qkvpacked(qkv, mask=mask).shape == (B, Sq, H, 4), name


def every_kind(B, H, Sq, Sk):
    """zoo's masks and those of blocks, alone, negated, and joined with one another in turn"""
    kinds = list(zoo(B, H, Sq, Sk))
    blocks = torch.ones(-(-Sq // 7), -(-Sk // 7), dtype=torch.bool)
    more = masks.Strided(2, 1, 7), masks.Dilated(1, 2, 7), masks.BlockSparse(blocks, 7), masks.Window(None, None)
    kinds += [(repr(mask), mask, None) for mask in more]
    for n, (name, mask, visible) in enumerate(kinds):
        other = kinds[(7 * n + 3) % len(kinds)][1]
        yield name, mask, visible
        yield f"~ {name}", ~mask, None
        yield f"{name} & {other}", mask & other, None
        yield f"{name} | {other}", mask | other, None


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


def test_numpys_numbers_are_numbers():
    numpy = pytest.importorskip("numpy")
    q, state = torch.randn(1, 2, 9, 4), torch.tensor([1, 2])
    for kind in (numpy.float16, numpy.float32, numpy.float64):
        options = {"scale": kind(0.5), "softcap": kind(2), "dropout_p": kind(0.5)}
        expected = mha_ext.attention(q, q, q, rng_state=state, **{name: float(x) for name, x in options.items()})
        assert torch.equal(mha_ext.attention(q, q, q, rng_state=state, **options), expected)
    for kind in (numpy.int32, numpy.int64, numpy.uint8):
        for make in (lambda n: masks.Window(n, n), lambda n: masks.Dilated(n, n, n), lambda n: masks.Strided(n, n, n)):
            assert torch.equal(make(kind(3)).to_dense(9, 9), make(3).to_dense(9, 9))
        expected = mha_ext.split_heads(torch.ones(2, 3, 6), 3)
        assert torch.equal(mha_ext.split_heads(torch.ones(2, 3, 6), kind(3)), expected)
        packed = q.transpose(1, 2).repeat(1, 1, 2, 1)  # of 2 heads and 1
        assert torch.equal(mha_ext.attention_qkvpacked(packed, kind(2)), mha_ext.attention_qkvpacked(packed, 2))


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


def test_a_mask_is_drawn():
    pytest.importorskip("matplotlib").use("Agg")
    mask = masks.Causal() & masks.Padding(torch.tensor([7, 3]))
    ax = mask.plot(7, 9, batch=1)
    assert torch.equal(torch.tensor(ax.images[0].get_array().data), mask.to_dense(7, 9)[1, 0])
    assert ax.images[0].get_clim() == (0, 1)
    assert ax.get_title() == repr(mask) and masks.Window(2, 0).plot(7, 7, ax=ax) is ax and len(ax.images) == 2


def test_a_dense_picture_has_the_masks_batch_and_device():
    assert masks.Dense(torch.ones(3, 4, dtype=torch.bool)).to_dense(3, 4).shape == (1, 1, 3, 4)
    assert masks.Padding(torch.zeros(2, dtype=torch.int64, device="meta")).to_dense(3, 4).is_meta
    assert masks.Causal().to_dense(3, 4, device="meta").is_meta and not masks.Causal().to_dense(3, 4).is_meta
