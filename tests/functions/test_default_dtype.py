"""torch.set_default_dtype and set_default_device change nothing but what asks torch for a type or a device of its own accord."""

from __future__ import annotations

import cases
import pytest
import torch

import mha_ext
from mha_ext import biases, masks, nn

B, H, S, D = 2, 4, 9, 8


def inputs():
    gen = cases.generator(0)
    return [cases.randn(gen, B, H, S, D).requires_grad_() for _ in range(3)]


def with_gradients(out, leaves):
    grads = torch.autograd.grad([x for x in out if x.requires_grad], leaves, [torch.ones_like(x) for x in out if x.requires_grad])
    return [*out, *grads]


def attends(**options):
    def run(q, k, v):
        return mha_ext.attention(q, k, v, return_lse=True, return_weights=True, **options)

    return run


def biased(q, k, v):
    slopes = biases.alibi_slopes(H, device="cpu")
    assert slopes.dtype == torch.float32
    table = torch.ones(32, H, dtype=torch.float32, device="cpu").cumsum(0)
    out = mha_ext.attention(q, k, v, bias=biases.ALiBi(slopes), mask=masks.Causal())
    return out, slopes, mha_ext.attention(q, k, v, bias=biases.T5Relative(table)), biases.T5Relative(table).to_dense(S, S)


def referenced(q, k, v):
    lengths = torch.tensor([9, 4], device="cpu")
    mask = masks.Causal() & masks.Prefix(lengths) | masks.Strided(2, 1, 3)
    return mha_ext.reference.attention(q, k, v, mask=mask, dropout_p=0.5, rng_state=torch.tensor([1, 2], device="cpu"), return_lse=True)


def rotated(q, k, v):
    return (nn.RotaryEmbedding(D)(q), nn.RotaryEmbedding(D)(k, torch.tensor([3, 4], device="cpu")), v)


def cached(dtype):
    def run(q, k, v):
        with torch.no_grad():
            cache = nn.KVCache(B, 16, H, D, device="cpu", dtype=dtype)
            out = cache.attend(q, k, v)
            found = [x for x in (cache.k_scale, cache.v_scale, cache.lengths) if x is not None]
            cache.reset()
        return [out, *found, q, k, v]

    return run


def merged(q, k, v):
    parts = [mha_ext.attention(q, k[:, :, i], v[:, :, i], return_lse=True) for i in (slice(0, 4), slice(4, 9))]
    return mha_ext.merge_partials(*zip(*parts))


def of_a_module(make):
    def run(q, k, v):
        torch.manual_seed(0)
        with torch.device("cpu"):
            module = make(device="cpu", dtype=torch.float32)
        x = q.transpose(1, 2).flatten(2)
        out = module(x, x, x)[0] if isinstance(module, nn.MultiheadAttention) else module(x)
        return out, mha_ext.split_heads(x, H), k, v

    return run


every_kind = masks.Causal() & masks.Padding(torch.tensor([9, 4])) & masks.LeftPadding(torch.tensor([0, 1])) & masks.Window(5, 0)
TABLE = {
    "masks": attends(mask=every_kind & masks.Dilated(1, 2, 3)),
    "or, not": attends(mask=~(every_kind | masks.Window(0, 0)) | masks.Documents(torch.arange(S)[None] // 4)),
    "soft cap, scale": attends(softcap=3.0, scale=0.3),
    "sinks": attends(sinks=torch.ones(H)),
    "mixes": attends(pre_mix=torch.eye(H), post_mix=torch.eye(H)),
    "dropout": attends(dropout_p=0.5, rng_state=torch.tensor([1, 2])),
    "dropout of torch's generator": attends(dropout_p=0.5),
    "biases": biased,
    "reference": referenced,
    "softmax": lambda q, k, v: (mha_ext.masked_softmax(q @ k.mT, masks.Causal()) @ v,),
    "packed": lambda q, k, v: (mha_ext.attention_qkvpacked(torch.stack((q, k, v), 1).permute(0, 3, 1, 2, 4), mask=masks.Causal()),),
    "sdpa": lambda q, k, v: (mha_ext.scaled_dot_product_attention(q, k, v, is_causal=True),),
    "rope": rotated,
    "merge": merged,
    "cache": cached(torch.float32),
    "int8 cache": cached(torch.int8),
    "self-attention": of_a_module(lambda **f: nn.SelfAttention(H * D, H, rope=True, qk_norm=True, causal=True, window=4, **f)),
    "learned mixes": of_a_module(lambda **f: nn.SelfAttention(H * D, H, talking_heads=True, head_communication=True, sinks=True, **f)),
    "torch's module": of_a_module(lambda **f: nn.MultiheadAttention(H * D, H, add_zero_attn=True, batch_first=True, **f)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("name", TABLE)
def test_types_devices_and_values(name):
    def run():
        torch.manual_seed(5)
        leaves = inputs_
        return with_gradients([*TABLE[name](*leaves)], leaves)

    inputs_ = inputs()
    expected = run()
    for dtype, device in ((torch.bfloat16, None), (torch.float64, None), (torch.float32, "meta")):
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        got = run()
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype and a.device == b.device, (dtype, device)
            assert torch.equal(a, b), (dtype, device)


@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Causal() & masks.Padding(torch.tensor([9, 4])) | masks.Window(0, 0)], ids=repr)
def test_explain(mask):
    q, k, v = inputs()
    expected = mha_ext.explain(q, k, v, mask=mask)
    with torch.device("meta"):
        assert mha_ext.explain(q, k, v, mask=mask) == expected


def test_what_is_made_from_nothing_follows_the_default_device_alone():
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        assert biases.alibi_slopes(4).is_meta and biases.alibi_slopes(4).dtype == torch.float32
        assert masks.Causal().to_dense(3, 3).is_meta and not masks.Causal().to_dense(3, 3, device="cpu").is_meta
        assert not masks.Padding(torch.tensor([2], device="cpu")).to_dense(3, 3).is_meta
