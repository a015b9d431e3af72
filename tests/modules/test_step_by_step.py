"""Modules step by step, with a cache: what they give all at once, for every option, mask and bias."""

from __future__ import annotations

import functools

import cases
import pytest
import torch

from mha_ext import biases, masks, nn
from mha_ext.nn.kv_cache import KVCache

B, H, N, CAPACITY = 2, 4, 75, 90
STEPS = (0, 33, 34, 38, 39, 70, N)


def gen(seed=0):
    return cases.generator(seed)


def randn(*shape, seed=0):
    return cases.randn(gen(seed), *shape, dtype=torch.float64)


def rows_of(x, start, end):
    """The part of a dense mask, bias or interval that is for these queries."""
    return x[..., start:end, :]


def fixed(mask):
    return lambda start, end: mask


DENSE = torch.rand(B, H, N, N, generator=gen(1)) < 0.6
BLOCKS = torch.rand(B, 1, 13, 13, generator=gen(2)) < 0.6
IDS = torch.randint(0, 3, (B, N), generator=gen(3))
BEGIN = torch.arange(N).sub(torch.randint(0, 30, (B, N), generator=gen(4)))
# Each: what is given for the queries start .. end; all at once, 0 .. N.
MASKS = {
    "window": fixed(masks.Window(3, 0)),
    "window to both sides": fixed(masks.Window(3, 5)),
    "causal": fixed(masks.Causal()),
    "causal top-left": fixed(masks.Causal("top_left")),
    "strided": fixed(masks.Strided(3, 2, 4)),
    "dilated": fixed(masks.Dilated(2, 2, 4)),
    "documents": fixed(masks.Documents(IDS)),
    "documents so far": lambda start, end: masks.Documents(IDS[:, :end]),
    "prefix": fixed(masks.Prefix(torch.tensor([10, 50]))),
    "padding": fixed(masks.Padding(torch.tensor([60, 74]))),
    "left padding": fixed(masks.LeftPadding(torch.tensor([0, 37]))),
    "intervals": lambda start, end: masks.Intervals(BEGIN[:, start:end], torch.full((1, 1), N)),
    "block sparse": fixed(masks.BlockSparse(BLOCKS, 6)),
    "dense": lambda start, end: masks.Dense(rows_of(DENSE, start, end)),
    "dense so far": lambda start, end: DENSE[:, :, start:end, :end],
    "dense of a head": lambda start, end: DENSE[0, 0, start:end],
    "all of them": lambda start, end: (
        masks.Window(40, 2) & masks.Documents(IDS) & masks.Strided(2, 1, 5) & masks.BlockSparse(BLOCKS, 6)
        & masks.Dense(rows_of(DENSE, start, end)) & masks.LeftPadding(torch.tensor([2, 5])) & masks.Causal("top_left")
    ),
    "either": lambda start, end: masks.Window(3, 0) | rows_of(DENSE, start, end) | masks.Strided(3, 2, 4),
    "not": fixed(~(masks.Documents(IDS) & masks.Window(20, 0)) & masks.Causal()),
    "either, one of which hides nothing": lambda start, end: rows_of(DENSE, start, end) | masks.Window(None, None),
    "not what hides nothing": fixed(~masks.Window(None, None)),
    "two documents": fixed(masks.Documents(IDS) & masks.Documents(IDS.flip(1))),
}  # fmt: skip
BIASES = {
    "alibi": fixed(biases.ALiBi(biases.alibi_slopes(H).double())),
    "t5": fixed(biases.T5Relative(randn(32, H, seed=5), bidirectional=False)),
    "t5 to both sides": fixed(biases.T5Relative(randn(32, H, seed=6), max_distance=40)),
    "dense": lambda start, end: rows_of(BIAS, start, end),
    "dense so far": lambda start, end: BIAS[:1, :, start:end, :end],
    "one row": lambda start, end: BIAS[:, :1, :1],
}
BIAS = randn(B, H, N, N, seed=7)


def cache_of(kind: str, module: nn.SelfAttention) -> KVCache:
    if kind == "paged":
        return nn.PagedKVCache(B, CAPACITY, module.num_kv_heads, module.head_dim, page_size=7, dtype=torch.float64)
    if kind == "ring":  # which is full before the last positions come
        return module.make_cache(B, 45, window=20)
    return module.make_cache(B, CAPACITY)


@functools.cache
def plain(window: int | None, sinks: bool = False) -> nn.SelfAttention:
    torch.manual_seed(0)
    module = nn.SelfAttention(32, H, num_kv_heads=2, causal=True, window=window, sinks=sinks, dtype=torch.float64).eval()
    if sinks:
        module.sinks.data.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    return module


def in_steps(module, x, cache, mask, bias):
    outs = []
    for start, end in zip(STEPS, STEPS[1:]):
        given = {"mask": mask and mask(start, end), "bias": bias and bias(start, end)}
        outs.append(module(x[:, start:end], cache=cache, **given))
    return torch.cat(outs, 1)


def compare(kind, mask=None, bias=None, sinks=False):
    module = plain(20 if kind == "ring" else None, sinks)
    x = randn(B, N, 32, seed=8)
    expected = module(x, mask=mask and mask(0, N), bias=bias and bias(0, N))
    torch.testing.assert_close(in_steps(module, x, cache_of(kind, module), mask, bias), expected)


KINDS = ["contiguous", "paged", "ring"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_masks(mask, kind):
    compare(kind, MASKS[mask])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", BIASES)
@torch.no_grad()
def test_biases(bias, kind):
    compare(kind, None, BIASES[bias], sinks=True)
    compare(kind, MASKS["documents"], BIASES[bias])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("many", [1, 5, 16])
@torch.no_grad()
def test_many_queries_are_taken_in_parts(many, kind, monkeypatch):
    """A long prompt with a mask that becomes dense."""
    monkeypatch.setattr("mha_ext.nn.kv_cache._MANY_QUERIES", many)
    compare(kind, MASKS["all of them"], BIASES["t5"])
    compare(kind, MASKS["intervals"], BIASES["dense so far"])


@pytest.mark.parametrize("given", [{}, {"mask": masks.Causal()}, {"bias": biases.ALiBi(biases.alibi_slopes(H))}], ids=str)
@torch.no_grad()
def test_only_what_may_become_dense_is_taken_in_parts(given, monkeypatch):
    attention, sizes = KVCache._attention, []
    monkeypatch.setattr("mha_ext.nn.kv_cache._MANY_QUERIES", 5)
    monkeypatch.setattr(KVCache, "_attention", lambda self, q, **more: sizes.append(q.shape[2]) or attention(self, q, **more))
    module = plain(None)
    module(randn(B, 12, 32), cache=cache_of("contiguous", module), **given)
    assert sizes == ([5, 5, 2] if given else [12])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("many", [4, 1024])
@torch.no_grad()
def test_ragged_sequences(many, kind, monkeypatch):
    """Each sequence's positions are its own, also where queries are taken in parts."""
    monkeypatch.setattr("mha_ext.nn.kv_cache._MANY_QUERIES", many)
    module = plain(20 if kind == "ring" else None)
    x = randn(B, N, 32, seed=8)
    mask = masks.Documents(IDS) & masks.Strided(2, 1, 5) & masks.Window(30, 1)
    bias = biases.ALiBi(biases.alibi_slopes(H).double())
    expected, cache, at = module(x, mask=mask, bias=bias), cache_of(kind, module), torch.zeros(B, dtype=torch.int64)
    for counts in ([10, 1], [0, 7], [3, 3], [20, 2], [5, 14]):
        counts = torch.tensor(counts)
        some = torch.stack([x[b, a : a + int(counts.max())] for b, a in enumerate(at.tolist())])
        out = module(some, mask=mask, bias=bias, cache=cache, counts=counts)
        for b, n in enumerate(counts.tolist()):
            torch.testing.assert_close(out[b, :n], expected[b, at[b] : at[b] + n])
        at += counts


@torch.no_grad()
def test_masks_of_two_positions_and_of_more_than_there_is_room_for():
    module, x = plain(None), randn(B, 7, 32, seed=9)
    mask, ids = torch.rand(B, 1, 7, 100, generator=gen(1)) < 0.6, torch.randint(0, 2, (B, 100), generator=gen(2))
    for many, enough in ((mask, mask[..., :7]), (masks.Documents(ids), masks.Documents(ids[:, :7]))):
        torch.testing.assert_close(module(x, cache=cache_of("contiguous", module), mask=many), module(x, mask=enough))
    two = mask[:, :, :2, :2]
    torch.testing.assert_close(module(x[:, :2], cache=cache_of("contiguous", module), mask=two), module(x[:, :2], mask=two))


OPTIONS = {
    "rope": {"rope": True},
    "qk_norm": {"qk_norm": True, "softcap": 3.0},
    "one head": {"num_kv_heads": 1, "packed": False, "bias": False},
    "window": {"window": 9, "rope": True},
    "open window": {"window": (None, 0)},
    "window to both sides": {"window": (5, 5), "sinks": True},
    "head_dim": {"head_dim": 10, "sinks": True},
    "talking": {"talking_heads": True, "head_communication": True, "num_kv_heads": 2},
    "talking in a window": {"talking_heads": True, "window": 3, "sinks": True, "softcap": 2.0},
}


@pytest.mark.parametrize("stored", [None, torch.int8, "paged", "paged int8"], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_every_option(options, stored):
    dtype = torch.float32 if "int8" in str(stored) else torch.float64
    module = nn.SelfAttention(32, H, causal=True, dtype=dtype, **options).eval()
    for p in module.parameters():
        p.add_(0.1 * torch.randn(p.shape, dtype=dtype))
    x = randn(B, N, 32, seed=8).to(dtype)
    held = torch.int8 if dtype == torch.float32 else dtype
    if "paged" in str(stored):
        cache = nn.PagedKVCache(B, CAPACITY, module.num_kv_heads, module.head_dim, page_size=8, dtype=held)
    else:
        cache = module.make_cache(B, CAPACITY, dtype=held)
    actual, expected = in_steps(module, x, cache, None, None), module(x)
    if held == dtype:
        torch.testing.assert_close(actual, expected)
    else:
        assert (actual - expected).abs().max() < 0.03 * expected.abs().max()


CROSS = {
    "plain": {},
    "qk_norm": {"qk_norm": True, "softcap": 3.0, "context_dim": 20, "num_kv_heads": 2},
    "window": {"window": (9, 4), "packed": False},
}


@pytest.mark.parametrize("options", CROSS.values(), ids=CROSS)
@torch.no_grad()
def test_cross_attention_to_a_projected_context(options):
    module = nn.CrossAttention(32, H, dtype=torch.float64, **options).eval()
    Sk = 51
    x, context = randn(B, N, 32, seed=1), randn(B, Sk, module.context_dim, seed=2)
    ids = torch.randint(0, 2, (B, Sk), generator=gen(3))
    projected = module.project(context)
    positions = torch.arange(N) + (Sk - N)
    given = {
        "none": (None, None),
        "padding": (masks.Padding(torch.tensor([40, 3])), None),
        "causal": (masks.Causal() & masks.Window(30, None), None),
        "prefix": (masks.Prefix(torch.tensor([7, 30])), biases.ALiBi(biases.alibi_slopes(H).double())),
        "strided": (masks.Strided(2, 1, 4), biases.T5Relative(randn(32, H, seed=3))),
    }
    if N <= Sk:
        given["documents"] = (masks.Documents(ids), None)
    for mask, bias in given.values():
        parts = [
            module(x[:, a:b], projected, mask, bias=bias, positions=positions[a:b]) for a, b in zip(STEPS, STEPS[1:])
        ]
        torch.testing.assert_close(torch.cat(parts, 1), module(x, context, mask, bias=bias))
    if "window" not in options:
        torch.testing.assert_close(module(x[:, 3:5], projected), module(x, context)[:, 3:5])


def test_cross_attention_says_what_it_needs():
    module, x = nn.CrossAttention(8, 2, window=3), torch.zeros(1, 2, 8)
    projected = module.project(torch.zeros(1, 5, 8))
    at = torch.arange(2)
    with pytest.raises(ValueError, match="accepted: with positions=, one for each query"):
        module(x, projected)
    with pytest.raises(ValueError, match=r"positions has shape \[3\]; accepted: \[Sq\] or \[B,Sq\] = \[1,2\]"):
        module(x, projected, positions=torch.arange(3))
    with pytest.raises(ValueError, match="BlockSparse counts queries from the first one"):
        module(x, projected, masks.BlockSparse(torch.ones(1, 1, dtype=torch.bool), 8), positions=at)
    with pytest.raises(ValueError, match="Causal counts queries from the first one"):
        module(x, projected, masks.Causal("top_left"), positions=at)
    module(x, projected, positions=at).sum().backward()
    assert module.kv_proj.weight.grad is not None


@torch.no_grad()
def test_what_does_not_cover_the_positions_is_refused():
    module, x = plain(None), randn(B, 5, 32)
    cache = cache_of("contiguous", module)
    module(x, cache=cache)
    for given in (
        {"mask": masks.Documents(IDS[:, :9])},
        {"mask": torch.ones(5, 9, dtype=torch.bool)},
        {"bias": torch.zeros(5, 9, dtype=torch.float64)},
        {"mask": masks.BlockSparse(BLOCKS[0, 0, :3, :3], 3)},
    ):
        with pytest.raises(ValueError, match="covers 9 positions and the cache has 10; accepted: all positions up to"):
            module(x, cache=cache, **given)
    for given, message in (
        ({"mask": torch.ones(N, N, dtype=torch.bool)}, r"mask has shape \[75,75\]; accepted: \[Sq,Sk\] = \[5,75\]"),
        ({"bias": torch.zeros(4, N)}, r"bias has shape \[4,75\]"),
        ({"mask": masks.Intervals(BEGIN, BEGIN)}, r"it accepts \[B,Sq\] = \[2,5\]"),
        ({"bias": biases.ALiBi(torch.ones(3))}, "ALiBi is for 3 heads but q has 4"),
        ({"mask": "causal"}, "mask is a str; accepted: a mask object"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            module(x, cache=cache, **given)
    assert cache.lengths.tolist() == [5, 5]
