"""gradcheck and gradgradcheck in fp64 for every differentiable argument and every differentiable output."""

from __future__ import annotations

import cases
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import mha_ext
from mha_ext import masks


def f64(*shape, seed=0):
    return cases.randn(cases.generator(seed), *shape, dtype=torch.float64).requires_grad_()


def inputs(B=2, H=2, Hk=1, Sq=3, Sk=5, D=3, Dv=2):
    return f64(B, H, Sq, D), f64(B, Hk, Sk, D, seed=1), f64(B, Hk, Sk, Dv, seed=2)


MASKS = {
    "none": None,
    "causal": masks.Causal(),
    "padding": masks.Padding(torch.tensor([0, 4])),  # the rows of sample 0 see nothing
    "dense": (torch.arange(15).view(3, 5) * 7 % 5 < 3),
    "and": masks.Causal("top_left") & masks.LeftPadding(torch.tensor([1, 0])) & masks.Window(2, None),
}
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 0.7},
    "scale": {"scale": -0.4},
    "dropout": {"dropout_p": 0.4, "rng_state": torch.tensor([3, 9])},
    "all": {"softcap": 1.5, "scale": 0.9, "dropout_p": 0.3, "rng_state": torch.tensor([1, 2])},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_attention(mask, options):
    def f(q, k, v, bias):
        return mha_ext.attention(q, k, v, mask=MASKS[mask], bias=bias, **OPTIONS[options])

    assert gradcheck(f, (*inputs(), f64(2, 2, 3, 5, seed=3)))


def finite(lse):
    return lse.masked_fill(lse.isinf(), 0.0)


@pytest.mark.parametrize("outputs", ["lse", "weights", "out, lse", "out, weights", "out, lse, weights"])
@pytest.mark.parametrize(
    "mask,options", [("none", "plain"), ("padding", "all"), ("and", "softcap"), ("dense", "dropout")]
)
def test_attention_with_lse_and_weights(outputs, mask, options):
    def f(q, k, v, bias):
        out, lse, weights = mha_ext.attention(
            q, k, v, mask=MASKS[mask], bias=bias, return_lse=True, return_weights=True, **OPTIONS[options]
        )
        found = {"out": out, "lse": finite(lse), "weights": weights}
        return tuple(found[name] for name in outputs.split(", "))

    assert gradcheck(f, (*inputs(), f64(1, 2, 3, 5, seed=3)))


@pytest.mark.parametrize(
    "shape", [(3, 5), (1, 1, 1, 5), (2, 1, 3, 1), (1, 2, 1, 1), (1, 1, 1, 1), (2, 2, 3, 5)], ids=str
)
def test_bias_broadcasts(shape):
    def f(bias):
        return mha_ext.attention(*(t.detach() for t in inputs()), mask=masks.Causal(), bias=bias)

    assert gradcheck(f, (f64(*shape, seed=4),))
    assert gradgradcheck(f, (f64(*shape, seed=4),))


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "and"])
@pytest.mark.parametrize("options", ["plain", "softcap", "all"])
def test_attention_twice(mask, options):
    def f(q, k, v, bias):
        return mha_ext.attention(q, k, v, mask=MASKS[mask], bias=bias, **OPTIONS[options])

    assert gradgradcheck(f, (*inputs(B=2, Sq=2, Sk=5), f64(1, 2, 2, 5, seed=3)))


@pytest.mark.parametrize(
    "outputs,mask,options",
    [
        ("lse", "and", "all"),  # which gradients are there does not depend on the mask
        ("weights", "padding", "plain"),
        ("out, lse, weights", "none", "plain"),
        ("out, lse, weights", "padding", "plain"),
        ("out, lse, weights", "and", "all"),
    ],
)
def test_attention_twice_with_lse_and_weights(outputs, mask, options):
    def f(q, k, v, bias):
        out, lse, weights = mha_ext.attention(
            q, k, v, mask=MASKS[mask], bias=bias, return_lse=True, return_weights=True, **OPTIONS[options]
        )
        found = {"out": out, "lse": finite(lse), "weights": weights}
        return tuple(found[name] for name in outputs.split(", "))

    assert gradgradcheck(f, (*inputs(Sq=2), f64(1, 2, 2, 5, seed=3)))


@pytest.mark.parametrize("bias_shape", [None, (3, 5), (2, 1, 1, 5)], ids=str)
@pytest.mark.parametrize("mask,p", [("none", 0.0), ("causal", 0.3), ("padding", 0.0), ("and", 0.3), ("dense", 0.0)])
def test_masked_softmax(bias_shape, mask, p):
    rng_state = torch.tensor([5, 6]) if p else None

    def f(scores, bias=None):
        return mha_ext.masked_softmax(scores, MASKS[mask], bias=bias, scale=0.8, dropout_p=p, rng_state=rng_state)

    leaves = (f64(2, 2, 3, 5),) + ((f64(*bias_shape, seed=1),) if bias_shape else ())
    assert gradcheck(f, leaves)
    assert gradgradcheck(f, leaves)


def test_heads():
    x, bias, mix = f64(2, 3, 8), f64(8, seed=1), f64(2, 2, seed=2)
    for check in (gradcheck, gradgradcheck):
        assert check(lambda x: mha_ext.split_heads(x, 4), (x,))
        assert check(lambda x, b: mha_ext.split_heads(x, 2, b), (x, bias))
        assert check(mha_ext.merge_heads, (f64(2, 2, 3, 4),))
        assert check(mha_ext.merge_heads, (f64(2, 2, 3, 4), mix))


def test_scaled_dot_product_attention():
    q, k, v = inputs(Hk=2)
    bias = f64(3, 5, seed=3)
    for check in (gradcheck, gradgradcheck):
        assert check(
            lambda q, k, v, b: mha_ext.scaled_dot_product_attention(q, k, v, b, is_causal=True), (q, k, v, bias)
        )


def test_non_contiguous_leaves_and_outputs():
    q, k, v = (f64(2, 4, 2, 3, seed=s) for s in range(3))  # [B,S,H,D]
    assert gradcheck(
        lambda q, k, v: mha_ext.attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).flatten(2), (q, k, v)
    )
    q, k, v = (f64(2, 2, 3, 4, seed=s) for s in range(3))  # the last dimension is strided
    assert gradcheck(lambda q, k, v: mha_ext.attention(*(t.transpose(2, 3) for t in (q, k, v))), (q, k, v))


def test_several_tiles():
    """Lengths of more than one tile: directional derivatives, as the full Jacobian would be too big."""
    q, k, v = f64(1, 2, 70, 4), f64(1, 1, 130, 4, seed=1), f64(1, 1, 130, 4, seed=2)
    bias = f64(1, 2, 70, 130, seed=3)

    def f(q, k, v, bias):
        return mha_ext.attention(q, k, v, mask=masks.Causal(), bias=bias, softcap=3.0, return_lse=True)

    assert gradcheck(f, (q, k, v, bias), fast_mode=True)
    assert gradgradcheck(lambda q, k, v: f(q, k, v, bias.detach()), (q, k, v), fast_mode=True)


def test_saved_tensors_may_wait_elsewhere_and_gradients_come_in_batches():
    q, k, v = inputs()
    bias = f64(1, 2, 3, 5, seed=3)
    dout = torch.stack([torch.ones(2, 2, 3, 2), torch.rand(2, 2, 3, 2)]).double()
    expected = [torch.autograd.grad(mha_ext.attention(q, k, v, bias=bias), (q, k, v, bias), d) for d in dout]
    with torch.autograd.graph.save_on_cpu():
        out = mha_ext.attention(q, k, v, bias=bias)
    for found, *each in zip(torch.autograd.grad(out, (q, k, v, bias), dout, is_grads_batched=True), *expected):
        torch.testing.assert_close(found, torch.stack(each), rtol=1e-12, atol=1e-12)
