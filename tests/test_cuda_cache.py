"""attention_cached on CUDA: pages and keys and values of 8 bits; see on_cuda.py."""

from __future__ import annotations

import cases
import pytest
import test_cached_attention
import torch
from on_cuda import to_cuda

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
