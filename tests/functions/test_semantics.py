"""The promised semantics, one test (or a few) per row of the table in docs/design.md."""

from __future__ import annotations

import cases
import oracle
import pytest
import torch
import torch.nn.functional as F

import mha_ext
from mha_ext import masks


def qkv(device, B=2, H=4, Hk=2, Sq=33, Sk=65, D=16, Dv=16, dtype=torch.float32, seed=0):
    gen = cases.generator(seed)
    shapes = ((B, H, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv))
    return [cases.randn(gen, *s, dtype=dtype).to(device).requires_grad_() for s in shapes]


# bool mask polarity ---------------------------------------------------------------------------------------------------


def test_true_means_attend(device):
    q, k, v = (t.detach() for t in qkv(device, Hk=4))
    only = torch.zeros(33, 65, dtype=torch.bool, device=device)
    only[:, 7] = True
    assert torch.equal(mha_ext.attention(q, k, v, mask=only), v[:, :, 7:8].expand(2, 4, 33, 16))
    assert torch.equal(mha_ext.scaled_dot_product_attention(q, k, v, only), v[:, :, 7:8].expand(2, 4, 33, 16))


def test_modules_keep_torch_polarity(device):
    x = torch.randn(1, 4, 8, device=device)
    module = mha_ext.nn.MultiheadAttention(8, 2, batch_first=True, device=device)
    hide = torch.tensor([[False, True, True, True]], device=device)
    _, weights = module(x, x, x, key_padding_mask=hide)
    assert torch.equal(weights[0, :, 0], torch.ones(4, device=device)) and not weights[0, :, 1:].any()


# mask/bias rank -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(65,), (33,), (2, 33, 65), (4, 33, 65), (1, 33, 65), (1, 1, 2, 33, 65), (), (2, 65), (4, 65)], ids=str
)
@pytest.mark.parametrize("kind", ["mask", "dense", "bias"])
def test_ranks_other_than_2_and_4_are_refused(kind, shape, device):
    """2-D must be [Sq,Sk] itself; 4-D broadcastable; anything else is a sentence with the shape."""
    q, k, v = qkv(device)
    with pytest.raises(ValueError) as error:
        if kind == "bias":
            mha_ext.attention(q, k, v, bias=torch.zeros(shape, device=device))
        else:
            t = torch.ones(shape, dtype=torch.bool, device=device)
            mha_ext.attention(q, k, v, mask=t if kind == "mask" else masks.Dense(t))
    assert str(list(shape)).replace(" ", "") in str(error.value).replace(" ", "")


@pytest.mark.parametrize(
    "shape", [(33, 65), (1, 1, 33, 65), (2, 1, 1, 65), (1, 4, 33, 1), (2, 4, 33, 65), (1, 1, 1, 1)], ids=str
)
def test_2d_and_4d_broadcast(shape, device):
    q, k, v = qkv(device)
    seen = torch.rand(shape, device=device) < 0.6
    seen[..., 0] = True
    assert torch.equal(
        mha_ext.attention(q, k, v, mask=seen), mha_ext.attention(q, k, v, mask=seen.expand(2, 4, 33, 65).contiguous())
    )
    bias = torch.randn(shape, device=device)
    full = bias.expand(2, 4, 33, 65).contiguous()
    assert torch.equal(mha_ext.attention(q, k, v, bias=bias), mha_ext.attention(q, k, v, bias=full))


# mask + causal --------------------------------------------------------------------------------------------------------


def test_mask_and_causal_both_apply(device):
    q, k, v = qkv(device)
    dense = torch.rand(2, 1, 33, 65, device=device) < 0.6
    both = dense & masks.Causal().to_dense(2, 4, 33, 65).to(device)
    expected = mha_ext.attention(q, k, v, mask=both)
    assert torch.equal(mha_ext.attention(q, k, v, mask=masks.Dense(dense) & masks.Causal()), expected)
    assert torch.equal(mha_ext.attention(q, k, v, mask=masks.Causal() & masks.Dense(dense)), expected)


# causal, Sq != Sk -----------------------------------------------------------------------------------------------------


def test_causal_alignment_is_named(device):
    q, k, v = (t.detach() for t in qkv(device, Sq=3, Sk=5, Hk=4))
    i, j = torch.arange(3, device=device)[:, None], torch.arange(5, device=device)
    for align, seen in (("bottom_right", j <= i + 2), ("top_left", j <= i)):
        _, weights = mha_ext.attention(q, k, v, mask=masks.Causal(align), return_weights=True)
        assert torch.equal(weights > 0, seen.expand(2, 4, 3, 5))
    assert torch.equal(
        mha_ext.attention(q, k, v, mask=masks.Causal()), mha_ext.attention(q, k, v, mask=masks.Causal("bottom_right"))
    )
    top_left = mha_ext.attention(q, k, v, mask=masks.Causal("top_left"))
    assert torch.equal(mha_ext.scaled_dot_product_attention(q, k, v, is_causal=True), top_left)
    torch.testing.assert_close(top_left, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    with pytest.raises(ValueError, match="bottom_right.*top_left|top_left.*bottom_right"):
        masks.Causal("upper")


# float mask instead of bool -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("make", [lambda t: t, lambda t: masks.Dense(t)], ids=["tensor", "Dense"])
def test_float_mask_is_refused(make, dtype, device):
    q, k, v = qkv(device)
    with pytest.raises(TypeError) as error:
        mha_ext.attention(q, k, v, mask=make(torch.ones(33, 65, dtype=dtype, device=device)))
    assert "bool" in str(error.value)
    if dtype.is_floating_point:
        assert "bias=" in str(error.value)


def test_bool_bias_is_refused(device):
    q, k, v = qkv(device)
    with pytest.raises(TypeError, match="mask="):
        mha_ext.attention(q, k, v, bias=torch.ones(33, 65, dtype=torch.bool, device=device))


# score order ----------------------------------------------------------------------------------------------------------


def test_score_order(device):
    """softcap(scale*qk), then bias, then mask, then softmax, then dropout: a bias beyond the cap is not capped, a mask beats any bias, and
    the kept weights are scaled by 1/(1-p) without renormalising."""
    q, k, v = (t.detach() for t in qkv(device, Hk=4, Sk=33, dtype=torch.float64))
    bias = 10 * cases.randn(cases.generator(1), 1, 4, 33, 33, dtype=torch.float64).to(device)
    rng_state = torch.tensor([3, 4], device=device)
    out, lse, weights = mha_ext.attention(
        q, k, v, mask=masks.Causal(), bias=bias, scale=2.0, softcap=1.5, dropout_p=0.25, rng_state=rng_state, return_lse=True,
        return_weights=True,
    )  # fmt: skip
    scores = 1.5 * torch.tanh(2.0 * q @ k.transpose(-1, -2) / 1.5) + bias
    scores = scores.masked_fill(torch.ones(33, 33, dtype=torch.bool, device=device).triu(1), -torch.inf)
    keep = mha_ext.dropout_mask(rng_state, 0.25, 2, 4, 33, 33, q.device)
    expected = torch.softmax(scores, -1) * keep / 0.75
    torch.testing.assert_close(weights, expected, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(out, expected @ v, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)


def test_small_finite_bias_is_plain_arithmetic(device):
    """A finite bias, however small, does not hide: a row of only such biases is an ordinary softmax."""
    for dtype in cases.DTYPES:
        q, k, v = (t.detach() for t in qkv(device, Hk=4, dtype=dtype))
        bias = torch.full((33, 65), torch.finfo(dtype).min / 2, dtype=dtype, device=device)
        bias[:, 30:] = torch.finfo(dtype).min
        out = mha_ext.attention(q, k, v, bias=bias)
        assert torch.isfinite(out).all()
        low = torch.full((1, 1, 1, 65), torch.finfo(dtype).min, dtype=dtype, device=device)
        out, lse = mha_ext.attention(q, k, v, bias=low, return_lse=True)
        assert torch.isfinite(out).all() and torch.isfinite(lse).all() and out.any()


# dropout --------------------------------------------------------------------------------------------------------------


def test_dropout_is_independent_of_tiles_threads_and_context(device):
    """An element's fate depends on (seed, offset, b, h, i, j) alone: a longer problem, another thread count or a single head agree."""
    rng_state = torch.tensor([99, 5], device=device)
    big = mha_ext.dropout_mask(rng_state, 0.3, 2, 3, 200, 300, torch.device(device))
    assert torch.equal(mha_ext.dropout_mask(rng_state, 0.3, 2, 3, 7, 5, torch.device(device)), big[:, :, :7, :5])
    assert torch.equal(mha_ext.dropout_mask(rng_state, 0.3, 1, 3, 200, 300, torch.device(device)), big[:1])
    q, k, v = (t.detach() for t in qkv(device, Hk=4, Sq=130, Sk=257))
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out, weights = mha_ext.attention(q, k, v, dropout_p=0.3, rng_state=rng_state, return_weights=True)
        assert torch.equal(weights > 0, mha_ext.dropout_mask(rng_state, 0.3, 2, 4, 130, 257, torch.device(device)))
        results.append(out)
    assert torch.equal(*results)
    rate = 1 - big.float().mean().item()
    assert abs(rate - 0.3) < 5 * (0.3 * 0.7 / big.numel()) ** 0.5  # five standard deviations


# accumulation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_accumulation_is_wider_than_half(dtype, device):
    """4,096 equal weights over values 1: sums in half precision would stick long before the end. The same for gradients of keys over 4,096
    queries: one rounding at the end."""
    S = 4096
    q = torch.zeros(1, 1, S, 8, dtype=dtype, device=device).requires_grad_()
    k, v = (
        torch.zeros(1, 1, 3, 8, dtype=dtype, device=device).requires_grad_(),
        torch.ones(1, 1, 3, 8, dtype=dtype, device=device),
    )
    v.requires_grad_()
    out = mha_ext.attention(q, k, v)
    (dv,) = torch.autograd.grad(out.sum(), v)
    truth = oracle.truths(q, k, v, dout=torch.ones_like(out))
    assert (truth["v"].exact - S / 3).abs().max() < 1e-9
    oracle.check({"v": dv}, truth)
    out, lse = mha_ext.attention(k, q, torch.ones_like(q), return_lse=True)
    one = torch.ones_like(out, dtype=torch.float64)
    oracle.compare("out", out, one, one.to(dtype))
    exact = torch.full_like(lse, S, dtype=torch.float64).log()
    oracle.compare("lse", lse.unsqueeze(-1), exact.unsqueeze(-1), exact.float().unsqueeze(-1))


def test_float64_is_float64(device):
    """Wrong by fp32 rounding would be 1e-7."""
    c = cases.Case(2, 4, 2, 65, 129, 32, 32, torch.float64, "causal", "1,H,Sq,Sk")
    x = cases.build(c, device)
    out, lse = mha_ext.attention(x.q, x.k, x.v, mask=x.mask, bias=x.bias, return_lse=True)
    assert lse.dtype == torch.float64
    leaves = x.leaves()
    grads = torch.autograd.grad(out, list(leaves.values()), x.dout)
    truth = oracle.truths(x.q, x.k, x.v, dout=x.dout, seen=x.seen, bias=x.bias)
    for name, value in {"out": out, "lse": lse, **dict(zip(leaves, grads))}.items():
        torch.testing.assert_close(value, truth[name].exact, rtol=1e-11, atol=1e-12)


# determinism ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", cases.CORE, ids=lambda c: c.id)
def test_bitwise_repeatable(c, device):
    results = []
    for _ in range(3):
        x = cases.build(c, device)
        out = mha_ext.attention(x.q, x.k, x.v, deterministic=True, **x.modifiers(), **c.options())
        results.append([out, *torch.autograd.grad(out, list(x.leaves().values()), x.dout)])
    for again in results[1:]:
        for a, b in zip(results[0], again):
            assert torch.equal(a, b)


# zero-sized dimensions ------------------------------------------------------------------------------------------------

SIZES = {"B": 2, "H": 4, "Hk": 2, "Sq": 5, "Sk": 7, "D": 8, "Dv": 6}


@pytest.mark.parametrize("zero", ["B", "Sq", "Sk", "D", "Dv", "H,Hk", "Sq,Sk", "B,Sk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_sizes(zero, dtype, device):
    n = {**SIZES, **dict.fromkeys(zero.split(","), 0)}
    q = torch.randn(n["B"], n["H"], n["Sq"], n["D"], device=device).to(dtype).requires_grad_()
    k = torch.randn(n["B"], n["Hk"], n["Sk"], n["D"], device=device).to(dtype).requires_grad_()
    v = torch.randn(n["B"], n["Hk"], n["Sk"], n["Dv"], device=device).to(dtype).requires_grad_()
    bias = torch.randn(1, n["H"], n["Sq"], n["Sk"], device=device).to(dtype).requires_grad_()
    options = {"scale": 1.0} if zero == "D" else {}
    out, lse, weights = mha_ext.attention(
        q, k, v, mask=masks.Causal(), bias=bias, return_lse=True, return_weights=True, **options
    )
    assert out.shape == (n["B"], n["H"], n["Sq"], n["Dv"]) and lse.shape == out.shape[:3]
    assert weights.shape == (n["B"], n["H"], n["Sq"], n["Sk"])
    grads = torch.autograd.grad(out.sum(), [q, k, v, bias])
    for g, t in zip(grads, (q, k, v, bias)):
        assert g.shape == t.shape and torch.isfinite(g).all()
        if zero != "D":
            assert zero == "Dv" or not g.any()
    if "Sk" in zero.split(","):
        assert not out.any() and (lse == -torch.inf).all()
    if zero == "D":  # all scores are 0: the mean over the visible values
        seen = masks.Causal().to_dense(2, 4, 5, 7).to(device)
        truth = oracle.truths(q, k, v, dout=torch.ones_like(out), seen=seen, bias=bias, scale=1.0)
        oracle.check({"out": out, "v": grads[2], "bias": grads[3]}, truth)


# sizes ----------------------------------------------------------------------------------------------------------------


def test_more_than_65535_heads_in_all(device):
    q, k, v = (torch.randn(33000, 2, 2, 2, device=device) for _ in range(3))
    out = mha_ext.attention(q, k, v, mask=masks.Causal())
    assert torch.equal(out[-1:], mha_ext.attention(q[-1:], k[-1:], v[-1:], mask=masks.Causal()))
    truth, _, _ = oracle.attention(q, k, v, seen=masks.Causal().to_dense(1, 1, 2, 2).to(device))
    rival = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    oracle.compare(
        "out",
        out,
        truth,
        rival,
        magnitude=(1 + q.abs().max() * k.abs().max()) * v.double().abs().amax((-1, -2), keepdim=True).expand_as(v),
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_offsets_beyond_32_bits(dtype):
    """Elements that lie more than 2^31 elements away from the start: a bias read through strides, made by expanding a small storage."""
    storage = torch.zeros(2**31 + 4096, dtype=torch.bool)  # 2 GiB
    far = storage.as_strided((1, 2, 4, 8), (0, 2**31, 8, 1))
    far[:, 1] = torch.rand(4, 8) < 0.6
    far[:, 0] = True
    q, k, v = (torch.randn(1, 2, 4 if n == 0 else 8, 8) for n in range(3))
    assert torch.equal(mha_ext.attention(q, k, v, mask=far), mha_ext.attention(q, k, v, mask=far.contiguous()))


# double backward ------------------------------------------------------------------------------------------------------


def test_double_backward(device):
    q, k, v = qkv(device, B=1, H=2, Hk=1, Sq=5, Sk=6, D=3, Dv=3, dtype=torch.float64)
    bias = torch.randn(1, 2, 5, 6, dtype=torch.float64, device=device, requires_grad=True)
    seen = masks.Causal().to_dense(1, 2, 5, 6).to(device)

    def penalty(out, inputs):
        grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in grads), inputs)

    inputs = [q, k, v, bias]
    ours = penalty(mha_ext.attention(q, k, v, mask=masks.Causal(), bias=bias), inputs)
    theirs = penalty(oracle.attention(q, k, v, seen=seen, bias=bias)[0], inputs)
    for a, b in zip(ours, theirs):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


# autocast -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts(dtype, device):
    q, k, v = qkv(device)
    with torch.autocast(device, dtype=dtype):
        out = mha_ext.attention(q, k.to(dtype), v)
        soft = [mha_ext.masked_softmax(torch.randn(1, 1, 3, 4, device=device).to(t)) for t in (torch.float32, dtype)]
    assert out.dtype == dtype
    assert [x.dtype for x in soft] == [torch.float32, dtype]  # in the scores' type
    assert torch.equal(out, mha_ext.attention(q.to(dtype), k.to(dtype), v.to(dtype)))
    grads = torch.autograd.grad(out.float().sum(), [q, k, v])
    assert [g.dtype for g in grads] == [torch.float32] * 3


def test_mixed_dtypes_are_refused_by_name(device):
    q, k, v = qkv(device)
    for args in ((q, k.bfloat16(), v), (q.half(), k, v), (q, k, v.double())):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            mha_ext.attention(*args)
        for t in args:
            assert str(t.dtype).removeprefix("torch.") in str(error.value)
