"""Caches of more and of fewer sequences than they began with: beams, answers to one prompt, and what is finished left out."""

from __future__ import annotations

import copy

import pytest
import test_cache
import torch
from test_cache_modules import Owner

from mha_ext import nn

B, HK, D, DV = test_cache.B, test_cache.HK, test_cache.D, test_cache.DV
KINDS = {"contiguous": {}, "ring": {"window": 30}, "paged": {"page_size": 16, "pages": 60}}
STORED = [torch.float32, torch.int8, torch.float8_e4m3fn]


def make(kind: str, stored: torch.dtype, capacity: int = 80):
    options = KINDS[kind] | {"value_dim": DV, "dtype": stored}
    return (nn.PagedKVCache if kind == "paged" else nn.KVCache)(B, capacity, HK, D, **options)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_forks_go_on_as_caches_of_their_own(kind, stored):
    """To the bit, from 3 sequences to 7, to 2 and to 2 others; and nothing of what another has changes."""
    q, k, v = test_cache.whole(length=60)
    cache = make(kind, stored)
    counts = torch.tensor([20, 1, 16])
    cache.append(k[:, :, :20], v[:, :, :20], counts)
    alone = [copy.deepcopy(cache) for _ in range(B)]
    gen, came_from = torch.Generator().manual_seed(0), list(range(B))
    for order in ([0, 0, 2, 1, 1, 2, 2], [6, 3], [1, 1]):
        cache.reorder(torch.tensor(order))
        came_from = [came_from[i] for i in order]
        alone = [copy.deepcopy(alone[i]) for i in order]
        assert cache.batch == len(order) == len(cache.lengths)
        for n in (1, 3):
            new = [torch.randn(len(order), *x.shape[1:2], n, x.shape[3], generator=gen) for x in (q, k, v)]
            out = cache.attend(*new)
            for i, (one, b) in enumerate(zip(alone, came_from)):
                expected = one.attend(*(x[i : i + 1].expand(B, -1, -1, -1) for x in new))[b]
                assert torch.equal(out[i], expected)
        cache.truncate(cache.lengths - 2)
        for one in alone:
            one.truncate(one.lengths - 2)


def pages_used(cache: nn.PagedKVCache) -> int:
    return cache.pages - cache.free_pages


@torch.no_grad()
def test_beams_have_the_pages_of_the_prompt_in_common():
    layer = nn.SelfAttention(32, 4, num_kv_heads=2, causal=True, rope=True).eval()
    cache = layer.make_cache(2, 64, page_size=8, pages=20)
    x = torch.randn(2, 20, 32)
    layer(x, cache=cache)
    assert pages_used(cache) == 2 * 3
    before = cache.k.clone()
    cache.reorder(torch.arange(2).repeat_interleave(4))
    assert pages_used(cache) == 2 * 3 and torch.equal(cache.k.view(torch.int32), before.view(torch.int32))
    new = torch.randn(8, 1, 32)
    out = layer(new, cache=cache)
    assert pages_used(cache) == 2 * (2 + 4)  # the last page is partly filled, and the last beam keeps it
    torch.testing.assert_close(out, layer(torch.cat([x.repeat_interleave(4, 0), new], 1))[:, -1:])
    cache.reorder(torch.tensor([0, 0, 0, 0, 4, 4, 4, 4]))  # one beam each survives
    assert pages_used(cache) == 2 * 3
    cache.reorder(torch.tensor([7]))
    assert pages_used(cache) == 3
    cache.reset()
    assert pages_used(cache) == 0 and (cache.block_table == cache.pages).all()


@torch.no_grad()
def test_whole_pages_are_not_copied():
    layer = nn.SelfAttention(32, 4, causal=True).eval()
    cache = layer.make_cache(1, 64, page_size=8, pages=6)
    layer(torch.randn(1, 16, 32), cache=cache)
    cache.reorder(torch.zeros(4, dtype=torch.int64))
    assert pages_used(cache) == 2
    layer(torch.randn(4, 1, 32), cache=cache)
    assert pages_used(cache) == 2 + 4
    assert (cache.block_table[:, :2] == cache.block_table[:1, :2]).all()
    cache.truncate(12)  # the second page is now partly filled, and everybody's
    assert pages_used(cache) == 2
    with pytest.raises(ValueError, match="7 more pages are needed and 4 of 6 are free"):
        layer(torch.randn(4, 5, 32), cache=cache)
    layer(torch.randn(4, 4, 32), cache=cache)
    assert pages_used(cache) == 1 + 4


@torch.no_grad()
def test_a_sequence_that_begins_like_another():
    """As servers keep a common prefix: a fork of what has it, cut to what is the same."""
    layer = nn.SelfAttention(32, 4, causal=True, rope=True).eval()
    cache = layer.make_cache(1, 64, page_size=8, pages=12)
    prefix, first, second = torch.randn(1, 16, 32), torch.randn(1, 9, 32), torch.randn(1, 5, 32)
    layer(torch.cat([prefix, first], 1), cache=cache)
    cache.reorder(torch.tensor([0, 0]))
    cache.truncate(torch.tensor([25, 16]))
    both = torch.cat([torch.zeros(1, 5, 32), second])
    out = layer(both, cache=cache, counts=torch.tensor([0, 5]))
    torch.testing.assert_close(out[1:], layer(torch.cat([prefix, second], 1))[:, 16:])
    assert cache.lengths.tolist() == [25, 21] and pages_used(cache) == 4 + 1
    layer(both[:, :1], cache=cache)
    assert cache.lengths.tolist() == [26, 22]


@torch.no_grad()
def test_compiled_steps_need_pages_of_their_own(fresh_compiler):
    model = Owner(cache=nn.PagedKVCache(2, 40, 2, 8, page_size=8, pages=20))
    x = torch.randn(2, 12, 32)
    model(x[:, :10])
    model.cache.reorder(torch.tensor([0, 0]))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = model.cache.k.clone()
    with pytest.raises(RuntimeError, match=r"1 positions were appended to a PagedKVCache without reserve\(1\) before"):
        compiled(x[:, 10:11])
    assert torch.equal(model.cache.k[:3].view(torch.int32), before[:3].view(torch.int32))
    model.cache.truncate(10)
    model.cache.reserve(2)
    new = torch.randn(2, 2, 32)
    out = torch.cat([compiled(new[:, :1]), compiled(new[:, 1:])], 1)
    torch.testing.assert_close(out, model.layer(torch.cat([x[:1, :10].expand(2, -1, -1), new], 1))[:, 10:])
    with pytest.raises(RuntimeError, match="without reserve"):
        for _ in range(5):
            compiled(new[:, :1])


@pytest.mark.parametrize("kind", ["contiguous", "ring"])
@torch.no_grad()
def test_reorder_in_compiled_code(kind, fresh_compiler):
    """As many sequences as before, in place; another number is for outside."""
    q, k, v = test_cache.whole(length=20)
    cache, other = make(kind, torch.float32), make(kind, torch.float32)
    for each in (cache, other):
        each.append(k, v)
    places = cache.k.data_ptr(), cache.lengths.data_ptr()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(indices, *new):
        cache.reorder(indices)
        return cache.attend(*new)

    new = [x[:, :, :1] for x in (q, k, v)]
    other.reorder(torch.tensor([2, 0, 0]))
    assert torch.equal(step(torch.tensor([2, 0, 0]), *new), other.attend(*new))
    assert (cache.k.data_ptr(), cache.lengths.data_ptr()) == places
    with pytest.raises(Exception, match="compiled code accepts one for each"):
        step(torch.tensor([2, 0, 0, 1]), *(torch.cat([x, x[:1]]) for x in new))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_made_in_one_mode_and_used_in_the_other(kind, mode):
    _, k, v = test_cache.whole(length=20)
    cache = make(kind, torch.int8)
    with mode():
        cache.append(k, v)
        cache.reorder(torch.tensor([0, 0, 1, 2]))
        cache.reorder(torch.tensor([3, 2, 1, 0]))
    with torch.no_grad():
        cache.append(*(x[[2, 1, 0, 0]] for x in (k, v)))
    assert not any(x.is_inference() for x in cache.buffers()) and cache.lengths.tolist() == [40] * 4


@pytest.mark.parametrize("options", [{"page_size": 8}, {"page_size": 64, "pages": 7, "dtype": torch.int8}], ids=str)
@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_modules_make_pages(options, window):
    module = nn.SelfAttention(32, 4, num_kv_heads=2, causal=True, rope=True, window=window).eval()
    cache = module.make_cache(2, 1000 if window else 50, **options)
    assert type(cache) is nn.PagedKVCache and cache.page_size == options["page_size"] and cache.window is None
    assert cache.k.dtype == options.get("dtype", torch.float32) and cache.pages == options.get("pages", cache.pages)
    x = torch.randn(2, 40, 32)
    out = torch.cat([module(part, cache=cache) for part in x.split([13, 1, 26], 1)], 1)
    assert (out - module(x)).abs().max() < (1e-5 if "dtype" not in options else 0.02)


@torch.no_grad()
def test_compiled_appends_need_room_in_every_sequence(fresh_compiler):
    cache, k = nn.PagedKVCache(2, 16, 1, 4, page_size=4), torch.randn(2, 1, 4, 4)
    append = torch.compile(lambda k: cache.append(k, k), backend="eager", fullgraph=True)
    cache.append(k, k, torch.tensor([4, 2]))
    without = r"1 positions were appended to a PagedKVCache without reserve\(1\) before"
    with pytest.raises(RuntimeError, match=without):  # the second has room for two
        append(k[:, :, :1])
    cache.reserve(4)
    append(k)
    assert cache.lengths.tolist() == [8, 6]
    with pytest.raises(RuntimeError, match=without):
        append(k[:, :, :1])
    cache.truncate(0)
    with pytest.raises(RuntimeError, match=without):  # its pages went back
        append(k[:, :, :1])
    assert cache.lengths.tolist() == [0, 0]


@torch.no_grad()
def test_a_shared_page_is_copied_where_the_pool_has_one():
    cache, k = nn.PagedKVCache(1, 8, 1, 4, page_size=4, pages=1), torch.randn(1, 1, 2, 4)
    cache.append(k, k)
    cache.reorder(torch.tensor([0, 0]))
    cache.reserve(0)
    with pytest.raises(ValueError, match="1 more pages are needed and 0 of 1 are free"):
        cache.append(k[:, :, :1].expand(2, -1, -1, -1), k[:, :, :1].expand(2, -1, -1, -1))


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_exported_steps_write_to_pages(strict, fresh_compiler):
    """Of the model's cache, which reserve() made room in; without, they are refused."""
    model = Owner(cache=nn.PagedKVCache(2, 40, 2, 8, page_size=8, pages=20))
    x = torch.randn(2, 12, 32)
    model(x[:, :10])
    program = torch.export.export(model, (x[:, 10:11],), strict=strict).module()
    assert model.cache.lengths.tolist() == [10, 10]
    model.cache.reorder(torch.tensor([1, 1]))
    with pytest.raises(RuntimeError, match=r"without reserve\(1\) before"):
        program(x[:, 10:11])
    model.cache.reserve(2)
    out = torch.cat([program(x[:, 10:11]), program(x[:, 11:])], 1)
    assert model.cache.lengths.tolist() == [12, 12] and pages_used(model.cache) == 3
    past = x[1:, :10].expand(2, -1, -1)
    torch.testing.assert_close(out, model.layer(torch.cat([past, x[:, 10:]], 1))[:, 10:])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_given_scales_go_with_their_sequences(kind):
    scales = torch.tensor([[0.01, 0.02], [0.04, 0.08], [0.16, 0.32]])
    options = KINDS[kind] | {"value_dim": DV, "dtype": torch.int8, "k_scale": scales, "v_scale": 2 * scales}
    cache = (nn.PagedKVCache if kind == "paged" else nn.KVCache)(B, 80, HK, D, **options)
    order = torch.tensor([2, 2, 0, 1])
    cache.reorder(order)
    k, v = torch.ones(4, HK, 1, D), torch.ones(4, HK, 1, DV)
    cache.append(k, v)
    for stored, scale in zip(cache._plain(torch.float32), (scales, 2 * scales)):
        x = stored[:4, :, 0, 0]  # of whole steps
        expected = ((1 / scale).round().clamp(max=127) * scale)[order]
        torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=str)
@torch.no_grad()
def test_caches_that_grow_keep_what_they_hold(stored):
    """As integrations make them grow."""
    q, k, v = test_cache.whole(length=30)
    options = {"value_dim": DV, "dtype": stored}
    paged = nn.PagedKVCache(B, 12, HK, D, page_size=4, pages=9, **options)
    contiguous, other = nn.KVCache(B, 12, HK, D, **options), nn.KVCache(B, 30, HK, D, **options)
    for cache in (paged, contiguous, other):
        cache.append(k[:, :, :9], v[:, :, :9])
    contiguous._grow(30)
    paged._grow(29)
    assert (paged.block_table[:, 3:] == 9).all() and paged.capacity == 32 and paged.free_pages == 0
    paged._grow_pool(24)
    assert (paged.block_table[:, 3:] == 24).all() and paged.pages == 24 and paged.free_pages == 15 and paged.k.shape[0] == 24
    new = [x[:, :, 9:] for x in (q, k, v)]
    expected = other.attend(*new)
    for cache in (paged, contiguous):
        torch.testing.assert_close(cache.attend(*new), expected)
    assert paged.free_pages == 0


@torch.no_grad()
def test_pages_up_to_the_capacity():
    cache, k = nn.PagedKVCache(2, 8, 1, 4, page_size=4), torch.randn(2, 1, 8, 4)
    cache.reserve(0)
    assert pages_used(cache) == 0
    cache.append(k, k)
    cache.reserve(0)
    assert cache.lengths.tolist() == [8, 8] and pages_used(cache) == 4
    with pytest.raises(ValueError, match="accepted: up to the capacity, 8"):
        cache.append(k[:, :, :1], k[:, :, :1])
    cache.truncate(torch.tensor([8, 3]))
    with pytest.raises(ValueError, match="accepted: up to the capacity, 8"):
        cache.append(k[:, :, :1], k[:, :, :1])
    cache.reset()
    cache.append(k, k, torch.tensor([2, 1]))
    cache.append(k[:, :, :6], k[:, :, :6])  # there is room, though not for 6 beyond the first 8
    assert cache.lengths.tolist() == [8, 7]
    cache.reorder(torch.tensor([1, 1]))
    cache.reserve(0)  # which nobody writes to
    assert pages_used(cache) == 2 and nn.PagedKVCache(1, 100, 1, 4).page_size == 64
