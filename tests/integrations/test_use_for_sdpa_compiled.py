"""use_for_sdpa with torch.compile, torch.export and torch's own samples of the function."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from test_use_for_sdpa import assert_within_rounding, inputs, kernels_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_methods_invocations import op_db

import mha_ext
from mha_ext import _aten

BOTH = {"attention_fwd": 1, "attention_bwd": 1}
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def step(function, q, k, v):
    out = function(q, k, v)
    return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_while_in_use(backend):
    tensors = inputs(dtype=torch.float64)
    expected = step(attend, *tensors)
    compiled = torch.compile(attend, fullgraph=True, backend=backend, dynamic=False)
    with mha_ext.use_for_sdpa():
        step(compiled, *tensors)  # compiles
        found, kernels = kernels_of(lambda: step(compiled, *tensors))
        assert kernels == BOTH
        assert_within_rounding(found, expected)
    found, kernels = kernels_of(lambda: step(compiled, *tensors))
    assert kernels == BOTH, "a compiled program keeps what it was compiled for"
    torch.compiler.reset()
    found, kernels = kernels_of(lambda: step(compiled, *tensors))
    assert not kernels
    assert_within_rounding(found, expected)


def test_compiled_before():
    """It holds torch's CPU kernel, which follows the use."""
    tensors = inputs(dtype=torch.float64)
    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    expected, kernels = kernels_of(lambda: step(compiled, *tensors))
    assert not kernels
    with mha_ext.use_for_sdpa():
        found, kernels = kernels_of(lambda: step(compiled, *tensors))
    assert kernels == BOTH
    assert_within_rounding(found, expected)
    assert not kernels_of(lambda: step(compiled, *tensors))[1]


def test_dynamic_shapes_compile_once():
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    with mha_ext.use_for_sdpa(), torch._dynamo.config.patch(error_on_recompile=True):
        for S in (40, 50, 61):
            tensors = inputs(2, 4, S, 16, dtype=torch.float64)
            step(compiled, *tensors)
            found, kernels = kernels_of(lambda tensors=tensors: step(compiled, *tensors))
            assert kernels == BOTH
            with sdpa_kernel(SDPBackend.MATH):
                expected = step(attend, *tensors)
            assert_within_rounding(found, expected)


def test_sdpa_kernel_within_a_compiled_program():
    def mathematical(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return attend(q, k, v)

    tensors = inputs(dtype=torch.float64)
    compiled = torch.compile(mathematical, backend="aot_eager", dynamic=False)
    with mha_ext.use_for_sdpa():
        found, kernels = kernels_of(lambda: step(compiled, *tensors))
    assert not kernels
    assert_within_rounding(found, step(attend, *tensors))


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return attend(q, k, v)


@pytest.mark.parametrize("exported_in_use", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
def test_exported(exported_in_use, decomposed):
    """A program holds torch's op whenever it was exported: it is saved and loaded without us, and follows the use."""
    tensors = inputs(dtype=torch.float64, grad=False)
    use = mha_ext.use_for_sdpa()
    if not exported_in_use:
        use.undo()
    program = torch.export.export(Attend(), tuple(tensors))
    if decomposed and not exported_in_use:  # torch's fused op; in use it would be ours
        program = program.run_decompositions(torch.export.default_decompositions())
    use.undo()
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    module = torch.export.load(file).module()
    assert "mha_ext" not in str(program.graph)
    expected, kernels = kernels_of(lambda: module(*tensors))
    assert not kernels
    with mha_ext.use_for_sdpa():
        found, kernels = kernels_of(lambda: module(*tensors))
    assert kernels == {"attention_fwd": 1}
    assert_within_rounding([found], [expected])


def test_traced():
    tensors = inputs(dtype=torch.float64, grad=False)
    traced = torch.jit.trace(Attend(), tensors)
    expected = traced(*tensors)
    with mha_ext.use_for_sdpa():
        found, kernels = kernels_of(lambda: traced(*tensors))
    assert kernels == {"attention_fwd": 1}
    assert_within_rounding([found], [expected])


INFO = next(info for info in op_db if info.name == "nn.functional.scaled_dot_product_attention")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_torchs_own_samples(dtype, monkeypatch):
    """Those that torch tests its function with: ranks, masks, grouped heads. Bit by bit what our function gives, or torch's where ours
    refuses; in float64 torch's results. No problem counts as small here."""
    monkeypatch.setattr(_aten, "_FEW", {})
    monkeypatch.setattr(_aten, "_FEW_OF_ONE_QUERY", 0)
    taken = 0
    for sample in INFO.sample_inputs("cpu", dtype, requires_grad=True):
        leaves = [sample.input, *(x for x in sample.args if isinstance(x, torch.Tensor) and x.requires_grad)]

        def run(function, sample=sample, leaves=leaves):
            torch.manual_seed(4)
            out = function(sample.input, *sample.args, **sample.kwargs)
            return [out, *torch.autograd.grad(out.sum(), leaves)]

        torchs = run(F.scaled_dot_product_attention)
        try:
            expected = run(mha_ext.scaled_dot_product_attention)
            taken += 1
        except (ValueError, TypeError):
            expected = torchs
        with mha_ext.use_for_sdpa():
            found = run(F.scaled_dot_product_attention)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
        if dtype == torch.float64 and not sample.kwargs.get("dropout_p"):
            assert_within_rounding(found, torchs)
    assert taken > 10
