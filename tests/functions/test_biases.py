"""Biases of the distance (ALiBi, T5) and attention sinks: against their definitions and transformers, gradients of every order and at real
sizes, transforms, compilation, refusals. The table of cases crosses them with everything else."""

from __future__ import annotations

import cases
import oracle
import pytest
import torch
import torch.nn.functional as F
from test_refusals import refusal
from torch.autograd import gradcheck, gradgradcheck
from torch.utils import _pytree as pytree

import mha_ext
from mha_ext import biases, masks


def make(kind: str, H: int, dtype=torch.float32, seed=0):
    """(bias object, its parameter)"""
    c = cases.Case(1, H, H, 1, 1, 1, 1, dtype)
    bias = cases.build_relative_bias(kind, c, cases.generator(seed))
    return bias, bias.slopes if kind == "alibi" else bias.table


@pytest.mark.parametrize("H", [1, 2, 3, 4, 7, 8, 12, 16, 20, 40])
def test_slopes_are_those_of_the_paper(H):
    slopes = biases.alibi_slopes(H)
    if H & (H - 1) == 0:
        assert torch.equal(slopes, torch.tensor([2 ** (-8 * (h + 1) / H) for h in range(H)]))
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), H, torch.float32)  # slopes * position
    torch.testing.assert_close(slopes, theirs[:, 0, 1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("num_buckets,max_distance", [(32, 128), (32, 20), (12, 40), (8, 1000), (64, 64), (4, 2)])
def test_buckets_are_those_of_transformers(num_buckets, max_distance, bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    if max_distance <= num_buckets // (4 if bidirectional else 2):
        pytest.skip("refused: no distance is left for the last bucket")
    distance = torch.arange(-5000, 5001)
    ours = biases.T5Relative(torch.zeros(num_buckets, 1), num_buckets, max_distance, bidirectional).bucket(distance)
    theirs = t5.T5Attention._relative_position_bucket(distance, bidirectional, num_buckets, max_distance)
    assert torch.equal(ours, theirs)
    assert ours.min() >= 0 and ours.max() < num_buckets


@pytest.mark.parametrize("bidirectional", [True, False])
def test_bias_is_that_of_a_t5_layer(bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(
        num_heads=3, d_model=12, d_kv=4, relative_attention_num_buckets=16, relative_attention_max_distance=50
    )
    config.is_decoder = not bidirectional
    layer = t5.T5Attention(config, has_relative_attention_bias=True)
    bias = biases.T5Relative(layer.relative_attention_bias.weight, 16, 50, bidirectional)
    assert torch.equal(bias.to_dense(70, 70), layer.compute_bias(70, 70)[0])


@pytest.mark.parametrize("kind", cases.RELATIVE)
@pytest.mark.parametrize("Sq,Sk", [(1, 1), (3, 7), (7, 3), (40, 40), (1, 200)])
def test_to_dense_is_the_definition(kind, Sq, Sk):
    bias, parameter = make(kind, 3)
    assert torch.equal(bias.to_dense(Sq, Sk)[None], cases.relative_bias(bias, parameter, Sq, Sk))


@pytest.mark.parametrize("Sq,Sk", [(1, 1), (3, 7), (7, 3), (1, 20)])
def test_clipped_sums_and_biases_of_ones_own_are_their_definitions(Sq, Sk):
    table, slopes, width = torch.randn(2, 5).requires_grad_(), torch.rand(2).requires_grad_(), torch.rand(2).requires_grad_()

    distance = torch.arange(Sk) - torch.arange(Sq)[:, None] - (Sk - Sq)
    clipped = torch.stack([row[distance.clamp(-2, 2) + 2] for row in table])
    own = -((distance / width[:, None, None]) ** 2)
    alibi = -slopes[:, None, None] * distance.abs()
    q, k = torch.randn(3, 2, Sq, 8), torch.randn(3, 2, Sk, 8)
    for bias, dense, parameters in (
        (biases.ClippedRelative(table), clipped, [table]),
        (cases.Gaussian(width), own, [width]),
        (biases.ClippedRelative(table) + biases.ALiBi(slopes) + cases.Gaussian(width), clipped + alibi + own, [table, slopes, width]),
    ):
        torch.testing.assert_close(bias.to_dense(Sq, Sk), dense)
        got, expected = (mha_ext.attention(q, k, k, bias=x, mask=masks.Causal()) for x in (bias, dense[None]))
        torch.testing.assert_close(got, expected)
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), parameters, retain_graph=True) for x in (got, expected))):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("kind", cases.RELATIVE)
def test_equals_the_dense_bias_to_the_bit(kind, dtype):
    """With gradients but the bias's, whose sums have another order. (Asking for a relative one's cuts the work by shapes alone, and
    changes the order of all sums: nobody does.)"""
    x = cases.build(cases.Case(2, 4, 2, 70, 130, 24, 24, dtype, "causal", layout="bshd"))
    bias, _ = make(kind, 4, dtype)
    bias = pytree.tree_map(torch.Tensor.detach, bias)
    results = []
    for given in (bias, bias.to_dense(70, 130)[None]):
        out, lse = mha_ext.attention(x.q, x.k, x.v, mask=x.mask, bias=given, softcap=4.0, return_lse=True)
        results.append((out, lse, *torch.autograd.grad(out, (x.q, x.k, x.v), x.dout)))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize(
    "kind,dtype", [("alibi", torch.float32), ("t5", torch.float32), ("alibi", torch.bfloat16)], ids=str
)
def test_gradient_at_real_size(kind, dtype):
    """Four thousand terms on each diagonal, millions behind each parameter."""
    x = cases.build(
        cases.Case(4, 1, 1, 1024, 1024, 32, 32, dtype, "causal" if kind == "alibi" else "none", "none", "bshd")
    )
    x.bias, parameter = make(kind, 1)
    (got,) = torch.autograd.grad(mha_ext.attention(x.q, x.k, x.v, **x.modifiers()), parameter, x.dout)
    truth = oracle.truths(x.q, x.k, x.v, **x.definition())["bias"]
    oracle.check({"bias": got}, {"bias": truth})
    # The rule's floor is wide here: most terms cancel. What cancels is small at random, so errors stay far below it.
    error, scale = (got.double() - truth.exact).abs(), truth.magnitude
    assert (error <= 64 * torch.finfo(dtype).eps * (scale * scale.clamp(min=1)).sqrt()).all(), (error, scale)


def parameter_errors(kind, B, H, S, D, seed):
    """(our largest error of a parameter's gradient, eager torch's with a dense bias, the largest gradient)"""
    gen = cases.generator(seed)
    q, k, v, dout = (cases.randn(gen, B, H, S, D) for _ in range(4))
    start = biases.alibi_slopes(H) if kind == "alibi" else cases.randn(gen, 32, H)
    seen = torch.ones(S, S, dtype=torch.bool).tril()

    def gradient(dtype, attend):
        parameter = start.to(dtype).requires_grad_()
        bias = biases.ALiBi(parameter) if kind == "alibi" else biases.T5Relative(parameter, bidirectional=False)
        return torch.autograd.grad(attend(bias, dtype), parameter, dout.to(dtype))[0].double()

    def eager(bias, dtype):
        return oracle.attention(q, k, v, seen=seen, bias=bias.to_dense(S, S)[None], dtype=dtype)[0]

    def ours(bias, dtype):
        return mha_ext.attention(q, k, v, mask=masks.Causal(), bias=bias)

    exact = gradient(torch.float64, eager)
    errors = ((gradient(torch.float32, attend) - exact).abs().max().item() for attend in (ours, eager))
    return *errors, exact.abs().max().item()


@pytest.mark.parametrize("kind,B,H,S,D", [("alibi", 16, 4, 256, 32), ("alibi", 1, 2, 2048, 32), ("t5", 8, 2, 256, 32)])
def test_gradient_is_as_exact_as_torchs(kind, B, H, S, D):
    """The sum of a row's gradients is 0; slopes multiply what rounding leaves of it by the distance. The worst of a few seeds."""
    ours, torchs, largest = (max(x) for x in zip(*(parameter_errors(kind, B, H, S, D, seed) for seed in range(3))))
    assert ours <= 2 * torchs + torch.finfo(torch.float32).eps * largest, (ours, torchs, largest)


@pytest.mark.parametrize(
    "kind,mask", [("alibi", masks.Padding(torch.tensor([0, 4]))), ("t5", masks.Causal())], ids=repr
)
def test_gradcheck(kind, mask):
    gen = cases.generator(1)
    q, k, v = (
        cases.randn(gen, *s, dtype=torch.float64).requires_grad_() for s in ((2, 2, 3, 3), (2, 1, 5, 3), (2, 1, 5, 2))
    )
    _, parameter = make(kind, 2, torch.float64)
    sinks = cases.randn(gen, 2, dtype=torch.float64).requires_grad_()

    def f(q, k, v, parameter, sinks):
        given = biases.ALiBi(parameter) if kind == "alibi" else biases.T5Relative(parameter, 12, 40, kind == "t5")
        return mha_ext.attention(
            q, k, v, bias=given, mask=mask, sinks=sinks, softcap=2.0, return_lse=True, return_weights=True
        )

    parameter = parameter.detach().requires_grad_()
    assert gradcheck(f, (q, k, v, parameter, sinks), fast_mode=True)
    assert gradgradcheck(f, (q, k, v, parameter, sinks), fast_mode=True)


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_gradcheck_of_sinks_in_full(p):
    gen = cases.generator(2)
    q, k, v = (
        cases.randn(gen, *s, dtype=torch.float64).requires_grad_() for s in ((2, 2, 3, 3), (2, 1, 5, 3), (2, 1, 5, 2))
    )
    sinks = cases.randn(gen, 2, dtype=torch.float64).requires_grad_()

    def f(q, k, v, sinks):
        return mha_ext.attention(
            q, k, v, sinks=sinks, mask=masks.Causal(), dropout_p=p, rng_state=torch.tensor([1, 2]), return_lse=True
        )

    assert gradcheck(f, (q, k, v, sinks))
    assert gradgradcheck(f, (q, k, v, sinks), fast_mode=True)


def test_transforms():
    q, k, v = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    slopes, sinks, table = torch.rand(2), torch.randn(2), torch.randn(12, 2)

    def loss(q, k, v, slopes, sinks, table):
        a = mha_ext.attention(q, k, v, bias=biases.ALiBi(slopes), mask=masks.Causal())
        b = mha_ext.attention(q, k, v, bias=biases.T5Relative(table, 12, 40), sinks=sinks)
        return a.square().sum() + b.sin().sum()

    every, inputs = tuple(range(6)), (q, k, v, slopes, sinks, table)
    leaves = [t.clone().requires_grad_() for t in inputs]
    for a, b in zip(torch.func.grad(loss, argnums=every)(*inputs), torch.autograd.grad(loss(*leaves), leaves)):
        torch.testing.assert_close(a, b)
    for mapped in ((0,), (3,), (4,), (0, 3), (0, 4, 5), every):
        many = [torch.stack([t, 2 * t, -t]) if n in mapped else t for n, t in enumerate(inputs)]
        dims = tuple(0 if n in mapped else None for n in every)
        got = torch.func.vmap(torch.func.grad(loss, argnums=every), in_dims=dims)(*many)
        for n in range(3):
            expected = torch.func.grad(loss, argnums=every)(*(t[n] if i in mapped else t for i, t in enumerate(many)))
            for a, b in zip(got, expected):
                torch.testing.assert_close(a[n], b, msg=f"mapped {mapped}")


def test_compiled_without_graph_breaks(fresh_compiler):
    """At several lengths, with one recompilation for all of them."""
    slopes, table, sinks = (
        torch.rand(2).requires_grad_(),
        torch.randn(32, 2).requires_grad_(),
        torch.randn(2).requires_grad_(),
    )

    def f(q, k, v, slopes, table, sinks):
        mask = masks.Strided(2, 1, 8) & masks.Causal()
        a = mha_ext.attention(q, k, v, bias=biases.ALiBi(slopes), mask=mask)
        return a + mha_ext.attention(q, k, v, bias=biases.T5Relative(table), sinks=sinks)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for S in (16, 24, 40):
        q, k, v = (torch.randn(2, 2, S, 8).requires_grad_() for _ in range(3))
        leaves = (q, k, v, slopes, table, sinks)
        got, expected = compiled(*leaves), f(*leaves)
        assert torch.equal(got, expected)
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (got, expected))):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("need", ["bias", "bias, sinks and blocks"])
def test_opcheck(need):
    forward, backward = torch.ops.mha_ext.attention_fwd.default, torch.ops.mha_ext.attention_bwd.default
    q, k, v = (torch.randn(2, 2, n, 4).requires_grad_() for n in (3, 5, 5))
    bias, _ = make("t5", 2)
    given = {
        "q": q,
        "k": k,
        "v": v,
        "scale": 0.5,
        "bias": bias.lower(2, 3, 5, torch.float32, q.device).detach().requires_grad_(),
    }
    if "sinks" in need:
        given.update(sinks=torch.randn(2).requires_grad_(), blocks=torch.rand(2, 1, 2, 3) < 0.6, block_size=2)
    torch.library.opcheck(forward, cases.op_arguments(forward, **given))
    with torch.no_grad():
        out, lse, lse_rest, _ = forward(*cases.op_arguments(forward, **given))
    given.update(dout=torch.randn_like(out).requires_grad_(), out=out, lse=lse, lse_rest=lse_rest, need_dbias=True)
    torch.library.opcheck(backward, cases.op_arguments(backward, **given))


def test_parameters_of_other_types_and_decoding():
    """Gradients come in the parameter's own type; the last query alone has the last row's bias (not its bits: its weights may be rounded less)."""
    q, k, v = (torch.randn(1, 4, 50, 16).bfloat16() for _ in range(3))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        embedding = torch.nn.Embedding(32, 4, dtype=dtype)
        out = mha_ext.attention(q, k, v, bias=biases.T5Relative(embedding.weight), mask=masks.Causal())
        out.float().sum().backward()
        assert embedding.weight.grad.dtype == dtype and embedding.weight.grad.any()
        last = mha_ext.attention(q[:, :, -1:], k, v, bias=biases.T5Relative(embedding.weight), mask=masks.Causal())
        dense = biases.T5Relative(embedding.weight.detach().double()).to_dense(50, 50)[:, -1:]
        rival = F.scaled_dot_product_attention(q[:, :, -1:], k, v, attn_mask=dense.bfloat16()[None])
        wide = [x.double() for x in (q[:, :, -1:], k, v)]
        exact, magnitude = (
            mha_ext.reference.attention(*wide[:2], x, bias=dense[None]) for x in (wide[2], wide[2].abs())
        )
        for got in (last, out[:, :, -1:]):
            oracle.compare("the last query", got, exact, rival, magnitude=magnitude)
    assert not mha_ext.attention(q, k, v, bias=biases.ALiBi(torch.ones(4))).requires_grad


@pytest.mark.parametrize("kind", ["alibi", "t5"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_half_types_are_widened_first(kind, half):
    """With 2048 keys: a slope times a distance, in bfloat16, would be off by up to 8; and gradients are summed before they round."""
    x = cases.build(cases.Case(1, 2, 2, 16, 2048, 8, 8, torch.float32, "causal", layout="plain"))
    parameter = make(kind, 2)[1].to(half).detach()
    results = []
    for given in (parameter.requires_grad_(), parameter.detach().float().requires_grad_()):
        bias = biases.ALiBi(given) if kind == "alibi" else biases.T5Relative(given, 12, 40)
        dense = bias.to_dense(16, 2048)
        out = mha_ext.attention(x.q, x.k, x.v, mask=x.mask, bias=bias)
        (grad,) = torch.autograd.grad(out, given, x.dout)
        assert grad.dtype == given.dtype and dense.dtype == torch.float32
        results.append((out, dense, grad.to(half)))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    wide = biases.ALiBi(parameter) if kind == "alibi" else biases.T5Relative(parameter, 12, 40)
    assert wide.lower(2, 3, 5, torch.float64, torch.device("cpu")).dtype == torch.float64


@pytest.mark.parametrize("Sq,Sk", [(0, 0), (0, 3), (3, 0)])
def test_sizes_of_zero(Sq, Sk):
    q, k = torch.randn(4, 2, Sq, 4), torch.randn(4, 2, Sk, 4)
    slopes, sinks = torch.rand(2).requires_grad_(), torch.randn(2).requires_grad_()
    out, lse = mha_ext.attention(q, k, k, bias=biases.ALiBi(slopes), sinks=sinks, return_lse=True)
    assert out.shape == q.shape and not out.any() and lse.shape == (4, 2, Sq)
    for g in torch.autograd.grad(out.sum(), (slopes, sinks)):
        assert not g.any()
    (dsinks,) = torch.autograd.grad(
        mha_ext.attention(q, k, k, sinks=sinks, return_lse=True)[1].sum(), sinks
    )  # each row's lse is the sink
    assert torch.equal(dsinks, torch.full((2,), float(4 * Sq if Sk == 0 else 0)))


# Sinks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_a_sink_is_a_key_without_a_value(dtype):
    """One more key whose score is the sink and whose value is 0 gives the same; none of -inf changes nothing."""
    q, k, v = (torch.randn(2, 4, n, 16).to(dtype) for n in (70, 90, 90))
    sinks = torch.tensor([0.5, -3.0, 4.0, 0.0], dtype=oracle.accumulate_dtype(dtype))
    more = torch.nn.functional.pad(k, (0, 0, 0, 1)), torch.nn.functional.pad(v, (0, 0, 0, 1))
    bias = torch.nn.functional.pad(torch.zeros(1, 4, 1, 90, dtype=sinks.dtype), (0, 1))
    bias[..., -1] = sinks[None, :, None]
    truth = oracle.truths(q, k, v, dout=q, sinks=sinks)
    out, lse = mha_ext.attention(q, k, v, sinks=sinks, return_lse=True)
    oracle.check({"out": out, "lse": lse}, truth)
    out, lse = mha_ext.attention(q, *more, bias=bias, return_lse=True)
    oracle.check({"out": out, "lse": lse}, truth)
    without = mha_ext.attention(q, k, v, return_lse=True, return_weights=True)
    minus = mha_ext.attention(q, k, v, sinks=torch.full_like(sinks, -torch.inf), return_lse=True, return_weights=True)
    assert all(torch.equal(a, b) for a, b in zip(without, minus))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_see_only_the_sink(dtype):
    """Their output is 0 and their lse the sink; NaN in what they hide, and in their own gradient, stays out."""
    q, k, v, dout = (torch.randn(2, 4, 70, 16).to(dtype) for _ in range(4))
    sinks = torch.randn(4).requires_grad_()
    hidden = torch.zeros(70, dtype=torch.bool)
    hidden[20:60] = True
    mask = masks.Dense((~hidden)[:, None]) & masks.Padding(torch.tensor([40, 0]))
    results = []
    for fill in (0.0, torch.nan):
        leaves = [t.clone() for t in (q, k, v)]
        leaves[0][:, :, hidden] = fill
        for t in leaves[1:]:
            t[:, :, 40:] = fill
            t[1] = fill
        leaves = [*(t.requires_grad_() for t in leaves), sinks]
        g = dout.clone()
        g[:, :, hidden] = g[1] = fill
        out, lse = mha_ext.attention(*leaves[:3], sinks=sinks, mask=mask, return_lse=True)
        assert not out[:, :, hidden].any() and not out[1].any()
        assert torch.equal(lse[1], sinks[:, None].expand(4, 70))
        results.append((out, lse, *torch.autograd.grad([out, lse], leaves, [g, torch.ones_like(lse)])))
    for a, b in zip(*results):
        assert torch.isfinite(a).all() and torch.equal(a, b)


@pytest.mark.parametrize("value", [50.0, 1e4, -1e4, -1e9])
def test_huge_sinks(value):
    """A sink far above all scores takes all weight; far below, none: no overflow on the way."""
    x = cases.build(cases.Case(1, 2, 2, 70, 90, 16, 16, torch.float32, "causal"))
    x.sinks = torch.full((2,), value, requires_grad=True)
    out, lse = mha_ext.attention(x.q, x.k, x.v, return_lse=True, **x.modifiers())
    leaves = x.leaves()
    grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), x.dout)))
    oracle.check({"out": out, "lse": lse, **grads}, oracle.truths(x.q, x.k, x.v, **x.definition()))


def test_a_nan_sink_shows():
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    out = mha_ext.attention(q, k, v, sinks=torch.tensor([torch.nan, 0.0]))
    assert out[:, 0].isnan().all() and torch.isfinite(out[:, 1]).all()


# Refusals -------------------------------------------------------------------------------------------------------------

Q, K = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)


def attend(**options):
    return lambda: mha_ext.attention(Q, K, K, **options)


REFUSED = {
    "slopes' heads": (attend(bias=biases.ALiBi(torch.ones(3))), ValueError, "ALiBi is for 3 heads", "4"),
    "table's heads": (attend(bias=biases.T5Relative(torch.ones(32, 2))), ValueError, "T5Relative is for 2 heads", "4"),
    "device": (attend(bias=biases.ALiBi(torch.ones(4, device="meta"))), ValueError, "ALiBi", "meta", "cpu"),
    "2-d slopes": (lambda: biases.ALiBi(torch.ones(4, 1)), TypeError, "[4,1]", "[H]"),
    "integer slopes": (lambda: biases.ALiBi(torch.ones(4, dtype=torch.int64)), TypeError, "int64"),
    "a list": (lambda: biases.ALiBi([0.5]), TypeError, "[0.5]"),
    "table": (lambda: biases.T5Relative(torch.ones(32)), TypeError, "[32]", "[num_buckets,H]"),
    "buckets": (lambda: biases.T5Relative(torch.ones(16, 4)), ValueError, "[16,4]", "num_buckets 32"),
    "few buckets": (lambda: biases.T5Relative(torch.ones(2, 4), 2), ValueError, "at least 4"),
    "max_distance": (lambda: biases.T5Relative(torch.ones(32, 4), 32, 8), ValueError, "max_distance 8", "exceeds the 8"),
    "even table": (lambda: biases.ClippedRelative(torch.ones(4, 6)), ValueError, "[4,6]", "odd n"),
    "1-d clipped": (lambda: biases.ClippedRelative(torch.ones(5)), TypeError, "[5]", "[H,n]"),
    "sum with a tensor": (lambda: biases.ALiBi(torch.ones(4)) + torch.ones(5, 7), TypeError, "[5,7]", "to_dense"),
    "tensor first": (lambda: torch.ones(5, 7) + biases.ALiBi(torch.ones(4)), TypeError, "[5,7]", "to_dense"),
    "sum of other heads": (lambda: biases.ALiBi(torch.ones(4)) + biases.ALiBi(torch.ones(2)), ValueError, "4, 2 heads"),
    "sum's heads": (attend(bias=biases.ALiBi(torch.ones(2)) + biases.ALiBi(torch.ones(2))), ValueError, "Sum is for 2 heads"),
    "own, unfinished": (attend(bias=type("Own", (biases.Bias,), {"tensors": ("x",), "x": torch.ones(4)})()), NotImplementedError, "Own has no of_distance"),
    "own, without tensors": (attend(bias=type("Own", (biases.Bias,), {})()), NotImplementedError, "Own names no tensors"),
    "class": (attend(bias=biases.ALiBi), TypeError, "bias is a type"),
    "softmax": (lambda: mha_ext.masked_softmax(torch.ones(1, 1, 2, 2), bias=biases.ALiBi(torch.ones(1))), TypeError, "ALiBi"),
    "sinks' shape": (attend(sinks=torch.ones(2)), ValueError, "[2]", "[H] = [4]"),
    "sinks' type": (attend(sinks=torch.ones(4, dtype=torch.int64)), ValueError, "int64"),
    "sinks' kind": (attend(sinks=1.0), ValueError, "float"),
    "sinks' device": (attend(sinks=torch.ones(4, device="meta")), ValueError, "meta"),
    "blocks": (attend(mask=masks.BlockSparse(torch.ones(2, 2, dtype=torch.bool), 4)), None),
    "blocks' shape": (attend(mask=masks.BlockSparse(torch.ones(2, 3, dtype=torch.bool), 4)), ValueError, "[2,3]", "[2,2]"),
    "blocks' rank": (attend(mask=masks.BlockSparse(torch.ones(2, 2, 2, dtype=torch.bool), 4)), ValueError, "[2,2,2]"),
    "blocks' batch": (attend(mask=masks.BlockSparse(torch.ones(3, 1, 2, 2, dtype=torch.bool), 4)), ValueError, "[3,1,2,2]", "B = 2, H = 4"),
    "blocks' heads": (attend(mask=masks.BlockSparse(torch.ones(1, 3, 2, 2, dtype=torch.bool), 4)), ValueError, "[1,3,2,2]", "B = 2, H = 4"),
    "blocks' rows": (attend(mask=masks.BlockSparse(torch.ones(1, 1, 3, 2, dtype=torch.bool), 4)), ValueError, "[1,1,3,2]", "[2,2]"),
    "blocks' type": (lambda: masks.BlockSparse(torch.ones(2, 2), 4), TypeError, "float32", "bool"),
    "block_size": (lambda: masks.BlockSparse(torch.ones(2, 2, dtype=torch.bool), 0), ValueError, "block_size is 0"),
    "stride": (lambda: masks.Strided(0), ValueError, "stride is 0"),
    "window": (lambda: masks.Dilated(-1, 2), ValueError, "window is -1"),
    "offset": (attend(mask=masks.Strided(2, 1, 4)), ValueError, "5 queries and 7 keys", "multiple of 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    f, kind, *parts = REFUSED[name]
    if kind is None:
        assert f().shape == (2, 4, 5, 8)
    else:
        refusal(f, *parts, kind=kind)
