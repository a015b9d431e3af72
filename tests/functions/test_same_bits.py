"""The bits of forward depend on its own sequence and head, not on what else is in the batch, on threads, or on where keys and values lie."""

from __future__ import annotations

import cases
import pytest
import torch

import mha_ext
from mha_ext import masks

MASKS = {
    "none": None,
    "causal": masks.Causal(),
    "window": masks.Window(70, 5),
    "padding": masks.Padding(torch.tensor([640, 333])),
}
B, H, HK, SK, D = 2, 4, 2, 640, 40


def inputs(dtype: torch.dtype, queries: int) -> list[torch.Tensor]:
    gen = cases.generator(queries)
    shapes = (B, H, queries, D), (B, HK, SK, D), (B, HK, SK, D), (B, H, queries, D)
    return [cases.surrounded(cases.randn(gen, *shape).to(dtype), (0, 2, 1, 3)) for shape in shapes]


def of_sequence(mask: masks.Mask | None, b: int) -> masks.Mask | None:
    return masks.Padding(mask.values[b : b + 1]) if isinstance(mask, masks.Padding) else mask


def results(q, k, v, dout, mask) -> list[torch.Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = mha_ext.attention(q, k, v, mask=mask, return_lse=True)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, [q, k, v], dout)]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("queries", [1, 5, 9, 64, 66, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_alone_and_in_a_batch(dtype, queries, mask):
    """A whole batch, on one thread and on three, with gradients; forward of one key/value head of one sequence by itself."""
    q, k, v, dout = inputs(dtype, queries)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = results(q, k, v, dout, mask)
        torch.set_num_threads(3)
        assert all(map(torch.equal, results(q, k, v, dout, mask), expected))
    finally:
        torch.set_num_threads(before)
    group = slice(2, 4)
    alone = results(q[1:, group], k[1:, 1:], v[1:, 1:], dout[1:, group], of_sequence(mask, 1))
    assert all(torch.equal(x, y[1:, group]) for x, y in zip(alone[:2], expected))


@pytest.mark.parametrize(
    "mask", [MASKS[name] for name in ("none", "causal", "padding")], ids=("none", "causal", "padding")
)
@pytest.mark.parametrize("queries", [1, 5, 9, 64, 66, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_in_one_piece_and_in_pages(dtype, queries, mask):
    """Pages of whole tiles, in any order; those that nobody sees may be anywhere. (The tiles of a window begin where it does, but in pages.)"""
    q, k, v, _ = inputs(dtype, queries)
    expected = mha_ext.attention_cached(q, k, v, mask=mask, return_lse=True)
    for size in (64, 128):
        count = SK // size
        pages = torch.randperm(B * count, generator=cases.generator(size)).view(B, count)
        stores = []
        for x in (k, v):
            store = torch.empty(B * count, HK, size, D, dtype=dtype)
            store[pages.flatten()] = x.unflatten(2, (count, size)).transpose(1, 2).flatten(0, 1)
            stores.append(store)
        if isinstance(mask, masks.Padding):
            pages[1, -(-333 // size) :] = -1
        got = mha_ext.attention_cached(q, *stores, block_table=pages, mask=mask, return_lse=True)
        assert all(map(torch.equal, got, expected)), size


def test_a_page_that_is_missed():
    """What many queries see must be there, whichever of them sees it."""
    q, k, v, _ = inputs(torch.bfloat16, 130)
    stores = [x.unflatten(2, (40, 16)).transpose(1, 2).flatten(0, 1) for x in (k, v)]
    table = torch.arange(B * 40).view(B, 40)
    lengths = torch.tensor([640, 300])
    expected = mha_ext.attention_cached(q, *stores, block_table=table, mask=masks.Padding(lengths))
    table[1, 19:] = 10**9
    assert torch.equal(mha_ext.attention_cached(q, *stores, block_table=table, mask=masks.Padding(lengths)), expected)
    table[1, 18] = -1
    with pytest.raises(RuntimeError, match="no page"):
        mha_ext.attention_cached(q, *stores, block_table=table, mask=masks.Padding(lengths))
