"""attention_cached and the caches on it: pages read in place, keys and values of 8 bits."""

from __future__ import annotations

import cases
import oracle
import pytest
import test_cache
import torch

import mha_ext
from mha_ext import biases, masks, nn
from mha_ext.cached import QUANTISED, quantise

B, H, HK, D, DV, LENGTH = test_cache.B, test_cache.H, test_cache.HK, test_cache.D, test_cache.DV, test_cache.LENGTH
MODES = [None, *QUANTISED]


def make(dtype=torch.float32, page_size=16, capacity=LENGTH, **options) -> nn.PagedKVCache:
    options = {"value_dim": DV, "dtype": dtype, "page_size": page_size} | options
    cache = nn.PagedKVCache(options.pop("batch", B), capacity, HK, D, **options)
    return test_cache.poison(cache) if not cache.quantised else cache


def paged(k, v, page_size, gen):
    """k, v [B,Hk,S,D] as pages in any order, poisoned where nothing is stored, and the block table."""
    batch, heads, length = k.shape[:3]
    columns = -(-length // page_size)
    pages = batch * columns + 3
    table = torch.randperm(pages, generator=gen)[: batch * columns].view(batch, columns)
    pools = []
    for x in (k, v):
        fill = {torch.int8: -128}.get(x.dtype, torch.nan)
        pool = (
            torch.full((pages, heads, page_size, x.shape[3]), fill)
            .to(x.dtype)
            .view(torch.int8 if x.itemsize == 1 else x.dtype)
        )
        raw = x.view(torch.int8) if x.itemsize == 1 else x
        for b in range(batch):
            for c in range(columns):
                part = raw[b, :, c * page_size : (c + 1) * page_size]
                pool[table[b, c], :, : part.shape[1]] = part
        pools.append(pool.view(x.dtype))
    return *pools, cases.surrounded(table)


def quantised(k, v, dtype):
    """Keys, values and scales as attention_cached takes them, and what they mean in float64."""
    given = []
    for x in (k, v):
        scale = (x.float().abs().amax((2, 3)) / QUANTISED[dtype]).clamp(min=1e-6)
        given += [quantise(x, scale, dtype), scale]
    k8, k_scale, v8, v_scale = given
    meant = [x.double() * s.double()[:, :, None, None] for x, s in ((k8, k_scale), (v8, v_scale))]
    return (k8, v8), {"k_scale": k_scale, "v_scale": v_scale}, meant


def check(q, meant, out, lse):
    """Causal attention of q to the keys and values meant, in float64, by the rule of oracle.py."""
    dtype = q.dtype
    seen = masks.Causal().to_dense(*q.shape[:3], meant[0].shape[2])
    exact, exact_lse, _ = oracle.attention(q, *meant, seen=seen)
    rival = oracle.attention(q, *(x.to(dtype) for x in meant), seen=seen, dtype=dtype)
    terms = oracle.attention(q, meant[0], meant[1].abs(), seen=seen)[0]
    groups = q.shape[1] // meant[0].shape[1]
    sizes = q.double().abs() @ meant[0].abs().repeat_interleave(groups, 1).transpose(2, 3)
    largest = 1 + q.shape[3] ** -0.5 * sizes.amax(-1)
    oracle.compare("out", out, exact, rival[0], magnitude=terms * largest[..., None])
    assert ((lse - exact_lse).abs() <= 2 * torch.finfo(dtype).eps * (largest + exact_lse.abs())).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", QUANTISED, ids=str)
@pytest.mark.parametrize("Sq", [1, 5, 70])
def test_quantised_is_exact_but_for_the_rounding_of_the_cache(dtype, stored, Sq):
    """Against fp64 attention over what the stored bits mean, by the ordinary rule: the kernel adds no error of its own."""
    q, k, v = test_cache.whole(dtype)
    q = q[:, :, :Sq]
    eight_bits, scales, meant = quantised(k, v, stored)
    out, lse = mha_ext.attention_cached(q, *eight_bits, mask=masks.Causal(), return_lse=True, **scales)
    check(q, meant, out, lse)


@pytest.mark.parametrize("stored", QUANTISED, ids=str)
def test_rounding_of_the_formats(stored):
    """Half a step of int8, half of 2^-3 of an e4m3 (half its smallest step near 0); the largest of each head is kept."""
    _, k, _ = test_cache.whole()
    (k8, _), scales, (meant, _) = quantised(k, k, stored)
    scale = scales["k_scale"].double()[:, :, None, None]
    step = (
        torch.ones_like(meant)
        if stored == torch.int8
        else torch.maximum(k.double().abs() / scale * 2**-3, torch.tensor(2**-9.0))
    )
    assert ((meant - k.double()).abs() <= 0.5 * step * scale * (1 + 2**-20)).all()
    assert (k8.float().abs().amax((2, 3)) == QUANTISED[stored]).all()


@pytest.mark.parametrize("stored", MODES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("Sq", [1, 3, 66])
def test_pages_are_read_in_place(page_size, stored, Sq):
    """To the bit what contiguous keys give where pages hold whole tiles, else within rounding."""
    gen = cases.generator(page_size)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = test_cache.whole(dtype)
        q = cases.surrounded(q[:, :, :Sq], (0, 2, 1, 3))
        scales = {}
        if stored:
            (k, v), scales, _ = quantised(k, v, stored)
        ends = torch.tensor([LENGTH, 1, 77])
        pages = paged(k, v, page_size, gen)
        capacity = pages[2].shape[1] * page_size
        mask, bias = masks.Padding(ends), cases.randn(gen, 1, H, 1, capacity)
        options = {"softcap": 5.0, "sinks": cases.randn(gen, H), "return_lse": True} | scales
        got = mha_ext.attention_cached(q, *pages[:2], block_table=pages[2], mask=mask, bias=bias, **options)
        expected = mha_ext.attention_cached(q, k, v, mask=mask, bias=bias[..., :LENGTH], **options)
        for a, b in zip(got, expected):
            if page_size % 64 == 0:
                assert torch.equal(a, b)
            else:  # both are rounded
                assert (a - b).abs().max() <= 2 * 2 * torch.finfo(dtype).eps * b.abs().max()


def test_without_pages_and_scales_it_is_attention():
    q, k, v = test_cache.whole(torch.float64)
    assert torch.equal(
        mha_ext.attention_cached(q, k, v, mask=masks.Causal()), mha_ext.attention(q, k, v, mask=masks.Causal())
    )


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("steps", test_cache.STEPS.values(), ids=test_cache.STEPS)
def test_a_paged_cache_in_any_steps(steps, dtype):
    q, k, v = test_cache.whole(dtype)
    cache = make(dtype)
    out = test_cache.in_steps(cache, q, k, v, steps)
    oracle.check({"out": out}, {"out": test_cache.truth(q, k, v)})
    assert cache.free_pages == cache.pages - B * -(-LENGTH // 16)


@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
@pytest.mark.parametrize("stored", QUANTISED, ids=str)
def test_quantised_caches_in_any_steps(stored, kind):
    """Near attention over the values themselves: by what the format rounds, in the root mean square."""
    q, k, v = test_cache.whole()
    options = {"dtype": stored, "value_dim": DV}
    if kind == "paged":
        cache, window = make(stored), None
    else:
        window = 40 if kind == "ring" else None
        cache = nn.KVCache(B, LENGTH if window is None else 120, HK, D, window=window, **options)
    out = test_cache.in_steps(cache, q, k, v, [60, 1, 1, 1, 50, 3])
    exact = test_cache.truth(q, k, v, window).exact
    error = (out - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    # e4m3 rounds by up to 2^-4, int8 by up to half a 64th of a head's largest value, some 4 times the usual one.
    assert error < 2**-4 if stored == torch.float8_e4m3fn else error < 4 * 2**-7


@pytest.mark.parametrize("stored", MODES, ids=str)
def test_ragged_sequences_share_a_pool(stored):
    """Pages go to whom needs them; what a sequence gives does not depend on the others."""
    q, k, v = test_cache.whole()
    dtype = stored or torch.float32
    cache, alone = make(dtype, pages=21), [make(dtype, batch=1) for _ in range(B)]
    at = torch.zeros(B, dtype=torch.int64)
    for counts in ([100, 3, 0], [1, 1, 1], [0, 60, 5], [1, 1, 1]):
        counts = torch.tensor(counts)
        parts = [torch.stack([x[b, :, a : a + int(counts.max())] for b, a in enumerate(at)]) for x in (q, k, v)]
        out = cache.attend(*parts, counts=counts)
        for b in range(B):
            assert torch.equal(out[b], alone[b].attend(*(x[b : b + 1] for x in parts), counts=counts[b : b + 1])[0])
        at += counts
    assert cache.lengths.tolist() == [102, 65, 7]
    cache.reset(1)
    assert cache.lengths.tolist() == [102, 0, 7] and cache.free_pages == 21 - 7 - 1
    cache.reset()
    assert cache.free_pages == 21


@pytest.mark.parametrize("stored", MODES, ids=str)
def test_reorder_and_truncate(stored):
    q, k, v = test_cache.whole()
    indices, dtype = torch.tensor([2, 2, 0]), stored or torch.float32
    caches = make(dtype, page_size=64), nn.KVCache(B, 192, HK, D, value_dim=DV, dtype=dtype)
    outs = []
    for cache in caches:
        test_cache.in_steps(cache, *(x[:, :, :100] for x in (q, k, v)), [])
        cache.truncate(torch.tensor([100, 20, 65]))
        cache.reorder(indices)
        assert cache.lengths.tolist() == [65, 65, 100]
        outs.append(cache.attend(*(x[:, :, 100:102] for x in (q, k, v))))
    assert torch.equal(*outs)


def test_the_pool_and_the_capacity_end():
    _, k, v = test_cache.whole()
    cache = make(capacity=100, pages=8)
    assert cache.capacity == 112
    cache.append(k[:, :, :20], v[:, :, :20])
    with pytest.raises(
        ValueError,
        match="20 positions were to be appended to sequences of up to 20; 3 more pages are needed and 2 of 8",
    ):
        cache.append(k[:, :, :20], v[:, :, :20])
    with pytest.raises(ValueError, match="up to 20; accepted: up to the capacity, 112"):
        cache.append(k[:, :, :100], v[:, :, :100])
    cache.truncate(torch.tensor([20, 0, 0]))
    cache.append(k[:, :, :20], v[:, :, :20])
    assert cache.lengths.tolist() == [40, 20, 20]


@torch.no_grad()
def test_compiled_steps_over_pages(fresh_compiler):
    from torch._dynamo.testing import CompileCounterWithBackend

    module = nn.SelfAttention(32, 4, causal=True, rope=True, num_kv_heads=2).eval()
    x = torch.randn(B, 60, 32)
    cache = nn.PagedKVCache(B, 60, 2, 8, page_size=8)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda x, cache: module(x, cache=cache), backend=counter, fullgraph=True)
    outs = [module(x[:, :30], cache=cache)]
    for i in range(30, 60):
        cache.reserve(1)
        outs.append(step(x[:, i : i + 1], cache))
    assert counter.frame_count == 1
    torch.testing.assert_close(torch.cat(outs, 1), module(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_8_bits_hold(dtype):
    """All 256 values of each format, NaN too, as values that one key brings each."""
    bits, ones = torch.arange(256, dtype=torch.uint8), {"k_scale": torch.ones(1, 1), "v_scale": torch.ones(1, 1)}
    for stored in QUANTISED:
        v = bits.view(stored).view(1, 1, 1, 256)
        out = mha_ext.attention_cached(
            torch.zeros(1, 1, 1, 8, dtype=dtype), torch.zeros(1, 1, 1, 8).to(stored), v, **ones
        )
        torch.testing.assert_close(out, v.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_thread_count_changes_no_bit():
    q, k, v = (
        cases.randn(cases.generator(n), 1, 4, s, 32, dtype=torch.bfloat16) for n, s in ((1, 1), (2, 3000), (3, 3000))
    )
    torch.set_num_threads(1)
    expected = mha_ext.attention(q, k, v)
    for threads in (2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(mha_ext.attention(q, k, v), expected)
    both = mha_ext.attention(*(torch.cat([x, x.flip(0) * 2]) for x in (q, k, v)))
    assert torch.equal(both[:1], expected)  # nor does the batch


TABLE = torch.zeros(3, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"block_table": TABLE[:2]}, r"block_table is a int64 tensor of shape \[2,2\]; accepted: an integer tensor \[B,n\] with B = 3"),
        ({"block_table": TABLE.float()}, "block_table was given a float32 tensor"),
        ({"to": torch.int8, "k_scale": [1.0, 1.0], "v_scale": torch.ones(3, 2)}, r"k_scale is \[1.0, 1.0\]; accepted: float32"),
        ({"to": torch.int8, "k_scale": torch.ones(3, 2, 7), "v_scale": torch.ones(3, 2, 20)}, r"or one per key, \[3,2,20\]"),
        ({"block_table": TABLE + 3}, "block_table has an entry that is no page"),
        ({"block_table": TABLE - 1}, "block_table has an entry that is no page"),
        ({"k_scale": torch.ones(3, 2)}, "k_scale is given for keys and values of float32"),
        ({"to": torch.int8}, "k_scale is missing for keys and values of int8"),
        ({"to": torch.int8, "k_scale": torch.ones(2), "v_scale": torch.ones(2)}, r"k_scale is a float32 tensor of shape \[2\]"),
        ({"to": torch.int8, "k_scale": torch.ones(2, 2), "v_scale": torch.ones(3, 2)}, r"k_scale is a float32 tensor of shape \[2,2\]"),
        ({"softcap": -1.0}, "softcap is -1.0; accepted: a positive limit"),
        ({"heads": 0}, "q, k, v have shapes .* with H a multiple of Hk"),
        ({"to": torch.float64}, "q, k, v have dtypes float32, float64, float64; accepted: one dtype, or k and v int8"),
        ({"grad": True}, "was given a tensor that requires grad; accepted: calls under torch.no_grad"),
        ({"bias": biases.ALiBi(torch.ones(H)) + biases.ALiBi(torch.ones(H, requires_grad=True))}, "was given a tensor that requires grad; accepted: calls under torch.no_grad"),
    ],
)  # fmt: skip
def test_refusals(options, message):
    q, k, v = test_cache.whole(length=20)
    options = dict(options)
    if options.pop("grad", False):
        q.requires_grad_()
    to, heads = options.pop("to", torch.float32), options.pop("heads", 2)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        mha_ext.attention_cached(q, k[:, :heads].to(to), v[:, :heads].to(to), **options)


def test_kinds_and_devices_that_are_refused():
    q, k, v = test_cache.whole(length=20)
    nested = torch.nested.nested_tensor(list(q), layout=torch.jagged)
    for wrong, message in ((q.long(), "q is int64; accepted: float32"), (nested, "q is a nested tensor of layout torch.jagged; accepted: a dense tensor")):
        with pytest.raises(TypeError, match=message):
            mha_ext.attention_cached(wrong, k, v)
    with pytest.raises(ValueError, match="v_scale has a tensor on meta"):
        mha_ext.attention_cached(q, k.to(torch.int8), v.to(torch.int8), k_scale=torch.ones(1, 2), v_scale=torch.ones(1, 2, device="meta"))
    with torch.autograd.forward_ad.dual_level():
        assert mha_ext.attention_cached(q, k, v).shape == (*q.shape[:3], v.shape[3])  # none of which has a tangent
    given = {"k": k, "v": v, "block_table": TABLE}
    for name, x in given.items():
        with pytest.raises(ValueError, match=f"{name} has a tensor on meta but the queries are on cpu"):
            mha_ext.attention_cached(q, **{**given, name: x.to("meta")})


def test_scales_of_heads_that_all_sequences_have():
    q, k, v = test_cache.whole(length=20)
    kv = [(x * 20).to(torch.int8) for x in (k, v)]
    one = torch.tensor([[0.02, 0.07]])
    found, expected = (mha_ext.attention_cached(q, *kv, k_scale=scale, v_scale=scale) for scale in (one, one.repeat(3, 1)))
    assert torch.equal(found, expected)


def test_refusals_of_caches():
    with pytest.raises(ValueError, match="window was given; PagedKVCache has none"):
        nn.PagedKVCache(1, 4, 1, 8, window=2)
    with pytest.raises(ValueError, match="page_size is 0; PagedKVCache accepts a positive int"):
        nn.PagedKVCache(1, 4, 1, 8, page_size=0)
    with pytest.raises(ValueError, match="k_scale was given with dtype=torch.float32"):
        nn.KVCache(1, 4, 1, 8, k_scale=torch.ones(1))
    with pytest.raises(TypeError, match="a quantised cache accepts float32, bfloat16 or float16"):
        nn.KVCache(1, 4, 1, 8, dtype=torch.int8).append(
            *(torch.zeros(1, 1, 1, 8, dtype=torch.float64) for _ in range(2))
        )
