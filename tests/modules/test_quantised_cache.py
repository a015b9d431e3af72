"""Caches of 8 bits: scales that each key and value have for themselves, and what is not finite."""

from __future__ import annotations

import cases
import pytest
import test_cache
import test_cached_attention
import torch

import mha_ext
from mha_ext import masks, nn
from mha_ext.cached import QUANTISED, quantise, scales_of

B, H, HK, D, DV, LENGTH = test_cache.B, test_cache.H, test_cache.HK, test_cache.D, test_cache.DV, test_cache.LENGTH
KINDS = ["contiguous", "ring", "paged"]


def make(kind, stored, **options):
    options |= {"value_dim": DV, "dtype": stored}
    if kind == "paged":
        return nn.PagedKVCache(B, LENGTH, HK, D, page_size=16, **options)
    return nn.KVCache(B, LENGTH if kind == "contiguous" else 120, HK, D, window=40 if kind == "ring" else None, **options)


def per_key(k, v, stored):
    """Keys, values and scales per key as attention_cached takes them, and what they mean in float64."""
    scales = [scales_of(x, stored) for x in (k, v)]
    eight = [quantise(x, s, stored) for x, s in zip((k, v), scales)]
    meant = [x.double() * s.double()[..., None] for x, s in zip(eight, scales)]
    return eight, dict(zip(("k_scale", "v_scale"), scales)), meant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", QUANTISED, ids=str)
@pytest.mark.parametrize("Sq", [1, 5, 70])
def test_scales_per_key_are_exact(dtype, stored, Sq):
    """Against fp64 attention over what the stored bits mean, by the ordinary rule: the kernel adds no error of its own."""
    q, k, v = test_cache.whole(dtype)
    gen = cases.generator(4)
    sizes = torch.exp2(torch.randint(-6, 4, (B, HK, LENGTH, 1), generator=gen)).to(dtype)
    (k8, v8), scales, meant = per_key(k * sizes, v * sizes.flip(2), stored)
    q = q[:, :, :Sq]
    out, lse = mha_ext.attention_cached(q, k8, v8, mask=masks.Causal(), return_lse=True, **scales)
    test_cached_attention.check(q, meant, out, lse)
    for page_size in (16, 64):
        *pools, table = test_cached_attention.paged(k8, v8, page_size, gen)
        in_pages = {}
        for name, scale in scales.items():  # pages of one element each
            pages = test_cached_attention.paged(scale[..., None], scale[..., None], page_size, cases.generator(9))
            order = pages[2].flatten()
            pool = torch.full(pools[0].shape[:3], torch.nan)
            pool[table.flatten()] = pages[0][order, ..., 0]
            in_pages[name] = pool
        end = torch.arange(LENGTH - Sq, LENGTH).expand(B, Sq) + 1
        seen = masks.Intervals(torch.zeros_like(end), end)
        for block_table in (table, table.int()):
            got = mha_ext.attention_cached(q, *pools, block_table=block_table, mask=seen, return_lse=True, **in_pages)
            test_cached_attention.check(q, meant, *got)


def error_of(cache, q, k, v):
    exact = test_cache.truth(q, k, v, cache.window).exact
    out = test_cache.in_steps(cache, q, k, v, [1, 60, 1, 1, 50, 3])
    return (out - exact).square().mean().sqrt() / exact.square().mean().sqrt()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", QUANTISED, ids=str)
def test_a_first_token_of_tiny_values_spoils_nothing(stored, kind):
    """The error is no larger than with scales that were chosen with all keys and values in view."""
    q, k, v = test_cache.whole()
    k[:, :, 0] *= 1e-3
    v[:, :, 0] *= 1e-3
    chosen = {name: x.abs().amax((2, 3)) / QUANTISED[stored] for name, x in (("k_scale", k), ("v_scale", v))}
    assert error_of(make(kind, stored), q, k, v) <= 1.05 * error_of(make(kind, stored, **chosen), q, k, v)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", QUANTISED, ids=str)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_shows_in_what_sees_it(wrong, stored, kind):
    """And changes no bit of anything else. In a key or in a value, in the first append or later, with given scales too."""
    q, k, v = test_cache.whole()
    at, window = 70, 20
    for given in ({}, {"k_scale": torch.full((HK,), 0.05), "v_scale": torch.full((B, HK), 0.05)}):
        for steps in ([LENGTH // 2, 1, 1], [1, 60, 1, 1, 50, 3]):
            clean = test_cache.in_steps(make(kind, stored, **given), q, k, v, steps, window=window)
            for which in (k, v):
                spoiled = which.clone()
                spoiled[1, 0, at, 5] = wrong
                new_k, new_v = (spoiled, v) if which is k else (k, spoiled)
                out = test_cache.in_steps(make(kind, stored, **given), q, new_k, new_v, steps, window=window)
                hit = torch.zeros(B, H, LENGTH, dtype=torch.bool)
                hit[1, : H // HK, at : at + window + 1] = True
                assert out[hit].isnan().all() and torch.equal(out[~hit], clean[~hit])


@pytest.mark.parametrize("stored", QUANTISED, ids=str)
def test_extreme_sizes(stored):
    """Zeros, the smallest and the largest floats: nothing is lost to a scale that is 0 or infinite."""
    x = torch.ones(1, 1, 6, 8) * torch.tensor([0.0, 1e-45, 1e-38, 1.0, 1e38, torch.finfo(torch.float32).max])[:, None]
    scale = scales_of(x, stored)
    assert scale.isfinite().all() and (scale > 0).all()
    back = quantise(x, scale, stored).double() * scale.double()[..., None]
    normal = x >= 1e-38 * QUANTISED[stored]
    assert (((back - x.double()).abs() <= 2**-20 * x.double()) | ~normal).all() and (back[~normal].abs() <= 2e-38).all()


def test_bytes_and_shapes():
    cache = make("paged", torch.int8)
    assert cache.k_scale.shape == cache.k.shape[:3] and cache.k_scale.dtype == torch.float32
    slots = cache.k.shape[0] * HK * 16
    assert cache.nbytes == slots * (D + DV + 8)
