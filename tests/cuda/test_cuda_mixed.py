"""Talking heads on CUDA: both kernels, every type and feature against the fp64 reference; see on_cuda.py."""

from __future__ import annotations

import cases
import oracle
import oracle_mixed
import pytest
import torch
from on_cuda import keep_of, modifiers, moved, named, prepared, to_cuda

from mha_ext import _ops

pytestmark = pytest.mark.cuda

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

# One case per type and per way through the kernels: masks by head, broadcast biases, several tiles, tails.
TABLE = [
    (cases.Case(2, 4, 2, 33, 40, 17, 9, F32, "causal & padding", "1,H,Sq,Sk", "bshd", sinks=True), "both"),
    (cases.Case(1, 3, 3, 31, 66, 8, 40, F64, "dense_bh", "B,1,1,Sk", softcap=5.0, dropout_p=0.2), "both"),
    (cases.Case(1, 4, 2, 40, 40, 16, 16, BF16, "window", "none", "packed"), "post"),
    (cases.Case(2, 2, 1, 35, 35, 32, 32, F16, "documents & causal", "1,H,1,Sk", scale=-0.3), "pre"),
    (cases.Case(1, 2, 2, 65, 65, 4, 4, F32, "blocks_16", "1,1,Sq,Sk", dropout_p=0.3), "pre"),
    (cases.Case(2, 3, 1, 1, 40, 8, 8, F32, "padding", "B,1,Sq,1"), "both"),
]  # fmt: skip
IDS = [f"{c.id}-{kind}" for c, kind in TABLE]


def contiguous_mixes(c: cases.Case, kind: str) -> dict[str, torch.Tensor]:
    """torch's kernels, which would copy others, do not run on the simulated device."""
    return {name: t.detach().contiguous().requires_grad_() for name, t in oracle_mixed.mixes(c, kind).items()}


def run(c: cases.Case, kind: str, return_weights: bool):
    """out, lse, weights, and the gradients by name, through autograd on CUDA."""
    c, x = prepared(c)
    matrices = contiguous_mixes(c, kind)
    given = moved({**modifiers(c, x), **matrices})
    q, k, v = map(to_cuda, (x.q, x.k, x.v))
    op = torch.ops.mha_ext.attention_mixed_fwd.default
    out, lse, _, weights = _ops.attention_mixed_fwd(
        *cases.op_arguments(op, q=q, k=k, v=v, **given, return_weights=return_weights)
    )
    assert out.is_cuda and out.dtype == c.dtype
    by_name = {"bias": given["bias"], "sinks": given["sinks"]}
    leaves = [q, k, v, *(t for t in by_name.values() if t is not None), *(given[name] for name in matrices)]
    gradients = torch.autograd.grad(out, leaves, to_cuda(x.dout))
    found = {"out": out.detach().cpu(), "lse": lse.detach().cpu(), **named(gradients[: len(x.leaves())], x)}
    found |= {name: g.cpu() for name, g in zip(matrices, gradients[len(x.leaves()) :])}
    if return_weights:
        found["weights"] = weights.detach().cpu()
    return c, x, matrices, found


@pytest.mark.parametrize("n", range(len(TABLE)), ids=IDS)
def test_against_the_truth(n):
    c, x, matrices, found = run(*TABLE[n], return_weights=n % 2 == 0)
    oracle.check(found, oracle_mixed.truths(c, x, matrices, keep_of(c, x)))


def test_repeats_to_the_bit():
    c, kind = TABLE[0]
    first, second = (run(c, kind, False)[3] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_gradients_of_lse_and_weights():
    """By the backward op itself."""
    c, x = prepared(cases.Case(1, 3, 3, 20, 40, 8, 8, F32, "causal"))
    matrices = contiguous_mixes(c, "both")
    given = moved({**modifiers(c, x), **matrices})
    q, k, v = map(to_cuda, (x.q, x.k, x.v))
    gen = cases.generator(5)
    dlse, dweights = cases.randn(gen, 1, 3, 20), cases.randn(gen, 1, 3, 20, 40)
    with torch.no_grad():
        op = torch.ops.mha_ext.attention_mixed_fwd.default
        _, lse, lse_rest, _ = op(*cases.op_arguments(op, q=q, k=k, v=v, **given))
        op = torch.ops.mha_ext.attention_mixed_bwd.default
        more = {
            "dout": to_cuda(x.dout),
            "dlse": dlse.cuda(),
            "dweights": dweights.cuda(),
            "lse": lse,
            "lse_rest": lse_rest,
        }
        dq, dk, dv, _, _, dpre, dpost = op(*cases.op_arguments(op, q=q, k=k, v=v, **given, **more))
    found = {"q": dq, "k": dk, "v": dv, "pre_mix": dpre, "post_mix": dpost}
    oracle.check(
        {name: t.cpu() for name, t in found.items()}, oracle_mixed.truths(c, x, matrices, None, dlse, dweights)
    )


def test_what_no_head_sees_has_no_influence():
    gen = cases.generator(3)
    q, k, v, dout = (cases.randn(gen, 1, 2, n, 8) for n in (20, 40, 40, 20))
    seen = torch.rand(1, 2, 20, 40, generator=gen) < 0.5
    seen[:, :, :, 3] = seen[:, :, 5] = False
    pre, post = (torch.eye(2) + 0.3 * cases.randn(gen, 2, 2) for _ in range(2))

    def results(value):
        a, b, c, d = (t.clone() for t in (q, k, v, dout))
        b[:, :, 3] = c[:, :, 3] = a[:, :, 5] = d[:, :, 5] = value
        leaves = [t.cuda().requires_grad_() for t in (a, b, c, pre, post)]
        names = dict(zip(("q", "k", "v", "pre_mix", "post_mix"), leaves))
        op = torch.ops.mha_ext.attention_mixed_fwd.default
        out = _ops.attention_mixed_fwd(*cases.op_arguments(op, **names, mask=seen.cuda(), scale=0.3))[0]
        return [t.detach().cpu() for t in (out, *torch.autograd.grad(out, leaves, d.cuda()))]

    for a, b in zip(results(0.25), results(float("nan"))):
        assert torch.equal(a, b)


def test_packed_sequences():
    """Each has the bits that it has alone, in forward and in the gradients of q, k and v; sums over all sequences are of those alone."""
    c = cases.Case(3, 4, 2, 40, 70, 16, 9, BF16)
    lengths = (40, 0, 33), (5, 20, 70)
    starts = [torch.tensor((0, *n)).cumsum(0) for n in lengths]
    gen = cases.generator(7)
    shapes = (c.H, 73, c.D), (c.Hk, 95, c.D), (c.Hk, 95, c.Dv), (c.H, 73, c.Dv)
    q, k, v, dout = (cases.surrounded(cases.randn(gen, 1, *n, dtype=c.dtype), (0, 2, 1, 3)) for n in shapes)
    bias, sinks = cases.randn(gen, 1, 4, 1, 70), cases.randn(gen, 4)
    mixes = contiguous_mixes(c, "both")
    given = {"sinks": sinks, "right": 0, "left": 30, "scale": 0.3, "softcap": 5.0}

    def results(q, k, v, dout, **more):
        """out, lse and the gradients: q, k, v, mixes, sinks, bias."""
        leaves = [to_cuda(t.detach().requires_grad_()) for t in (q, k, v)]
        rest = moved({**given, **mixes, **more})
        rest["sinks"].requires_grad_(), rest["bias"].requires_grad_()
        op = torch.ops.mha_ext.attention_mixed_fwd.default
        names = dict(zip("qkv", leaves))
        out, lse, _, _ = _ops.attention_mixed_fwd(*cases.op_arguments(op, **names, **rest))
        leaves += [rest[name] for name in (*mixes, "sinks", "bias")]
        gradients = torch.autograd.grad(out, leaves, to_cuda(dout))
        return [t.detach().cpu() for t in (out, lse, *gradients)]

    longest = {"max_q": c.Sq, "max_k": c.Sk}
    packed = results(q, k, v, dout, bias=bias, q_starts=starts[0], k_starts=starts[1], **longest)
    sums = [torch.zeros_like(t) for t in packed[5:]]
    for n, (Sq, Sk) in enumerate(zip(*lengths)):
        rows, keys = (slice(*s[n : n + 2].tolist()) for s in starts)
        alone = results(q[:, :, rows], k[:, :, keys], v[:, :, keys], dout[:, :, rows], bias=bias[..., :Sk].contiguous())
        for i, (a, b) in enumerate(zip(packed[:5], alone)):
            assert torch.equal(a[:, :, keys if i in (3, 4) else rows], b), i
        alone[-1] = torch.nn.functional.pad(alone[-1], (0, 70 - Sk))
        sums = [a + b for a, b in zip(sums, alone[5:])]
        one = cases.Case(1, c.H, c.Hk, Sq, Sk, c.D, c.Dv, c.dtype, scale=0.3, softcap=5.0)
        i, j = torch.arange(Sq)[:, None] + Sk - Sq, torch.arange(Sk)
        seen = ((j <= i) & (j >= i - 30)).expand(1, c.H, Sq, Sk)
        x = cases.Inputs(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], None, seen, bias[..., :Sk], dout[:, :, rows], None, sinks
        )
        if Sq:
            names = dict(zip(("out", "lse", "q", "k", "v"), alone))
            oracle.check(names, oracle_mixed.truths(one, x, mixes, None))
    for a, b in zip(packed[5:], sums):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_packed_sequences_drop_what_a_batch_does():
    c = cases.Case(2, 2, 2, 33, 40, 8, 8, F32)
    q, k, v = (cases.randn(cases.generator(n), c.B, c.H, s, 8) for n, s in enumerate((c.Sq, c.Sk, c.Sk)))
    pack = lambda t: t.transpose(0, 1).flatten(1, 2)[None].contiguous()
    given = {
        "pre_mix": contiguous_mixes(c, "both")["pre_mix"].detach(),
        "dropout_p": 0.4,
        "rng_state": torch.tensor([1, 2]),
    }
    starts = {"q_starts": torch.tensor([0, 33, 66]), "k_starts": torch.tensor([0, 40, 80]), "max_q": 33, "max_k": 40}
    op = torch.ops.mha_ext.attention_mixed_fwd.default

    def out(q, k, v, **more):
        return op(*cases.op_arguments(op, **moved({"q": q, "k": k, "v": v, **given, **more}), scale=0.3))[0].cpu()

    assert torch.equal(out(*map(pack, (q, k, v)), **starts), pack(out(q, k, v)))
