"""Sinks, packed sequences, relative biases and block-sparse masks on CUDA; see on_cuda.py."""

from __future__ import annotations

import dataclasses
import itertools

import cases
import oracle
import pytest
import torch
from on_cuda import backward, forward, modifiers, moved, prepared, to_cuda, truth

import mha_ext
from mha_ext import masks

pytestmark = pytest.mark.cuda

VARIANTS = pytest.mark.parametrize("deterministic", [False, True], ids=["atomics", "deterministic"])


def both(tensors, dout, given, deterministic, dlse=None):
    """(out, lse), (dq, dk, dv, dbias, dsinks) on the CPU, from CUDA."""
    tensors, there = [to_cuda(t.detach()) for t in tensors], moved(given)
    outputs = [t.detach() for t in forward(*tensors, there, deterministic=deterministic)]
    grads = backward(to_cuda(dout), *tensors, outputs, there, deterministic, to_cuda(dlse))
    return [t.cpu() for t in outputs[:2]], [t.cpu() for t in grads]


def part_of(t: oracle.Truth, of) -> oracle.Truth:
    return oracle.Truth(of(t.exact), None if t.rival is None else of(t.rival), of(t.magnitude), t.dtype)


SINKS = [
    cases.Case(2, 4, 2, 65, 97, 64, 64, torch.bfloat16, mask) for mask in ("none", "causal", "padding", "dense_b1")
]
SINKS += [
    cases.Case(1, 2, 1, 97, 65, 128, 128, torch.bfloat16, "causal"),  # the first rows see nothing
    cases.Case(2, 2, 1, 2, 1100, 64, 64, torch.bfloat16, "padding"),  # keys in parts
    cases.Case(2, 2, 1, 40, 33, 16, 24, torch.float32, "causal"),
    cases.Case(2, 2, 1, 40, 33, 16, 24, torch.float64, "padding", softcap=3.0),
]


@VARIANTS
@pytest.mark.parametrize("c", SINKS, ids=lambda c: c.id)
def test_sinks(c, deterministic):
    c, x = prepared(c)
    accumulate = oracle.accumulate_dtype(c.dtype)
    sinks = torch.linspace(-2, 4, c.H).to(accumulate)
    dlse = cases.randn(cases.generator(3), c.B, c.H, c.Sq, dtype=accumulate)
    given = {**modifiers(c, x), "sinks": sinks}
    blind = ~x.seen.any(-1) if x.seen is not None else torch.zeros(c.B, c.H, c.Sq, dtype=torch.bool)
    dout = x.dout.masked_fill(blind[..., None], 0)
    (out, lse), (dq, dk, dv, _, dsinks) = both((x.q, x.k, x.v), dout, given, deterministic, dlse)
    got = {"out": out, "lse": lse, "q": dq, "k": dk, "v": dv, "sinks": dsinks}
    oracle.check(got, truth(c, dataclasses.replace(x, dout=dout, sinks=sinks), dlse=dlse))
    assert torch.equal(lse[blind], sinks[None, :, None].expand_as(lse)[blind]) and not out[blind].any()
    # Nothing that the output gradient holds in rows that see nothing reaches a result.
    poisoned = dout.masked_fill(blind[..., None], float("nan"))
    _, again = both((x.q, x.k, x.v), poisoned, given, deterministic, dlse)
    assert torch.equal(again[4], dsinks) and (not deterministic or all(map(torch.equal, again, (dq, dk, dv, again[3]))))


@dataclasses.dataclass
class Packed:
    """Sequences of different lengths, also empty ones, behind one another."""

    c: cases.Case  # B sequences, of the longest lengths
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    aligned: bool = True  # rows

    def starts(self) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.tensor((0, *n)).cumsum(0) for n in (self.lengths_q, self.lengths_k))

    def parts(self, t: torch.Tensor, starts: torch.Tensor):
        """The sequences of t [1,H,T,...]."""
        return [t[:, :, a:b] for a, b in itertools.pairwise(starts)]


def packed_inputs(p: Packed):
    c, gen = p.c, cases.generator(11)
    Tq, Tk = sum(p.lengths_q), sum(p.lengths_k)
    sizes = (c.H, Tq, c.D), (c.Hk, Tk, c.D), (c.Hk, Tk, c.Dv), (c.H, Tq, c.Dv)
    return [cases.surrounded(cases.randn(gen, 1, *n, dtype=c.dtype), (0, 2, 1, 3), aligned=p.aligned) for n in sizes]


# The limits of causal and window are relative to the diagonal.
BANDS = {"causal": {"right": 0}, "window": {"left": 9, "right": 4}}

LENGTHS = (70, 0, 33, 1), (90, 5, 33, 130)
PACKED = [
    pytest.param(c, kind, relative, id=f"{str(c.dtype)[6:]}-d{c.D}-h{c.H}:{c.Hk}-{kind}{'-relative' * relative}")
    for c, kind, relative in (
        (cases.Case(4, 2, 2, 70, 130, 64, 64, torch.bfloat16), "causal", False),
        (cases.Case(4, 4, 2, 70, 130, 64, 64, torch.bfloat16), "window", False),
        (cases.Case(4, 2, 1, 70, 130, 64, 64, torch.bfloat16), "causal", True),
        (cases.Case(4, 2, 1, 70, 130, 128, 128, torch.bfloat16), "window", True),
        (cases.Case(4, 2, 1, 70, 130, 16, 24, torch.float32), "causal", True),
        (cases.Case(4, 2, 1, 70, 130, 8, 8, torch.float64), "window", False),
    )
]


@VARIANTS
@pytest.mark.parametrize("c,kind,relative", PACKED)
def test_packed_sequences(c, kind, relative, deterministic):
    """Each sequence has the bits that it has alone, which the reference confirms."""
    p = Packed(c, *LENGTHS, aligned=kind == "window")
    q, k, v, dout = packed_inputs(p)
    q_starts, k_starts = p.starts()
    accumulate = oracle.accumulate_dtype(c.dtype)
    sinks = torch.linspace(-1, 2, c.H).to(accumulate)
    given = {"bias": None, "left": None, "right": None, "scale": c.D**-0.5, "softcap": 0.0, "dropout_p": 0.0}
    given |= {"sinks": sinks, "rng_state": None, **BANDS[kind]}
    if relative:
        given["bias"] = cases.randn(cases.generator(2), 1, c.H, c.Sq + c.Sk - 1, dtype=accumulate)
    whole = {"q_starts": q_starts, "k_starts": k_starts, "max_q": c.Sq, "max_k": c.Sk}
    (out, lse), grads = both((q, k, v), dout, {**given, **whole}, deterministic)
    dbias, dsinks = torch.zeros_like(grads[3]), torch.zeros_like(grads[4])
    split = [p.parts(t, s) for t, s in ((q, q_starts), (k, k_starts), (v, k_starts), (dout, q_starts))]
    got = [p.parts(t, s) for t, s in ((out, q_starts), (lse, q_starts), (grads[0], q_starts), (grads[1], k_starts),
                                      (grads[2], k_starts))]  # fmt: skip
    for n, (Sq, Sk) in enumerate(zip(*LENGTHS)):
        one = cases.Case(1, c.H, c.Hk, Sq, Sk, c.D, c.Dv, c.dtype)
        alone = dict(given)
        if relative:  # distances are from the own diagonal
            alone["bias"] = (
                given["bias"][..., c.Sk - Sk : c.Sk + Sq - 1] if Sq else given["bias"][..., : max(Sk - 1, 0)]
            )
        inputs = [part[n] for part in split]
        results, gradients = both(inputs[:3], inputs[3], alone, deterministic)
        exact = [*results, *gradients[:3]]
        same = exact[:2] + exact[3:] if not deterministic else exact  # atomics add in any order
        assert all(map(torch.equal, same, [part[n] for i, part in enumerate(got) if deterministic or i != 2]))
        dsinks += gradients[4]
        if relative and Sq:
            dbias[..., c.Sk - Sk : c.Sk + Sq - 1] += gradients[3]
        if Sq == 0 or Sk == 0:
            continue
        i, j = torch.arange(Sq)[:, None] + (Sk - Sq), torch.arange(Sk)
        seen = (j <= i) if kind == "causal" else (i - 9 <= j) & (j <= i + 4)
        seen = seen.expand(1, c.H, Sq, Sk)
        dense = alone["bias"][:, :, torch.arange(Sk) - torch.arange(Sq)[:, None] + Sq - 1] if relative else None
        expected = truth(one, cases.Inputs(*inputs[:3], None, seen, dense, inputs[3], None, sinks))
        names = dict(zip(("out", "lse", "q", "k", "v"), [part[n] for part in got]))
        oracle.check({**names, "sinks": gradients[4]}, expected)
    torch.testing.assert_close(grads[4], dsinks)
    if relative:
        torch.testing.assert_close(grads[3], dbias)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("D,softcap", [(64, 0.0), (128, 5.0), (256, 0.0)])
def test_packed_sequences_keep_to_themselves(D, softcap, value):
    """What a sequence's neighbours hold, which lies in the same tiles, changes no bit of it."""
    p = Packed(cases.Case(3, 2, 1, 70, 90, D, D, torch.bfloat16), (70, 33, 20), (90, 33, 61))
    tensors = packed_inputs(p)
    starts = p.starts()
    given = {"bias": None, "left": None, "right": 0, "scale": 0.125, "softcap": softcap, "dropout_p": 0.0}
    given |= {"sinks": None, "rng_state": None, "max_q": p.c.Sq, "max_k": p.c.Sk}
    given |= {"q_starts": starts[0], "k_starts": starts[1]}
    results = []
    for poisoned in (False, True):
        if poisoned:
            for t, of in zip(tensors, (0, 1, 1, 0)):
                t[:, :, : starts[of][1]] = t[:, :, starts[of][2] :] = value
        outputs, grads = both(tensors[:3], tensors[3], given, deterministic=True)
        results.append([p.parts(t, starts[of])[1] for t, of in zip((*outputs, *grads[:3]), (0, 0, 0, 1, 1))])
    assert all(map(torch.equal, *results)) and all(t.isfinite().all() for t in results[0])


@VARIANTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_sequences_with_dropout(dtype, deterministic):
    """Sequence b draws what sample b of a batch does, and gives the same bits."""
    c = cases.Case(2, 2, 1, 33, 70, 64, 64, dtype, "causal", layout="plain", dropout_p=0.3)
    c, x = prepared(c)
    x.dout = x.dout.contiguous()  # sums of aligned rows run in another order
    starts = {"q_starts": torch.tensor([0, c.Sq, 2 * c.Sq]), "k_starts": torch.tensor([0, c.Sk, 2 * c.Sk])}
    starts |= {"max_q": c.Sq, "max_k": c.Sk}
    given = {**modifiers(c, x), "left": None, "right": 0}
    (out, lse), grads = both((x.q, x.k, x.v), x.dout, given, deterministic)
    pack = lambda t: t.detach().transpose(0, 1).flatten(1, 2)[None]
    tensors = [pack(t) for t in (x.q, x.k, x.v)]
    (packed_out, packed_lse), packed = both(tensors, pack(x.dout), {**given, **starts}, deterministic)
    for i, (a, b) in enumerate(zip((packed_out, packed_lse, *packed[:3]), (out, lse, *grads))):
        if i == 2 and not deterministic:  # atomics add in any order
            rounding = 2 * torch.finfo(a.dtype).eps * pack(b).abs().max().item()
            torch.testing.assert_close(a, pack(b), atol=rounding, rtol=0)
        else:
            assert torch.equal(a, pack(b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("heads,Sq,Sk", [("1,H", 70, 150), ("B,1", 150, 33), ("B,H", 65, 64), ("1,1", 1, 65)])
def test_gradient_of_a_relative_bias(heads, Sq, Sk, dtype):
    c, x = prepared(cases.Case(2, 2, 1, Sq, Sk, 64 if dtype == torch.bfloat16 else 8, 8, dtype, "causal"))
    sizes = [{"B": c.B, "H": c.H, "1": 1}[name] for name in heads.split(",")]
    bias = cases.randn(cases.generator(4), *sizes, Sq + Sk - 1, dtype=oracle.accumulate_dtype(dtype))
    x.bias = bias[..., torch.arange(Sk) - torch.arange(Sq)[:, None] + Sq - 1].requires_grad_()
    given = {**modifiers(c, x), "bias": cases.surrounded(bias)}
    results = [both((x.q, x.k, x.v), x.dout, given, True) for _ in range(2)]
    assert torch.equal(results[0][1][3], results[1][1][3])
    expected = truth(c, x)
    diagonals = lambda t: torch.stack([t.diagonal(n - (Sq - 1), -2, -1).sum(-1) for n in range(Sq + Sk - 1)], -1)
    expected["bias"] = part_of(expected["bias"], diagonals)
    (out, lse), (dq, dk, dv, dbias, _) = results[0]
    oracle.check({"out": out, "lse": lse, "q": dq, "k": dk, "v": dv, "bias": dbias}, expected)


@VARIANTS
@pytest.mark.parametrize("block_size", [64, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_block_sparse_and_causal(dtype, block_size, deterministic):
    c, x = prepared(cases.Case(1, 2, 1, 200, 260, 64, 64, dtype))
    count = [-(-n // block_size) for n in (c.Sq, c.Sk)]
    blocks = torch.rand(1, c.H, *count, generator=cases.generator(9)) < 0.4
    blocks[:, 0, 1] = False  # rows that see nothing
    mask = masks.BlockSparse(blocks, block_size) & masks.Causal()
    x.mask, x.seen = mask, mask.to_dense(c.B, c.H, c.Sq, c.Sk)
    # Keys and values that no query sees are never read into a result.
    hidden = ~x.seen.any(2).any(1)[:, None, :, None]
    x.k, x.v = (t.detach().masked_fill(hidden, float("nan")) for t in (x.k, x.v))
    (out, lse), grads = both((x.q, x.k, x.v), x.dout, modifiers(c, x), deterministic)
    x.k, x.v = (t.masked_fill(hidden, 0).requires_grad_() for t in (x.k, x.v))
    oracle.check({"out": out, "lse": lse, **dict(zip("qkv", grads))}, truth(c, x))


def test_qkvpacked_equals_its_slices_to_the_bit_and_writes_its_gradient_in_one_piece():
    torch.manual_seed(0)
    qkv, dout = torch.randn(2, 40, 4 + 2 * 2, 64).bfloat16().cuda(), torch.randn(2, 40, 4, 64).bfloat16().cuda()
    qkv.requires_grad_()
    out = mha_ext.attention_qkvpacked(qkv, 4, mask=masks.Causal(), deterministic=True)
    (gradient,) = torch.autograd.grad(out, qkv, dout.view(out.shape))
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in qkv.split([4, 2, 2], dim=2))
    expected = mha_ext.attention(q, k, v, mask=masks.Causal(), deterministic=True)
    gradients = torch.autograd.grad(expected, (q, k, v), dout.transpose(1, 2))
    assert torch.equal(out.detach().view(dout.shape).cpu(), expected.detach().transpose(1, 2).cpu())
    assert gradient.is_contiguous() and gradient.shape == qkv.shape
    for mine, its in zip(gradient.cpu().split([4, 2, 2], dim=2), gradients, strict=True):
        assert torch.equal(mine, its.transpose(1, 2).cpu())


def test_vmap_is_a_loop():
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 4, 20, 64).bfloat16().cuda() for _ in range(3))
    mapped = torch.vmap(lambda *x: mha_ext.attention(*x, mask=masks.Causal()))(q, k, v)
    for i in range(3):
        assert torch.equal(mapped[i].cpu(), mha_ext.attention(q[i], k[i], v[i], mask=masks.Causal()).cpu())
