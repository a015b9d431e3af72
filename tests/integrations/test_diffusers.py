"""mha_ext as an attention backend of diffusers."""

from __future__ import annotations

import sys

import pytest
import torch
from op_names import Ops

diffusers = pytest.importorskip("diffusers")

from diffusers.models import attention_dispatch

from mha_ext.integrations import diffusers as integration


def test_a_transformer_on_the_backend():
    """Joint attention of text and image, without and with gradients, as by torch's."""
    assert integration.register() == integration.register() == "mha_ext"
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=12,
        pooled_projection_dim=10, axes_dims_rope=(4, 4, 8),
    ).double()  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 5, 12), "pooled_projections": torch.randn(2, 10),
        "timestep": torch.tensor([0.1, 0.7]), "img_ids": torch.randn(16, 3), "txt_ids": torch.randn(5, 3),
    }  # fmt: skip
    inputs = {name: x.double() for name, x in inputs.items()}

    def run(backend):
        model.set_attention_backend(backend)
        with Ops() as ops:
            out = model(**inputs).sample
            gradients = torch.autograd.grad(out.sin().sum(), list(model.parameters()), allow_unused=True)
        return ops.ours(), [out, *(g for g in gradients if g is not None)]

    (none, expected), (calls, found) = run("native"), run("mha_ext")
    assert (none, calls) == (0, 2)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    with attention_dispatch.attention_backend("mha_ext"):
        assert attention_dispatch._AttentionBackendRegistry.get_active_backend()[1] is integration.attention_backend


@pytest.mark.parametrize("kind", ["none", "padding", "bias", "causal", "grouped"])
def test_the_function_is_native_attention(kind):
    B, S, H, D = 2, 9, 4, 8
    q, k, v = (torch.randn(B, S, H // 2 if kind == "grouped" and n else H, D, dtype=torch.float64) for n in range(3))
    options = {"is_causal": kind == "causal", "enable_gqa": kind == "grouped"}
    if kind == "padding":
        options["attn_mask"] = torch.arange(S) < torch.tensor([[S], [5]])
    elif kind == "bias":
        options["attn_mask"] = torch.randn(B, 1, S, S, dtype=torch.float64)
    torch.testing.assert_close(
        integration.attention_backend(q, k, v, **options), attention_dispatch._native_attention(q, k, v, **options)
    )


def test_refusals(monkeypatch):
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(ValueError, match=r"return_lse=True was asked .* \[1,3,2,8\]; accepted: whole sequences without"):
        integration.attention_backend(q, q, q, return_lse=True)
    with pytest.raises(ValueError, match="context parallelism was asked"):
        integration.attention_backend(q, q, q, _parallel_config=object())
    monkeypatch.delattr(attention_dispatch, "_AttentionBackendRegistry")
    with pytest.raises(ImportError, match="diffusers is .* accepted: 0.36 or later"):
        integration.register()
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match="diffusers is not installed; accepted: 0.36 or later"):
        integration.register()
