"""Exported to ONNX and run by ONNX Runtime, the ops give what they give here."""

from __future__ import annotations

import sys
import traceback

import oracle
import pytest
import torch
from torch import nn

pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")

import mha_ext
from mha_ext import masks
from mha_ext.integrations import onnx as integration

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def exported(model, inputs, **options):
    program = torch.onnx.export(
        model, inputs, dynamo=True, opset_version=integration.OPSET, custom_translation_table=integration.translations(),
        verbose=False, **options,
    )  # fmt: skip
    return program.model_proto


def run(proto, inputs):
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    return [torch.from_numpy(x) for x in session.run(None, dict(zip(names, (x.numpy() for x in inputs))))]


def operators(proto) -> set[str]:
    return {node.op_type for node in proto.graph.node}


def inputs_of(B=2, H=4, Hk=4, Sq=9, Sk=9, D=8):
    return tuple(torch.randn(B, h, S, D) for h, S in ((H, Sq), (Hk, Sk), (Hk, Sk)))


BIAS, IDS = torch.randn(1, 4, 9, 9), torch.tensor([[0, 0, 1, 1, 0, 2, 2, 2, 2]])
CASES = {  # the arguments, and whether it is ONNX's Attention
    "plain": ({}, True),
    "causal": ({"mask": masks.Causal()}, True),
    "window": ({"mask": masks.Window(3, 1)}, True),
    "padding": ({"mask": masks.Causal() & masks.Padding(torch.tensor([9, 0]))}, True),
    "documents": ({"mask": masks.Documents(IDS)}, True),
    "blocks": ({"mask": masks.BlockSparse(torch.tensor([[True, False, True], [False, False, False], [True, True, False]]), 4)}, True),
    "dense": ({"mask": torch.rand(9, 9) < 0.3}, True),
    "bias": ({"bias": BIAS, "mask": masks.Causal()}, True),
    "soft cap": ({"softcap": 2.0, "scale": 0.7}, True),
    "soft cap, causal, bias": ({"softcap": 2.0, "bias": BIAS, "mask": masks.Causal()}, False),
    "sinks": ({"sinks": torch.randn(4), "mask": masks.Causal()}, False),
    "lse": ({"return_lse": True, "mask": masks.LeftPadding(torch.tensor([2, 9]))}, True),
    "weights": ({"return_weights": True, "mask": masks.Causal()}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_attention(case):
    options, fused = CASES[case]
    inputs = inputs_of(Hk=4 if case == "plain" else 2)
    call = Call(lambda q, k, v: mha_ext.attention(q, k, v, **options))
    proto = exported(call, inputs)
    assert ("Attention" in operators(proto)) == fused and "mha_ext" not in str(proto.opset_import)
    found = run(proto, inputs)
    wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()}
    expected, exact = call(*inputs), mha_ext.attention(*(x.double() for x in inputs), **wide)
    expected, exact = ((x,) if isinstance(x, torch.Tensor) else x for x in (expected, exact))
    for name, a, e, r in zip(("out", "lse"), found, exact, expected, strict=False):
        rows = e.isinf() if name == "lse" else torch.zeros_like(e, dtype=torch.bool)
        assert torch.equal(a[rows], e[rows].float())
        largest = e.masked_fill(rows, 0).abs().amax().expand_as(e)
        oracle.compare(name, a.masked_fill(rows, 0), e.masked_fill(rows, 0), r.masked_fill(rows, 0), magnitude=4 * largest)


def test_more_keys_than_queries():
    """Causal is bottom-right here, top-left in ONNX."""
    inputs = inputs_of(Sq=5)
    call = Call(lambda q, k, v: mha_ext.attention(q, k, v, mask=masks.Causal()))
    torch.testing.assert_close(run(exported(call, inputs), inputs)[0], call(*inputs))


def test_parts():
    x, scores, mix = torch.randn(2, 5, 12), torch.randn(2, 3, 5, 7), torch.randn(3, 3)
    for function, inputs in (
        (lambda x: mha_ext.split_heads(x, 3, torch.ones(12)), (x,)),
        (lambda x, mix: mha_ext.merge_heads(mha_ext.split_heads(x, 3), mix), (x, mix)),
        (lambda x: mha_ext.masked_softmax(x, masks.Causal(), scale=0.3), (scores,)),
    ):
        torch.testing.assert_close(run(exported(Call(function), inputs), inputs)[0], function(*inputs))


def test_a_trained_layer_with_any_length():
    layer = mha_ext.nn.SelfAttention(32, 4, num_kv_heads=2, rope=True, causal=True).eval()
    S = torch.export.Dim("S", min=2, max=64)
    proto = exported(layer, (torch.randn(2, 9, 32),), dynamic_shapes={"x": {1: S}})
    with torch.no_grad():
        for length in (9, 17):
            x = torch.randn(2, length, 32)
            torch.testing.assert_close(run(proto, (x,))[0], layer(x), rtol=1e-4, atol=1e-5)


def test_refusals(monkeypatch):
    call = Call(lambda q, k, v: mha_ext.attention(q, k, v, dropout_p=0.1))
    with pytest.raises(torch.onnx.errors.OnnxExporterError) as told:
        exported(call, inputs_of())
    whole = "".join(traceback.format_exception(told.value))
    assert "attention with dropout was exported to ONNX; accepted: a model without" in whole
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match="onnxscript with opset 23 is not installed; accepted: onnxscript 0.5"):
        integration.translations()
