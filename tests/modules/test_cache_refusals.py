"""Bad calls to caches: one sentence each, and the cache stays as it was."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import test_cache
import torch

from mha_ext import biases, masks, nn

B, H, HK, D, DV = test_cache.B, test_cache.H, test_cache.HK, test_cache.D, test_cache.DV
S = 3
KINDS = {
    "contiguous": lambda: nn.KVCache(B, 12, HK, D, value_dim=DV),
    "int8": lambda: nn.KVCache(B, 12, HK, D, value_dim=DV, dtype=torch.int8),
    "ring": lambda: nn.KVCache(B, 12, HK, D, value_dim=DV, window=5),
    "paged": lambda: nn.PagedKVCache(B, 12, HK, D, value_dim=DV, page_size=4, pages=8),
}
counts = torch.tensor
ids = torch.zeros(B, 4, dtype=torch.int64)


class Own(masks.Mask):
    """That says nothing about caches."""


# What is called, and what of the message does not depend on the kind of cache.
CALLS = {
    "counts beyond the positions": (lambda c, q, k, v: c.append(k, v, counts([1, 9, 0])), r"counts are \[1, 9, 0\]; accepted: numbers from 0 to the 3 positions"),
    "negative counts": (lambda c, q, k, v: c.append(k, v, counts([1, -1, 0])), r"counts are \[1, -1, 0\]"),
    "counts in attend": (lambda c, q, k, v: c.attend(q, k, v, counts=counts([1, 4, 0])), r"counts are \[1, 4, 0\]"),
    "counts of floats": (lambda c, q, k, v: c.append(k, v, counts([1.0, 1, 0])), "counts is a float32 tensor"),
    "counts of bools": (lambda c, q, k, v: c.append(k, v, counts([True, True, False])), "counts is a bool tensor"),
    "counts of a string": (lambda c, q, k, v: c.append(k, v, "all"), "counts is a str; accepted: an integer tensor"),
    "counts of a wrong length": (lambda c, q, k, v: c.append(k, v, counts([1])), r"counts is a int64 tensor of shape \[1\]"),
    "sparse counts": (lambda c, q, k, v: c.append(k, v, counts([1, 1, 1]).to_sparse()), "counts is a tensor of layout torch.sparse_coo"),
    "counts on another device": (lambda c, q, k, v: c.append(k, v, counts([1, 1, 1]).to("meta")), "counts has a tensor on meta"),
    "lists": (lambda c, q, k, v: c.append([k], [v]), "k, v are a list, a list; a cache accepts two tensors"),
    "no values": (lambda c, q, k, v: c.attend(q, k, None), "k, v are a Tensor, a NoneType"),
    "sparse keys": (lambda c, q, k, v: c.append(k.to_sparse(), v), "k is a tensor of layout torch.sparse_coo"),
    "three dimensions": (lambda c, q, k, v: c.append(k[0], v[0]), r"k, v have shapes \[2,3,24\]"),
    "another head size": (lambda c, q, k, v: c.append(k[..., :8], v), r"k, v have shapes \[3,2,3,8\]"),
    "fewer values": (lambda c, q, k, v: c.append(k, v[:, :, :2]), "k, v have shapes"),
    "another type": (lambda c, q, k, v: c.append(k.double(), v.double()), "k, v are float64, float64"),
    "keys on another device": (lambda c, q, k, v: c.append(k.to("meta"), v), "k, v are on meta, cpu and the cache on cpu; accepted: one device"),
    "values on another device": (lambda c, q, k, v: c.append(k, v.to("meta")), "k, v are on cpu, meta and the cache on cpu; accepted: one device"),
    "another device": (lambda c, q, k, v: c.append(k.to("meta"), v.to("meta")), "accepted: one device"),
    "no queries": (lambda c, q, k, v: c.attend(None, k, v), "q is a NoneType; accepted: a tensor"),
    "more queries than keys": (lambda c, q, k, v: c.attend(torch.cat([q, q[:, :, :1]], 2), k, v), "one query for each new key"),
    "fewer queries": (lambda c, q, k, v: c.attend(q[:, :, 1:], k, v), "one query for each new key"),
    "heads that do not divide": (lambda c, q, k, v: c.attend(q[:, :5], k, v), "H a multiple of Hk = 2"),
    "no heads": (lambda c, q, k, v: c.attend(q[:, :0], k, v), "H a multiple of Hk = 2"),
    "queries of another size": (lambda c, q, k, v: c.attend(q[..., :8], k, v), r"q has shape \[3,6,3,8\]"),
    "queries of another type": (lambda c, q, k, v: c.attend(q.half(), k, v), "q is float16 and k float32"),
    "queries on another device": (lambda c, q, k, v: c.attend(q.to("meta"), k, v), "q is on meta and the cache on cpu"),
    "a negative window": (lambda c, q, k, v: c.attend(q, k, v, window=-1), "window is -1; accepted: an int >= 0"),
    "a window of half a position": (lambda c, q, k, v: c.attend(q, k, v, window=1.5), "window is 1.5; accepted: an int >= 0"),
    "a true window": (lambda c, q, k, v: c.attend(q, k, v, window=True), "window is True; accepted"),
    "scale": (lambda c, q, k, v: c.attend(q, k, v, scale="1"), "scale is .*; accepted: a"),
    "softcap": (lambda c, q, k, v: c.attend(q, k, v, softcap=-1.0), "softcap is -1.0; accepted: a positive limit"),
    "sinks": (lambda c, q, k, v: c.attend(q, k, v, sinks=torch.zeros(5)), r"sinks is a float32 tensor of shape \[5\]"),
    "mix": (lambda c, q, k, v: c.attend(q, k, v, pre_mix=torch.eye(5)), r"pre_mix has shape \[5,5\]"),
    "a mask of floats": (lambda c, q, k, v: c.attend(q, k, v, mask=torch.zeros(3, 12)), "mask is a float32 tensor"),
    "a mask of other rows": (lambda c, q, k, v: c.attend(q, k, v, mask=torch.ones(2, 12) > 0), r"mask has shape \[2,12\]"),
    "a mask of few columns": (lambda c, q, k, v: c.attend(q, k, v, mask=torch.ones(3, 4) > 0), "mask covers 4 positions and the cache has 7"),
    "documents of few positions": (lambda c, q, k, v: c.attend(q, k, v, mask=masks.Documents(ids)), "Documents covers 4 positions"),
    "documents of other sequences": (lambda c, q, k, v: c.attend(q, k, v, mask=masks.Documents(ids.repeat(2, 9))), r"ids of shape \[6,36\]"),
    "padding of other sequences": (lambda c, q, k, v: c.attend(q, k, v, mask=masks.Padding(counts([1, 2]))), "Padding was given a tensor of shape"),
    "a name as mask": (lambda c, q, k, v: c.attend(q, k, v, mask="causal"), "mask is a str"),
    "a mask of one's own": (lambda c, q, k, v: c.attend(q, k, v, mask=Own()), "Own was given with a cache; accepted: the masks of mha_ext.masks"),
    "a bias of other heads": (lambda c, q, k, v: c.attend(q, k, v, bias=biases.ALiBi(torch.ones(5))), "ALiBi is for 5 heads but q has 6"),
    "a bias of few columns": (lambda c, q, k, v: c.attend(q, k, v, bias=torch.zeros(3, 4)), "bias covers 4 positions"),
    "a bias of ints": (lambda c, q, k, v: c.attend(q, k, v, bias=torch.zeros(3, 12, dtype=torch.int64)), "bias is a int64 tensor"),
    "a bias as a list": (lambda c, q, k, v: c.attend(q, k, v, bias=[0.0]), "bias is a list; accepted"),
    "half a length": (lambda c, q, k, v: c.truncate(1.5), "lengths is a float32 tensor"),
    "a length as text": (lambda c, q, k, v: c.truncate("2"), "lengths is a str; accepted: an integer tensor"),
    "a negative length": (lambda c, q, k, v: c.truncate(-1), "lengths is -1; truncate\\(\\) accepts numbers >= 0"),
    "negative lengths": (lambda c, q, k, v: c.truncate(counts([1, -1, 2])), r"lengths are \[1, -1, 2\]"),
    "lengths of others": (lambda c, q, k, v: c.truncate(counts([1])), "lengths is a int64 tensor of shape"),
    "a true length": (lambda c, q, k, v: c.truncate(True), "lengths is a bool tensor"),
    "a sequence that is not there": (lambda c, q, k, v: c.reset(3), "sequences are 3; accepted: numbers of sequences, 0 to 2"),
    "a negative sequence": (lambda c, q, k, v: c.reset([0, -1]), r"sequences are \[0, -1\]"),
    "sequences as text": (lambda c, q, k, v: c.reset("all"), "sequences is a str; accepted: a number, numbers of sequences"),
    "half a sequence": (lambda c, q, k, v: c.reset(torch.tensor(0.5)), "sequences is a float32 tensor"),
    "flags of others": (lambda c, q, k, v: c.reset(torch.ones(2, dtype=torch.bool)), "sequences is a bool tensor"),
    "sequences of pairs": (lambda c, q, k, v: c.reset(counts([[0, 1]])), r"sequences is a int64 tensor of shape \[1,2\]"),
    "sparse sequences": (lambda c, q, k, v: c.reset(counts([0, 1]).to_sparse()), "sequences is a tensor of layout torch.sparse_coo"),
    "sparse flags": (lambda c, q, k, v: c.reset(counts([True, False, True]).to_sparse()), "sequences is a tensor of layout torch.sparse_coo"),
    "sequences on another device": (lambda c, q, k, v: c.reset(counts([0, 1]).to("meta")), "sequences has a tensor on meta"),
    "more than any sequence": (lambda c, q, k, v: c.reset([0, 2**70]), "sequences is a list; accepted: a number, numbers of sequences"),
    "more than any window": (lambda c, q, k, v: c.attend(q, k, v, window=2**70), f"window is {2**70}; accepted: an int >= 0"),
    "more than any length": (lambda c, q, k, v: c.truncate([1, 2, 2**70]), "lengths is a list; accepted: an integer tensor"),
    "an order of pairs": (lambda c, q, k, v: c.reorder(counts([[0, 1, 2]])), r"indices is a int64 tensor of shape \[1,3\]; accepted: an integer tensor \[N\]"),
    "an order of none": (lambda c, q, k, v: c.reorder(counts([], dtype=torch.int64)), r"indices is a int64 tensor of shape \[0\]"),
    "an order as text": (lambda c, q, k, v: c.reorder("best"), "indices is a str; accepted: an integer tensor"),
    "an order of bools": (lambda c, q, k, v: c.reorder(counts([True, False, True])), "indices is a bool tensor"),
    "a negative order": (lambda c, q, k, v: c.reorder(counts([0, -1])), r"indices are \[0, -1\]; accepted: numbers of sequences, 0 to 2"),
    "an order that is not there": (lambda c, q, k, v: c.reorder(counts([0, 1, 3])), r"indices are \[0, 1, 3\]"),
    "an order on another device": (lambda c, q, k, v: c.reorder(counts([0, 1, 2]).to("meta")), "indices has a tensor on meta"),
    "a sparse order": (lambda c, q, k, v: c.reorder(counts([0, 1, 2]).to_sparse()), "indices is a tensor of layout torch.sparse_coo"),
    "sparse queries": (lambda c, q, k, v: c.attend(q.to_sparse(), k, v), "q is a tensor of layout torch.sparse_coo"),
    "an order of floats": (lambda c, q, k, v: c.reorder(torch.zeros(3)), "indices is a float32 tensor"),
    "more than there is room": (lambda c, q, k, v: c.append(k.repeat(1, 1, 5, 1), v.repeat(1, 1, 5, 1)), "15 positions were"),
}  # fmt: skip


def state_of(cache):
    """Bit for bit, as slots that hold nothing yet may hold NaN."""
    bits = {name: x.clone().view(torch.uint8) for name, x in cache.named_buffers()}
    return bits, copy.deepcopy({name: vars(cache).get(name) for name in ("_free", "_owned", "_users", "_bounds")})


def same(state, other):
    return state[1] == other[1] and state[0].keys() == other[0].keys() and all(torch.equal(x, other[0][name]) for name, x in state[0].items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
@torch.no_grad()
def test_a_refusal_changes_nothing(call, kind):
    q, k, v = test_cache.whole(length=4 + S)
    cache = KINDS[kind]()
    cache.append(k[:, :, :4], v[:, :, :4])
    before = state_of(cache)
    function, message = CALLS[call]
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        function(cache, *(x[:, :, 4:] for x in (q, k, v)))
    text = str(raised.value)
    assert text.count("accept") == 1 and "\n" not in text
    assert same(state_of(cache), before)


@torch.no_grad()
def test_what_numbers_may_be():
    sizes = np.int64(B), np.int32(10), np.uint8(HK), np.int64(D)
    with pytest.raises(ValueError, match="window was given; PagedKVCache has none"):
        nn.PagedKVCache(*sizes, window=4)
    assert nn.PagedKVCache(*sizes, page_size=np.int64(4)).block_table.shape == (B, 3)
    assert nn.PagedKVCache(*sizes, page_size=4, pages=np.int16(5)).free_pages == 5
    assert nn.KVCache(*sizes, value_dim=np.int64(DV)).v.shape == (B, HK, 10, DV)
    _, k, v = test_cache.whole(length=4)
    for sequences in (1, range(1, 2), (1,), [False, True, False], torch.tensor([1], dtype=torch.uint64), torch.tensor(1)):
        cache = KINDS["contiguous"]()
        cache.append(k, v)
        cache.reset(sequences)
        assert cache.lengths.tolist() == [4, 0, 4]
        cache.truncate(2**70)
        cache.reset([])
        cache.reorder(torch.tensor([2, 1], dtype=torch.uint64))
        assert cache.lengths.tolist() == [4, 0]


def test_no_pages_left():
    cache = nn.PagedKVCache(2, 12, 1, 4, page_size=4, pages=3)
    k = torch.ones(2, 1, 4, 4)
    cache.append(k, k)
    before = state_of(cache)
    for n in (-3, 1.5, True, "2"):
        with pytest.raises(ValueError, match=r"n is .*; reserve\(\) accepts a number of positions"):
            cache.reserve(n)
    with pytest.raises(ValueError, match="2 more pages are needed and 1 of 3 are free"):
        cache.append(k, k)
    assert same(state_of(cache), before)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"batch": 0}, "batch is 0; KVCache accepts a positive int"),
        ({"batch": 2**70}, f"batch is {2**70}; KVCache accepts a positive int"),
        ({"capacity": 2.0}, "capacity is 2.0; KVCache accepts a positive int"),
        ({"num_kv_heads": "2"}, "num_kv_heads is '2'"),
        ({"head_dim": True}, "head_dim is True"),
        ({"value_dim": -1}, "value_dim is -1"),
        ({"window": 8}, "window is 8 and capacity 8"),
        ({"window": 1.0}, "window is 1.0 and capacity 8"),
        ({"dtype": torch.int32}, "dtype is torch.int32; KVCache accepts one of float32"),
        ({"dtype": "int8"}, "dtype is 'int8'; KVCache accepts one of"),
        (
            {"dtype": torch.int8, "k_scale": torch.tensor([1.0, -1.0])},
            "k_scale has numbers that are not positive and finite",
        ),
        ({"dtype": torch.int8, "k_scale": torch.tensor([1.0, 0.0])}, "k_scale has numbers that are not positive"),
        ({"dtype": torch.int8, "v_scale": torch.tensor([torch.nan, 1.0])}, "v_scale has numbers that are not positive"),
        (
            {"dtype": torch.int8, "k_scale": torch.ones(3)},
            r"k_scale has shape \[3\]; accepted: \[Hk\] or \[B,Hk\] = \[2,2\]",
        ),
        ({"dtype": torch.int8, "k_scale": "big"}, "k_scale is a str; accepted: a tensor"),
        ({"k_scale": torch.ones(2)}, "k_scale was given with dtype=torch.float32"),
    ],
)
def test_making_one(options, message):
    given = {"batch": 2, "capacity": 8, "num_kv_heads": 2, "head_dim": 4} | options
    with pytest.raises((ValueError, TypeError), match=message):
        nn.KVCache(**given)


def test_modules():
    module, x = nn.SelfAttention(8, 2, causal=True).eval(), torch.zeros(1, 1, 8)
    with torch.no_grad():
        for cache in ({}, [], "yes", torch.zeros(2)):
            with pytest.raises(TypeError, match="cache is .*; accepted: what make_cache"):
                module(x, cache=cache)
        with pytest.raises(TypeError, match=r"x is .*; accepted: a tensor \[B,S,8\]"):
            module([x])
        with pytest.raises(ValueError, match=r"k, v have shapes \[1,2,1,4\].*; this cache accepts"):
            module(x, cache=nn.SelfAttention(12, 3, causal=True).make_cache(1, 4))
        for rope in (False, True):
            layer = nn.SelfAttention(8, 2, causal=True, rope=rope).eval()
            for B, sequences in ((1, 3), (3, 1), (2, 3)):
                with pytest.raises(ValueError, match=f"x has {B} sequences and the cache {sequences}; accepted: the same"):
                    layer(torch.zeros(B, 1, 8), cache=layer.make_cache(sequences, 4))
    for options, message in (
        ({"page_size": 0}, "page_size is 0; PagedKVCache accepts a positive int"),
        ({"page_size": 4, "window": 2}, "window was given with page_size; make_cache\\(\\) accepts one"),
        ({"pages": 4}, "pages was given without page_size; make_cache\\(\\) accepts both"),
        ({"page_size": 4, "pages": 0}, "pages is 0; PagedKVCache accepts"),
        (
            {"block_size": 4},
            "make_cache\\(\\) has no argument block_size; accepted: batch, capacity, page_size, device, dtype",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            module.make_cache(1, 4, **options)
    windowed = nn.SelfAttention(8, 2, causal=True, window=2).make_cache(1, 1000)
    with torch.no_grad(), pytest.raises(ValueError, match="the cache keeps a window of 2 but this module has none"):
        module(x, cache=windowed)
