"""Caches as parts of models: their types, devices, copies, and tracing that leaves them as they were."""

from __future__ import annotations

import copy
import io

import pytest
import test_cache
import torch

from mha_ext import nn


class Owner(torch.nn.Module):
    """A model with a cache of its own."""

    def __init__(self, **options):
        super().__init__()
        self.layer = nn.SelfAttention(32, 4, causal=True, rope=True, num_kv_heads=2).eval()
        self.cache = options.pop("cache", None) or self.layer.make_cache(2, 40, **options)

    def forward(self, x):
        return self.layer(x, cache=self.cache)


def steps(model, x, sizes):
    return torch.cat([model(part) for part in x.split(sizes, dim=1)], 1)


@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_exporting_leaves_the_cache_as_it_was(strict, stored, fresh_compiler):
    """And the exported program goes on from there, in the model's buffers."""
    model, x = Owner(dtype=stored), torch.randn(2, 12, 32)
    expected = model.layer(x)
    model(x[:, :5])
    before = {name: x.clone() for name, x in model.cache.named_buffers()}
    program = torch.export.export(model, (x[:, 5:6],), strict=strict).module()
    for name, buffer in model.cache.named_buffers():
        assert torch.equal(buffer.view(torch.int8), before[name].view(torch.int8))
    assert not any(name.startswith("cache") for name in model.state_dict())
    error = (steps(program, x[:, 5:], 1) - expected[:, 5:]).abs().max()
    assert error < (1e-5 if stored == torch.float32 else 0.02)
    assert model.cache.lengths.tolist() == [12, 12]
    model.cache.truncate(5)
    assert (steps(model, x[:, 5:], 1) - expected[:, 5:]).abs().max() < (1e-5 if stored == torch.float32 else 0.02)


@torch.no_grad()
def test_a_trace_that_fails_leaves_the_cache_as_it_was(fresh_compiler):
    class Broken(Owner):
        def forward(self, x):
            out = super().forward(x)
            if out.sum() > 0:  # no graph has that
                return out + 1
            raise RuntimeError("a branch on values")

    model, x = Broken(), torch.randn(2, 3, 32)
    for strict in (False, True):
        with pytest.raises(Exception, match="(?i)data.dependent"):
            torch.export.export(model, (x,), strict=strict)
        assert model.cache.lengths.tolist() == [0, 0] and not torch._is_functional_tensor(model.cache.k)
    out = Owner.forward(model, x)
    torch.testing.assert_close(out, model.layer(x))


@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
@torch.no_grad()
def test_compiled_steps_of_an_owned_cache_share_a_graph(kind, fresh_compiler):
    from torch._dynamo.testing import CompileCounterWithBackend

    model = Owner()
    if kind == "paged":
        model = Owner(cache=nn.PagedKVCache(2, 40, 2, 8, page_size=8))
    elif kind == "ring":
        model.layer = nn.SelfAttention(32, 4, causal=True, window=5).eval()
        model.cache = model.layer.make_cache(2, 1000)
        assert model.cache.window == 5
    x = torch.randn(2, 30, 32)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    outs = [model(x[:, :9])]
    for i in range(9, 30):
        if kind == "paged":
            model.cache.reserve(1)
        outs.append(compiled(x[:, i : i + 1]))
    assert counter.frame_count == 1
    torch.testing.assert_close(torch.cat(outs, 1), model.layer(x))


@torch.no_grad()
def test_compiled_steps_stop_at_the_capacity(fresh_compiler):
    model, x = Owner(), torch.randn(2, 40, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model(x[:, :39])
    compiled(x[:, :1])
    with pytest.raises(RuntimeError, match="beyond a cache's capacity, 40"):
        compiled(x[:, :1])
    with pytest.raises(ValueError, match="appended to sequences of up to 40"):
        model(x[:, :1])
    assert model.cache.lengths.tolist() == [40, 40]
    model.cache.truncate(39)
    compiled(x[:, :1])


class EightBits(torch.Tensor):
    """A weight of 8 bits as libraries make them: a subclass that computes in floats and says int8."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=torch.int8)

    def __init__(self, weight):
        self.scale = weight.abs().amax() / 127
        self.bits = (weight / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            x, weight, *bias = args
            return function(x, weight.bits.to(x.dtype) * weight.scale.to(x.dtype), *bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(torch.zeros(x.shape, dtype=torch.int8) if isinstance(x, cls) else x for x in args))


@torch.no_grad()
def test_weights_of_8_bits_make_no_cache_of_8_bits():
    def quantised_by_a_subclass(module):
        for linear in (module.qkv_proj, module.out_proj):
            weight = EightBits(linear.weight.detach())
            del linear.weight
            linear.weight = weight
        return module

    def quantised_by_torch(module):
        with pytest.warns(DeprecationWarning):
            return torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear})

    for quantise in (quantised_by_a_subclass, quantised_by_torch):
        module = quantise(nn.SelfAttention(32, 4, causal=True, packed=False).eval() if quantise is quantised_by_torch
                          else nn.SelfAttention(32, 4, causal=True).eval())  # fmt: skip
        with pytest.raises(ValueError, match=r"the weights are .*; make_cache\(\) then needs dtype="):
            module.make_cache(2, 12)
        x = torch.randn(2, 10, 32)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.int8, 0.05)):
            cache = module.make_cache(2, 12, dtype=dtype)
            assert cache.k.dtype == dtype
            whole = torch.cat([module(x[:, :7], cache=cache), module(x[:, 7:], cache=cache)], 1)
            # quantize_dynamic scales activations by what it is given at once
            loose = tolerance if quantise is quantised_by_a_subclass else 0.05
            assert (whole - module(x)).abs().max() < loose


@torch.no_grad()
def test_autocast():
    module, x = nn.SelfAttention(32, 4, causal=True, rope=True, qk_norm=True).eval(), torch.randn(2, 10, 32)
    with torch.autocast("cpu", torch.bfloat16):
        cache = module.make_cache(2, 12)
        assert cache.k.dtype == torch.bfloat16
        parts = torch.cat([module(x[:, :7], cache=cache), module(x[:, 7:], cache=cache)], 1)
        assert parts.dtype == torch.bfloat16
        torch.testing.assert_close(parts, module(x), atol=2e-2, rtol=2e-2)
        eight = module.make_cache(2, 12, dtype=torch.int8)
        torch.testing.assert_close(module(x, cache=eight), module(x), atol=5e-2, rtol=5e-2)
        with pytest.raises(TypeError, match="make the cache with dtype=torch.bfloat16"):
            module(x, cache=module.make_cache(2, 12, dtype=torch.float32))
    assert module.make_cache(2, 12).k.dtype == torch.float32


@pytest.mark.parametrize("stored", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
@torch.no_grad()
def test_copies_are_caches_of_their_own(kind, stored):
    q, k, v = test_cache.whole(length=20)
    options = {"value_dim": test_cache.DV, "dtype": stored}
    if kind == "paged":
        cache = nn.PagedKVCache(test_cache.B, 30, test_cache.HK, test_cache.D, page_size=8, **options)
    else:
        cache = nn.KVCache(
            test_cache.B, 30, test_cache.HK, test_cache.D, window=8 if kind == "ring" else None, **options
        )
    cache.append(*(x[:, :, :15] for x in (k, v)))

    def saved(x):
        file = io.BytesIO()
        torch.save(x, file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    new = [x[:, :, 15:] for x in (q, k, v)]
    with torch.inference_mode():
        made_there = copy.deepcopy(cache)
    copies = [copy.deepcopy(cache), saved(cache), made_there]
    expected = copy.deepcopy(cache).attend(*new)
    for one in copies:
        assert torch.equal(one.attend(*new), expected)
        one.truncate(18)
        one.reorder(torch.tensor([1, 0, 2]))
    assert cache.lengths.tolist() == [15] * 3
    assert torch.equal(cache.attend(*new), expected)


@torch.no_grad()
def test_models_move_their_caches():
    for stored in (torch.float8_e4m3fn, torch.int8):
        model = Owner(dtype=stored)
        model.half()
        assert model.cache.k.dtype == model.cache.v.dtype == stored and model.cache.k_scale.dtype == torch.float32
    out = model(torch.randn(2, 3, 32).half())
    assert out.dtype == torch.half and model.cache.lengths.tolist() == [3, 3]
    plain = Owner().bfloat16()
    assert plain.cache.k.dtype == torch.bfloat16 and plain.cache.lengths.dtype == torch.int64
    plain(torch.randn(2, 3, 32).bfloat16())
    assert all(x.is_meta for x in Owner().to("meta").cache.buffers())
    assert plain.cache.to("cpu") is plain.cache


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_made_under_inference_mode_and_used_under_no_grad(kind):
    layer, x = nn.SelfAttention(32, 4, causal=True).eval(), torch.randn(2, 6, 32)
    with torch.inference_mode():
        cache = layer.make_cache(2, 8) if kind == "contiguous" else nn.PagedKVCache(2, 8, 4, 8, page_size=4)
        first = layer(x[:, :2], cache=cache)
    with torch.no_grad():
        outs = [first, layer(x[:, 2:4], cache=cache)]
        cache.truncate(4)
        cache.reorder(torch.tensor([0, 1]))
    with torch.inference_mode():
        outs.append(layer(x[:, 4:], cache=cache))
        expected = layer(x)
    torch.testing.assert_close(torch.cat(outs, 1), expected)


@torch.no_grad()
def test_nothing_new():
    """No positions, or counts of 0: no state changes, and later steps are right."""
    q, k, v = test_cache.whole(length=12)
    for stored in (torch.float32, torch.int8):
        for options in ({}, {"window": 5}):
            cache, other = (nn.KVCache(3, 20, test_cache.HK, test_cache.D, value_dim=test_cache.DV, dtype=stored, **options) for _ in "ab")  # fmt: skip
            for at in (0, 6):
                assert cache.attend(*(x[:, :, :0] for x in (q, k, v))).shape == (3, test_cache.H, 0, test_cache.DV)
                out = cache.attend(*(x[:, :, 3:6] for x in (q, k, v)), counts=torch.zeros(3, dtype=torch.int64))
                assert not out.any() and cache.lengths.tolist() == [at] * 3
                part = [x[:, :, at : at + 6] for x in (q, k, v)]
                assert torch.equal(cache.attend(*part), other.attend(*part))


@torch.no_grad()
def test_reset_forgets_what_a_ring_has_written():
    """So that its first positions can be taken back again."""
    _, k, v = test_cache.whole(length=60)
    ring = nn.KVCache(3, 20, test_cache.HK, test_cache.D, value_dim=test_cache.DV, window=12)
    for i in range(0, 60, 6):
        ring.append(k[:, :, i : i + 6], v[:, :, i : i + 6])
    ring.reset([0, 2])
    ring.append(k[:, :, :6], v[:, :, :6])
    ring.truncate(torch.tensor([1, 60, 2]))
    assert ring.lengths.tolist() == [1, 60, 2]
    with pytest.raises(ValueError, match="go back too far"):
        ring.truncate(torch.tensor([1, 40, 2]))


@pytest.mark.parametrize("window", [8, 400])
def test_a_ring_is_made_where_it_is_smaller(window):
    """It is kept twice, and has room for some positions more than the window."""
    layer = nn.SelfAttention(16, 2, causal=True, window=window)
    kept = window + max(64, window // 4)
    for capacity in (window, kept, kept + 1, 2 * kept - 1, 2 * kept, 2 * kept + 1, 5 * kept):
        cache, whole = layer.make_cache(1, capacity), nn.KVCache(1, capacity, 2, 8)
        assert (cache.window is not None) == (capacity > 2 * kept) and cache.nbytes <= whole.nbytes
        assert cache.window in (None, window) and cache.capacity >= min(capacity, window + 64)
