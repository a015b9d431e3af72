"""Talking heads (pre_mix, post_mix): forward and backward against the fp64 truth, and everything else that attention promises."""

from __future__ import annotations

import dataclasses

import cases
import oracle
import oracle_mixed
import pytest
import test_isa
import torch
from torch.autograd import gradcheck, gradgradcheck

import mha_ext
from mha_ext import masks, reference

KINDS = ["both", "pre", "both", "post"]
SMALL = [c for c in cases.ALL if c.H > 1 and c.B * c.H < 200 and c.Sq * c.Sk <= 257 * 258 and c.D < 200]
TABLE = [(c, KINDS[n % 4]) for n, c in enumerate(SMALL[::3] + [c for c in cases.CORE if c.H > 1])]


def keep_of(c, x):
    return mha_ext.dropout_mask(x.rng_state, c.dropout_p, c.B, c.H, c.Sq, c.Sk) if c.dropout_p else None


def run(c: cases.Case, x: cases.Inputs, given: dict, **more):
    return mha_ext.attention(x.q, x.k, x.v, **x.modifiers(), **c.options(), **given, **more)


def results(c: cases.Case, kind: str) -> dict[str, torch.Tensor]:
    """out, lse, and the gradients of all inputs."""
    x, given = cases.build(c), oracle_mixed.mixes(c, kind)
    out, lse = run(c, x, given, return_lse=True)
    leaves = {**x.leaves(), **given}
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), x.dout)))}


def check(c: cases.Case, kind: str) -> dict[str, torch.Tensor]:
    found = results(c, kind)
    x = cases.build(c)
    oracle.check(found, oracle_mixed.truths(c, x, oracle_mixed.mixes(c, kind), keep_of(c, x)))
    return found


def check_core() -> None:
    for c, kind in TABLE[-len(cases.CORE) :: 3]:
        check(c, kind)


@pytest.mark.parametrize("c,kind", TABLE, ids=lambda x: x if isinstance(x, str) else x.id)
def test_forward_and_gradients(c, kind):
    found = check(c, kind)
    assert found["out"].dtype == c.dtype and found["lse"].dtype == oracle.accumulate_dtype(c.dtype)


@pytest.mark.parametrize("c,kind", TABLE[::4], ids=lambda x: x if isinstance(x, str) else x.id)
def test_gradients_through_lse_and_weights(c, kind):
    x, given = cases.build(c), oracle_mixed.mixes(c, kind)
    out, lse, weights = run(c, x, given, return_lse=True, return_weights=True)
    gen = cases.generator(5)
    dlse = cases.surrounded(cases.randn(gen, *lse.shape, dtype=lse.dtype))
    dweights = cases.surrounded(cases.randn(gen, *weights.shape, dtype=c.dtype), (3, 1, 0, 2))
    leaves = {**x.leaves(), **given}
    gradients = torch.autograd.grad([out, lse, weights], list(leaves.values()), [x.dout, dlse, dweights])
    found = {"out": out, "lse": lse, "weights": weights, **dict(zip(leaves, gradients))}
    oracle.check(found, oracle_mixed.truths(c, x, given, keep_of(c, x), dlse, dweights))


def test_reference_is_the_truth():
    c = cases.Case(2, 4, 2, 33, 65, 17, 17, torch.float64, "causal & padding", "1,H,Sq,Sk", dropout_p=0.2, softcap=2.0, sinks=True)
    x, given = cases.build(c), oracle_mixed.mixes(c, "both")
    found = reference.attention(x.q, x.k, x.v, **x.modifiers(), **c.options(), **given, return_lse=True, return_weights=True)
    expected = oracle_mixed.truths(c, x, given, keep_of(c, x))
    oracle.check(dict(zip(("out", "lse", "weights"), found)), expected)


@pytest.mark.parametrize("kind", oracle_mixed.KINDS)
def test_mixing_by_the_identity_is_attention(kind):
    q, k, v = torch.randn(2, 4, 70, 16), torch.randn(2, 2, 130, 16), torch.randn(2, 2, 130, 8)
    given = {name: torch.eye(4) for name in oracle_mixed.KINDS[kind]}
    found = mha_ext.attention(q, k, v, mask=masks.Causal(), return_lse=True, return_weights=True, **given)
    plain = mha_ext.attention(q, k, v, mask=masks.Causal(), return_lse=True, return_weights=True)
    for a, b in zip(found, plain):
        torch.testing.assert_close(a, b)


def test_what_a_mix_does_is_exact_for_a_permutation():
    """new[g] = old[h] where matrix[h,g] is 1: the rows say from which head, the columns to which."""
    q, k, v = torch.randn(1, 3, 5, 8), torch.randn(1, 3, 7, 8), torch.randn(1, 3, 7, 8)
    matrix = torch.zeros(3, 3)
    matrix[0, 1] = matrix[1, 2] = matrix[2, 0] = 1  # head 0 becomes head 1, ..
    at = [2, 0, 1]  # new head g is old head at[g]
    plain = mha_ext.attention(q, k, v, return_lse=True, return_weights=True)
    _, lse, weights = mha_ext.attention(q, k, v, pre_mix=matrix, return_lse=True, return_weights=True)
    torch.testing.assert_close(lse, plain[1][:, at])
    torch.testing.assert_close(weights, plain[2][:, at])
    _, lse, weights = mha_ext.attention(q, k, v, post_mix=matrix, return_lse=True, return_weights=True)
    torch.testing.assert_close(lse, plain[1])
    torch.testing.assert_close(weights, plain[2][:, at])


# Derivatives ----------------------------------------------------------------------------------------------------------


def f64(*shape, seed=0):
    return cases.randn(cases.generator(seed), *shape, dtype=torch.float64).requires_grad_()


def small_inputs(Sq=3, Sk=5, H=4):
    return f64(2, H, Sq, 3), f64(2, 2, Sk, 3, seed=1), f64(2, 2, Sk, 2, seed=2), f64(H, H, seed=3), f64(H, H, seed=4)


OPTIONS = {
    "plain": {},
    "causal": {"mask": masks.Causal("top_left"), "softcap": 0.7},
    "all": {
        "mask": masks.Padding(torch.tensor([0, 4])), "softcap": 1.5, "scale": -0.9, "dropout_p": 0.3, "rng_state": torch.tensor([1, 2]),
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("twice", [False, True])
def test_gradcheck(options, twice):
    def f(q, k, v, pre, post, bias, sinks):
        out, lse, weights = mha_ext.attention(
            q, k, v, pre_mix=pre, post_mix=post, bias=bias, sinks=sinks, return_lse=True, return_weights=True, **OPTIONS[options]
        )
        return out, lse, weights

    inputs = *small_inputs(Sq=2), f64(1, 4, 2, 5, seed=5), f64(4, seed=6)
    assert gradgradcheck(f, inputs, fast_mode=True) if twice else gradcheck(f, inputs)


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_gradcheck_of_one_matrix(kind):
    q, k, v, matrix, _ = small_inputs()
    name = oracle_mixed.KINDS[kind][0]

    def f(q, k, v, matrix):
        return mha_ext.attention(q, k, v, mask=masks.Causal(), **{name: matrix})

    assert gradcheck(f, (q, k, v, matrix)) and gradgradcheck(f, (q, k, v, matrix), fast_mode=True)


@pytest.mark.parametrize("needs", ["q", "post_mix", "v"])
def test_only_some_inputs_require_gradients(needs):
    c = cases.Case(2, 4, 2, 33, 65, 16, 16, torch.float32, "causal")
    full = results(c, "both")
    x, given = cases.build(c), oracle_mixed.mixes(c, "both")
    leaves = {**x.leaves(), **given}
    for name, t in leaves.items():
        t.requires_grad_(name == needs)
    assert torch.equal(torch.autograd.grad(run(c, x, given), leaves[needs], x.dout)[0], full[needs])


# Masks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [False, True])
def test_what_no_head_sees_has_no_influence(per_head):
    """NaN in keys, values, queries and output gradients that are hidden from all heads."""
    gen = cases.generator(3)
    q, k, v, dout = (cases.randn(gen, *s) for s in ((2, 4, 70, 16), (2, 2, 100, 16), (2, 2, 100, 16), (2, 4, 70, 16)))
    seen = torch.rand(2, 4 if per_head else 1, 70, 100, generator=gen) < 0.5
    seen[:, :, :, [3, 40, 99]] = False  # keys that nobody sees
    seen[:, :, [5, 69]] = False  # queries that see nothing
    matrices = [torch.eye(4) + 0.3 * cases.randn(gen, 4, 4) for _ in range(2)]

    def all_results(value):
        tensors = [t.clone() for t in (q, k, v)]
        tensors[1][:, :, [3, 40, 99]] = tensors[2][:, :, [3, 40, 99]] = value
        tensors[0][:, :, [5, 69]] = value
        doutput = dout.clone()
        doutput[:, :, [5, 69]] = value
        leaves = [t.requires_grad_() for t in tensors] + [m.clone().requires_grad_() for m in matrices]
        out, lse = mha_ext.attention(*leaves[:3], pre_mix=leaves[3], post_mix=leaves[4], mask=seen, softcap=5.0, return_lse=True)
        return [out, lse, *torch.autograd.grad(out, leaves, doutput)]

    clean = all_results(0.25)
    assert clean[0][:, :, 5].eq(0).all() and clean[1][:, :, 5].eq(-torch.inf).all()
    for value in (float("nan"), float("inf")):
        for a, b in zip(clean, all_results(value)):
            assert torch.equal(a, b)


def test_masks_by_head():
    """A row that one head does not see at all, blocks by head, and a mixed head's weights in return_weights."""
    c = cases.Case(2, 4, 2, 70, 130, 16, 16, torch.float32)
    x, given = cases.build(c), oracle_mixed.mixes(c, "both")
    blocks = torch.rand(1, 4, 5, 9, generator=cases.generator(1)) < 0.5
    blocks[:, 2, 1] = False
    i, j = torch.arange(70)[:, None] // 16, torch.arange(130) // 16
    x.mask, x.seen = masks.BlockSparse(blocks, 16) & masks.Causal(), blocks[:, :, i, j].expand(2, 4, 70, 130).clone()
    x.seen &= torch.arange(130) <= torch.arange(70)[:, None] + 60
    out, lse, weights = run(c, x, given, return_lse=True, return_weights=True)
    leaves = {**x.leaves(), **given}
    gradients = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), x.dout)))
    oracle.check({"out": out, "lse": lse, "weights": weights, **gradients}, oracle_mixed.truths(c, x, given, None))


@pytest.mark.parametrize("shape", [(0, 4, 2, 3, 5), (2, 4, 2, 0, 5), (2, 4, 2, 3, 0), (2, 0, 0, 3, 5)], ids=str)
def test_zero_sizes(shape):
    B, H, Hk, Sq, Sk = shape
    q, k, v = (torch.randn(B, h, s, 8, requires_grad=True) for h, s in ((H, Sq), (Hk, Sk), (Hk, Sk)))
    pre, post = (torch.randn(H, H, requires_grad=True) for _ in range(2))
    out, lse = mha_ext.attention(q, k, v, pre_mix=pre, post_mix=post, return_lse=True)
    assert out.shape == (B, H, Sq, 8) and not out.any() and lse.eq(-torch.inf).all()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), [q, k, v, pre, post]))


# Packed sequences -----------------------------------------------------------------------------------------------------


def test_packed_sequences_are_sequences_alone():
    lengths_q, lengths_k = [5, 0, 70, 1], [9, 3, 66, 130]
    gen = cases.generator(2)
    q, k, v = (cases.randn(gen, sum(n), h, 16).requires_grad_() for n, h in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2)))
    pre, post = ((torch.eye(4) + 0.3 * cases.randn(gen, 4, 4)).requires_grad_() for _ in range(2))
    bias, sinks = cases.randn(gen, 4, 1, 1, 130).requires_grad_(), cases.randn(gen, 4).requires_grad_()
    rng_state = torch.tensor([4, 5])
    starts = [torch.tensor([0, *n]).cumsum(0) for n in (lengths_q, lengths_k)]
    given = {"mask": masks.Causal(), "sinks": sinks, "pre_mix": pre, "post_mix": post}
    more = {"bias": bias, "dropout_p": 0.2, "rng_state": rng_state}
    out, lse = mha_ext.attention_varlen(q, k, v, *starts, return_lse=True, **given, **more)
    dout = cases.randn(gen, *out.shape)
    leaves = [q, k, v, pre, post, sinks]
    gradients = torch.autograd.grad(out, leaves, dout)
    expected = [torch.zeros_like(t) for t in leaves]
    keep = mha_ext.dropout_mask(rng_state, 0.2, 4, 4, 70, 130)
    for n in range(4):
        rows, keys = slice(*starts[0][n : n + 2].tolist()), slice(*starts[1][n : n + 2].tolist())
        Sq, Sk = lengths_q[n], lengths_k[n]
        one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        visible = masks.Causal().to_dense(1, 4, Sq, Sk)
        one, one_lse, _ = reference.attend(
            *(x.double() for x in (one_q, one_k, one_v)), bias[n : n + 1, ..., :Sk], visible, 0.25, 0.0, 0.2, keep[n : n + 1, :, :Sq, :Sk],
            sinks.double(), None, pre.double(), post.double(),
        )  # fmt: skip
        torch.testing.assert_close(out[rows], one[0].transpose(0, 1).float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[:, rows], one_lse[0].float(), rtol=1e-4, atol=1e-5)
        found = torch.autograd.grad(one, leaves, dout[rows].double().transpose(0, 1)[None])
        expected = [a + b for a, b in zip(expected, found)]
        # without dropout, a sequence gives to the bit what it gives alone
        alone = mha_ext.attention(one_q, one_k, one_v, bias=bias[n : n + 1, ..., :Sk], **given)
        packed = mha_ext.attention_varlen(q, k, v, *starts, bias=bias, **given)
        assert torch.equal(packed[rows], alone[0].transpose(0, 1))
    for a, b in zip(gradients, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# Determinism, instruction sets, memory --------------------------------------------------------------------------------

ACROSS_THREADS = [
    cases.Case(1, 4, 2, 700, 300, 16, 24, torch.float32, "causal & padding", "1,1,Sq,Sk", dropout_p=0.1),
    cases.Case(3, 3, 1, 129, 129, 32, 32, torch.bfloat16, "dense_bh", "1,H,1,Sk", "bshd", softcap=3.0),
]


@pytest.mark.parametrize("c", ACROSS_THREADS, ids=lambda c: c.id)
def test_thread_count_changes_no_bit(c):
    torch.set_num_threads(1)
    expected = results(c, "both")
    for threads in (2, 5):
        torch.set_num_threads(threads)
        for name, t in results(c, "both").items():
            assert torch.equal(t, expected[name]), (threads, name)


@pytest.mark.parametrize("isa", test_isa.AVAILABLE[:-1])
def test_core_cases_on_each_isa(isa):
    """The best one runs the whole file anyway."""
    result = test_isa.run("import test_mixed; test_mixed.check_core()", isa)
    assert result.returncode == 0, result.stderr[-3000:]


def test_tiles_that_are_not_kept():
    """More keys than a thread keeps tiles of."""
    c = cases.Case(1, 8, 2, 3, 9000, 8, 8, torch.float32, "padding")
    check(c, "both")


@pytest.mark.slow
def test_memory_is_linear_in_the_lengths():
    """Two heads, D = 16, S = 8192: scores would be 512 MB; inputs and gradients are 8 MB, kept tiles 8 MB per thread."""
    from test_memory import MB, peak

    used = peak("""
warm_up(torch.float32, 16)
q, k, v = (torch.randn(1, 2, 8192, 16).requires_grad_() for _ in range(3))
m = torch.eye(2).requires_grad_()
print(peak_of(lambda: mha_ext.attention(q, k, v, pre_mix=m, post_mix=m, mask=masks.Causal()).sum().backward()))
""")
    assert used < 64 * MB, f"{used / MB:.0f} MB"


# torch around the ops -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", oracle_mixed.KINDS)
def test_compiles_as_one_graph(kind):
    matrices = {name: torch.randn(4, 4, requires_grad=True) for name in oracle_mixed.KINDS[kind]}

    def f(q, k, v):
        return mha_ext.attention(q, k, v, mask=masks.Causal(), **matrices)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (12, 33):
        q, k, v = (torch.randn(2, h, length, 8, requires_grad=True) for h in (4, 2, 2))
        leaves = [q, k, v, *matrices.values()]
        actual, expected = compiled(q, k, v), f(q, k, v)
        assert torch.equal(actual, expected)
        for a, b in zip(torch.autograd.grad(actual.sum(), leaves), torch.autograd.grad(expected.sum(), leaves)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("everything", [False, True])
def test_opcheck(everything):
    q, k, v = (torch.randn(2, s, 4, 8).transpose(1, 2).requires_grad_() for s in (5, 7, 7))
    given = {"q": q, "k": k, "v": v, "pre_mix": torch.randn(4, 4, requires_grad=True), "scale": 0.3}
    if everything:
        given |= {
            "post_mix": torch.randn(4, 4, requires_grad=True), "bias": torch.randn(1, 4, 1, 7, requires_grad=True), "right": 2,
            "sinks": torch.randn(4, requires_grad=True), "dropout_p": 0.25, "rng_state": torch.tensor([1, 2]), "return_weights": True,
        }  # fmt: skip
    forward = torch.ops.mha_ext.attention_mixed_fwd.default
    arguments = cases.op_arguments(forward, **given)
    torch.library.opcheck(forward, arguments)
    with torch.no_grad():
        out, lse, lse_rest, weights = forward(*arguments)
    given.pop("return_weights", None)
    given |= {"dout": torch.randn_like(out).requires_grad_(), "lse": lse, "lse_rest": lse_rest}
    if everything:
        given |= {"dlse": torch.randn_like(lse), "dweights": torch.randn_like(weights), "need_dbias": True}
    backward = torch.ops.mha_ext.attention_mixed_bwd.default
    torch.library.opcheck(backward, cases.op_arguments(backward, **given))


def test_vmap_and_func_grad():
    q, k, v = (torch.randn(3, 2, h, s, 8) for h, s in ((4, 5), (2, 7), (2, 7)))
    pre, post = torch.randn(3, 4, 4), torch.randn(4, 4)

    def f(q, k, v, pre):
        return mha_ext.attention(q, k, v, pre_mix=pre, post_mix=post, mask=masks.Causal())

    expected = torch.stack([f(*x) for x in zip(q, k, v, pre)])
    assert torch.equal(torch.vmap(f)(q, k, v, pre), expected)
    gradients = torch.vmap(torch.func.grad(lambda *x: f(*x).square().sum(), argnums=(0, 3)))(q, k, v, pre)
    for n in range(3):
        leaves = [x[n].clone().requires_grad_() for x in (q, k, v, pre)]
        found = torch.autograd.grad(f(*leaves).square().sum(), [leaves[0], leaves[3]])
        for a, b in zip(gradients, found):
            assert torch.equal(a[n], b)


def test_autocast_takes_float32_matrices():
    q, k, v = (torch.randn(1, 4, 9, 8) for _ in range(3))
    matrix = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = mha_ext.attention(q, k, v, pre_mix=matrix, post_mix=matrix.bfloat16())
    half = [x.bfloat16() for x in (q, k, v)]
    expected = mha_ext.attention(*half, pre_mix=matrix, post_mix=matrix.bfloat16())
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    assert torch.autograd.grad(out.float().sum(), matrix)[0].dtype == torch.float32


@pytest.mark.parametrize("name", ["pre_mix", "post_mix"])
def test_refusals(name):
    q = torch.randn(2, 4, 5, 8)
    for value, error, words in (
        (torch.eye(3), ValueError, ["[3,3]", "[4,4]"]),
        (torch.ones(4), ValueError, ["[4]", "[4,4]"]),
        (torch.eye(4).double(), TypeError, ["float64", "float32"]),
        (torch.eye(4).bfloat16(), TypeError, ["bfloat16", "float32"]),
        (torch.eye(4, dtype=torch.int64), TypeError, ["int64", "float32"]),
        ([[1.0]], TypeError, ["list", "[4,4]"]),
    ):
        with pytest.raises(error) as refusal:
            mha_ext.attention(q, q, q, **{name: value})
        assert all(word in str(refusal.value) for word in [name, *words])


def test_explain_names_the_kernel_and_the_reason():
    q = torch.randn(2, 4, 130, 8)
    plan = mha_ext.explain(q, q, q, pre_mix=torch.eye(4), post_mix=torch.eye(4))
    plain = mha_ext.explain(q, q, q)
    assert "attention_mixed_fwd" in plan.kernel and "all heads" in plan.refusals["attention_fwd"]
    assert plan.flops - plain.flops == 2 * 2 * 130 * 130 * 4 * (4 + 4)
    assert plan.workspace[0] > plain.workspace[0] and plan.tasks == (6, 6)
    assert "attention_mixed_fwd" in str(plan)


def test_module_begins_as_attention_and_learns_its_mixes():
    torch.manual_seed(3)
    plain = mha_ext.nn.SelfAttention(32, 4, num_kv_heads=2, causal=True)
    mixing = mha_ext.nn.SelfAttention(32, 4, num_kv_heads=2, causal=True, talking_heads=True, head_communication=True)
    assert set(mixing.state_dict()) - set(plain.state_dict()) == {"pre_mix", "post_mix", "head_mix"}
    mixing.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(mixing(x), plain(x))
    with torch.no_grad():
        for matrix in (mixing.pre_mix, mixing.post_mix, mixing.head_mix):
            matrix += 0.2 * torch.randn(4, 4)
    q, k, v = mixing._project(x)
    out = mha_ext.attention(q, k, v, mask=masks.Causal(), pre_mix=mixing.pre_mix, post_mix=mixing.post_mix)
    expected = mixing.out_proj(torch.einsum("bhsd,hg->bsgd", out, mixing.head_mix).flatten(2))
    torch.testing.assert_close(mixing(x), expected)
    mixing(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in mixing.parameters())
    with torch.no_grad():
        torch.testing.assert_close(mixing.eval()(x, cache=mixing.make_cache(2, 20)), mixing(x))


def test_head_communication_with_a_cache():
    module = mha_ext.nn.SelfAttention(32, 4, causal=True, head_communication=True).eval()
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        module.head_mix += 0.2 * torch.randn(4, 4)
        torch.testing.assert_close(module(x, cache=module.make_cache(2, 20)), module(x))


def test_half_matrices_are_those_of_float32():
    c = dataclasses.replace(cases.CORE[1], mask="causal")
    x = cases.build(c)
    matrix = torch.randn(c.H, c.H).bfloat16()
    assert torch.equal(run(c, x, {"pre_mix": matrix}), run(c, x, {"pre_mix": matrix.float()}))
