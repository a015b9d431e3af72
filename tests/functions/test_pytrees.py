"""Mask and bias objects as containers of tensors: moved, copied, pickled, and as arguments of compiled, exported and vmapped functions."""

from __future__ import annotations

import copy
import io
import pickle

import cases
import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils.checkpoint import checkpoint

import mha_ext
from mha_ext import biases, masks

B, H, S, D = 2, 4, 8, 4


def randn(*shape, seed=0):
    return cases.randn(cases.generator(seed), *shape)


def every_mask():
    ids = torch.arange(S).div(3, rounding_mode="floor").expand(B, S)
    yield masks.Causal()
    yield masks.Causal("top_left")
    yield masks.Window(3, None)
    yield masks.Padding(torch.tensor([5, 8]))
    yield masks.LeftPadding(torch.tensor([2, 0]))
    yield masks.Prefix(torch.tensor([2, 4]))
    yield masks.Intervals(torch.tensor([[0], [2]]), torch.tensor([[4], [8]]))
    yield masks.Documents(ids)
    yield masks.Dense(torch.rand(B, 1, S, S, generator=cases.generator(1)) < 0.6)
    yield masks.BlockSparse(torch.rand(2, 2, generator=cases.generator(2)) < 0.7, 4)
    yield masks.Strided(2, 1, 2)
    yield masks.Dilated(1, 2, 2)
    yield masks.Causal() & masks.Padding(torch.tensor([5, 8])) & masks.Documents(ids)
    yield masks.Window(1, 0) | masks.Padding(torch.tensor([2, 0]))
    yield ~masks.Causal() & masks.LeftPadding(torch.tensor([2, 0]))


MASKS = list(every_mask())
BIASES = [
    biases.ALiBi(biases.alibi_slopes(H)),
    biases.T5Relative(randn(12, H), 12, 40, bidirectional=False),
    biases.ClippedRelative(randn(H, 5)) + biases.ALiBi(biases.alibi_slopes(H)),
]


def attend(q, mask=None, bias=None):
    return mha_ext.attention(q, q, q, mask=mask, bias=bias)


@pytest.mark.parametrize("given", MASKS + BIASES, ids=repr)
def test_taken_apart_put_together_moved_copied_and_pickled(given):
    options = {"mask": given} if isinstance(given, masks.Mask) else {"bias": given}
    q = randn(B, H, S, D)
    expected = attend(q, **options)
    leaves, spec = pytree.tree_flatten(given)
    assert all(isinstance(x, torch.Tensor) for x in leaves)
    with_names = [x for _, x in pytree.tree_flatten_with_path(given)[0]]
    assert all(a is b for a, b in zip(leaves, with_names, strict=True))
    again = (
        pytree.tree_unflatten(leaves, spec),
        pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec))),
        copy.copy(given),
        copy.deepcopy(given),
        pickle.loads(pickle.dumps(given)),
        given.to("cpu"),
    )
    for x in again:
        assert type(x) is type(given) and repr(x) == repr(given)
        assert pytree.tree_structure(x) == spec
        assert torch.equal(attend(q, **dict.fromkeys(options, x)), expected)
    moved = given.to("meta")
    assert all(x.is_meta for x in pytree.tree_leaves(moved)) and repr(moved) == repr(given)
    assert all(not x.is_meta for x in pytree.tree_leaves(given))
    assert attend(q.to("meta"), **dict.fromkeys(options, moved)).shape == q.shape


@pytest.mark.parametrize("given", MASKS + BIASES, ids=repr)
def test_as_an_argument_of_an_exported_program(given):
    class Model(torch.nn.Module):
        def forward(self, q, given):
            return attend(q, **({"mask": given} if isinstance(given, masks.Mask) else {"bias": given}))

    q = randn(B, H, S, D)
    program = torch.export.export(Model(), (q, given))
    other = pytree.tree_map(lambda x: x.flip(0), given)  # other values
    for x in (given, other):
        assert torch.equal(program.module()(q, x), Model()(q, x))


def test_an_exported_program_with_a_mask_is_saved_and_serves_every_length():
    class Model(torch.nn.Module):
        def forward(self, q, mask):
            return attend(q, mask)

    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length")
    mask = masks.Causal() & masks.Padding(torch.tensor([5, 8, 3]))
    shapes = {"q": {0: batch, 2: length}, "mask": [[], [{0: batch}]]}
    program = torch.export.export(Model(), (randn(3, H, S, D), mask), dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    for n, s in ((2, 20), (5, 9)):
        q, mask = randn(n, H, s, D), masks.Causal() & masks.Padding(torch.arange(n) + 3)
        assert torch.equal(loaded.module()(q, mask), attend(q, mask))
    with pytest.raises(ValueError):  # another structure is another program
        loaded.module()(randn(2, H, S, D), masks.Window(3, 0) & masks.Padding(torch.tensor([5, 8])))


def test_as_arguments_of_one_compiled_function(fresh_compiler):
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=False)
    q = randn(B, H, S, D).requires_grad_()
    for mask, bias in zip(MASKS[-4:], [*BIASES, None]):
        torch._dynamo.reset()  # each is a program of its own
        got, expected = compiled(q, mask, bias), attend(q, mask, bias)
        assert torch.equal(got, expected), mask
        for a, b in zip(*(torch.autograd.grad(x.sum(), q) for x in (got, expected))):
            torch.testing.assert_close(a, b, msg=repr(mask))


def test_made_and_moved_in_compiled_code(fresh_compiler):
    def f(q, n, seen):
        mask = (masks.Causal() | masks.Dense(seen)) & masks.Not(masks.Padding(n).to(q.device))
        return attend(q, mask)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for s in (9, 12):
        args = randn(B, H, s, D), torch.tensor([2, 3]), torch.rand(s, s) < 0.5
        assert torch.equal(compiled(*args), f(*args))


@pytest.mark.parametrize("make", [
    lambda g: masks.Padding(torch.randint(1, S, (B,), generator=g)),
    lambda g: masks.Causal() & masks.LeftPadding(torch.randint(0, S, (B,), generator=g)),
    lambda g: masks.Dense(torch.rand(1, H, S, S, generator=g) < 0.6),
    lambda g: masks.Documents(torch.randint(0, 2, (B, S), generator=g)) | masks.Window(1, 1),
    lambda g: biases.ALiBi(torch.rand(H, generator=g)),
])  # fmt: skip
def test_vmap_over_the_tensors_of_an_object(make):
    gen = cases.generator(3)
    given = [make(gen) for _ in range(3)]
    stacked = pytree.tree_map(lambda *x: torch.stack(x), *given)
    q = randn(3, B, H, S, D)

    def f(q, x):
        return attend(q, **({"mask": x} if isinstance(x, masks.Mask) else {"bias": x}))

    expected = torch.stack([f(*both) for both in zip(q, given)])
    torch.testing.assert_close(torch.vmap(f)(q, stacked), expected)
    expected = torch.stack([f(q[0], x) for x in given])
    torch.testing.assert_close(torch.vmap(f, in_dims=(None, 0))(q[0], stacked), expected)


@pytest.mark.parametrize("mask", [
    masks.Padding(torch.tensor([5, 2, 0])), masks.Causal() & masks.LeftPadding(torch.tensor([2, 0, 8])), masks.Prefix(torch.tensor([2, 1, 4])),
    masks.Intervals(torch.tensor([[0], [2], [1]]), torch.arange(8).expand(3, 8)), masks.Documents(torch.arange(24).view(3, 8) // 5),
], ids=repr)  # fmt: skip
def test_vmap_over_sequences_takes_each_its_entry_of_a_mask(mask):
    q = randn(3, H, S, D)
    found = torch.vmap(lambda q, mask: attend(q[None], mask)[0])(q, mask)
    torch.testing.assert_close(found, attend(q, mask))


def test_through_functional_call_checkpoint_and_func_grad():
    layer = mha_ext.nn.SelfAttention(16, 4, num_kv_heads=2)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    x, mask = randn(B, S, 16).requires_grad_(), MASKS[-3]
    expected = torch.autograd.grad(layer(x, mask).sum(), x)[0]
    out = torch.func.functional_call(layer, parameters, (x, mask))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], expected)
    for reentrant in (False, True):
        out = checkpoint(layer, x, mask, use_reentrant=reentrant)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0] if not reentrant else expected, expected)
    slopes = biases.ALiBi(torch.rand(H))
    grad = torch.func.grad(lambda bias, q: attend(q, bias=bias).square().sum())(slopes, randn(B, H, S, D))
    leaf = slopes.slopes.clone().requires_grad_()
    expected = torch.autograd.grad(attend(randn(B, H, S, D), bias=biases.ALiBi(leaf)).square().sum(), leaf)[0]
    assert type(grad) is biases.ALiBi
    torch.testing.assert_close(grad.slopes, expected)


def test_a_subclass_is_a_container_too():
    class Every(masks.Mask):
        tensors = ("starts",)

        def __init__(self, starts, step):
            self.starts, self.step = starts, step

        def lower(self, B, H, Sq, Sk, device, lengths=None):
            j = torch.arange(Sk, device=device)
            return masks.MaskArgs(mask=((j - self.starts[:, None]) % self.step == 0)[:, None, None])

    mask = Every(torch.tensor([0, 1]), 3)
    assert repr(mask).endswith("Every(starts=[2], step=3)")
    assert mask.to_dense(2, 7)[:, 0, 0].int().tolist() == [[1, 0, 0, 1, 0, 0, 1], [0, 1, 0, 0, 1, 0, 0]]
    assert pytree.tree_map(lambda x: x + 1, mask).to_dense(1, 3)[:, 0, 0].int().tolist() == [[0, 1, 0], [0, 0, 1]]
    q = randn(B, H, S, D)
    assert torch.equal(attend(q, mask), attend(q, mask.to_dense(S, S)))
