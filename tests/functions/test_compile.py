"""torch.compile, torch.export, autocast, checkpointing, torch.func."""

from __future__ import annotations

import copy

import cases
import oracle
import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import mha_ext
from mha_ext import masks

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def randn(*shape, dtype=torch.float32, seed=0, grad=False):
    return cases.randn(cases.generator(seed), *shape, dtype=dtype).requires_grad_(grad)


def counting(fn, **options):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(fn, fullgraph=True, backend=counter, **options), counter


FUNCTIONS = {
    "plain": lambda q, k, v, n: mha_ext.attention(q, k, v),
    "causal": lambda q, k, v, n: mha_ext.attention(q, k, v, mask=masks.Causal()),
    "window & padding": lambda q, k, v, n: mha_ext.attention(q, k, v, mask=masks.Window(9, 0) & masks.Padding(n)),
    "prefix": lambda q, k, v, n: mha_ext.attention(q, k, v, mask=masks.Prefix(n)),
    "documents": lambda q, k, v, n: mha_ext.attention(
        q, k, v, mask=masks.Documents(torch.arange(k.shape[2]).div(5, rounding_mode="floor")[None]) & masks.Causal()
    ),
    "dense": lambda q, k, v, n: mha_ext.attention(
        q, k, v, mask=torch.arange(k.shape[2]) < torch.arange(q.shape[2])[:, None] + 3
    ),
    "bias": lambda q, k, v, n: mha_ext.attention(
        q, k, v, bias=-torch.arange(k.shape[2]).float().view(1, 1, 1, -1), softcap=5.0
    ),
    "lse and weights": lambda q, k, v, n: sum(
        t.masked_fill(t.isinf(), 0).sum() for t in mha_ext.attention(q, k, v, return_lse=True, return_weights=True)
    ),
    "sdpa": lambda q, k, v, n: mha_ext.scaled_dot_product_attention(q, k, v, is_causal=True),
    "softmax": lambda q, k, v, n: mha_ext.masked_softmax(q @ k.transpose(-1, -2), masks.Causal()) @ v,
    "heads": lambda q, k, v, n: mha_ext.split_heads(mha_ext.merge_heads(q), 2) + k + v,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dynamic", [True, None])
def test_three_lengths_one_graph_and_at_most_one_recompile(name, dynamic):
    f = FUNCTIONS[name]
    compiled, counter = counting(f, dynamic=dynamic)
    for length in (12, 33, 70):
        q, k, v = (randn(2, 2, length, 8, seed=s, grad=True) for s in range(3))
        n = torch.tensor([length, length // 2])
        actual, expected = compiled(q, k, v, n), f(q, k, v, n)
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected)
        for a, b in zip(torch.autograd.grad(actual.sum(), [q, k, v]), torch.autograd.grad(expected.sum(), [q, k, v])):
            torch.testing.assert_close(a, b)
    assert counter.frame_count <= 2


def test_dynamic_batch_and_query_length_too():
    compiled, counter = counting(lambda q, k, v: mha_ext.attention(q, k, v, mask=masks.Causal()), dynamic=True)
    for B, Sq, Sk in ((3, 12, 33), (5, 7, 9), (6, 50, 20)):  # no two equal sizes, which a graph would tie together
        q, k, v = (randn(B, 4, s, 8, seed=n, grad=True) for n, s in enumerate((Sq, Sk, Sk)))
        actual = compiled(q, k[:, :2], v[:, :2])
        expected = mha_ext.attention(q, k[:, :2], v[:, :2], mask=masks.Causal())
        assert torch.equal(actual, expected)
    assert counter.frame_count <= 2


def test_strided_inputs_keep_the_promised_layout_when_compiled():
    compiled, _ = counting(lambda q, k, v: mha_ext.attention(q, k, v).transpose(1, 2).flatten(2), dynamic=True)
    for length in (9, 20):
        q, k, v = (randn(2, length, 4, 8, seed=s, grad=True).transpose(1, 2) for s in range(3))
        actual, expected = compiled(q, k, v), mha_ext.attention(q, k, v).transpose(1, 2).flatten(2)
        assert actual.is_contiguous() and torch.equal(actual, expected)


@pytest.mark.slow
def test_with_the_default_backend():
    """Inductor, which generates code around the ops: forward and backward of a block with dropout off, three lengths."""
    block = Block()

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for length in (12, 33):
        x = randn(2, length, 32, grad=True)
        actual, expected = compiled(x), block(x)
        torch.testing.assert_close(actual, expected)
        leaves = [x, *block.parameters()]
        for a, b in zip(
            torch.autograd.grad(actual.square().sum(), leaves), torch.autograd.grad(expected.square().sum(), leaves)
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


class Block(torch.nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.out, self.dropout = (
            torch.nn.LayerNorm(32),
            torch.nn.Linear(32, 96),
            torch.nn.Linear(32, 32),
            dropout,
        )

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        out = mha_ext.attention(q, k, v, mask=masks.Causal(), dropout_p=self.dropout)
        return x + self.out(out.transpose(1, 2).flatten(2))


# Export ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "both"])
def test_export_with_dynamic_batch_and_length(mask):
    class Model(torch.nn.Module):
        def forward(self, q, k, v, n):
            chosen = {
                "none": None,
                "causal": masks.Causal(),
                "padding": masks.Padding(n),
                "both": masks.Causal() & masks.Padding(n),
            }[mask]
            return mha_ext.attention(q, k, v, mask=chosen)

    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    args = tuple(randn(3, 2, 9, 8, seed=s) for s in range(3)) + (torch.tensor([9, 4, 1]),)
    shape = {0: batch, 2: length}
    program = torch.export.export(Model(), args, dynamic_shapes=(shape, shape, shape, {0: batch}))
    for B, S in ((2, 20), (5, 3)):
        args = tuple(randn(B, 2, S, 8, seed=s) for s in range(3)) + (torch.randint(0, S + 1, (B,)),)
        assert torch.equal(program.module()(*args), Model()(*args))
    names = [str(node.target) for node in program.graph.nodes]
    assert any("mha_ext" in name for name in names)


def test_export_of_a_block_and_of_softmax_and_heads():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            x = self.block(x)
            weights = mha_ext.masked_softmax(
                mha_ext.split_heads(x, 4) @ mha_ext.split_heads(x, 4).transpose(-1, -2), masks.Causal()
            )
            return mha_ext.merge_heads(weights @ mha_ext.split_heads(x, 4))

    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    model = Model()
    program = torch.export.export(model, (randn(2, 9, 32),), dynamic_shapes=(dims,))
    for shape in ((3, 17, 32), (4, 2, 32)):
        x = randn(*shape)
        torch.testing.assert_close(program.module()(x), model(x))


# Dropout under compile and checkpointing ------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_with_dropout_drops_the_same_again(reentrant):
    block = Block(dropout=0.4)
    x = randn(2, 17, 32, grad=True)
    results = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        block.zero_grad()
        x.grad = None
        out = run(x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad.clone(), *(p.grad.clone() for p in block.parameters())])
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_checkpoint_inside_compile():
    block = Block(dropout=0.4)
    x = randn(2, 17, 32, grad=True)
    f = lambda x: checkpoint(block, x, use_reentrant=False)
    compiled, _ = counting(f)
    results = []
    for run in (f, compiled):
        torch.manual_seed(3)
        out = run(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_compiled_dropout_differs_from_call_to_call():
    compiled, _ = counting(lambda q: mha_ext.attention(q, q, q, dropout_p=0.5))
    q = randn(1, 2, 17, 8)
    a, b = compiled(q), compiled(q)
    assert not torch.equal(a, b)


# Autocast -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_in_compiled_code(enabled):
    block = Block()
    x = randn(2, 9, 32, grad=True)

    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            return block(x)

    compiled, _ = counting(f)
    actual, expected = compiled(x), f(x)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected)


def test_autocast_covers_every_function():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = randn(2, 5, 32)
        q = mha_ext.split_heads(torch.nn.functional.linear(x, randn(32, 32)), 4)  # bf16 from here
        assert q.dtype == torch.bfloat16
        k = randn(2, 4, 5, 8)  # fp32
        assert mha_ext.attention(q, k, k).dtype == torch.bfloat16
        assert mha_ext.attention(q, k, k, bias=randn(5, 5)).dtype == torch.bfloat16
        assert mha_ext.scaled_dot_product_attention(q, k, k, randn(5, 5)).dtype == torch.bfloat16
        assert mha_ext.merge_heads(q, randn(4, 4)).dtype == torch.bfloat16
        assert mha_ext.split_heads(q.transpose(1, 2).flatten(2), 4, randn(32)).dtype == torch.bfloat16
        double = mha_ext.attention(*(randn(1, 1, 3, 4, dtype=torch.float64) for _ in range(3)))
        assert double.dtype == torch.float64  # as torch's autocast leaves float64 alone
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert mha_ext.attention(k, k, k).dtype == torch.float32


# torch.func -----------------------------------------------------------------------------------------------------------


def loss(q, k, v):
    return mha_ext.attention(q, k, v, mask=masks.Causal()).square().sum()


def test_func_grad_and_vjp():
    q, k, v = (randn(2, 2, 5, 4, dtype=torch.float64, seed=s, grad=True) for s in range(3))
    expected = torch.autograd.grad(loss(q, k, v), [q, k, v])
    actual = torch.func.grad(loss, argnums=(0, 1, 2))(*(t.detach() for t in (q, k, v)))
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b)
    out, pull = torch.func.vjp(loss, *(t.detach() for t in (q, k, v)))
    for a, b in zip(pull(torch.ones_like(out)), expected):
        torch.testing.assert_close(a, b)


def test_jacrev_and_hessian():
    q, k, v = (randn(1, 1, 3, 2, dtype=torch.float64, seed=s) for s in range(3))
    truth = lambda q: oracle.attention(q, k, v)[0].square().sum()
    ours = lambda q: mha_ext.attention(q, k, v).square().sum()
    torch.testing.assert_close(torch.func.jacrev(ours)(q), torch.func.jacrev(truth)(q))
    torch.testing.assert_close(
        torch.func.jacrev(torch.func.jacrev(ours))(q), torch.func.jacrev(torch.func.jacrev(truth))(q)
    )


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (1, 0, None)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "bias", "dense"])
def test_vmap_equals_the_loop(kind, in_dims):
    N = 3
    tensors = [randn(N, 2, 4, 5, 8, seed=s) for s in range(3)]
    tensors = [t[0] if d is None else t.movedim(0, d) for t, d in zip(tensors, in_dims)]
    bias, seen = randn(1, 4, 5, 5, seed=4), torch.rand(2, 1, 5, 5) < 0.6

    def f(q, k, v):
        options = {"plain": {}, "causal": {"mask": masks.Causal()}, "bias": {"bias": bias}, "dense": {"mask": seen}}[
            kind
        ]
        return mha_ext.attention(q, k, v, return_lse=True, **options)

    actual = torch.vmap(f, in_dims=in_dims)(*tensors)
    loop = [f(*(t if d is None else t.select(d, n) for t, d in zip(tensors, in_dims))) for n in range(N)]
    for a, b in zip(actual, zip(*loop)):
        torch.testing.assert_close(a, torch.stack(b))


@pytest.mark.parametrize("bias_dim", [0, 1, None])
def test_vmap_over_the_bias_and_its_gradient(bias_dim):
    q, k, v = (randn(3, 2, 2, 5, 4, dtype=torch.float64, seed=s) for s in range(3))
    bias = (
        randn(1, 2, 5, 5, dtype=torch.float64)
        if bias_dim is None
        else randn(3, 1, 2, 5, 5, dtype=torch.float64).movedim(0, bias_dim)
    )

    def f(fn):
        def value(q, k, v, bias):
            return fn(q, k, v, bias).square().sum()

        return torch.vmap(torch.func.grad(value, argnums=(0, 1, 2, 3)), in_dims=(0, 0, 0, bias_dim))(q, k, v, bias)

    ours = f(lambda q, k, v, bias: mha_ext.attention(q, k, v, mask=masks.Causal(), bias=bias))
    seen = masks.Causal().to_dense(2, 2, 5, 5)
    theirs = f(lambda q, k, v, bias: oracle.attention(q, k, v, seen=seen, bias=bias)[0])
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


def test_per_sample_gradients_of_a_block():
    block = Block().double()
    parameters = {name: p.detach() for name, p in block.named_parameters()}
    x = randn(4, 6, 32, dtype=torch.float64)

    def one(parameters, x):
        return torch.func.functional_call(block, parameters, (x[None],)).square().sum()

    actual = torch.vmap(torch.func.grad(one), in_dims=(None, 0))(parameters, x)
    for n in range(4):
        expected = torch.autograd.grad(block(x[n : n + 1]).square().sum(), list(block.parameters()))
        for (name, a), b in zip(actual.items(), expected):
            torch.testing.assert_close(a[n], b, msg=lambda m, name=name: f"{name}: {m}")


def test_vmap_of_softmax_and_heads():
    x = randn(3, 2, 5, 8)
    actual = torch.vmap(lambda x: mha_ext.split_heads(x, 2))(x)
    torch.testing.assert_close(actual, torch.stack([mha_ext.split_heads(one, 2) for one in x]))
    y = randn(3, 2, 2, 5, 4)
    torch.testing.assert_close(torch.vmap(mha_ext.merge_heads)(y), torch.stack([mha_ext.merge_heads(one) for one in y]))
    mix = randn(3, 2, 2)
    expected = torch.stack([mha_ext.merge_heads(*both) for both in zip(y, mix)])
    torch.testing.assert_close(torch.vmap(mha_ext.merge_heads)(y, mix), expected)
    f = lambda s: mha_ext.masked_softmax(s, masks.Causal())
    torch.testing.assert_close(torch.vmap(f, in_dims=1)(y), torch.stack([f(one) for one in y.unbind(1)]))


def test_vmap_of_ops_without_gradients(capfd):
    """By rules of their own: torch's way for ops without one says so, and asks for an issue."""
    q, k, v = (randn(3, 2, 4, 5, 8, seed=s) for s in range(3))
    f = lambda *x: mha_ext.attention_cached(*x, mask=masks.Causal(), return_lse=True)
    for a, b in zip(torch.vmap(f, in_dims=(0, 0, None))(q, k, v[0]), zip(*(f(*x, v[0]) for x in zip(q, k)))):
        torch.testing.assert_close(a, torch.stack(b))
    states = torch.tensor([[1, 2], [3, 4]])
    f = lambda state: mha_ext.dropout_mask(state, 0.5, 1, 2, 5, 6)
    assert torch.equal(torch.vmap(f)(states), torch.stack([f(state) for state in states]))
    assert "performance drop" not in capfd.readouterr().err


def test_functionalize():
    q = randn(1, 2, 5, 4)
    for f in (lambda q: mha_ext.attention(q, q, q, mask=masks.Causal()), lambda q: mha_ext.masked_softmax(q), mha_ext.merge_heads):
        gradients = [torch.autograd.grad(g(x).square().sum(), x)[0] for g in (f, torch.func.functionalize(f)) for x in [q.clone().requires_grad_()]]
        assert torch.equal(torch.func.functionalize(f)(q), f(q)) and torch.equal(*gradients)


def test_vmap_over_nothing():
    q, sinks = randn(0, 2, 4, 5, 8), randn(4)
    assert torch.vmap(lambda q: mha_ext.attention(q, q, q))(q).shape == q.shape
    with pytest.raises(ValueError, match="torch.vmap was given no problems, a dimension of size 0"):
        torch.vmap(lambda q: mha_ext.attention(q, q, q, sinks=sinks))(q)


# Models ---------------------------------------------------------------------------------------------------------------


def test_modules_compile_and_export():
    module = mha_ext.nn.MultiheadAttention(32, 4, batch_first=True)
    x = randn(2, 9, 32)
    compiled, _ = counting(lambda x, pad: module(x, x, x, key_padding_mask=pad)[0], dynamic=True)
    for length in (9, 20):
        x = randn(2, length, 32)
        pad = torch.arange(length) >= torch.tensor([[length], [4]])
        torch.testing.assert_close(compiled(x, pad), module(x, x, x, key_padding_mask=pad)[0])


def test_deepcopy_of_a_compiled_model_and_functional_state():
    block = Block()
    compiled = torch.compile(copy.deepcopy(block), backend="aot_eager", fullgraph=True)
    x = randn(2, 9, 32)
    torch.testing.assert_close(compiled(x), block(x))


@pytest.mark.parametrize("function", [lambda x: mha_ext.attention(x, x, x), mha_ext.masked_softmax, mha_ext.merge_heads])
def test_vmap_under_ordinary_autograd_equals_the_loop(function):
    x = randn(3, 1, 2, 4, 4, grad=True)
    dout = torch.randn_like(torch.stack([function(one) for one in x]))
    want = torch.autograd.grad(torch.stack([function(one) for one in x]), x, dout)[0]
    torch.testing.assert_close(torch.autograd.grad(torch.vmap(function)(x), x, dout)[0], want)
    total = torch.func.grad(lambda x: (torch.vmap(function)(x) * dout).sum())(x.detach())
    torch.testing.assert_close(total, want)


@pytest.mark.parametrize("function", [lambda x: mha_ext.attention(x, x, x), mha_ext.masked_softmax, mha_ext.merge_heads])
def test_forward_mode_is_refused_not_ignored(function):
    x = randn(1, 2, 4, 4)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(function, (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        function(torch.autograd.forward_ad.make_dual(x, x))


def test_meta_tensors_have_shapes():
    x = torch.empty(1, 2, 3, 4, device="meta")
    assert mha_ext.attention(x, x, x).shape == x.shape
    assert mha_ext.scaled_dot_product_attention(x, x, x, x.new_zeros(3, 3)).shape == x.shape
    module = mha_ext.nn.SelfAttention(8, 2, device="meta")
    assert module(torch.empty(1, 3, 8, device="meta")).shape == (1, 3, 8)
