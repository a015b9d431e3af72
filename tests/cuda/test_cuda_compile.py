"""What is around the kernels, with CUDA tensors: torch.compile, torch.export, torch.func, nested tensors, checkpointing, autocast and
training. Most are the CPU's tests with CUDA as the default device. In simulation, where torch's own CUDA kernels do not run, its CPU
kernels take their place (torch_on_cpu.py), also in what inductor compiles."""

from __future__ import annotations

import pytest
import test_compile
import test_dynamic_shapes
import test_nested
import test_opcheck
import test_pytrees
import torch
from test_compile import (  # noqa: F401  (collected here, too)
    test_checkpoint_inside_compile,
    test_checkpoint_with_dropout_drops_the_same_again,
    test_compiled_dropout_differs_from_call_to_call,
    test_export_of_a_block_and_of_softmax_and_heads,
    test_jacrev_and_hessian,
    test_strided_inputs_keep_the_promised_layout_when_compiled,
)
from test_nested import test_cross_attention, test_is_what_packed_sequences_give  # noqa: F401
from test_opcheck import test_opcheck_attention_cached, test_opcheck_the_small_ops  # noqa: F401
from test_pytrees import test_made_and_moved_in_compiled_code  # noqa: F401
from torch_on_cpu import simulated, torch_on_cpu

import mha_ext
from mha_ext import masks

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fresh_compiler")]


@pytest.fixture(autouse=True, scope="module")
def torchs_kernels():
    if torch.cuda.is_available() and simulated():
        with torch_on_cpu():
            yield
    else:
        yield


@pytest.fixture(autouse=True)
def cuda_by_default(torchs_kernels):
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def on_cuda(test, *arguments):
    """Runs a test of another file, which makes its tensors on the default device."""
    assert torch.empty(0).is_cuda
    test(*arguments)


@pytest.mark.parametrize("name", test_compile.FUNCTIONS)
def test_three_lengths_one_graph(name):
    on_cuda(test_compile.test_three_lengths_one_graph_and_at_most_one_recompile, name, True)


@pytest.mark.parametrize("name", ["varlen", "paged", "int8", "packed", "weights, mixed"])
def test_sizes_that_the_program_does_not_know(name):
    on_cuda(test_dynamic_shapes.test_functions_with_grouped_heads, name)


@pytest.mark.parametrize("name", ["rope, qk_norm", "talking"])
def test_modules(name):
    on_cuda(test_dynamic_shapes.test_modules_with_grouped_heads, name)


@pytest.mark.parametrize("n", [-4, -1])
def test_masks_and_biases_as_arguments(n):
    move = lambda x: None if x is None else x.to("cuda")
    mask, bias = move(test_pytrees.MASKS[n]), move([*test_pytrees.BIASES, None][n])
    q = test_pytrees.randn(2, 4, 8, 4).cuda().requires_grad_()
    compiled = torch.compile(test_pytrees.attend, fullgraph=True, backend="aot_eager", dynamic=False)
    got, expected = compiled(q, mask, bias), test_pytrees.attend(q, mask, bias)
    assert got.is_cuda and torch.equal(got, expected)
    for a, b in zip(*(torch.autograd.grad(x.sum(), q) for x in (got, expected))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("how", ["plain", "band"])
def test_opcheck_of_attention(how):
    on_cuda(test_opcheck.test_opcheck_attention_fwd, how, True, "bshd")
    on_cuda(test_opcheck.test_opcheck_attention_bwd, how, how == "band")


def test_with_the_default_backend(monkeypatch):
    """Inductor's program around the ops; in simulation, without triton, its operations are calls of torch's."""
    if simulated():
        monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
        monkeypatch.setattr("torch.utils._triton.triton_hash_with_backend", lambda: "none")
        with torch._inductor.config.patch(fallback_by_default=True):
            on_cuda(test_compile.test_with_the_default_backend)
    else:
        on_cuda(test_compile.test_with_the_default_backend)


def test_func_grad():
    on_cuda(test_compile.test_func_grad_and_vjp)


def test_dropout_under_vmap_asks_for_randomness():
    q = torch.randn(2, 1, 2, 5, 8)
    f = lambda q: mha_ext.attention(q, q, q, dropout_p=0.5)
    with pytest.raises(ValueError, match="randomness"):
        torch.vmap(f)(q)
    found = torch.vmap(f, randomness="different")(torch.ones_like(q))
    assert not torch.equal(found[0], found[1])


def test_nested_batch_of_a_module():
    on_cuda(test_nested.test_self_attention, {"causal": True, "num_kv_heads": 2, "window": 9})


def test_autocast():
    block = test_compile.Block()
    x = test_compile.randn(2, 9, 32, grad=True)

    def f(x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return block(x)

    compiled, _ = test_compile.counting(f)
    actual, expected = compiled(x), f(x)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        q = torch.randn(1, 2, 5, 8)
        assert mha_ext.attention(q, q, q).dtype == torch.bfloat16


def test_a_gradient_is_added_to_one_that_is_there():
    leaves = [test_compile.randn(1, 2, 17, 8, seed=s, grad=True) for s in range(3)]
    for n in (1, 2):
        mha_ext.attention(*leaves, mask=masks.Causal(), deterministic=True).square().sum().backward()
        if n == 1:
            first = [x.grad.clone() for x in leaves]
    for x, grad in zip(leaves, first):
        assert x.grad.is_cuda and torch.equal(x.grad, 2 * grad)


def test_training_lowers_the_loss_as_on_the_cpu():
    def losses(device):
        block = test_compile.Block().to(device)
        x, target = (test_compile.randn(2, 9, 32, seed=s).to(device) for s in range(2))
        optimizer, found = torch.optim.AdamW(block.parameters(), lr=0.01), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = (block(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    found = losses("cuda")
    torch.set_default_device(None)
    assert found[2] < found[0]
    torch.testing.assert_close(found, losses("cpu"), rtol=1e-4, atol=1e-5)
