"""What other libraries do with attention modules: torch.fx, peft, and whatever reads their attributes."""

from __future__ import annotations

import copy
import importlib.util
import pickle

import pytest
import torch
from torch import nn

import mha_ext

N, S, E, H = 2, 5, 8, 2
f64 = torch.float64


class Model(nn.Module):
    def __init__(self, kind=nn.MultiheadAttention):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(E, E, dtype=f64)
        self.attn = kind(E, H, batch_first=True, dtype=f64)

    def forward(self, x):
        y = self.linear(x)
        return self.attn(y, y, y)[0]


def x(seed=1):
    return torch.randn(N, S, E, dtype=f64, generator=torch.Generator().manual_seed(seed))


OPTIONS = [{}, {"bias": False}, {"kdim": 3}, {"add_bias_kv": True, "add_zero_attn": True}, {"batch_first": True, "dropout": 0.5}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attributes_are_torchs(options):
    theirs, ours, swapped = (kind(E, H, **options) for kind in (nn.MultiheadAttention, mha_ext.nn.MultiheadAttention, nn.MultiheadAttention))
    report = mha_ext.swap_attention(swapped)
    told = {name: value for name, value in vars(theirs).items() if not isinstance(value, dict)}
    assert "_qkv_same_embed_dim" in told
    for module in (ours, swapped):
        assert {name: vars(module)[name] for name in told} == told
    for module in (ours, swapped, pickle.loads(pickle.dumps(ours)), copy.deepcopy(swapped)):
        assert module.__module__ == "torch.nn" and type(module).__module__ == "mha_ext.nn.multihead_attention"
    report.undo()
    assert vars(swapped).keys() == vars(theirs).keys() and not swapped._forward_pre_hooks
    assert swapped.__module__ == theirs.__module__


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.theirs = nn.MultiheadAttention(E, H, batch_first=True)
        self.rope = mha_ext.nn.RotaryEmbedding(E // H)
        self.ours = mha_ext.nn.SelfAttention(E, H, rope=True)
        self.cross = mha_ext.nn.CrossAttention(E, H)

    def forward(self, x):
        y = self.theirs(x, x, x)[0]
        y = self.ours(y)
        y = self.rope(y.unflatten(-1, (H, E // H)).transpose(1, 2)).transpose(1, 2).flatten(2)
        return self.cross(y, x)


def test_modules_are_leaves_of_torch_fx():
    model = Blocks()
    mha_ext.swap_attention(model)
    traced = torch.fx.symbolic_trace(model)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["theirs", "ours", "rope", "cross"]
    for graph in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        assert torch.equal(graph(x().float()), model(x().float()))


class Calls(nn.Module):
    """Our functions, called by hand."""

    def __init__(self, function, *arguments, **options):
        super().__init__()
        self.call = lambda x: function(*(x,) * arguments[0], *arguments[1:], **options)

    def forward(self, x):
        return self.call(x) * 2


CALLS = {
    "attention": (mha_ext.attention, 3, {"scale": 0.5}), "explicit": (mha_ext.scaled_dot_product_attention, 3, {"is_causal": True}),
    "softmax": (mha_ext.masked_softmax, 1, {"scale": 2.0}), "merge_heads": (mha_ext.merge_heads, 1, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_functions_are_nodes_of_torch_fx(name):
    function, n, options = CALLS[name]
    model = Calls(function, n, **options)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"][0] is function
    heads = torch.randn(N, H, S, 4)
    assert torch.equal(traced(heads), model(heads))


class VisionAttention(nn.Module):
    """In the shape of timm's."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.scale = H, (E // H) ** -0.5
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x):
        B, n, C = x.shape
        q, k, v = self.qkv(x).reshape(B, n, 3, H, C // H).permute(2, 0, 3, 1, 4).unbind(0)
        out = nn.functional.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.proj(out.transpose(1, 2).reshape(B, n, C))


def test_packed_attention_is_traced_through_as_before():
    """Its projections are nodes that feature extraction and quantisation find."""
    model = nn.Sequential(VisionAttention())
    before = torch.fx.symbolic_trace(model)
    assert mha_ext.swap_attention(model).replaced
    after = torch.fx.symbolic_trace(model)
    leaves = [[n.target for n in graph.graph.nodes if n.op == "call_module"] for graph in (before, after)]
    assert leaves[0] == leaves[1] == ["0.qkv", "0.proj"]
    assert mha_ext.scaled_dot_product_attention in [n.target for n in after.graph.nodes]
    torch.testing.assert_close(after(x().float()), before(x().float()))


def lora(model, when):
    """Outputs and losses of training with LoRA, then merged; of a model that is swapped before, after, or not at all."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    if when == "before":
        assert mha_ext.swap_attention(model).replaced
    model = get_peft_model(model, LoraConfig(target_modules=["attn"], r=2, init_lora_weights=False))
    if when == "after":
        assert len(mha_ext.swap_attention(model).replaced) == 1
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) < 200
    optimizer, found = torch.optim.SGD(trained, 1e-4), []
    for _ in range(3):
        loss = model(x()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    model.eval()
    found.append(model(x()).detach())
    with torch.no_grad():
        found.append(model(x()))
        with model.disable_adapter():
            found.append(model(x()))
    merged = model.merge_and_unload()
    found.append(merged(x()).detach())
    assert type(merged.attn) in (nn.MultiheadAttention, mha_ext.nn.MultiheadAttention)
    if when == "before":
        assert type(merged.attn) is mha_ext.nn.MultiheadAttention
    return found


needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


@needs_peft
@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_lora_of_peft(when):
    expected = lora(Model(), "never")
    found = lora(Model(mha_ext.nn.MultiheadAttention) if when == "never" else Model(), when)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.allclose(expected[3], expected[5])  # the adapter does something


@needs_peft
def test_lora_in_torchs_encoder():
    """torch's fast path for evaluation reads the parameters below the adapter; a swapped model does not let it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=f64)
    model = nn.TransformerEncoder(layer, 2)
    report = mha_ext.swap_attention(model)
    model = get_peft_model(model, LoraConfig(target_modules=["self_attn"], r=2, init_lora_weights=False)).eval()
    expected = model(x()).detach()
    with torch.no_grad():
        torch.testing.assert_close(model(x()), expected)
        with model.disable_adapter():
            assert not torch.allclose(model(x()), expected)
    report.undo()
    assert type(model.base_model.model.layers[0].self_attn.base_layer) is nn.MultiheadAttention


@needs_peft
def test_lora_of_self_attention():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    base = nn.Sequential(mha_ext.nn.SelfAttention(E, H, causal=True, rope=True))
    model = get_peft_model(base, LoraConfig(target_modules=["qkv_proj", "out_proj"], r=2, init_lora_weights=False)).eval()
    inputs = x().float()
    expected = model(inputs)
    expected.sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    cache = base[0].make_cache(N, 8)
    with torch.no_grad():
        steps = [base[0](inputs[:, t : t + 1], cache=cache) for t in range(S)]
    torch.testing.assert_close(torch.cat(steps, 1), expected.detach())
    torch.testing.assert_close(model.merge_and_unload()(inputs), expected)
