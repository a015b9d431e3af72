"""attention_varlen: packed sequences against the same sequences alone, to the bit, and against the fp64 reference; gradients of every order,
transforms, compilation, refusals."""

from __future__ import annotations

import functools

import cases
import oracle
import pytest
import torch
from test_refusals import refusal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

import mha_ext
from mha_ext import biases, masks, reference

H, HK, D, DV = 4, 2, 24, 20
LENGTHS_Q, LENGTHS_K = [5, 0, 130, 64, 1, 3], [9, 3, 130, 70, 0, 2]
N = len(LENGTHS_Q)


def starts(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


CU_Q, CU_K = starts(LENGTHS_Q), starts(LENGTHS_K)


def packed(dtype=torch.float32, layout="thd", seed=0):
    """q, k, v inside NaN, and the gradient of the output; "htd": they lie as [H,T,D]."""
    gen, order = cases.generator(seed), (0, 1, 2) if layout == "thd" else (1, 0, 2)
    shapes = ((int(CU_Q[-1]), H, D), (int(CU_K[-1]), HK, D), (int(CU_K[-1]), HK, DV))
    leaves = [cases.surrounded(cases.randn(gen, *s, dtype=dtype), order).requires_grad_() for s in shapes]
    return leaves, cases.surrounded(cases.randn(gen, shapes[0][0], H, DV, dtype=dtype), (1, 0, 2))


def per_sequence(kind: str, n: int | None):
    """The mask of all sequences (n is None), or that of sequence n alone."""
    gen = cases.generator(7)
    prefix, left, padding = torch.tensor([2, 1, 10, 3, 0, 1]), torch.tensor([1, 0, 40, 0, 0, 2]), torch.tensor([4, 3, 99, 0, 0, 9])
    ids, dense = torch.randint(0, 3, (N, 130), generator=gen), torch.rand(N, H, 130, 130, generator=gen) < 0.6
    blocks = torch.rand(N, 1, 6, 6, generator=gen) < 0.6
    at = slice(None) if n is None else slice(n, n + 1)
    q, k = (130, 130) if n is None else (LENGTHS_Q[n], LENGTHS_K[n])
    return {
        "none": None,
        "causal": masks.Causal(),
        "top_left": masks.Causal("top_left"),
        "window": masks.Window(20, 3),
        "prefix": masks.Prefix(prefix[at]),
        "padding": masks.Padding(padding[at]) & masks.LeftPadding(left[at]),
        "dense": masks.Dense(dense[at, :, :q, :k]),
        "blocks": masks.BlockSparse(blocks[at, :, : -(-q // 24), : -(-k // 24)], 24) & masks.Causal(),
        "documents": masks.Documents(ids[at, :k]) if n is None or q <= k else None,
    }[kind]  # fmt: skip


MASKS = ["none", "causal", "top_left", "window", "prefix", "padding", "dense", "blocks", "documents"]


def alone(tensors, kind="none", **options):
    """Sequence by sequence with mha_ext.attention, put together again; ids of a query past the keys don't exist, so none may be there."""
    outs, lses = [], []
    for n in range(N):
        (q0, q1), (k0, k1) = CU_Q[n : n + 2].tolist(), CU_K[n : n + 2].tolist()
        q, k, v = (t[a:b].transpose(0, 1)[None] for t, a, b in zip(tensors, (q0, k0, k0), (q1, k1, k1)))
        out, lse = mha_ext.attention(q, k, v, mask=per_sequence(kind, n), return_lse=True, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def varlen(tensors, kind="none", **options):
    return mha_ext.attention_varlen(*tensors, CU_Q, CU_K, mask=per_sequence(kind, None), return_lse=True, **options)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_a_sequence_is_what_it_is_alone_to_the_bit(kind, dtype):
    """Output, logsumexp and gradients; a table of biases too, whose gradient alone is a sum over sequences in another order."""
    if kind == "documents":  # a sequence of more queries than keys has no document ids
        pairs = [n for n in range(N) if LENGTHS_Q[n] <= LENGTHS_K[n]]
    else:
        pairs = list(range(N))
    leaves, dout = packed(dtype, "thd" if kind in MASKS[::2] else "htd")
    gen = cases.generator(3)
    parameter = cases.randn(gen, H, dtype=oracle.accumulate_dtype(dtype)).abs().requires_grad_()
    sinks = cases.randn(gen, H, dtype=oracle.accumulate_dtype(dtype)).requires_grad_()
    options = {"softcap": 9.0, "bias": biases.ALiBi(parameter), "sinks": sinks} if kind in ("causal", "blocks", "top_left") else {}
    out, lse = varlen(leaves, kind, **options)
    assert out.shape == dout.shape and lse.shape == (H, dout.shape[0]) and lse.dtype == oracle.accumulate_dtype(dtype)
    expected_out, expected_lse = alone(leaves, kind, **options)
    more = [parameter, sinks] if options else []
    loss = [(out, dout), (lse.masked_fill(lse.isinf(), 0), torch.ones_like(lse))]
    grads = torch.autograd.grad([x for x, _ in loss], leaves + more, [g for _, g in loss])
    expected_lse_finite = expected_lse.masked_fill(expected_lse.isinf(), 0)
    expected = torch.autograd.grad([expected_out, expected_lse_finite], leaves + more, [dout, torch.ones_like(lse)])
    rows = torch.cat([torch.arange(CU_Q[n], CU_Q[n + 1]) for n in pairs])
    keys = torch.cat([torch.arange(CU_K[n], CU_K[n + 1]) for n in pairs])
    assert torch.equal(out[rows], expected_out[rows]) and torch.equal(lse[:, rows], expected_lse[:, rows])
    for name, at, a, b in zip("qkv", (rows, keys, keys), grads, expected):
        assert torch.equal(a[at], b[at]), name
    for a, b in zip(grads[3:], expected[3:]):
        oracle.compare("parameter", a, b.double(), b, oracle.GRADIENT, magnitude=b.double().abs().amax().expand_as(b) * 8)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_another_sequence_changes_no_bit(dtype):
    """Not its values (NaN too), not its length, not its absence; with dropout and biases."""
    leaves, dout = packed(dtype)
    rng_state, table = torch.tensor([3, 4]), torch.randn(32, H)
    options = {"rng_state": rng_state, "dropout_p": 0.3, "bias": biases.T5Relative(table), "mask": masks.Causal()}
    if dtype == torch.float64:
        options["bias"] = biases.T5Relative(table.double())

    def run(tensors, cu_q, cu_k, dout):
        tensors = [t.detach().requires_grad_() for t in tensors]
        out, lse = mha_ext.attention_varlen(*tensors, cu_q, cu_k, return_lse=True, **options)
        return out, lse.t(), *torch.autograd.grad(out, tensors, dout)

    def part(results, cu_q, cu_k, n):
        places = (slice(cu_q[n], cu_q[n + 1]),) * 3 + (slice(cu_k[n], cu_k[n + 1]),) * 2
        return [x[at] for x, at in zip(results, places)]

    n, other = 3, 2
    expected = part(run(leaves, CU_Q, CU_K, dout), CU_Q, CU_K, n)
    q, k, v = (t.detach().clone() for t in leaves)
    q[CU_Q[other] : CU_Q[other + 1]] = k[CU_K[other] : CU_K[other + 1]] = torch.nan
    v[CU_K[other] : CU_K[other + 1]] = torch.inf
    for a, b in zip(part(run((q, k, v), CU_Q, CU_K, dout), CU_Q, CU_K, n), expected):
        assert torch.isfinite(a).all() and torch.equal(a, b)
    cut_q, cut_k = LENGTHS_Q.copy(), LENGTHS_K.copy()
    for length_q, length_k in ((70, 101), (0, 0), (1, 130)):
        cut_q[other], cut_k[other] = length_q, length_k
        cu_q, cu_k = starts(cut_q), starts(cut_k)

        def cut(x, cu, length):
            return torch.cat([x[: cu[other] + length], x[cu[other + 1] :]])

        tensors = cut(q, CU_Q, length_q), cut(k, CU_K, length_k), cut(v, CU_K, length_k)
        results = run(tensors, cu_q, cu_k, cut(dout, CU_Q, length_q))
        for a, b in zip(part(results, cu_q, cu_k, n), expected):
            assert torch.equal(a, b), (length_q, length_k)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "scale": -0.2}, {"dropout_p": 0.3}], ids=str)
def test_against_the_reference(options, dtype):
    """Padded to one length, as one fp64 problem."""
    leaves, dout = packed(dtype)
    sinks = torch.randn(H, dtype=oracle.accumulate_dtype(dtype)).requires_grad_()
    options = {**options, "rng_state": torch.tensor([3, 4])} if "dropout_p" in options else options
    out, _ = varlen(leaves, "window", sinks=sinks, **options)
    grads = torch.autograd.grad(out, [*leaves, sinks], dout)

    def pad(x, cu):
        return reference.Packed.pad(x.transpose(0, 1)[None], cu, 130)

    def unpad(x, cu):
        return torch.cat([x[n, :, : cu[n + 1] - cu[n]] for n in range(N)], 1).transpose(0, 1)

    q, k, v = (pad(t.detach(), cu) for t, cu in zip(leaves, (CU_Q, CU_K, CU_K)))
    i, j = torch.arange(130).view(1, 1, -1, 1), torch.arange(130)
    lq, lk = (cu.diff().view(-1, 1, 1, 1) for cu in (CU_Q, CU_K))
    seen = (i < lq) & (j < lk) & (j >= i + lk - lq - 20) & (j <= i + lk - lq + 3)
    numbers = {name: x for name, x in options.items() if name != "rng_state"}
    keep = mha_ext.dropout_mask(options["rng_state"], 0.3, N, H, 130, 130) if "dropout_p" in options else None
    truth = oracle.truths(q, k, v, dout=pad(dout, CU_Q), seen=seen.expand(N, H, 130, 130), sinks=sinks, keep=keep, **numbers)
    for name, cu in (("out", CU_Q), ("q", CU_Q), ("k", CU_K), ("v", CU_K)):
        t = truth[name]
        rival = None if t.rival is None else unpad(t.rival, cu)
        truth[name] = oracle.Truth(unpad(t.exact, cu), rival, unpad(t.magnitude, cu), t.dtype)
    oracle.check({"out": out, **dict(zip(("q", "k", "v", "sinks"), grads))}, truth)


def test_thread_count_changes_no_bit():
    leaves, dout = packed(torch.bfloat16)
    results = []
    slopes, sinks = torch.rand(H).requires_grad_(), torch.randn(H).requires_grad_()
    for threads in (1, 2, 3, 7, 1):
        torch.set_num_threads(threads)
        out, lse = varlen(leaves, "blocks", bias=biases.ALiBi(slopes), sinks=sinks)
        results.append([out, lse, *torch.autograd.grad(out, [*leaves, slopes, sinks], dout)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


# Gradients of every order, transforms, compilation --------------------------------------------------------------------

CU_SMALL_Q, CU_SMALL_K = starts([2, 0, 3]), starts([3, 1, 2])


def small(seed=0):
    gen = cases.generator(seed)
    shapes = ((5, 2, 3), (6, 1, 3), (6, 1, 2), (2,), (2,))
    return tuple(cases.randn(gen, *s, dtype=torch.float64).requires_grad_() for s in shapes)


def small_attention(q, k, v, slopes, sinks, **options):
    bias = biases.ALiBi(slopes)
    return mha_ext.attention_varlen(q, k, v, CU_SMALL_Q, CU_SMALL_K, bias=bias, sinks=sinks, return_lse=True, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"mask": masks.Causal()}, {"mask": masks.Padding(torch.tensor([0, 1, 2])), "softcap": 0.9, "dropout_p": 0.4, "rng_state": torch.tensor([1, 2])}],
    ids=["none", "causal", "all"],
)  # fmt: skip
def test_gradcheck(options):
    f = functools.partial(small_attention, **options)
    assert gradcheck(f, small())
    assert gradgradcheck(f, small(), fast_mode=True)


def test_func_grad_and_vmap():
    q, k, v, slopes, sinks = (t.detach() for t in small())

    def loss(q, k, v, slopes, sinks):
        out, lse = small_attention(q, k, v, slopes, sinks, mask=masks.Causal("top_left"))
        return out.square().sum() + lse.sum()

    every = tuple(range(5))
    got = torch.func.grad(loss, argnums=every)(q, k, v, slopes, sinks)
    leaves = small()
    for a, b in zip(got, torch.autograd.grad(loss(*leaves), leaves)):
        torch.testing.assert_close(a, b)
    many = torch.stack([q, 2 * q, -q])
    mapped = torch.func.vmap(loss, in_dims=(0, None, None, None, None))(many, k, v, slopes, sinks)
    torch.testing.assert_close(mapped, torch.stack([loss(x, k, v, slopes, sinks) for x in many]))
    each = torch.func.vmap(torch.func.grad(loss, argnums=every), in_dims=(0, None, None, None, 0))
    got = each(many, k, v, slopes, torch.stack([sinks] * 3))
    for n, x in enumerate(many):
        for a, b in zip(got, torch.func.grad(loss, argnums=every)(x, k, v, slopes, sinks)):
            torch.testing.assert_close(a[n], b)


def test_compiled_without_graph_breaks(fresh_compiler):
    leaves, dout = packed()
    slopes = torch.rand(H).requires_grad_()

    def f(q, k, v, slopes, cu_q, cu_k):
        return mha_ext.attention_varlen(
            q, k, v, cu_q, cu_k, max_seqlen_q=130, max_seqlen_k=130, mask=masks.Causal() & masks.Window(9, None), bias=biases.ALiBi(slopes)
        )  # fmt: skip

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for cu_q, cu_k in ((CU_Q, CU_K), (starts([3, 0, 130, 66, 1, 3]), starts([4, 8, 130, 69, 1, 2]))):
        got, expected = (g(*leaves, slopes, cu_q, cu_k) for g in (compiled, f))
        assert torch.equal(got, expected)
        for a, b in zip(*(torch.autograd.grad(x, [*leaves, slopes], dout) for x in (got, expected))):
            assert torch.equal(a, b)


def test_opcheck():
    forward, backward = torch.ops.mha_ext.attention_fwd.default, torch.ops.mha_ext.attention_bwd.default
    q, k, v, slopes, sinks = small()
    q, k, v = (t.detach().transpose(0, 1)[None].requires_grad_() for t in (q, k, v))
    bias = biases.ALiBi(slopes).lower(2, 3, 3, torch.float64, q.device).detach().requires_grad_()
    given = {
        "q": q, "k": k, "v": v, "bias": bias, "sinks": sinks, "q_starts": CU_SMALL_Q, "k_starts": CU_SMALL_K, "max_q": 3, "max_k": 3, "scale": 0.3,
    }  # fmt: skip
    torch.library.opcheck(forward, cases.op_arguments(forward, **given))
    with torch.no_grad():
        out, lse, lse_rest, _ = forward(*cases.op_arguments(forward, **given))
    given.update(dout=torch.randn_like(out).requires_grad_(), out=out, lse=lse, lse_rest=lse_rest, need_dbias=True)
    torch.library.opcheck(backward, cases.op_arguments(backward, **given))


# Sizes of zero, patterns of blocks, refusals --------------------------------------------------------------------------


@pytest.mark.parametrize("lengths_q,lengths_k", [([], []), ([0], [0]), ([0, 0], [0, 3]), ([2, 1], [0, 0])], ids=str)
def test_sizes_of_zero(lengths_q, lengths_k):
    q, k, v = (torch.randn(sum(n), 2, 4).requires_grad_() for n in (lengths_q, lengths_k, lengths_k))
    sinks, slopes = torch.randn(2).requires_grad_(), torch.rand(2).requires_grad_()
    out, lse = mha_ext.attention_varlen(
        q, k, v, starts(lengths_q), starts(lengths_k), sinks=sinks, bias=biases.ALiBi(slopes), return_lse=True
    )
    assert out.shape == q.shape and not out.any()
    assert torch.equal(lse, sinks[:, None].expand(2, len(q)))
    for leaf, g in zip((q, k, v, sinks, slopes), torch.autograd.grad(out.sum(), (q, k, v, sinks, slopes))):
        assert g.shape == leaf.shape and not g.any()


def test_patterns_of_blocks_follow_each_sequence():
    """Strided and Dilated know each sequence's own offset."""
    lengths_q, lengths_k = [10, 40, 5], [10, 56, 21]
    cu_q, cu_k = starts(lengths_q), starts(lengths_k)
    q, k, v = (torch.randn(n, 2, 8) for n in (55, 87, 87))
    for mask in (masks.Strided(2, 1, 8), masks.Dilated(1, 2, 16)):
        out = mha_ext.attention_varlen(q, k, v, cu_q, cu_k, mask=mask)
        for n in range(3):
            rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
            expected = mha_ext.attention(*(t[at].transpose(0, 1)[None] for t, at in ((q, rows), (k, keys), (v, keys))), mask=mask)
            assert torch.equal(out[rows], expected[0].transpose(0, 1))
    refusal(
        lambda: mha_ext.attention_varlen(q, k, v, starts([10, 40, 5]), starts([10, 57, 20]), mask=masks.Strided(2, 1, 8)),
        "Strided", "40 queries", "57 keys", "multiple of 8", kind=ValueError,
    )  # fmt: skip


def call(q=None, k=None, v=None, cu_q=CU_Q, cu_k=CU_K, **options):
    leaves, _ = packed()
    q, k, v = (given if given is not None else leaf for given, leaf in zip((q, k, v), leaves))
    return mha_ext.attention_varlen(q, k, v, cu_q, cu_k, **options)


REFUSED = {
    "4-d": (lambda: call(q=torch.randn(1, 2, 3, 4)), "[1,2,3,4]", "[Tq,H,D]"),
    "lists": (lambda: mha_ext.attention_varlen([1], [2], [3], CU_Q, CU_K), "list"),
    "none": (lambda: call(cu_q=None), "cu_seqlens_q", "missing"),
    "float": (lambda: call(cu_q=CU_Q.float()), "cu_seqlens_q", "float32"),
    "2-d": (lambda: call(cu_k=CU_K[None]), "cu_seqlens_k", "[1,7]"),
    "empty": (lambda: call(cu_q=CU_Q[:0]), "cu_seqlens_q", "empty"),
    "counts": (lambda: call(cu_k=starts([9, 3, 130, 70, 2])), "[7]", "[6]"),
    "first": (lambda: call(cu_q=CU_Q + 1), "cu_seqlens_q", "from 1", "203"),
    "last": (lambda: call(cu_k=CU_K.clone().index_fill_(0, torch.tensor(6), 300)), "cu_seqlens_k", "300", "214"),
    "decreasing": (lambda: call(cu_q=torch.tensor([0, 5, 4, 130, 199, 200, 203])), "cu_seqlens_q", "from 5 to 4", "sequence 1"),
    "bound": (lambda: call(max_seqlen_q=129), "max_seqlen_q is 129", "130"),
    "negative bound": (lambda: call(max_seqlen_k=-1), "max_seqlen_k is -1"),
    "bound's type": (lambda: call(max_seqlen_k=130.0), "max_seqlen_k is 130.0"),
    "device": (lambda: call(cu_q=CU_Q.to("meta")), "cu_seqlens_q", "meta"),
    "mask": (lambda: call(mask=torch.ones(5, 7, dtype=torch.bool)), "[5,7]", "[130,130]"),
    "lengths": (lambda: call(mask=masks.Padding(torch.tensor([1, 2]))), "Padding", "[2]", "[6]"),
    "bias": (lambda: call(bias=biases.ALiBi(torch.ones(3))), "ALiBi", "3 heads", "4"),
    "sinks": (lambda: call(sinks=torch.ones(3)), "sinks", "[3]", "[4]"),
    "probability": (lambda: call(dropout_p=2.0), "dropout_p is 2.0"),
    "softcap": (lambda: call(softcap=-1.0), "softcap is -1.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    f, *parts = REFUSED[name]
    refusal(f, *parts, kind=TypeError if name == "lists" else ValueError)


def test_refusals_of_the_op():
    """Where Python cannot look (compiled code), the op does."""
    op = torch.ops.mha_ext.attention_fwd.default
    q, k, v = (t.detach().transpose(0, 1)[None] for t in packed()[0])

    def run(**given):
        given = {"q_starts": CU_Q, "k_starts": CU_K, "max_q": 130, "max_k": 130, **given}
        return op(*cases.op_arguments(op, q=q, k=k, v=v, scale=0.1, **given))

    refusal(lambda: run(q_starts=CU_Q + 1), "q_starts", "from 1", kind=RuntimeError)
    refusal(lambda: run(max_k=100), "k_starts", "sequence 2", "130", kind=RuntimeError)
    refusal(lambda: run(k_starts=None), "k_starts", "missing", kind=RuntimeError)
    refusal(lambda: run(return_weights=True), "return_weights", kind=RuntimeError)
    refusal(lambda: run(q_starts=torch.tensor([0, 5, 4, 130, 199, 200, 203])), "q_starts", "-1", kind=RuntimeError)


def test_bounds_that_cannot_be_looked_up_are_asked_for():
    q, starts = torch.randn(5, 2, 8), torch.tensor([[0, 2, 5], [0, 1, 5]])
    attend = lambda q, cu, **bounds: mha_ext.attention_varlen(q, q, q, cu, cu, **bounds)
    missing = pytest.raises(ValueError, match="max_seqlen_q is missing and cu_seqlens_q has no values here .*: give max_seqlen_q")
    with missing:
        torch.vmap(lambda cu: attend(q, cu))(starts)
    with missing:
        attend(q.to("meta"), starts[0].to("meta"))
    mode = FakeTensorMode()
    fake = mode.from_tensor(q), mode.from_tensor(starts[0])
    with mode:
        assert attend(*fake, max_seqlen_q=5, max_seqlen_k=5).shape == q.shape
        with missing:
            attend(*fake)
    bounds = {"max_seqlen_q": 5, "max_seqlen_k": 5}
    found = torch.vmap(lambda cu: attend(q, cu, **bounds))(starts)
    assert torch.equal(found, torch.stack([attend(q, cu) for cu in starts]))
