"""attention forward and backward over the table of cases, against the fp64 reference."""

from __future__ import annotations

import cases
import oracle
import pytest
import torch

import mha_ext
from mha_ext import masks


def run(c: cases.Case, x: cases.Inputs, **more):
    return mha_ext.attention(x.q, x.k, x.v, **x.modifiers(), **c.options(), **more)


def kept(c: cases.Case, x: cases.Inputs):
    if not c.dropout_p:
        return None
    return mha_ext.dropout_mask(x.rng_state, c.dropout_p, c.B, c.H, c.Sq, c.Sk, x.q.device)


def expected(c: cases.Case, x: cases.Inputs, **more):
    return oracle.truths(x.q, x.k, x.v, **x.definition(), keep=kept(c, x), **c.options(), **more)


@pytest.mark.parametrize("c", cases.ALL, ids=lambda c: c.id)
def test_forward_and_gradients(c, device):
    x = cases.build(c, device)
    out, lse = run(c, x, return_lse=True)
    assert out.dtype == c.dtype and lse.dtype == oracle.accumulate_dtype(c.dtype)
    leaves = x.leaves()
    grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), x.dout)))
    for name, g in grads.items():
        assert g.dtype == leaves[name].dtype
    oracle.check({"out": out, "lse": lse, **grads}, expected(c, x))


WITH_WEIGHTS = [c for c in cases.ALL if c.Sq * c.Sk <= 257 * 258 and c.B * c.H < 100][::3]


@pytest.mark.parametrize("c", WITH_WEIGHTS, ids=lambda c: c.id)
def test_gradients_through_lse_and_weights(c, device):
    x = cases.build(c, device)
    out, lse, weights = run(c, x, return_lse=True, return_weights=True)
    gen = cases.generator(5)
    dlse = cases.surrounded(cases.randn(gen, *lse.shape, dtype=lse.dtype).to(device))
    dweights = cases.surrounded(cases.randn(gen, *weights.shape, dtype=c.dtype).to(device), (3, 1, 0, 2))
    leaves = x.leaves()
    grads = torch.autograd.grad([out, lse, weights], list(leaves.values()), [x.dout, dlse, dweights])
    truth = expected(c, x, dlse=dlse, dweights=dweights)
    oracle.check({"out": out, "lse": lse, "weights": weights, **dict(zip(leaves, grads))}, truth)


@pytest.mark.parametrize("which", ["lse", "weights"])
def test_gradient_of_one_other_output_alone(which, device):
    """out itself takes no part in the loss, so that its gradient arrives undefined or zero."""
    c = cases.Case(2, 4, 2, 33, 65, 17, 17, torch.float32, "causal & padding", "1,H,Sq,Sk", dropout_p=0.2)
    x = cases.build(c, device)
    _, lse, weights = run(c, x, return_lse=True, return_weights=True)
    value = {"lse": lse, "weights": weights}[which]
    dvalue = cases.randn(cases.generator(6), *value.shape).to(device)
    leaves = x.leaves()
    grads = torch.autograd.grad(value, list(leaves.values()), dvalue, allow_unused=True)
    grads = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves.values())]
    x.dout = torch.zeros_like(x.dout)
    truth = expected(c, x, **{"d" + which: dvalue})
    oracle.check(dict(zip(leaves, grads)), truth)


def test_what_is_returned_in_which_order():
    q = torch.randn(2, 4, 5, 8)
    k, v = torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 3)
    out = mha_ext.attention(q, k, v)
    assert isinstance(out, torch.Tensor) and out.shape == (2, 4, 5, 3)
    both = mha_ext.attention(q, k, v, return_lse=True)
    assert isinstance(both, tuple) and [t.shape for t in both] == [(2, 4, 5, 3), (2, 4, 5)]
    both = mha_ext.attention(q, k, v, return_weights=True)
    assert isinstance(both, tuple) and [t.shape for t in both] == [(2, 4, 5, 3), (2, 4, 5, 7)]
    three = mha_ext.attention(q, k, v, return_lse=True, return_weights=True)
    assert [t.shape for t in three] == [(2, 4, 5, 3), (2, 4, 5), (2, 4, 5, 7)]
    for other in (both[0], three[0]):
        torch.testing.assert_close(other, out)
    # lse is the natural log of the softmax denominator, and the weights sum to one
    scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5
    oracle.compare(
        "lse", three[1], scores.logsumexp(-1), (q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5).logsumexp(-1)
    )
    oracle.compare("sum", three[2].sum(-1), torch.ones(2, 4, 5), torch.softmax(scores.float(), -1).sum(-1))


@pytest.mark.parametrize(
    "shape", ["5,7", "1,1,5,7", "2,1,5,7", "1,4,5,7", "2,4,5,7", "1,1,1,7", "2,1,1,7", "2,4,1,1", "1,4,1,1", "1,1,5,1"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_bias_of_every_broadcast(shape, dtype, mask, device):
    c = cases.Case(2, 4, 2, 5, 7, 8, 8, dtype, mask)
    x = cases.build(c, device)
    bias = cases.randn(cases.generator(1), *map(int, shape.split(",")), dtype=dtype).to(device)
    x.bias = cases.surrounded(bias).requires_grad_()
    out = run(c, x)
    leaves = x.leaves()
    grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), x.dout)))
    assert grads["bias"].shape == bias.shape and grads["bias"].dtype == dtype
    oracle.check({"out": out, **grads}, expected(c, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_bias_for_half_inputs(dtype, device):
    """A bias may keep more digits than q: it is added in fp32."""
    c = cases.Case(2, 4, 2, 33, 65, 32, 32, dtype, "causal")
    x = cases.build(c, device)
    x.bias = cases.randn(cases.generator(2), 1, 4, 33, 65).to(device).requires_grad_()
    out = run(c, x)
    leaves = x.leaves()
    grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), x.dout)))
    assert grads["bias"].dtype == torch.float32
    oracle.check({"out": out, **grads}, expected(c, x))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_follows_the_published_mask(p, device):
    """The kernels drop what dropout_mask says, and dropout_mask is Philox as csrc/philox.h defines it."""
    c = cases.Case(2, 3, 3, 33, 70, 16, 16, torch.float32, "causal", dropout_p=p)
    x = cases.build(c, device)
    rng_state = torch.tensor([-5, 2**40 + 3], device=device)
    keep = mha_ext.dropout_mask(rng_state, p, c.B, c.H, c.Sq, c.Sk, torch.device(device))
    assert keep.dtype == torch.bool and keep.shape == (c.B, c.H, c.Sq, c.Sk)
    assert torch.equal(keep.cpu(), oracle.dropout_mask(rng_state.tolist(), p, c.B, c.H, c.Sq, c.Sk))
    out, weights = mha_ext.attention(x.q, x.k, x.v, mask=x.mask, dropout_p=p, rng_state=rng_state, return_weights=True)
    grads = torch.autograd.grad(out, [x.q, x.k, x.v], x.dout)
    truth = oracle.truths(x.q, x.k, x.v, dout=x.dout, seen=x.seen, keep=keep, dropout_p=p)
    oracle.check({"out": out, "weights": weights, **dict(zip("qkv", grads))}, truth)


def test_philox_known_answers():
    """The vectors that the authors of Random123 publish, so that the oracle itself is right."""
    import numpy as np

    ones = 0xFFFFFFFF
    got = oracle.philox4x32_10(np.zeros(4, np.uint32), (0, 0))
    assert [hex(w) for w in got] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    got = oracle.philox4x32_10(np.full(4, ones, np.uint32), (ones, ones))
    assert [hex(w) for w in got] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap_with_large_scores(softcap, dtype, device):
    c = cases.Case(1, 2, 2, 65, 65, 64, 64, dtype, "causal", softcap=softcap, scale=3.0)
    x = cases.build(c, device)
    out, lse = run(c, x, return_lse=True)
    grads = torch.autograd.grad(out, [x.q, x.k, x.v], x.dout)
    oracle.check({"out": out, "lse": lse, **dict(zip("qkv", grads))}, expected(c, x))


def test_any_strides_equal_contiguous_bit_by_bit(device):
    """The layout of the inputs changes neither bit of the result."""
    c = cases.Case(2, 4, 2, 65, 65, 32, 32, torch.float32, "causal & padding", "1,H,Sq,Sk")
    results = []
    for layout in ["plain", "padded", "bshd", "packed", "last_sparse"]:
        gen = cases.generator(3)
        q, k, v = (cases.randn(gen, *s).to(device) for s in ((2, 4, 65, 32), (2, 2, 65, 32), (2, 2, 65, 32)))
        mask, _ = cases.build_mask(c.mask, c, gen, device)
        bias = cases.build_bias(c.bias, c, gen, device)
        q, k, v = (t.detach().requires_grad_() for t in cases.lay_out(q, k, v, layout))
        out = mha_ext.attention(q, k, v, mask=mask, bias=bias)
        results.append([out, *torch.autograd.grad(out.square().sum(), [q, k, v, bias])])
    for other in results[1:]:
        for name, a, b in zip(["out", "q", "k", "v", "bias"], results[0], other):
            assert torch.equal(a, b), name


def test_output_has_the_memory_order_of_q(device):
    """Merging the heads of a [B,S,H,D]-laid q is a free view; the gradients follow their inputs."""
    q, k, v = (torch.randn(2, 9, 4, 8, device=device).transpose(1, 2).requires_grad_() for _ in range(3))
    out = mha_ext.attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    assert out.transpose(1, 2).reshape(2, 9, 32).data_ptr() == out.data_ptr()
    for g in torch.autograd.grad(out.sum(), [q, k, v]):
        assert g.transpose(1, 2).is_contiguous()
    assert mha_ext.attention(*(torch.randn(2, 4, 9, 8, device=device) for _ in range(3))).is_contiguous()
    by_head = torch.randn(4, 2, 9, 8, device=device).transpose(0, 1)
    assert mha_ext.attention(by_head, by_head, by_head).transpose(0, 1).is_contiguous()


def test_inputs_stay_as_they_are(device):
    c = cases.CORE[0]
    x = cases.build(c, device)
    tensors = [x.q, x.k, x.v, x.bias, x.dout]
    before = [t.detach().clone() for t in tensors]
    out = run(c, x)
    torch.autograd.grad(out, [x.q, x.k, x.v, x.bias], x.dout)
    for a, b in zip(tensors, before):
        assert torch.equal(a.detach(), b)


@pytest.mark.parametrize("needs", ["q", "k", "v", "bias", "qk", "v,bias", ""])
def test_only_some_inputs_require_gradients(needs, device):
    c = cases.CORE[0]
    x = cases.build(c, device)
    full = dict(zip(x.leaves(), torch.autograd.grad(run(c, x), list(x.leaves().values()), x.dout)))
    for name, t in x.leaves().items():
        t.requires_grad_(name in needs.split(",") or (len(name) == 1 and name in needs.split(",")[0]))
    wanted = {name: t for name, t in x.leaves().items() if t.requires_grad}
    out = run(c, x)
    assert out.requires_grad == bool(wanted)
    if wanted:
        for name, g in zip(wanted, torch.autograd.grad(out, list(wanted.values()), x.dout)):
            assert torch.equal(g, full[name]), name


def test_rng_state_none_follows_torch_manual_seed(device):
    q, k, v = (torch.randn(2, 2, 33, 16, device=device) for _ in range(3))
    torch.manual_seed(5)
    first = mha_ext.attention(q, k, v, dropout_p=0.4)
    second = mha_ext.attention(q, k, v, dropout_p=0.4)
    torch.manual_seed(5)
    again = mha_ext.attention(q, k, v, dropout_p=0.4)
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_rng_state_is_not_changed_and_other_states_differ(device):
    q, k, v = (torch.randn(1, 2, 33, 16, device=device) for _ in range(3))
    seen = []
    for state in ([1, 0], [2, 0], [1, 1], [1 + 2**32, 0], [1, 2**33], [-1, 0]):
        rng_state = torch.tensor(state, device=device)
        seen.append(mha_ext.attention(q, k, v, dropout_p=0.5, rng_state=rng_state))
        assert rng_state.tolist() == state
    for a in range(len(seen)):
        for b in range(a):
            assert not torch.equal(seen[a], seen[b]), (a, b)


def test_bool_tensor_as_mask_equals_dense(device):
    q, k, v = (torch.randn(2, 3, 9, 8, device=device) for _ in range(3))
    seen = torch.rand(2, 1, 9, 9, device=device) < 0.5
    assert torch.equal(mha_ext.attention(q, k, v, mask=seen), mha_ext.attention(q, k, v, mask=masks.Dense(seen)))


def test_long_sums_in_float32():
    """Thousands of terms behind each element; the rule's floor is wide there, the root mean square needs none."""
    gen = cases.generator(0)
    q, k, v, dout = (cases.randn(gen, 1, 1, 4096, 64).requires_grad_() for _ in range(4))

    def run(attend, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout.detach().to(dtype))

    exact = run(lambda *qkv: oracle.attention(*qkv)[0], torch.float64)
    ours, torchs = (run(f, torch.float32) for f in (mha_ext.attention, torch.nn.functional.scaled_dot_product_attention))
    for name, a, b, x in zip(("out", "dq", "dk", "dv"), ours, torchs, exact):
        errors = [(t.double() - x).square().mean().sqrt().item() for t in (a, b)]
        assert errors[0] <= 2 * errors[1], (name, *errors)


def test_no_query_heads_leave_no_gradient(device):
    """Nothing adds to the keys' and values' gradients, in memory that held something else."""
    junk = [torch.full((1, 1, n, 8), torch.nan, device=device) for n in range(1, 40)]
    del junk
    q = torch.randn(1, 0, 7, 8, device=device, requires_grad=True)
    k, v = (torch.randn(1, 1, 9, 8, device=device, requires_grad=True) for _ in "kv")
    for gradient in torch.autograd.grad(mha_ext.attention(q, k, v).sum(), (k, v)):
        assert gradient.shape == k.shape and not gradient.any()


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("blind", [True, False])
def test_blocks_of_queries_between_others_that_see_none_of_these_keys(blind, dtype, threads):
    """Nothing is taken from what such blocks would have packed: a workspace is memory of any content."""
    torch.set_num_threads(threads)
    Sq, Sk = (320, 64) if blind else (768, 1536)
    block = torch.arange(Sq)[None] // 64
    if blind:
        begin, end = torch.zeros(1, 1, dtype=torch.int64), torch.where((block > 0) & (block < 3), 0, Sk)
    else:  # even blocks see the first keys, odd ones the last
        begin, end = block % 2 * 1024, block % 2 * 1024 + 512
    mask = masks.Intervals(begin, end)
    gen = cases.generator(threads)
    q, k, v, dout = (cases.randn(gen, 1, 1, s, 32, dtype=dtype).requires_grad_() for s in (Sq, Sk, Sk, Sq))
    out = mha_ext.attention(q, k, v, mask=mask)
    truth = oracle.truths(q, k, v, dout=dout.detach(), seen=mask.to_dense(1, 1, Sq, Sk))
    for _ in range(3):
        junk = [torch.full((n << 10,), 255, dtype=torch.uint8) for n in range(100, 4000, 50)]
        del junk
        found = torch.autograd.grad(out, (q, k, v), dout.detach(), retain_graph=True)
        oracle.check({"out": out, **dict(zip("qkv", found))}, truth)
