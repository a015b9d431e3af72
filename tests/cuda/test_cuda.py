"""attention on CUDA: every kernel, type and feature against the fp64 reference, over the CPU tests' table of cases; see on_cuda.py."""

from __future__ import annotations

import dataclasses

import cases
import oracle
import pytest
import torch
from on_cuda import backward, forward, keep_of, modifiers, moved, named, prepared, to_cuda, truth

import mha_ext
from mha_ext import masks

pytestmark = pytest.mark.cuda

HALVES = [torch.bfloat16, torch.float16]


def work(c: cases.Case) -> int:
    """Multiplications of the forward: what a simulated kernel takes time for."""
    return c.B * c.H * (max(c.Sq, 16) * max(c.Sk, 16) * (c.D + c.Dv) + 10_000)


LIMIT = {torch.float32: 3_000_000, torch.float64: 3_000_000, torch.bfloat16: 12_000_000, torch.float16: 12_000_000}
TABLE = [c for c in cases.ALL + cases.CORE if work(c) <= LIMIT[c.dtype]]


def run(c: cases.Case, deterministic: bool):
    """Forward and backward through autograd on CUDA, against the reference."""
    c, x = prepared(c)
    q, k, v = map(to_cuda, (x.q, x.k, x.v))
    given = moved(modifiers(c, x))
    out, lse, _, _ = forward(q, k, v, given, deterministic=deterministic)
    assert out.is_cuda and out.dtype == c.dtype and lse.dtype == oracle.accumulate_dtype(c.dtype)
    leaves = [t for t in (q, k, v, given["bias"], given["sinks"]) if t is not None]
    grads = torch.autograd.grad(out, leaves, to_cuda(x.dout))
    oracle.check({"out": out.cpu(), "lse": lse.cpu(), **named(grads, x)}, truth(c, x))


@pytest.mark.parametrize("n", range(len(TABLE)), ids=[c.id for c in TABLE])
def test_over_the_table(n):
    run(TABLE[n], deterministic=n % 2 == 1)


# Tensors that TMA reads (the table's rows mostly start at other places), for the kernels for compute capability 9.0.
ALIGNED = [
    dataclasses.replace(c, layout="aligned")
    for c in (
        cases.Case(2, 4, 2, 200, 333, 40, 64, torch.float16, "causal & padding"),
        cases.Case(2, 2, 1, 150, 300, 128, 111, torch.bfloat16, "prefix", sinks=True),
        cases.Case(1, 2, 1, 300, 200, 64, 64, torch.bfloat16, "none"),  # three query tiles
        cases.Case(1, 2, 2, 260, 150, 80, 128, torch.float16, "window & left_padding"),
        cases.Case(1, 2, 1, 130, 90, 256, 200, torch.bfloat16, "causal"),
        cases.Case(1, 2, 1, 130, 200, 192, 128, torch.bfloat16, "causal & padding"),
        cases.Case(2, 4, 2, 140, 140, 64, 64, torch.bfloat16, "documents & causal", "1,H,Sq,Sk", dropout_p=0.2, softcap=5.0),
        cases.Case(1, 2, 1, 70, 130, 128, 128, torch.float16, "dense_bh", "B,1,1,Sk", sinks=True),
        cases.Case(1, 2, 2, 70, 130, 192, 128, torch.float16, "causal", "alibi", dropout_p=0.2),
        cases.Case(2, 8, 2, 3, 600, 64, 64, torch.bfloat16, "causal"),
        cases.Case(1, 12, 2, 11, 1100, 128, 128, torch.bfloat16, "window & padding"),
        cases.Case(2, 6, 2, 1, 700, 192, 128, torch.float16, "padding", sinks=True),
        cases.Case(2, 8, 2, 1, 300, 128, 128, torch.bfloat16, "window"),
        cases.Case(1, 4, 1, 1, 900, 64, 64, torch.float16, "causal", "1,H,Sq,Sk"),
        cases.Case(1, 8, 1, 5, 300, 64, 64, torch.bfloat16, "dense_b1", softcap=3.0),
    )
]


@pytest.mark.parametrize("n", range(len(ALIGNED)), ids=[c.id for c in ALIGNED])
def test_aligned_rows(n):
    run(ALIGNED[n], deterministic=n % 2 == 1)


# One case per compiled kernel: what `plain` allows, and what only the general kernels do, at every head size of the tables.
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomics", "deterministic"])
@pytest.mark.parametrize("kind", ["plain", "general"])
@pytest.mark.parametrize("head", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_tensor_core_kernel(dtype, head, kind, deterministic):
    Sq, Sk = (130, 150) if head <= 64 else (70, 100)
    c = cases.Case(1, 1, 1, Sq, Sk, head, head, dtype, "causal & padding", layout="plain")
    if kind == "general":
        c = dataclasses.replace(c, mask="dense_b1", bias="1,H,Sq,Sk", softcap=8.0, dropout_p=0.2)
    run(c, deterministic)


WEIGHTS = [
    cases.Case(1, 2, 1, 33, 70, d, d, dtype, "causal", "1,H,Sq,Sk", dropout_p=0.2)
    for dtype in HALVES
    for d in (17, 64, 96, 128, 200)
]
WEIGHTS += [
    cases.Case(1, 2, 1, 20, 33, 16, 24, dtype, "padding", "B,1,1,Sk", softcap=3.0)
    for dtype in (torch.float32, torch.float64)
]


@pytest.mark.parametrize("c", WEIGHTS, ids=lambda c: c.id)
def test_lse_and_weights_and_their_gradients(c):
    c, x = prepared(c)
    given, on_device = modifiers(c, x), [to_cuda(t) for t in (x.q, x.k, x.v)]
    there = moved(given)
    outputs = forward(*on_device, there, return_weights=True)
    gen = cases.generator(5)
    dlse = cases.randn(gen, c.B, c.H, c.Sq, dtype=oracle.accumulate_dtype(c.dtype))
    dweights = cases.surrounded(cases.randn(gen, c.B, c.H, c.Sq, c.Sk, dtype=c.dtype), (3, 1, 0, 2))
    weights = outputs[3].detach().cpu()
    product = torch.where(weights == 0, 0, weights.to(dlse.dtype) * dweights).sum(-1)
    outputs = [t.detach() for t in outputs]
    grads = backward(
        to_cuda(x.dout), *on_device, outputs, there, dlse=(dlse - product).cuda(), dweights=to_cuda(dweights)
    )
    got = {"out": outputs[0].cpu(), "lse": outputs[1].cpu(), "weights": weights, **named(grads, x)}
    oracle.check(got, truth(c, x, dlse=dlse, dweights=dweights))
    if c.dropout_p:
        assert not weights[~keep_of(c, x)].any()


@pytest.mark.parametrize(
    "shape", ["1,1,5,7", "2,1,5,7", "1,4,5,7", "2,4,5,7", "1,1,1,7", "2,1,1,7", "2,4,1,1", "1,4,1,1", "1,1,5,1"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_of_every_broadcast(shape, dtype):
    c = cases.Case(2, 4, 2, 5, 7, 8, 8, dtype, "causal")
    c, x = prepared(c)
    sizes = [int(n) for n in shape.split(",")]
    x.bias = cases.surrounded(cases.randn(cases.generator(1), *sizes)).requires_grad_()
    q, k, v = map(to_cuda, (x.q, x.k, x.v))
    given = moved(modifiers(c, x))
    for deterministic in (False, True):
        out = forward(q, k, v, given, deterministic=deterministic)[0]
        grads = torch.autograd.grad(out, [q, k, v, given["bias"]], to_cuda(x.dout))
        oracle.check({"out": out.cpu(), **named(grads, x)}, truth(c, x))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("Sq,mask", [(1, "padding"), (3, "causal")])
def test_few_queries_of_many_keys(Sq, mask, dtype):
    """Keys are taken in parts, whose results are combined."""
    run(cases.Case(2, 8, 2, Sq, 1100, 64, 64, dtype, mask, layout="bshd"), deterministic=False)


REPEATED = [cases.Case(2, 2, 1, 65, 130, 32, 32, dtype, "causal", "1,1,1,Sk") for dtype in cases.DTYPES]
REPEATED += [
    cases.Case(2, 2, 1, 150, 400, 64, 64, torch.bfloat16, "causal", layout="aligned"),
    cases.Case(2, 2, 1, 130, 300, 128, 128, torch.float16, "none", layout="aligned"),
    cases.Case(2, 2, 1, 130, 300, 128, 128, torch.bfloat16, "window", softcap=5.0, dropout_p=0.2, layout="aligned"),
    cases.Case(2, 1, 1, 70, 260, 256, 192, torch.bfloat16, "causal", layout="aligned"),
]


@pytest.mark.parametrize("c", REPEATED, ids=lambda c: c.id)
def test_deterministic_backward_repeats_its_bits(c):
    """Twice the same, and a sample alone has the bits that it has in a batch, where other blocks run beside its own."""
    c, x = prepared(c)
    tensors, given = [to_cuda(t) for t in (x.q, x.k, x.v)], moved(modifiers(c, x))
    outputs = [t.detach() for t in forward(*tensors, given, deterministic=True)]
    first, second = (backward(to_cuda(x.dout), *tensors, outputs, given, deterministic=True) for _ in range(2))
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, second))
    dout, *alone = (to_cuda(t.detach()[:1]) for t in (x.dout, x.q, x.k, x.v))
    grads = backward(dout, *alone, [t[:1] for t in outputs], given, deterministic=True)
    assert all(torch.equal(a.cpu()[:1], b.cpu()) for a, b in zip(first[:3], grads))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_hidden_keys_and_queries_have_no_influence(value, dtype):
    """Keys 40.. are hidden from all, and queries 50.. see nothing; both hold NaN or infinities, and so does the gradient there."""
    c, x = prepared(cases.Case(1, 2, 1, 65, 70, 32, 32, dtype))
    seen = torch.ones(1, 1, 65, 70, dtype=torch.bool)
    seen[..., 40:], seen[:, :, 50:] = False, False
    results = []
    for fill in (0.0, value):
        q, k, v, dout = (t.detach().clone() for t in (x.q, x.k, x.v, x.dout))
        k[:, :, 40:], v[:, :, 40:], q[:, :, 50:], dout[:, :, 50:] = fill, fill, fill, fill
        tensors = [t.cuda() for t in (q, k, v)]
        given = moved({**modifiers(c, x), "mask": seen})
        outputs = forward(*tensors, given)
        grads = backward(dout.cuda(), *tensors, outputs, given, deterministic=True)
        results.append([t.cpu() for t in (outputs[0], outputs[1], *grads[:3])])
    out, lse, dq, dk, dv = results[1]
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert not out[:, :, 50:].any() and (lse[:, :, 50:] == -torch.inf).all() and not dq[:, :, 50:].any()
    assert not dk[:, :, 40:].any() and not dv[:, :, 40:].any() and out[:, :, :50].all()


@pytest.mark.parametrize("where", ["a row", "hidden keys"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_amid_the_tiles_of_a_block_of_keys(head_dim, where):
    """On compute capability 9.0 a tile's last product goes on into the next tile, but not where something is not finite."""
    length, row, S = 200, 70, 260
    mask = masks.Causal() & masks.Padding(torch.tensor([length]).cuda())
    generator, results = cases.generator(7), []
    given = [cases.randn(generator, 1, 1, S, head_dim, dtype=torch.bfloat16) for _ in range(4)]
    for fill in (0.0, float("nan")):
        q, k, v, dout = (t.clone() for t in given)
        for t in (q, dout) if where == "a row" else (k, v):
            t[:, :, row if where == "a row" else slice(length, None)] = fill
        leaves = [t.cuda().requires_grad_() for t in (q, k, v)]
        out = mha_ext.attention(*leaves, mask=mask, deterministic=True)
        results.append([t.cpu() for t in torch.autograd.grad(out, leaves, dout.cuda())])
    apart = [row, range(row + 1), range(row + 1)] if where == "a row" else [[], [], []]
    for zero, nan, at in zip(*results, apart):
        assert zero.isfinite().all() and nan[:, :, at].isnan().all()
        nan[:, :, at] = zero[:, :, at]
        assert torch.equal(zero, nan)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_bias_at_the_end_of_the_range(dtype):
    """finfo.min hides beside other biases, and hides nothing where all keys have it."""
    c, x = prepared(cases.Case(1, 2, 2, 33, 65, 32, 32, dtype))
    low = torch.finfo(dtype).min
    bias = torch.zeros(1, 1, 33, 65, dtype=dtype)
    bias[..., :5, 30:], bias[..., 5:9, :] = low, low
    x.bias = bias
    tensors, given = [to_cuda(t.detach()) for t in (x.q, x.k, x.v)], moved(modifiers(c, x))
    out, lse, rest, _ = (t.cpu() for t in forward(*tensors, given))
    on_cpu = forward(x.q.detach(), x.k.detach(), x.v.detach(), modifiers(c, x))
    expected = truth(c, x)
    oracle.check({"out": out}, expected)
    assert torch.isfinite(lse).all() and torch.isfinite(rest).all()
    torch.testing.assert_close(lse, on_cpu[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", ["0,2,3,4", "2,0,3,4", "2,2,0,4", "2,2,3,0"])
def test_zero_sizes(sizes, dtype):
    B, H, Sq, Sk = map(int, sizes.split(","))
    q, k, v = (torch.ones(B, H, s, 8, dtype=dtype).cuda().requires_grad_() for s in (Sq, Sk, Sk))
    out, lse = mha_ext.attention(q, k, v, mask=masks.Causal(), return_lse=True)
    grads = torch.autograd.grad(out, [q, k, v], torch.ones(out.shape, dtype=dtype).cuda())
    assert out.shape == q.shape and all(g.shape == t.shape for g, t in zip(grads, (q, k, v)))
    assert not any(t.cpu().any() for t in (out, *grads)) and (lse.cpu() == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_heads_than_one_grid_dimension_holds(dtype):
    if torch.cuda.get_device_name().startswith("ptxsim"):
        pytest.skip("so many blocks take minutes in simulation")
    q, k, v = (cases.randn(cases.generator(n), 1, 65_600, 1, 2, dtype=dtype) for n in range(3))
    given = {"bias": None, "scale": 1.0, "left": None, "right": None}
    out = forward(q.cuda(), k.cuda(), v.cuda(), given)[0]
    assert torch.equal(out.cpu(), v)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_masks_of_the_package(dtype):
    """The public function, with masks whose lowering runs nothing on the device."""
    c, x = prepared(cases.Case(2, 2, 1, 40, 40, 16, 16, dtype))
    q, k, v = map(to_cuda, (x.q, x.k, x.v))
    ids = (torch.arange(40) // 9)[None]
    dense = torch.rand(2, 1, 40, 40) < 0.6
    for make in (
        lambda move: masks.Causal() & masks.Padding(move(torch.tensor([40, 7]))),
        lambda move: masks.Window(5, 3) & masks.LeftPadding(move(torch.tensor([0, 4]))),
        lambda move: masks.Documents(move(ids)) & masks.Causal("top_left"),
        lambda move: masks.Dense(move(dense)),
    ):
        x.seen = make(lambda t: t).to_dense(2, 2, 40, 40)
        out, lse = mha_ext.attention(q, k, v, mask=make(torch.Tensor.cuda), return_lse=True)
        grads = torch.autograd.grad(out, [q, k, v], to_cuda(x.dout))
        oracle.check({"out": out.cpu(), "lse": lse.cpu(), **named(grads, x)}, truth(c, x))
