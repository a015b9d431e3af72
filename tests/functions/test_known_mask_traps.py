"""Faults of masks that users of attention libraries have reported: the first part of the list that test_known_traps.py goes on with."""

from __future__ import annotations

import cases
import oracle
import pytest
import torch
import torch.nn.functional as F

import mha_ext
from mha_ext import masks


def randn(*shape, dtype=torch.float32, device="cpu", seed=0, grad=False):
    return cases.randn(cases.generator(seed), *shape, dtype=dtype).to(device).requires_grad_(grad)


def module_and_grads(module, run, loss_of):
    module.zero_grad()
    loss_of(run(module)).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def compare_fp32(name, actual, expected):
    """Two fp32 results of the same sums in another order."""
    scale = expected.abs().max().item()
    assert torch.isfinite(actual).all(), name
    assert (actual - expected).abs().max().item() <= 64 * torch.finfo(torch.float32).eps * max(scale, 1e-3), name


# Masked rows and NaN --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["key_padding", "attn_mask", "float_padding", "float_attn_mask"])
def test_trap_01_fully_padded_sample_does_not_poison_training(kind, need_weights, device):
    torch.manual_seed(0)
    module = mha_ext.nn.MultiheadAttention(16, 2, batch_first=True, device=device)
    x = torch.randn(2, 7, 16, device=device)
    hide = torch.zeros(2, 7, dtype=torch.bool, device=device)
    hide[0] = True
    if "attn_mask" in kind:
        hide = hide[:, None, :].expand(2, 7, 7).repeat_interleave(2, 0)
    if "float" in kind:
        hide = torch.zeros(hide.shape, device=device).masked_fill(hide, -torch.inf)
    options = {"key_padding_mask" if "padding" in kind else "attn_mask": hide}

    def loss(result):
        return result[0][-1].square().sum()

    with_padding = module_and_grads(module, lambda m: m(x, x, x, need_weights=need_weights, **options), loss)
    alone = module_and_grads(module, lambda m: m(x[1:], x[1:], x[1:], need_weights=need_weights), loss)
    for name in alone:
        compare_fp32(name, with_padding[name], alone[name])


def test_trap_01_functional(device):
    q, k, v = (randn(2, 2, 5, 8, device=device, seed=s, grad=True) for s in range(3))
    out = mha_ext.attention(q, k, v, mask=masks.Padding(torch.tensor([0, 5], device=device)))
    for g in torch.autograd.grad(out[1].square().sum(), [q, k, v]):
        assert torch.isfinite(g).all() and not g[0].any() and g[1].any()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_trap_02_fully_masked_row_with_and_without_weights(average, training, device):
    torch.manual_seed(0)
    module = mha_ext.nn.MultiheadAttention(16, 2, batch_first=True, device=device).train(training)
    x = torch.randn(2, 5, 16, device=device)
    hide = torch.zeros(5, 5, dtype=torch.bool, device=device)
    hide[2] = True
    with_weights, weights = module(x, x, x, attn_mask=hide, average_attn_weights=average)
    without, none = module(x, x, x, attn_mask=hide, need_weights=False)
    assert none is None
    assert torch.isfinite(with_weights).all()
    compare_fp32("out", without, with_weights)
    compare_fp32("masked row", with_weights[:, 2], module.out_proj.bias.expand(2, 16))
    assert not weights[..., 2, :].any() and torch.isfinite(weights).all()


@pytest.mark.parametrize("kind", ["none", "padding", "float", "both"])
@pytest.mark.parametrize("dtype,embed,heads", [(torch.float32, 16, 2), (torch.float16, 12, 2), (torch.bfloat16, 24, 4)])
@pytest.mark.parametrize("need_weights", [True, False])
def test_trap_03_train_and_eval_agree(kind, dtype, embed, heads, need_weights, device):
    """Head size 6 in fp16 among them; torch has a fast path that differs here, this module has none."""
    torch.manual_seed(0)
    module = mha_ext.nn.MultiheadAttention(embed, heads, batch_first=True, device=device, dtype=dtype)
    x = torch.randn(3, 9, embed, device=device).to(dtype)
    options = {}
    if kind in ("padding", "both"):
        options["key_padding_mask"] = torch.arange(9, device=device) >= torch.tensor([[9], [4], [0]], device=device)
    if kind in ("float", "both"):
        options["attn_mask"] = torch.randn(9, 9, device=device).to(dtype)
    trained = module.train()(x, x, x, need_weights=need_weights, **options)[0]
    with torch.no_grad():
        evaluated = module.eval()(x, x, x, need_weights=need_weights, **options)[0]
    with torch.inference_mode():
        inferred = module(x, x, x, need_weights=need_weights, **options)[0]
    assert torch.isfinite(trained).all()
    assert (trained - evaluated).abs().max() <= 1e-6 and (trained - inferred).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("row", [0, 31, 64])
def test_trap_04_a_row_all_false(row, dtype, device):
    q, k, v = (randn(1, 2, 65, 16, dtype=dtype, device=device, seed=s, grad=True) for s in range(3))
    seen = torch.ones(65, 65, dtype=torch.bool, device=device)
    seen[row] = False
    out = mha_ext.attention(q, k, v, mask=seen)
    grads = torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
    assert not out[:, :, row].any() and not grads[0][:, :, row].any()
    truth = oracle.truths(q, k, v, dout=torch.ones_like(out), seen=seen)
    oracle.check({"out": out, **dict(zip("qkv", grads))}, truth)


def test_trap_04_everything_false(device):
    q, k, v = (randn(1, 2, 9, 8, device=device, seed=s, grad=True) for s in range(3))
    out, lse = mha_ext.attention(q, k, v, mask=torch.zeros(9, 9, dtype=torch.bool, device=device), return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()
    for g in torch.autograd.grad(out.sum(), [q, k, v]):
        assert not g.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_trap_05_merge_of_parts_with_one_fully_masked(dtype, device):
    """Two parts of the keys merged through their lse equal the unsplit result, also where one part is hidden from a row."""
    q, k, v = (randn(2, 2, 9, 8, dtype=dtype, device=device, seed=s) for s in range(3))
    lengths = torch.tensor([4, 7], device=device)  # sample 0 sees nothing of the second part
    whole, whole_lse = mha_ext.attention(q, k, v, mask=masks.Padding(lengths), return_lse=True)
    parts = [
        mha_ext.attention(q, k[:, :, s], v[:, :, s], mask=masks.Padding(lengths - s.start), return_lse=True)
        for s in (slice(0, 4), slice(4, 9))
    ]
    assert (parts[1][1][0] == -torch.inf).all() and not parts[1][0][0].any()
    outs, lses = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    out, lse = mha_ext.merge_partials(outs, lses)
    exact, exact_lse, _ = oracle.attention(
        q, k, v, seen=(torch.arange(9, device=device) < lengths[:, None])[:, None, None]
    )
    oracle.compare("out", out, exact, whole)
    oracle.compare("lse", lse, exact_lse, whole_lse)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_trap_06_nan_in_the_padding_of_a_cache(value, dtype, device):
    lengths = torch.tensor([3, 70], device=device)
    hidden = torch.arange(129, device=device) >= lengths[:, None]
    for Sq in (1, 2, 33):
        q = randn(2, 4, Sq, 16, dtype=dtype, device=device, grad=True)
        clean = [
            randn(2, 2, 129, 16, dtype=dtype, device=device, seed=s).masked_fill(hidden[:, None, :, None], 0.0)
            for s in (1, 2)
        ]
        dirty = [t.masked_fill(hidden[:, None, :, None], value) for t in clean]
        results = []
        for k, v in (clean, dirty):
            k, v = k.requires_grad_(), v.requires_grad_()
            out = mha_ext.attention(q, k, v, mask=masks.Padding(lengths))
            results.append([out, *torch.autograd.grad(out.float().square().sum(), [q, k, v])])
        for a, b in zip(*results):
            assert torch.isfinite(a).all() and torch.equal(a, b)
        assert not results[1][2].masked_select(hidden[:, None, :, None]).any()


# What a mask means ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_trap_07_three_dimensional_mask_is_ambiguous(kind, device):
    q = randn(4, 4, 5, 8, device=device)
    t = torch.ones(4, 5, 5, dtype=torch.bool, device=device)
    with pytest.raises(ValueError) as error:
        mha_ext.attention(q, q, q, **{kind: t if kind == "mask" else t.float()})
    text = str(error.value).replace(" ", "")
    assert "[4,5,5]" in text or "(4,5,5)" in text
    assert "[:,None]" in text or "unsqueeze(1)" in text, "the fix for a mask per batch element"
    assert "[None]" in text or "unsqueeze(0)" in text, "the fix for a mask per head"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "shape", [(5, 6), (2, 1, 5, 6), (2, 3, 5, 6), (1, 3, 5, 6), (1, 1, 1, 6), (2, 1, 1, 6), (1, 1, 5, 1)], ids=str
)
def test_trap_08_masks_equal_their_expanded_form(shape, training, device):
    q, k, v = (randn(2, 3, s, 8, device=device, seed=s, grad=training) for s in (5, 6, 6))
    seen = torch.rand(shape, generator=cases.generator(1)).to(device) < 0.6
    full = seen.expand(2, 3, 5, 6).contiguous()
    with torch.set_grad_enabled(training):
        for fn in (
            lambda m: mha_ext.attention(q, k, v, mask=m),
            lambda m: mha_ext.scaled_dot_product_attention(q, k, v, m),
        ):
            a, b = fn(seen), fn(full)
            assert torch.equal(a, b)
            if training:
                for x, y in zip(torch.autograd.grad(a.sum(), [q, k, v]), torch.autograd.grad(b.sum(), [q, k, v])):
                    assert torch.equal(x, y)
    exact, _, _ = oracle.attention(q, k, v, seen=full)
    rival = oracle.attention(q, k, v, seen=full, dtype=torch.float32)[0]
    oracle.compare("out", a, exact, rival, magnitude=4 * v.detach().double().abs().amax().expand_as(exact))


def test_trap_09_causal_and_padding(device):
    q, k, v = (randn(3, 2, 40, 8, device=device, seed=s, grad=True) for s in range(3))
    lengths = torch.tensor([40, 17, 0], device=device)
    both = torch.ones(40, 40, dtype=torch.bool, device=device).tril() & (
        torch.arange(40, device=device) < lengths.view(-1, 1, 1, 1)
    )
    dout = randn(3, 2, 40, 8, device=device, seed=4)
    truth = oracle.truths(q, k, v, dout=dout, seen=both)
    for mask in (masks.Causal() & masks.Padding(lengths), masks.Padding(lengths) & masks.Causal(), both):
        out = mha_ext.attention(q, k, v, mask=mask)
        grads = torch.autograd.grad(out, [q, k, v], dout)
        oracle.check({"out": out, **dict(zip("qkv", grads))}, truth)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_trap_10_causal_in_both_alignments(dtype, device):
    triangles = {
        (2, 5, "bottom_right"): [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        (2, 5, "top_left"): [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
        (5, 2, "bottom_right"): [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]],
        (5, 2, "top_left"): [[1, 0], [1, 1], [1, 1], [1, 1], [1, 1]],
        (1, 3, "bottom_right"): [[1, 1, 1]],
        (1, 3, "top_left"): [[1, 0, 0]],
    }
    for (Sq, Sk, align), triangle in triangles.items():
        q = randn(1, 2, Sq, 8, dtype=dtype, device=device, grad=True)
        k, v = (randn(1, 2, Sk, 8, dtype=dtype, device=device, seed=s, grad=True) for s in (1, 2))
        seen = torch.tensor(triangle, dtype=torch.bool, device=device)
        out, weights = mha_ext.attention(q, k, v, mask=masks.Causal(align), return_weights=True)
        assert torch.equal(weights > 0, seen.expand(1, 2, Sq, Sk))
        grads = torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
        oracle.check(
            {"out": out, **dict(zip("qkv", grads))}, oracle.truths(q, k, v, dout=torch.ones_like(out), seen=seen)
        )
        assert int((~seen.any(1)).sum()) == (3 if (Sq, align) == (5, "bottom_right") else 0)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_trap_11_sdpa_with_attn_mask_and_is_causal(kind, dtype, device):
    """One rule: both apply."""
    q, k, v = (randn(2, 2, 9, 8, dtype=dtype, device=device, seed=s) for s in range(3))
    seen = torch.rand(9, 9, generator=cases.generator(3)).to(device) < 0.7
    seen[:, 0] = True
    mask = seen if kind == "bool" else torch.zeros(9, 9, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)
    both = seen & torch.ones(9, 9, dtype=torch.bool, device=device).tril()
    out = mha_ext.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    exact, _, _ = oracle.attention(q, k, v, seen=both)
    oracle.compare(
        "out",
        out,
        exact,
        F.scaled_dot_product_attention(q, k, v, both),
        magnitude=4 * v.double().abs().amax().expand_as(exact),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("Sk", [77, 1, 7, 9, 513])
def test_trap_12_unaligned_bias(dtype, Sk, device):
    q = randn(2, 3, 40, 32, dtype=dtype, device=device, grad=True)
    k, v = (randn(2, 3, Sk, 32, dtype=dtype, device=device, seed=s, grad=True) for s in (1, 2))
    bias = randn(2, 3, 40, Sk, dtype=dtype, device=device, seed=3, grad=True)
    assert bias.is_contiguous()
    out = mha_ext.attention(q, k, v, bias=bias)
    dout = randn(2, 3, 40, 32, dtype=dtype, device=device, seed=4)
    grads = torch.autograd.grad(out, [q, k, v, bias], dout)
    oracle.check(
        {"out": out, **dict(zip(("q", "k", "v", "bias"), grads))}, oracle.truths(q, k, v, dout=dout, bias=bias)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trap_13_expanded_by_stride_zero(dtype, device):
    q, k, v = (randn(3, 2, 33, 16, dtype=dtype, device=device, seed=s) for s in range(3))
    seen = (torch.rand(1, 1, 1, 33, generator=cases.generator(5)) < 0.6).to(device)
    assert torch.equal(
        mha_ext.attention(q, k, v, mask=seen.expand(3, 2, 33, 33)),
        mha_ext.attention(q, k, v, mask=seen.expand(3, 2, 33, 33).contiguous()),
    )
    small = randn(1, 2, 1, 33, dtype=dtype, device=device, seed=6, grad=True)
    out = mha_ext.attention(q, k, v, bias=small.expand(3, 2, 33, 33))
    dout = randn(3, 2, 33, 16, dtype=dtype, device=device, seed=7)
    (grad,) = torch.autograd.grad(out, small, dout)
    truth = oracle.truths(q, k, v, dout=dout, bias=small)
    # autograd itself sums the expanded gradient in `dtype` here: allow what its sum of as many roundings may add
    truth["bias"].magnitude *= 4
    oracle.check({"out": out, "bias": grad}, truth)
    leaf = (
        small.detach().expand(3, 2, 33, 33).requires_grad_()
    )  # the expanded tensor itself is the leaf: its gradient is full-sized
    out = mha_ext.attention(q, k, v, bias=leaf)
    (grad,) = torch.autograd.grad(out, leaf, dout)
    oracle.check({"bias": grad}, oracle.truths(q, k, v, dout=dout, bias=leaf))


def test_trap_14_masks_that_are_refused_with_the_fix(device):
    q, k, v = randn(2, 3, 5, 8, device=device), randn(2, 3, 7, 8, device=device), randn(2, 3, 7, 8, device=device)

    def refusal(error_type, mask):
        with pytest.raises(error_type) as error:
            mha_ext.attention(q, k, v, mask=mask)
        return str(error.value).replace(" ", "").replace("(", "[").replace(")", "]")

    ones = lambda *s: torch.ones(s, dtype=torch.bool, device=device)
    assert "[7" in refusal(ValueError, ones(7))
    text = refusal(ValueError, ones(2, 7))
    assert "[2,7]" in text and ("Padding" in text or "[:,None,None,:]" in text)
    assert "[5,6]" in refusal(ValueError, ones(5, 6))
    assert "[2,1,5,8]" in refusal(ValueError, ones(2, 1, 5, 8))
    assert "bias" in refusal(TypeError, ones(5, 7).float())
    for bad in (torch.ones(3), torch.ones(2, 2)):
        with pytest.raises(ValueError):
            mha_ext.attention(q, k, v, mask=masks.Padding(bad.long().to(device)))
    with pytest.raises(TypeError):
        mha_ext.attention(q, k, v, mask="causal")
