"""attention_cached on CUDA: pages and keys and values of 8 bits; see on_cuda.py."""

from __future__ import annotations

import json

import cases
import pytest
import test_cached_attention
import test_quantised_cache
import torch
from on_cuda import to_cuda
from test_cuda_ops import in_a_process_of_its_own
from torch_on_cpu import simulated

import mha_ext
from mha_ext import masks
from mha_ext.cached import QUANTISED

pytestmark = pytest.mark.cuda

B, H, HK, LENGTH = 2, 4, 2, 70


def inputs(dtype, D=24, Dv=17, Sq=3):
    gen = cases.generator(D)
    return [cases.randn(gen, B, h, s, d, dtype=dtype) for h, s, d in ((H, Sq, D), (HK, LENGTH, D), (HK, LENGTH, Dv))]


def cached(q, k, v, scales=None, **options):
    tensors = [x if x.is_cuda else to_cuda(x) for x in (q, k, v)]
    scales = {name: to_cuda(x) for name, x in (scales or {}).items()}
    out, lse = mha_ext.attention_cached(*tensors, return_lse=True, **scales, **options)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("sizes", [(24, 17), (128, 128), (33, 140)], ids=str)
@pytest.mark.parametrize("stored", [None, *QUANTISED], ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_pages(dtype, stored, sizes):
    if stored and dtype == torch.float64:
        pytest.skip("refused")
    q, k, v = inputs(dtype, *sizes)
    scales, meant = None, [k.double(), v.double()]
    if stored:
        (k, v), scales, meant = test_cached_attention.quantised(k, v, stored)
    for page_size in (16, 7):
        *pools, table = test_cached_attention.paged(k, v, page_size, cases.generator(page_size))
        end = torch.full((B, 3), LENGTH - 2) + torch.arange(3)
        seen = masks.Intervals(torch.zeros_like(end).cuda(), end.cuda())
        got = cached(cases.surrounded(q), *pools, scales, block_table=to_cuda(table), mask=seen)
        test_cached_attention.check(q, meant, *got)


@pytest.mark.parametrize("stored", QUANTISED, ids=str)
def test_quantised_without_pages(stored):
    q, k, v = inputs(torch.bfloat16, Sq=70)
    (k, v), scales, meant = test_cached_attention.quantised(k, v, stored)
    test_cached_attention.check(q, meant, *cached(q, k, v, scales, mask=masks.Causal()))


def test_options_are_those_of_the_cpu():
    q, k, v = inputs(torch.float32)
    *pools, table = test_cached_attention.paged(k, v, 16, cases.generator(1))
    bias, ends = cases.randn(cases.generator(2), 1, H, 1, table.shape[1] * 16), torch.tensor([5, 66])
    options = {"softcap": 4.0, "scale": 0.3}
    got = cached(q, *pools, block_table=to_cuda(table), mask=masks.Padding(ends.cuda()), bias=to_cuda(bias), **options)
    expected = mha_ext.attention_cached(
        q, *pools, block_table=table, mask=masks.Padding(ends), bias=bias, return_lse=True, **options
    )
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b)


def test_what_e4m3_holds():
    """All 256 of them, NaN too, as values that one key brings each."""
    bits = torch.arange(256, dtype=torch.uint8)
    v = bits.view(torch.float8_e4m3fn).view(1, 1, 1, 256)
    k, q = torch.zeros(1, 1, 1, 8).to(torch.float8_e4m3fn), torch.zeros(1, 1, 1, 8)
    ones = {"k_scale": torch.ones(1, 1), "v_scale": torch.ones(1, 1)}
    out = cached(q, k, v, ones)[0]
    torch.testing.assert_close(out, v.float(), rtol=0, atol=0, equal_nan=True)


def test_an_entry_that_is_no_page_shows():
    q, k, v = inputs(torch.float32)
    *pools, table = test_cached_attention.paged(k, v, 16, cases.generator(1))
    table = table.clone()
    table[0, 1], table[1, 4] = 99, -1
    out = cached(q, *pools, block_table=table.cuda(), mask=masks.Padding(torch.tensor([30, 64]).cuda()))[0]
    assert out[0].isnan().all() and out[1].isfinite().all()


# Tensor cores -------------------------------------------------------------------------------------------------------------


def decoding(dtype, heads, kv_heads, length, D, Dv, Sq=1, seed=1):
    gen = cases.generator(seed)
    shapes = (heads, Sq, D), (kv_heads, length, D), (kv_heads, length, Dv)
    return [cases.randn(gen, B, *s, dtype=dtype) for s in shapes]


def causal(Sq, length):
    """Bottom-right, as intervals: there are more keys in the pages."""
    end = torch.full((B, Sq), length - Sq + 1) + torch.arange(Sq)
    return masks.Intervals(torch.zeros_like(end).cuda(), end.cuda())


def in_pages(k, v, scales, page_size):
    """Pools, block table and scales; those of single keys lie in pages, too."""
    *pools, table = test_cached_attention.paged(k, v, page_size, cases.generator(page_size))
    if scales and scales["k_scale"].dim() == 3:
        both = [
            test_cached_attention.paged(x[..., None], x[..., None], page_size, cases.generator(page_size))
            for x in scales.values()
        ]
        scales = {name: pool[0][..., 0].contiguous() for name, pool in zip(scales, both)}
        assert all(torch.equal(b[2], table) for b in both)
    return pools, table, scales


def kernel(*arguments, **options):
    """The name of the kernel that a call would run."""
    mha_ext._C_cuda.note_kernels(False)
    try:
        cached(*arguments, **options)
    finally:
        found = mha_ext._C_cuda.noted_kernels()
    return found[0][0]


DECODE = [  # heads, key/value heads, keys, D, Dv, page size (0: none), queries
    (8, 2, 70, 128, 128, 16, 1), (8, 1, 600, 128, 128, 32, 1), (3, 3, 33, 64, 48, 7, 1), (12, 1, 50, 128, 64, 16, 1), (4, 2, 1, 48, 16, 16, 1),
    (8, 2, 100, 128, 128, 0, 1),
    (4, 1, 70, 128, 128, 16, 2), (6, 2, 300, 128, 128, 32, 5), (3, 3, 60, 64, 48, 7, 21), (2, 2, 90, 128, 128, 0, 35), (2, 1, 24, 48, 128, 4, 24),
]  # fmt: skip


@pytest.mark.parametrize("sizes", DECODE, ids=str)
@pytest.mark.parametrize("stored", [None, *QUANTISED, "per key"], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tensor_cores(dtype, stored, sizes):
    heads, kv_heads, length, D, Dv, page_size, Sq = sizes
    if stored is None and page_size == 0:
        pytest.skip("as other tensors")
    q, k, v = decoding(dtype, heads, kv_heads, length, D, Dv, Sq)
    scales, meant = None, [k.double(), v.double()]
    if stored == "per key":
        # Weights times scales down to 2^-20, which fp16 has no room for.
        shrink = torch.exp2(torch.randint(-20, 1, (B, kv_heads, length, 1), generator=cases.generator(3)).to(dtype))
        (k, v), scales, meant = test_quantised_cache.per_key(k, v * shrink, torch.int8)
    elif stored:
        (k, v), scales, meant = test_cached_attention.quantised(k, v, stored)
    options = {"mask": causal(Sq, length)}
    if page_size:
        (k, v), table, scales = in_pages(k, v, scales, page_size)
        options["block_table"] = to_cuda(table)
    assert kernel(q, k, v, scales, **options) == "attention_cached_sm80"
    test_cached_attention.check(q, meant, *cached(q, k, v, scales, **options))


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("Sq", [1, 5])
def test_tensor_cores_with_everything(Sq, by_head):
    """Masks, bias, soft cap and sinks against the simple kernels, which take the same in fp32."""
    q, k, v = decoding(torch.float32, 8, 2, 300, 128, 128, Sq)
    q, k, v = (x.bfloat16().float() for x in (q, k, v))
    *pools, table = test_cached_attention.paged(k, v, 16, cases.generator(1))
    columns = table.shape[1] * 16
    gen = cases.generator(2)
    seen = (torch.rand(B, 8 if by_head else 1, Sq, columns, generator=gen) < 0.6) & (torch.arange(columns) < 290)
    mask = masks.Dense(seen.cuda()) & masks.LeftPadding(torch.tensor([40, 0]).cuda())
    bias, sinks = cases.randn(gen, 1, 8, Sq, columns), cases.randn(gen, 8)
    options = {
        "softcap": 4.0,
        "scale": -0.3,
        "bias": to_cuda(bias),
        "sinks": sinks.cuda(),
        "mask": mask,
        "block_table": to_cuda(table),
    }
    half = [q.bfloat16(), *(x.bfloat16() for x in pools)]
    assert kernel(*half, **options) == "attention_cached_sm80"
    expected, got = cached(q, *pools, **options), cached(*half, **options)
    torch.testing.assert_close(got[0].float(), expected[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(got[1], expected[1], atol=1e-3, rtol=1e-4)
    ends = torch.tensor([0, 5])
    out, lse = cached(*half, block_table=to_cuda(table), mask=masks.Padding(ends.cuda()))
    assert not out[0].any() and (lse[0] == -torch.inf).all() and out[1].isfinite().all()


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn, "per key"], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_not_finite_keeps_to_rows_that_see_it(dtype, stored):
    """Keys and values that some rows of a tile see and others do not: those others keep every bit."""
    Sq, length = 8, 40  # 16 rows; the first queries end at key 33
    q, k, v = decoding(dtype, 4, 2, length, 128, 128, Sq)
    scales = None
    if stored == "per key":
        (k, v), scales, _ = test_quantised_cache.per_key(k, v, torch.int8)
    elif stored:
        (k, v), scales, _ = test_cached_attention.quantised(k, v, stored)
    by_head = torch.ones(B, 4, Sq, length, dtype=torch.bool)
    by_head[:, 1, 6:, 20] = False
    for mask, at, hidden in [
        (causal(Sq, length), 37, torch.arange(Sq).expand(4, Sq) < 5),
        (causal(Sq, length) & masks.Dense(by_head.cuda()), 20, ~by_head[0, :, :, 20]),
    ]:
        clean = cached(q, k, v, scales, mask=mask) if stored else paged_call(q, k, v, mask)
        for which in range(2):
            tensors = [k.clone(), v.clone()]
            if stored == "per key":
                broken = {n: s.clone() for n, s in scales.items()}
                broken[("k_scale", "v_scale")[which]][0, 0, at] = torch.nan
            else:
                broken = scales
                tensors[which][0, 0, at, 5] = torch.inf if which and not stored else torch.nan
            got = cached(q, *tensors, broken, mask=mask) if stored else paged_call(q, *tensors, mask)
            for a, b in zip(got, clean):
                a, b = (x if x.dim() == 4 else x[..., None] for x in (a, b))
                assert torch.equal(a[1], b[1]) and torch.equal(a[0, 2:], b[0, 2:])
                for h in range(2):
                    assert torch.equal(a[0, h, hidden[h]], b[0, h, hidden[h]])
            broken_rows = ~got[0][0].isfinite().all(-1)
            assert torch.equal(broken_rows[:2], ~hidden[:2])


def paged_call(q, k, v, mask):
    *pools, table = test_cached_attention.paged(k, v, 8, cases.generator(1))
    return cached(q, *pools, block_table=to_cuda(table), mask=mask)


def test_a_page_that_is_none_shows_in_rows_that_see_it():
    q, k, v = decoding(torch.bfloat16, 4, 2, 48, 128, 128, 8)
    *pools, table = test_cached_attention.paged(k, v, 4, cases.generator(1))
    table = table.clone()
    table[0, 11] = -1  # keys 44 to 47: the first three queries end at key 43
    out, lse = cached(q, *pools, block_table=table.cuda(), mask=causal(8, 48))
    for x in (out[..., 0], lse):
        assert x[0, :, :3].isfinite().all() and x[0, :, 4:].isnan().all() and x[1].isfinite().all()


def test_visible_nan_and_pages_that_are_none_show():
    q, k, v = decoding(torch.bfloat16, 4, 2, 64, 64, 64)
    *pools, table = test_cached_attention.paged(k, v, 16, cases.generator(1))
    broken = table.clone()
    broken[0, 1], broken[1, 3] = 99, -1
    seen = masks.Padding(torch.tensor([30, 48]).cuda())
    out, lse = cached(q, *pools, block_table=broken.cuda(), mask=seen)
    assert out[0].isnan().all() and lse[0].isnan().all() and out[1].isfinite().all() and lse[1].isfinite().all()
    pools[0][table[1, 0], 1, 3, 5] = torch.nan
    out, lse = cached(q, *pools, block_table=to_cuda(table), mask=seen)
    assert (
        out[1, 2:].isnan().all()
        and lse[1, 2:].isnan().all()
        and out[1, :2].isfinite().all()
        and out[0].isfinite().all()
    )
    eight = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 1, 2, 128)
    ones = {"k_scale": torch.ones(1, 1), "v_scale": torch.ones(1, 1)}
    for dtype in (torch.bfloat16, torch.float16):
        keys = torch.zeros(1, 1, 2, 8).to(torch.float8_e4m3fn)
        for n in range(2):
            one = masks.Intervals(torch.full((1, 1), n).cuda(), torch.full((1, 1), n + 1).cuda())
            out = cached(torch.ones(1, 1, 1, 8, dtype=dtype), keys, eight, ones, mask=one)[0]
            torch.testing.assert_close(out[0, 0, 0].float(), eight[0, 0, n].float(), rtol=0, atol=0, equal_nan=True)


COUNTED = """
import torch, mha_ext
gen = torch.Generator().manual_seed(0)
k = torch.randn(16, 1, 64, 128, generator=gen).mul(30).to(torch.int8).cuda()
scale = torch.full((1, 1), 0.03).cuda()
q, table = torch.ones(1, 8, 1, 128).bfloat16().cuda(), torch.randperm(16, generator=gen)[None].cuda()
mha_ext.attention_cached(q, k, k.clone().cuda(), block_table=table, k_scale=scale, v_scale=scale)
"""


def test_eight_heads_read_each_key_once(tmp_path):
    """In whole sectors of 32 bytes, four for a key and four for a value of 128 bytes; queries and tables are little beside them."""
    if not simulated():
        pytest.skip("the simulation counts")
    in_a_process_of_its_own(COUNTED, PTXSIM_STATS=str(tmp_path / "stats"))
    counts = json.loads((tmp_path / "stats").read_text().splitlines()[0])
    assert "attention_cached_sm80" in counts["mangled"]
    assert 8 <= counts["global_load_sectors"] / 1024 < 11 and counts["warp_instructions"] / 1024 < 80
