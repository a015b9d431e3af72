"""attention_qkvpacked: what attention gives for the slices, to the bit, with one gradient that nothing concatenates."""

from __future__ import annotations

import cases
import pytest
import torch
from test_refusals import refusal
from torch.autograd import gradcheck, gradgradcheck

import mha_ext
from mha_ext import biases, masks


def packed(B=2, S=70, H=4, HK=2, D=24, dtype=torch.float32):
    return cases.surrounded(cases.randn(cases.generator(1), B, S, H + 2 * HK, D, dtype=dtype)).requires_grad_()


def by_slices(qkv, H, **options):
    kv = (qkv.shape[2] - H) // 2
    found = mha_ext.attention(*(t.transpose(1, 2) for t in qkv.split([H, kv, kv], 2)), **options)
    return (found[0].transpose(1, 2), *found[1:]) if isinstance(found, tuple) else found.transpose(1, 2)


OPTIONS = {
    "plain": {},
    "causal": {"mask": masks.Causal()},
    "all": {
        "mask": masks.Padding(torch.tensor([30, 70])), "softcap": 5.0, "dropout_p": 0.2, "rng_state": torch.tensor([1, 2]), "scale": 0.3,
        "return_lse": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_slices_to_the_bit(name, dtype):
    qkv = packed(dtype=dtype)
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    slopes, sinks = torch.rand(4, dtype=accumulate).requires_grad_(), torch.randn(4, dtype=accumulate).requires_grad_()
    options = {**OPTIONS[name], **({"bias": biases.ALiBi(slopes), "sinks": sinks} if name == "all" else {})}
    leaves = [qkv, *([slopes, sinks] if name == "all" else [])]
    results = []
    for f in (mha_ext.attention_qkvpacked, by_slices):
        out = f(qkv, 4, **options)
        outs = out if isinstance(out, tuple) else (out,)
        assert outs[0].shape == (2, 70, 4, 24) and outs[0].is_contiguous()
        results.append((*outs, *torch.autograd.grad([t.float().square().sum() for t in outs], leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][len(results[0]) - len(leaves)].is_contiguous()


def test_five_dimensions_and_what_goes_by_slices():
    qkv = torch.randn(2, 9, 3, 4, 8).requires_grad_()
    flat = qkv.flatten(2, 3)
    assert torch.equal(mha_ext.attention_qkvpacked(qkv), mha_ext.attention_qkvpacked(flat, 4))
    assert torch.equal(mha_ext.attention_qkvpacked(qkv, 4), mha_ext.attention_qkvpacked(flat, 4))
    out, weights = mha_ext.attention_qkvpacked(qkv, return_weights=True)
    assert weights.shape == (2, 4, 9, 9) and torch.equal(out, by_slices(flat, 4))
    mixed = mha_ext.attention_qkvpacked(qkv, pre_mix=torch.eye(4))
    torch.testing.assert_close(mixed, out)
    with torch.autocast("cpu", torch.bfloat16):
        half = mha_ext.attention_qkvpacked(qkv)
    assert half.dtype == torch.bfloat16
    assert torch.autograd.grad(half.float().sum(), qkv)[0].dtype == torch.float32


def test_the_gradient_is_not_concatenated():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    qkv = packed().detach().clone().requires_grad_()
    out = mha_ext.attention_qkvpacked(qkv, 4)
    with Watch():
        torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert any("attention_packed_bwd" in name for name in seen)
    assert not any(word in name for name in seen for word in ("cat", "add", "copy", "clone", "zeros")), seen


def test_gradcheck_and_transforms():
    gen = cases.generator(2)
    qkv = cases.randn(gen, 2, 3, 4, 2, dtype=torch.float64).requires_grad_()
    sinks, slopes = (cases.randn(gen, 2, dtype=torch.float64).requires_grad_() for _ in range(2))

    def f(qkv, slopes, sinks):
        return mha_ext.attention_qkvpacked(
            qkv, 2, bias=biases.ALiBi(slopes), sinks=sinks, mask=masks.Causal(), softcap=2.0, return_lse=True
        )

    assert gradcheck(f, (qkv, slopes, sinks), fast_mode=True)
    assert gradgradcheck(f, (qkv, slopes, sinks), fast_mode=True)

    def loss(qkv):
        return f(qkv, slopes.detach(), sinks.detach())[0].square().sum()

    x = qkv.detach()
    expected = torch.autograd.grad(loss(qkv), qkv)[0]
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    many = torch.stack([x, -x])
    got = torch.func.vmap(torch.func.grad(loss))(many)
    torch.testing.assert_close(got, torch.stack([torch.func.grad(loss)(t) for t in many]))


def test_compiled_and_opcheck(fresh_compiler):
    qkv = packed()
    compiled = torch.compile(lambda x: mha_ext.attention_qkvpacked(x, 4, mask=masks.Causal()), fullgraph=True, backend="aot_eager")
    got, expected = compiled(qkv), mha_ext.attention_qkvpacked(qkv, 4, mask=masks.Causal())
    assert torch.equal(got, expected)
    assert torch.equal(*(torch.autograd.grad(t.square().sum(), qkv)[0] for t in (got, expected)))
    forward, backward = torch.ops.mha_ext.attention_packed_fwd.default, torch.ops.mha_ext.attention_packed_bwd.default
    small = torch.randn(2, 3, 4, 4).requires_grad_()
    torch.library.opcheck(forward, cases.op_arguments(forward, qkv=small, num_heads=2, scale=0.5, sinks=torch.randn(2).requires_grad_()))
    with torch.no_grad():
        out, lse, lse_rest = forward(*cases.op_arguments(forward, qkv=small, num_heads=2, scale=0.5))
    q, k, v = (t.transpose(1, 2).detach().requires_grad_() for t in small.split([2, 1, 1], 2))
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "lse_rest": lse_rest, "scale": 0.5}
    torch.library.opcheck(backward, cases.op_arguments(backward, dout=torch.randn_like(out).requires_grad_(), **given))


def test_sizes_of_zero():
    for shape, heads in (((0, 3, 3, 2, 4), None), ((2, 0, 3, 2, 4), None), ((2, 3, 0, 4), 0)):
        qkv = torch.randn(shape).requires_grad_()
        out = mha_ext.attention_qkvpacked(qkv, heads)
        assert torch.autograd.grad(out.sum(), qkv)[0].shape == shape


def test_refusals():
    qkv = torch.randn(2, 5, 8, 4)
    for given, heads in ((qkv, None), (qkv, 3), (qkv, 8), (qkv, 5), (qkv[0], 4), (qkv.unflatten(2, (4, 2)), 2), (qkv[:, :, None], None)):
        refusal(lambda given=given, heads=heads: mha_ext.attention_qkvpacked(given, heads), "qkv has shape", "num_heads is", kind=ValueError)
    refusal(lambda: mha_ext.attention_qkvpacked([1.0]), "list", kind=TypeError)
    refusal(lambda: mha_ext.attention_qkvpacked(qkv.long(), 4), "int64", kind=TypeError)
    op = torch.ops.mha_ext.attention_packed_bwd.default
    q, k, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4), torch.zeros(1, 2, 3)
    refusal(lambda: op(*cases.op_arguments(op, dout=q, q=q, k=k, v=k, out=q, lse=lse, lse_rest=lse)), "one length", kind=RuntimeError)
