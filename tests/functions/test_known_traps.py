"""Faults that users of attention libraries have reported, numbered, each as a small input with the right outcome. Each stands for its kind, so
siblings are tested beside it. 1 to 14 are about masks: test_known_mask_traps.py."""

from __future__ import annotations

import cases
import oracle
import pytest
import torch
import torch.nn.functional as F
from test_known_mask_traps import compare_fp32, randn
from torch.utils.checkpoint import checkpoint

import mha_ext
from mha_ext import masks

# Bias gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", ["1,H,S,S", "H,1,1 as 4-D", "B,1,1,S", "1,1,S,S", "S,S", "B,H,S,S", "1,H,1,S", "B,1,S,1", "1,1,1,1"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Window(9, 2)], ids=["none", "causal", "window"])
def test_trap_15_bias_gradients(shape, dtype, mask, device):
    B, H, S = 2, 3, 70
    sizes = {"1,H,S,S": (1, H, S, S), "H,1,1 as 4-D": (1, H, 1, 1), "B,1,1,S": (B, 1, 1, S), "1,1,S,S": (1, 1, S, S), "S,S": (S, S),
             "B,H,S,S": (B, H, S, S), "1,H,1,S": (1, H, 1, S), "B,1,S,1": (B, 1, S, 1), "1,1,1,1": (1, 1, 1, 1)}[shape]  # fmt: skip
    q, k, v, dout = (randn(B, H, S, 16, dtype=dtype, device=device, seed=s) for s in range(4))
    bias = randn(*sizes, dtype=dtype, device=device, seed=5, grad=True)
    seen = mask.to_dense(B, H, S, S).to(device) if mask is not None else None
    out = mha_ext.attention(q, k, v, mask=mask, bias=bias)
    (grad,) = torch.autograd.grad(out, bias, dout)
    oracle.check({"out": out, "bias": grad}, oracle.truths(q, k, v, dout=dout, seen=seen, bias=bias))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_trap_16_only_the_bias_requires_grad(dtype, device):
    q, k, v = (randn(2, 3, 33, 16, dtype=dtype, device=device, seed=s) for s in range(3))
    bias = randn(1, 3, 33, 33, dtype=dtype, device=device, seed=5, grad=True)
    out = mha_ext.attention(q, k, v, bias=bias)
    assert out.requires_grad
    out.float().square().sum().backward()
    assert torch.isfinite(bias.grad).all() and bias.grad.any()
    scores = randn(2, 3, 33, 33, dtype=dtype, device=device)
    bias.grad = None
    mha_ext.masked_softmax(scores, bias=bias).float().square().sum().backward()
    assert bias.grad.any()


def test_trap_17_gathered_table_twice_bitwise_equal(device):
    table = randn(20, 4, device=device, seed=1, grad=True)
    index = (torch.arange(70)[:, None] - torch.arange(70)).clamp(-9, 9).add(9).to(device)
    q, k, v = (randn(2, 4, 70, 16, device=device, seed=s) for s in range(3))
    grads = []
    for _ in range(2):
        bias = table[index].permute(2, 0, 1)[None]
        out = mha_ext.attention(q, k, v, bias=bias)
        grads.append(torch.autograd.grad(out.square().sum(), table)[0])
    assert torch.equal(*grads) and grads[0].any()


# Strides and sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trap_18_gradients_arrive_in_any_layout(dtype, device):
    q, k, v = (randn(2, 4, 33, 16, dtype=dtype, device=device, seed=s, grad=True) for s in range(3))
    weight = randn(2, 33, 64, dtype=dtype, device=device, seed=4)
    uses = {
        "merged heads": lambda o: (o.transpose(1, 2).reshape(2, 33, 64) * weight).sum(),
        "sum": lambda o: o.sum(),
        "mean of rows": lambda o: o.mean(2).square().sum(),
        "one element": lambda o: o[1, 2, 3, 4],
        "every other": lambda o: o[..., ::2].sum(),
        "transposed": lambda o: o.permute(3, 2, 1, 0).flatten()[:1000].sum(),
    }
    seen = masks.Causal().to_dense(2, 4, 33, 33).to(device)
    for name, use in uses.items():
        out = mha_ext.attention(q, k, v, mask=masks.Causal())
        leaf = out.detach().requires_grad_()
        (dout,) = torch.autograd.grad(use(leaf), leaf)  # what arrives, made contiguous on the way
        grads = torch.autograd.grad(use(out), [q, k, v])
        truth = oracle.truths(q, k, v, dout=dout.contiguous(), seen=seen)
        oracle.check({f"{n} of {name}": g for n, g in zip("qkv", grads)}, {f"{n} of {name}": truth[n] for n in "qkv"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["expanded", "transposed", "stepped", "poisoned"])
def test_trap_18_the_gradient_itself_in_any_layout(layout, dtype, device):
    q, k, v = (randn(2, 4, 33, 16, dtype=dtype, device=device, seed=s, grad=True) for s in range(3))
    base = randn(2, 4, 33, 16, dtype=dtype, device=device, seed=5)
    dout = {
        "expanded": base[:1, :1].expand(2, 4, 33, 16),
        "transposed": base.transpose(2, 3).contiguous().transpose(2, 3),
        "stepped": randn(2, 4, 33, 32, dtype=dtype, device=device, seed=6)[..., ::2],
        "poisoned": cases.surrounded(base, (3, 1, 2, 0)),
    }[layout]
    out = mha_ext.attention(q, k, v)
    got, expected = (
        torch.autograd.grad(out, [q, k, v], dout, retain_graph=True),
        torch.autograd.grad(out, [q, k, v], dout.contiguous()),
    )
    for a, b in zip(got, expected):
        assert torch.equal(a, b)


def test_trap_19_softmax_on_any_stride(device):
    scores = randn(2, 3, 40, 70, device=device)
    for view in (scores.transpose(-1, -2), scores[..., ::2], scores.flip(-1), scores[:, :1].expand(2, 5, 40, 70)):
        out = mha_ext.masked_softmax(view, masks.Window(None, 3))
        seen = masks.Window(None, 3).to_dense(*view.shape).to(device)
        exact, rival = oracle.softmax(view.double(), seen)[0], oracle.softmax(view, seen)[0]
        oracle.compare("out", out, exact, rival, magnitude=exact * (1 + view.abs().amax()))


@pytest.mark.parametrize("length", [1, 17, 2047, 4097, 16385, 100001])
def test_trap_20_long_softmax_rows(length, device):
    scores = randn(1, 1, 2, length, device=device, grad=True)
    out = mha_ext.masked_softmax(scores)
    exact, rival = torch.softmax(scores.double(), -1), torch.softmax(scores, -1)
    oracle.compare("out", out, exact, rival)
    oracle.compare(
        "sum",
        out.double().sum(-1, keepdim=True).float(),
        torch.ones(1, 1, 2, 1, device=device),
        rival.double().sum(-1, keepdim=True),
    )
    (grad,) = torch.autograd.grad(out.square().sum(), scores)
    (exact_grad,) = torch.autograd.grad(exact.square().sum(), scores)
    (rival_grad,) = torch.autograd.grad(rival.square().sum(), scores)
    oracle.compare("grad", grad, exact_grad, rival_grad, oracle.GRADIENT)


@pytest.mark.parametrize("B,Sq,Sk", [(2, 0, 5), (2, 5, 0), (0, 5, 5), (2, 0, 0)])
@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Window(1, 1)], ids=["none", "causal", "window"])
def test_trap_21_zero_lengths(B, Sq, Sk, mask, device):
    q, k, v = (randn(B, 4, s, 8, device=device, grad=True) for s in (Sq, Sk, Sk))
    for fn in (
        lambda: mha_ext.attention(q, k, v, mask=mask),
        lambda: mha_ext.scaled_dot_product_attention(q, k, v, is_causal=mask is not None),
        lambda: mha_ext.attention(q, k, v, mask=mask, dropout_p=0.5),
        lambda: mha_ext.attention(q, k, v, mask=torch.ones(Sq, Sk, dtype=torch.bool, device=device)),
    ):
        out = fn()
        assert out.shape == (B, 4, Sq, 8) and not out.any()
        for g, t in zip(torch.autograd.grad(out.sum(), [q, k, v]), (q, k, v)):
            assert g.shape == t.shape and not g.any()
    module = mha_ext.nn.MultiheadAttention(8, 2, batch_first=True, device=device)
    x, y = torch.randn(B, Sq, 8, device=device), torch.randn(B, Sk, 8, device=device)
    out, weights = module(x, y, y)
    assert out.shape == (B, Sq, 8) and weights.shape == (B, Sq, Sk) and torch.isfinite(out).all()


@pytest.mark.parametrize("Sq,Sk", [(1, 1), (5, 3), (17, 19), (31, 67), (100, 131), (255, 193), (301, 77)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trap_22_odd_lengths_in_backward(Sq, Sk, dtype, device):
    for mask in ("none", "causal", "window"):
        c = cases.Case(1, 2, 1, Sq, Sk, 24, 24, dtype, mask, "1,H,Sq,Sk", "bshd")
        x = cases.build(c, device)
        out = mha_ext.attention(x.q, x.k, x.v, mask=x.mask, bias=x.bias)
        grads = torch.autograd.grad(out, [x.q, x.k, x.v, x.bias], x.dout)
        truth = oracle.truths(x.q, x.k, x.v, dout=x.dout, seen=x.seen, bias=x.bias)
        oracle.check({"out": out, **dict(zip(("q", "k", "v", "bias"), grads))}, truth)


@pytest.mark.parametrize("D,Dv", [(8, 10), (192, 128), (10, 8), (1, 64), (64, 1), (576, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_trap_23_value_head_size_differs(D, Dv, dtype, device):
    c = cases.Case(1, 2, 1, 33, 65, D, Dv, dtype, "causal", layout="bshd")
    x = cases.build(c, device)
    out, lse = mha_ext.attention(x.q, x.k, x.v, mask=x.mask, return_lse=True)
    grads = torch.autograd.grad(out, [x.q, x.k, x.v], x.dout)
    oracle.check(
        {"out": out, "lse": lse, **dict(zip("qkv", grads))}, oracle.truths(x.q, x.k, x.v, dout=x.dout, seen=x.seen)
    )
    torch.testing.assert_close(
        mha_ext.scaled_dot_product_attention(x.q, x.k, x.v, enable_gqa=True).shape, (1, 2, 33, Dv)
    )


# Dropout and determinism ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_trap_24_eager_compile_and_checkpoint_drop_the_same(device, fresh_compiler):
    q, k, v = (randn(2, 2, 33, 16, device=device, seed=s, grad=True) for s in range(3))

    def f(q, k, v):
        return mha_ext.attention(q, k, v, dropout_p=0.4).square()

    results = []
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for run in (
        f,
        compiled,
        lambda *a: checkpoint(f, *a, use_reentrant=False),
        lambda *a: checkpoint(f, *a, use_reentrant=True),
    ):
        torch.manual_seed(7)
        for t in (q, k, v):
            t.grad = None
        out = run(q, k, v)
        out.sum().backward()
        results.append([out.detach(), *(t.grad for t in (q, k, v))])
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert torch.equal(a, b)
    torch.manual_seed(8)
    assert not torch.equal(f(q, k, v), results[0][0])


def test_trap_25_mean_over_seeds_and_the_extremes(device):
    q, k, v = (randn(1, 2, 17, 8, device=device, seed=s, grad=True) for s in range(3))
    plain = mha_ext.attention(q, k, v)
    outs = torch.stack(
        [mha_ext.attention(q, k, v, dropout_p=0.3, rng_state=torch.tensor([s, 0], device=device)) for s in range(1500)]
    )
    deviation = outs.std(0) / 1500**0.5
    assert ((outs.mean(0) - plain).abs() <= 6 * deviation).all()
    assert torch.equal(mha_ext.attention(q, k, v, dropout_p=0.0), plain)
    out, weights = mha_ext.attention(q, k, v, dropout_p=1.0, return_weights=True)
    assert not out.any() and not weights.any()
    for g in torch.autograd.grad(out.sum() + weights.sum(), [q, k, v]):
        assert not g.any()
    almost = mha_ext.attention(q, k, v, dropout_p=1 - 1e-7, rng_state=torch.tensor([1, 2], device=device))
    assert torch.isfinite(almost).all()
    tiny = mha_ext.attention(q, k, v, dropout_p=1e-12, rng_state=torch.tensor([1, 2], device=device))
    compare_fp32("p -> 0", tiny, plain)
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError):
            mha_ext.attention(q, k, v, dropout_p=p)


def test_trap_26_returned_weights_are_those_that_were_used(device):
    for dtype in (torch.float32, torch.float64):
        q, k, v = (randn(2, 3, 33, 16, dtype=dtype, device=device, seed=s) for s in range(3))
        out, weights = mha_ext.attention(q, k, v, dropout_p=0.5, return_weights=True)
        assert (weights == 0).float().mean() > 0.3
        exact = weights.double() @ v.double()
        oracle.compare("out", out, exact, weights @ v, magnitude=weights.double() @ v.double().abs())
    torch.manual_seed(0)
    module = mha_ext.nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True, device=device)
    x = torch.randn(2, 33, 16, device=device)
    out, weights = module(x, x, x, average_attn_weights=False)
    assert (weights == 0).any()
    value = F.linear(x, module.in_proj_weight[32:], module.in_proj_bias[32:]).view(2, 33, 2, 8).transpose(1, 2)
    compare_fp32("module", out, module.out_proj((weights @ value).transpose(1, 2).reshape(2, 33, 16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trap_27_backward_ten_times_bitwise_equal(dtype, device):
    c = cases.Case(2, 4, 2, 200, 200, 32, 32, dtype, "causal & padding", "1,H,Sq,Sk", "bshd", dropout_p=0.2)
    x = cases.build(c, device)
    leaves = list(x.leaves().values())
    out = mha_ext.attention(
        x.q, x.k, x.v, mask=x.mask, bias=x.bias, dropout_p=0.2, rng_state=x.rng_state, deterministic=True
    )
    first = torch.autograd.grad(out, leaves, x.dout, retain_graph=True)
    for _ in range(9):
        for a, b in zip(first, torch.autograd.grad(out, leaves, x.dout, retain_graph=True)):
            assert torch.equal(a, b)


# Autograd, compile, dtypes --------------------------------------------------------------------------------------------


def test_trap_28_double_backward_is_not_silently_zero(device):
    q, k, v = (randn(1, 2, 4, 3, dtype=torch.float64, device=device, seed=s, grad=True) for s in range(3))
    assert torch.autograd.gradgradcheck(lambda q, k, v: mha_ext.attention(q, k, v, mask=masks.Causal()), (q, k, v))
    scores = randn(1, 2, 3, 4, dtype=torch.float64, device=device, grad=True)
    assert torch.autograd.gradgradcheck(lambda s: mha_ext.masked_softmax(s, masks.Causal(), scale=0.7), (scores,))
    x = randn(2, 3, 4, dtype=torch.float64, device=device, grad=True)
    bias, mix = (
        randn(4, dtype=torch.float64, device=device, grad=True),
        randn(2, 2, dtype=torch.float64, device=device, grad=True),
    )
    assert torch.autograd.gradgradcheck(
        lambda x, b, m: mha_ext.merge_heads(mha_ext.split_heads(x, 2, b), m).square(), (x, bias, mix)
    )


def test_trap_29_vmap_over_batch_and_heads(device):
    q, k, v = (randn(3, 2, 4, 9, 8, device=device, seed=s) for s in range(3))
    f = lambda q, k, v: mha_ext.attention(q, k, v, mask=masks.Causal())
    mapped = torch.vmap(f)(q, k, v)
    looped = torch.stack([f(*one) for one in zip(q, k, v)])
    compare_fp32("batch", mapped, looped)
    one_head = lambda q, k, v: f(q[None, None], k[None, None], v[None, None])[0, 0]
    heads = torch.vmap(torch.vmap(one_head))(q[0], k[0], v[0])
    compare_fp32("batch and heads", heads, f(q[0], k[0], v[0]))
    last = torch.vmap(f, in_dims=(-1, 0, 0), out_dims=2)(q.movedim(0, -1), k, v)
    compare_fp32("other dims", last.movedim(2, 0), looped)


@pytest.mark.slow
def test_trap_30_compile_with_three_lengths(device, fresh_compiler):
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def f(q, k, v, n):
        return mha_ext.attention(q, k, v, mask=masks.Causal() & masks.Padding(n))

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=counter)
    for length in (17, 33, 50):
        q, k, v = (randn(2, 2, length, 16, device=device, seed=s, grad=True) for s in range(3))
        n = torch.tensor([length, 5], device=device)
        a, b = compiled(q, k, v, n), f(q, k, v, n)
        assert torch.equal(a, b)
        for x, y in zip(torch.autograd.grad(a.sum(), [q, k, v]), torch.autograd.grad(b.sum(), [q, k, v])):
            assert torch.equal(x, y)
    assert counter.frame_count <= 2


def test_trap_31_autocast_and_mixed_dtypes(device):
    torch.manual_seed(0)
    module = mha_ext.nn.MultiheadAttention(16, 2, batch_first=True, device=device)
    x = torch.randn(2, 5, 16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, _ = module(x, x, x)
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in module.parameters())
    q, k = torch.randn(1, 1, 3, 8, device=device), torch.randn(1, 1, 3, 8, device=device).bfloat16()
    with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
        mha_ext.attention(q, k, k)
    assert "float32" in str(error.value) and "bfloat16" in str(error.value)


# 32 (no copy of K/V for grouped queries) is in test_memory.py


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trap_33_packed_sequences_do_not_see_each_other(dtype, device):
    ids = torch.tensor([[0] * 70 + [1] * 59], device=device)
    for mask in (masks.Documents(ids), masks.Documents(ids) & masks.Causal()):
        results = []
        for change in (0.0, 3.0, float("nan")):
            q, k, v = (randn(1, 2, 129, 16, dtype=dtype, device=device, seed=s) for s in range(3))
            for t in (q, k, v):
                t[:, :, 70:] += change
            q, k, v = (t.requires_grad_() for t in (q, k, v))
            out = mha_ext.attention(q, k, v, mask=mask)
            dout = randn(1, 2, 129, 16, dtype=dtype, device=device, seed=4)
            grads = torch.autograd.grad(out, [q, k, v], dout)
            results.append([t[:, :, :70] for t in (out, *grads)])
        for other in results[1:]:
            for a, b in zip(results[0], other):
                assert torch.equal(a, b)


@pytest.mark.parametrize("magnitude", [60.0, 1000.0, 30000.0])
def test_trap_34_fp16_logits_beyond_65504(magnitude, device):
    """q.k reaches magnitude^2 * 64: far beyond fp16, also before scaling."""
    q, k, v = (randn(1, 2, 33, 64, dtype=torch.float16, device=device, seed=s) for s in range(3))
    q, k = q.sign() * magnitude, k.sign() * magnitude
    q, k, v = (t.half().requires_grad_() for t in (q, k, v))
    out, lse = mha_ext.attention(q, k, v, return_lse=True)
    exact, exact_lse, _ = oracle.attention(q, k, v)
    rival, rival_lse, _ = oracle.attention(q, k, v, dtype=torch.float32)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all() and exact_lse.abs().max() > 65504 * (magnitude > 100)
    # scores are multiples of magnitude^2 / 4, so ties are exact and everything else is far away
    oracle.compare("out", out, exact, rival, magnitude=exact.abs().amax().expand_as(exact))
    oracle.compare("lse", lse, exact_lse, rival_lse)
    small_scale = mha_ext.attention(q, k, v, scale=1e-6 / magnitude)
    assert torch.isfinite(small_scale).all()
    for g in torch.autograd.grad(small_scale.float().sum(), [q, k, v]):
        assert torch.isfinite(g).all()


@pytest.mark.parametrize("scale", [0.0, -1.0, -0.125, 1e-30, 25.0])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal & padding"])
def test_trap_35_any_scale(scale, dtype, mask, device):
    c = cases.Case(2, 2, 1, 65, 67, 16, 16, dtype, mask, scale=scale)
    x = cases.build(c, device)
    out, lse = mha_ext.attention(x.q, x.k, x.v, mask=x.mask, scale=scale, return_lse=True)
    grads = torch.autograd.grad(out, [x.q, x.k, x.v], x.dout)
    truth = oracle.truths(x.q, x.k, x.v, dout=x.dout, seen=x.seen, scale=scale)
    oracle.check({"out": out, "lse": lse, **dict(zip("qkv", grads))}, truth)
    if scale == 0.0:
        assert not grads[0].any() and not grads[1].any()
    out = mha_ext.masked_softmax(x.q.detach(), scale=scale)
    exact = torch.softmax(x.q.detach().double() * scale, -1)
    oracle.compare(
        "softmax",
        out,
        exact,
        torch.softmax(x.q.detach() * scale, -1),
        magnitude=exact * (1 + abs(scale) * x.q.detach().double().abs().amax()),
    )
