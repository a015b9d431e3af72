"""Attention on DTensors in real processes against the same in one."""

from __future__ import annotations

import subprocess
import sys

import cases
import pytest
import torch
import torch.distributed as dist
from torch import nn

import mha_ext
from mha_ext import masks

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.xdist_group("processes"),
]

B, H, Hk, S, D = 4, 8, 4, 12, 6


def close(actual, expected):
    """The same sums in perhaps another order."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def randn(*shape, seed=0):
    return cases.randn(cases.generator(seed), *shape, dtype=torch.float64)


def mesh_of(*shape):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape)


def placements_of(text):
    from torch.distributed.tensor import Replicate, Shard

    return [{"r": Replicate(), "b": Shard(0), "h": Shard(1), "s": Shard(2)}[c] for c in text]


def mask_of(kind):
    lengths, starts = torch.tensor([12, 7, 0, 5]), torch.tensor([0, 2, 3, 12])
    return {
        "none": None,
        "causal": masks.Causal(),
        "padding": masks.Padding(lengths),
        "left_padding": masks.LeftPadding(starts) & masks.Window(4, None),
        "prefix": masks.Prefix(lengths[:1]),
        "documents": masks.Documents(torch.arange(S)[None] // 5),
        "dense": masks.Dense(torch.rand(B, H, S, S, generator=cases.generator(5)) < 0.5),
        "blocks": masks.BlockSparse(torch.rand(1, H, 3, 3, generator=cases.generator(6)) < 0.5, 4) & masks.Causal(),
        "dense_1h": torch.rand(1, H, S, S, generator=cases.generator(5)) < 0.5,
    }[kind]


ATTENTION = [
    # mesh, placements of q, k, v, mask, shape of the bias
    ((2,), "bbb", "none", None),
    ((2,), "hhh", "causal", (1, H, S, S)),
    ((2,), "bbb", "padding", (1, H, S, S)),
    ((2,), "hhh", "left_padding", (B, 1, S, S)),
    ((2,), "bbb", "documents", (B, H, 1, S)),
    ((2,), "sss", "prefix", (S, S)),  # changed to one that works
    ((2,), "sss", "padding", None),
    ((2,), "sss", "left_padding", None),  # the same tensors as with padding, in other places
    ((2,), "hbr", "dense", None),
    ((4,), "hhh", "dense_1h", (S, S)),
    ((2,), "hhh", "blocks", "alibi"),
    ((4,), "bbb", "blocks", "alibi"),
    ((2, 2), ("bh", "bh", "bh"), "dense", (1, H, S, S)),
    ((2, 2), ("rh", "rh", "rh"), "causal", (B, H, S, S)),
]


def attention_on(mesh_shape, placements, kind, bias_shape, heads=(H, Hk)):
    from torch.distributed.tensor import distribute_tensor

    mesh = mesh_of(*mesh_shape)
    H, Hk = heads
    shapes = (B, H, S, D), (B, Hk, S, D), (B, Hk, S, D + 1)
    whole = [randn(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    bias = sinks = None
    if bias_shape == "alibi":
        bias, sinks = randn(H, seed=7).requires_grad_(), randn(H, seed=8).requires_grad_()
    elif bias_shape is not None:
        bias = randn(*bias_shape, seed=7).requires_grad_()
    shards = [distribute_tensor(x.detach(), mesh, placements_of(p)).requires_grad_() for x, p in zip(whole, placements)]
    other_bias = None if bias is None else bias.detach().clone().requires_grad_()
    results = []
    for (q, k, v), b in ((whole, bias), (shards, other_bias)):
        options = {"bias": b if sinks is None else mha_ext.biases.ALiBi(b), "sinks": sinks, "softcap": 3.0}
        out, lse = mha_ext.attention(q, k, v, mask=mask_of(kind), return_lse=True, **options)
        leaves = [x for x in (q, k, v, b, sinks) if x is not None]
        shape = dict(zip(("out", "lse"), (out, lse)))
        loss = (out * out).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()
        results.append([out, lse, *torch.autograd.grad(loss, leaves)])
    for i, (expected, actual) in enumerate(zip(*results)):
        close(full(actual), expected)
        if i < 2 and set("".join(placements)) <= {"b", "h"} and "dense" != kind:
            assert list(actual.placements) == placements_of(placements[0]), shape
    return True


@pytest.mark.parametrize("mesh, placements, kind, bias", ATTENTION, ids=str)
def test_attention(processes, mesh, placements, kind, bias):
    processes[torch.Size(mesh).numel()].run(attention_on, mesh, placements, kind, bias)


def test_heads_that_do_not_divide_are_gathered(processes):
    """3 key/value heads on 2 processes would part groups of query heads from their key/value head."""
    processes[2].run(attention_on, (2,), "hhr", "causal", None, (12, 3))


def talking_heads_on(n):
    from torch.distributed.tensor import distribute_tensor

    whole = [randn(B, heads, S, D, seed=i).requires_grad_() for i, heads in enumerate((H, Hk, Hk))]
    mixes = [randn(H, H, seed=3 + i).requires_grad_() for i in range(2)]
    bias, sinks = randn(1, H, S, S, seed=5).requires_grad_(), randn(H, seed=6).requires_grad_()
    more = [*mixes, bias, sinks]
    for letter, kind, with_post in (("b", "padding", True), ("h", "causal", False), ("s", "dense", True)):
        shards = [distribute_tensor(x.detach(), mesh_of(n), placements_of(letter)).requires_grad_() for x in whole]
        results = []
        for q, k, v in (whole, shards):
            options = {"pre_mix": mixes[0], "post_mix": mixes[1] if with_post else None, "bias": bias, "sinks": sinks}
            out, lse = mha_ext.attention(q, k, v, mask=mask_of(kind), return_lse=True, **options)
            loss = (out * out).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()
            leaves = [x for x in (q, k, v, *more) if with_post or x is not mixes[1]]
            results.append([out, lse, *torch.autograd.grad(loss, leaves)])
        for expected, actual in zip(*results):
            close(full(actual), expected)
        assert list(results[1][0].placements) == placements_of("b" if letter == "b" else "r") or letter == "s"


def test_talking_heads(processes):
    processes[2].run(talking_heads_on, 2)


def cached_on(n):
    """Of plain keys, pages, and 8 bits with scales."""
    from torch.distributed.tensor import distribute_tensor

    from mha_ext.cached import quantise

    q, k, v = (randn(B, heads, S, D, seed=i) for i, heads in enumerate((H, Hk, Hk)))
    order = torch.randperm(B * 3, generator=cases.generator(9)).view(B, 3)
    pages = [x.unflatten(2, (3, 4)).transpose(1, 2).flatten(0, 1)[order.flatten().argsort()] for x in (k, v)]
    scales = torch.rand(B, Hk, generator=cases.generator(10)) + 0.01
    small = [quantise(x, scales, torch.int8) for x in (k, v)]
    calls = [
        ((q, k, v), {"mask": mask_of("padding"), "sinks": randn(H, seed=7)}, False),
        ((q, *pages), {"mask": mask_of("causal"), "block_table": order}, True),
        ((q.float(), *small), {"k_scale": scales, "v_scale": scales, "bias": torch.rand(1, H, S, S)}, False),
    ]
    for tensors, options, paged in calls:
        dist.broadcast(options.get("bias", scales), 0)
        expected = mha_ext.attention_cached(*tensors, return_lse=True, **options)
        for letters in ("brr" if paged else "bbb", "hhh"):
            shards = [distribute_tensor(x, mesh_of(n), placements_of(p)) for x, p in zip(tensors, letters)]
            actual = mha_ext.attention_cached(*shards, return_lse=True, **options)
            for a, b in zip(actual, expected):
                assert list(a.placements) == placements_of(letters[0])
                torch.testing.assert_close(a.full_tensor(), b)


@pytest.mark.parametrize("n", [2, 4])
def test_attention_of_a_cache(processes, n):
    processes[n].run(cached_on, n)


def drop_in_on(n):
    from torch.distributed.tensor import distribute_tensor

    whole = [randn(B, heads, S, D, seed=i) for i, heads in enumerate((H, Hk, Hk))]
    seen = torch.rand(S, S, generator=cases.generator(5)) < 0.7
    options = {"attn_mask": seen, "is_causal": True, "enable_gqa": True}
    expected = mha_ext.scaled_dot_product_attention(*whole, **options)
    for letter in "bh":
        shards = [distribute_tensor(x, mesh_of(n), placements_of(letter)) for x in whole]
        actual = mha_ext.scaled_dot_product_attention(*shards, **options)
        assert list(actual.placements) == placements_of(letter)
        close(full(actual), expected)


def test_scaled_dot_product_attention(processes):
    processes[2].run(drop_in_on, 2)


def compiled_on(n):
    from torch.distributed.tensor import distribute_tensor

    shapes = (B, H, S, D), (B, Hk, S, D), (B, Hk, S, D)
    q, k, v = (distribute_tensor(randn(*s, seed=i), mesh_of(n), placements_of("h")).requires_grad_() for i, s in enumerate(shapes))

    mask = mask_of("padding")

    def function(q, k, v):
        return 2 * mha_ext.attention(q, k, v, mask=mask)

    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        out = call(q, k, v)
        results.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
    for eager, other in zip(*results):
        close(full(other), full(eager))


def test_compiled(processes):
    processes[2].run(compiled_on, 2)


def packed_sequences_on(n):
    from torch.distributed.tensor import distribute_tensor

    whole = [randn(15, heads, D, seed=i).requires_grad_() for i, heads in enumerate((H, Hk, Hk))]
    shards = [distribute_tensor(x.detach(), mesh_of(n), placements_of("h")).requires_grad_() for x in whole]
    starts = torch.tensor([0, 4, 4, 15])
    results = []
    for q, k, v in (whole, shards):
        out, lse = mha_ext.attention_varlen(q, k, v, starts, starts, mask=masks.Causal(), return_lse=True)
        results.append([out, lse, *torch.autograd.grad((out * out).sum(), (q, k, v))])
    for a, b in zip(*results):
        assert list(b.placements) == placements_of("b" if b is results[1][1] else "h")
        close(full(b), a)


def test_packed_sequences(processes):
    processes[2].run(packed_sequences_on, 2)


def other_ops_on(n):
    from torch.distributed.tensor import distribute_tensor

    mesh = mesh_of(n)
    scores, x, heads = randn(B, H, S, S), randn(B, S, H * D, seed=1), randn(B, H, S, D, seed=2)
    bias, row, mix = randn(1, H, S, S, seed=3), randn(H * D, seed=4), randn(H, H, seed=5)
    cases_ = [
        ("bhs", scores, bias, lambda t, b: mha_ext.masked_softmax(t, mask_of("padding"), bias=b, scale=0.7)),
        ("bhs", x, row, lambda t, b: mha_ext.split_heads(t, H, b)),
        ("bhs", heads, mix, mha_ext.merge_heads),
        ("bhs", heads, row, lambda t, b: mha_ext.merge_heads(t)),
    ]
    for letters, tensor, other, function in cases_:
        tensor.requires_grad_(), other.requires_grad_()
        expected = function(tensor, other)
        weight = torch.randn_like(expected)
        dist.broadcast(weight, 0)
        wanted = torch.autograd.grad(expected, (tensor, other), weight, allow_unused=True)
        for letter in letters:
            if letter == "s" and tensor.dim() == 3:
                placements = placements_of("h")
            else:
                placements = placements_of("s" if letter == "h" and tensor.dim() == 3 else letter)
            shard = distribute_tensor(tensor.detach(), mesh, placements).requires_grad_()
            actual = function(shard, other)
            close(actual.full_tensor(), expected)
            dweight = distribute_tensor(weight, mesh, placements_of("r"))
            got = torch.autograd.grad(actual, (shard, other), dweight, allow_unused=True)
            for a, b in zip(got, wanted):
                close(full(a), b)


@pytest.mark.parametrize("n", [2, 4])
def test_other_ops(processes, n):
    processes[n].run(other_ops_on, n)


def refusals():
    mesh = mesh_of(2)
    head_parallel = mha_ext.distributed.HeadParallel()
    with pytest.raises(TypeError, match="HeadParallel was given a Linear"):
        head_parallel._apply(nn.Linear(2, 2), mesh)
    for heads, kv_heads in ((6, 3), (3, 1)):
        with pytest.raises(ValueError, match=f"{heads} query and {kv_heads} key/value heads do not divide evenly among 2"):
            head_parallel._apply(mha_ext.nn.SelfAttention(6, heads, num_kv_heads=kv_heads), mesh)
    module = mha_ext.nn.SelfAttention(8, 4)
    module.extra = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="parameter extra, which HeadParallel cannot shard"):
        head_parallel._apply(module, mesh)


def test_refusals(processes):
    processes[2].run(refusals)


def test_importing_the_package_does_not_bring_distributed():
    code = "import sys, mha_ext; assert 'torch.distributed.tensor' not in sys.modules; mha_ext.distributed.HeadParallel"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="mha_ext.*nothing"):
        _ = mha_ext.nothing
