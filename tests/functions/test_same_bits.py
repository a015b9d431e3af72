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


def in_pages(x: torch.Tensor, pages: torch.Tensor, size: int) -> torch.Tensor:
    raw = x.view(torch.int8) if x.itemsize == 1 else x
    store = torch.empty(pages.numel(), HK, size, *x.shape[3:], dtype=raw.dtype)
    store[pages.flatten()] = raw.unflatten(2, (pages.shape[1], size)).transpose(1, 2).flatten(0, 1)
    return store.view(x.dtype)


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
        stores = [in_pages(x, pages, size) for x in (k, v)]
        if isinstance(mask, masks.Padding):
            pages[1, -(-333 // size) :] = -1
        got = mha_ext.attention_cached(q, *stores, block_table=pages, mask=mask, return_lse=True)
        assert all(map(torch.equal, got, expected)), size


@pytest.mark.skipif(mha_ext._ops.cpu_isa() != "amx", reason="a tile of other instruction sets lies in one page")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("size", [1, 5, 16, 40])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_few_rows_of_bfloat16_in_pages_of_any_size(stored, size, mask):
    for queries in (1, 3):
        q, k, v, _ = inputs(torch.bfloat16, queries)
        scales = {}
        if stored != torch.bfloat16:
            k, v = ((x * 20).to(stored) for x in (k, v))
            scales = {f"{x}_scale": torch.rand(B, HK, SK, generator=cases.generator(size)) / 20 for x in "kv"}
        expected = mha_ext.attention_cached(q, k, v, mask=mask, return_lse=True, **scales)
        pages = torch.randperm(B * SK // size, generator=cases.generator(size)).view(B, -1)
        paged = {name: in_pages(x, pages, size) for name, x in ({"k": k, "v": v} | scales).items()}
        if isinstance(mask, masks.Padding):
            pages[1, -(-333 // size) :] = -1
        if isinstance(mask, masks.Window):
            pages[:, : (SK - queries - 70) // size] = -1
        got = mha_ext.attention_cached(q, block_table=pages, mask=mask, return_lse=True, **paged)
        assert all(map(torch.equal, got, expected)), queries


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
