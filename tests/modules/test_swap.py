"""swap_attention: same objects, same weights, same results, our kernels; and back."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
from op_names import Ops
from torch import nn

import mha_ext
from mha_ext.swap import PackedAttention

N, S, E, H = 2, 7, 12, 2


class Attention(nn.Module):
    """Self-attention in the shape of timm's."""

    def __init__(self, dim=E, heads=H, norm=False, gated=False, dropout=0.0, fused=True):
        super().__init__()
        self.num_heads, self.head_dim, self.scale, self.fused_attn = heads, dim // heads, (dim // heads) ** -0.5, fused
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = nn.LayerNorm(self.head_dim) if norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if norm else nn.Identity()
        self.attn_drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(dim) if norm else nn.Identity()
        self.gate = nn.Linear(dim, dim) if gated else None
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def weights(self, q, k, attn_mask, is_causal):
        scores = q * self.scale @ k.transpose(-1, -2)
        if is_causal:
            attn_mask = torch.ones(x := q.shape[-2], x, dtype=torch.bool).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return self.attn_drop(scores.softmax(-1))

    def attend(self, x, attn_mask=None, is_causal=False):
        B, length, C = x.shape
        q, k, v = self.qkv(x).reshape(B, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        out = self.weights(self.q_norm(q), self.k_norm(k), attn_mask, is_causal) @ v
        out = self.norm(out.transpose(1, 2).reshape(B, length, C))
        out = out * self.gate(x).sigmoid() if self.gate is not None else out
        return self.proj_drop(self.proj(out))

    def forward(self, x, attn_mask=None, is_causal=False):
        return self.attend(x, attn_mask, is_causal)


class Old(Attention):
    def forward(self, x):
        return self.attend(x)


class OtherScale(Attention):
    def forward(self, x):
        return self.attend(2 * x)


class OtherArguments(Attention):
    def forward(self, x, rope):
        return self.attend(x + rope)


class RelativePositions(Attention):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(H, S, S))


class Windowed(Attention):
    def __init__(self):
        super().__init__()
        self.relative = nn.Linear(2, 2)


def nonzero(model: nn.Module) -> nn.Module:
    """No parameter is 0 or 1: biases and norms must count."""
    torch.manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def encoder(**options) -> nn.Module:
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64, **options)
    return nonzero(nn.TransformerEncoder(layer, 2))


def padding() -> torch.Tensor:
    return torch.arange(S) >= torch.tensor([[S], [S - 3]])


def state(model: nn.Module) -> dict:
    """Everything that must stay: identities of modules, tensors and hooks, flags, types, devices."""
    kept = {}
    for name, module in model.named_modules():
        kept[name] = id(module), module.training, list(module._forward_hooks.values())
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        kept[name] = id(x), x.dtype, x.device, x.requires_grad
    return kept


def test_everything_else_stays():
    model = encoder()
    model.layers[1].eval()
    model.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    calls = []
    model.layers[1].self_attn.register_forward_hook(lambda module, inputs, output: calls.append(type(module)))
    before, saved, types = state(model), copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    report = mha_ext.swap_attention(model)
    assert report.replaced == {
        "layers.0.self_attn": "torch.nn.MultiheadAttention", "layers.1.self_attn": "torch.nn.MultiheadAttention",
    }  # fmt: skip
    assert report.kept == {} and "2 attention modules replaced, 0 kept" in str(report)
    assert state(model) == before and list(model.state_dict()) == list(saved)
    model(torch.randn(N, S, E, dtype=torch.float64))
    assert calls == [mha_ext.nn.MultiheadAttention]
    report.undo()
    assert [type(m) for m in model.modules()] == types and report.replaced == {}
    assert state(model) == before
    for name, x in model.state_dict().items():
        assert torch.equal(x, saved[name])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_torch_encoder(training, nested, padded):
    """Outputs stay; where torch took its fast path, ours do not let it; undo brings it back."""
    model = encoder().train(training)
    model.use_nested_tensor = nested
    x, pad = torch.randn(N, S, E, dtype=torch.float64), padding() if padded else None
    with torch.no_grad(), Ops() as ops:
        expected = model(x, src_key_padding_mask=pad)
    assert ops.torchs() and ("aten::_transformer_encoder_layer_fwd" in ops.names) == (not training)
    report = mha_ext.swap_attention(model)
    with torch.no_grad(), Ops() as ops:
        out = model(x, src_key_padding_mask=pad)
    assert ops.ours() == 2 and not ops.torchs()
    there = ~pad if padded else slice(None)
    torch.testing.assert_close(out[there], expected[there])
    assert out.shape == expected.shape
    report.undo()
    with torch.no_grad(), Ops() as ops:
        again = model(x, src_key_padding_mask=pad)
    assert ops.ours() == 0 and torch.equal(again[there], expected[there])


def test_torch_decoder_with_gradients():
    layer = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    model = nonzero(nn.TransformerDecoder(layer, 2))
    x, memory = torch.randn(N, S, E, dtype=torch.float64), torch.randn(N, 5, E, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    results = []
    for step in ("before", "after"):
        if step == "after":
            assert len(mha_ext.swap_attention(model).replaced) == 4
        with Ops() as ops:
            out = model(x, memory, tgt_mask=causal, tgt_is_causal=True)
        assert ops.ours() == (4 if step == "after" else 0)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    for a, b in zip(*results):
        torch.testing.assert_close(b, a)


OPTIONS = [
    {}, {"bias": False}, {"kdim": 10, "vdim": 8}, {"add_bias_kv": True, "add_zero_attn": True}, {"batch_first": True},
    {"dropout": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_model_itself(options):
    model = nonzero(nn.MultiheadAttention(E, H, dtype=torch.float64, **options)).eval()
    q = torch.randn(S, N, E, dtype=torch.float64)
    k, v = (torch.randn(S, N, options.get(n, E), dtype=torch.float64) for n in ("kdim", "vdim"))
    expected, flag = model(q, k, v), model._qkv_same_embed_dim
    report = mha_ext.swap_attention(model)
    assert list(report.replaced) == [""] and type(model) is mha_ext.nn.MultiheadAttention
    for a, b in zip(model(q, k, v), expected):
        torch.testing.assert_close(a, b)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in copies:
        torch.testing.assert_close(other(q, k, v)[0], expected[0])
    report.undo()
    assert type(model) is nn.MultiheadAttention and model._qkv_same_embed_dim == flag
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert list(copies[0].state_dict()) == list(model.state_dict())


def test_twice_changes_nothing_more():
    model = nn.Sequential(encoder(), Attention())
    assert len(mha_ext.swap_attention(model).replaced) == 3
    report = mha_ext.swap_attention(model)
    assert report.replaced == {} and report.kept == {}


def test_shared_modules_are_replaced_once():
    one = nn.MultiheadAttention(E, H)
    model = nn.ModuleList([one, one])
    assert list(mha_ext.swap_attention(model).replaced) == ["0"]
    assert model[1] is one and type(one) is mha_ext.nn.MultiheadAttention


class Subclass(nn.MultiheadAttention):
    pass


def with_hook_on_out_proj():
    module = nn.MultiheadAttention(E, H)
    module.out_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


class LinearAttention(nn.Module):
    pass


KEPT = {
    "subclass": (lambda: Subclass(E, H), r"Subclass may do more than torch.nn.MultiheadAttention"),
    "hook on out_proj": (with_hook_on_out_proj, "hooks on out_proj, which torch reads and does not call"),
    "another attention": (LinearAttention, "LinearAttention is neither"),
    "relative positions": (RelativePositions, r"RelativePositions has tensors of its own \(bias\)"),
    "another submodule": (Windowed, "Windowed has relative besides"),
    "other arguments": (OtherArguments, r"forward takes rope; accepted: x, attn_mask, is_causal"),
    "another formula": (OtherScale, "OtherScale computes something else"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_and_why(name):
    make, reason = KEPT[name]
    module = make()
    kind = type(module)
    report = mha_ext.swap_attention(nn.Sequential(module))
    assert report.replaced == {} and list(report.kept) == ["0"] and type(module) is kind
    assert re.search(reason, report.kept["0"]), report.kept["0"]
    assert "  0: kept, " in str(report)


@pytest.mark.parametrize("make", [lambda: nn.MultiheadAttention(E, H), Attention])
def test_forward_set_on_the_object_is_kept(make):
    module = make()
    module.forward = lambda x: x
    assert "set on the object" in mha_ext.swap_attention(module).kept[""]


def test_meta_device_is_kept():
    with torch.device("meta"):
        model = nn.Sequential(Attention(), nn.MultiheadAttention(E, H))
    report = mha_ext.swap_attention(model)
    assert list(report.replaced) == ["1"] and "meta device" in report.kept["0"]


PACKED = [{}, {"norm": True}, {"gated": True}, {"norm": True, "gated": True, "heads": 3}]


@pytest.mark.parametrize("options", PACKED, ids=str)
@pytest.mark.parametrize("kind", [Attention, Old])
def test_packed(kind, options):
    model = nonzero(kind(**options)).double()
    before = state(model)
    x = torch.randn(N, S, E, dtype=torch.float64)
    calls = [{}]
    if kind is Attention:
        seen = torch.rand(N, 1, S, S) < 0.5
        seen |= torch.eye(S, dtype=torch.bool)
        calls += [{"is_causal": True}, {"attn_mask": seen}, {"attn_mask": torch.randn(S, S, dtype=torch.float64)}]

    def results():
        found = []
        for call in calls:
            out = model(x, **call)
            found += [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]
        return found

    expected = results()
    report = mha_ext.swap_attention(model)
    assert report.replaced == {"": f"{kind.__module__}.{kind.__qualname__}"} and type(model) is PackedAttention
    assert state(model) == before
    with Ops() as ops:
        model(x)
    assert ops.ours() == 1
    for a, b in zip(results(), expected):
        torch.testing.assert_close(a, b)
    assert model.float()(x.float()).dtype == torch.float32  # modules convert and move as before
    report.undo()
    assert type(model) is kind


def test_packed_dropout_and_hooks():
    """Trying a copy runs no hook; dropout of weights is on in training only."""
    model = nonzero(Attention(dropout=0.5))
    calls = []
    model.qkv.register_forward_hook(lambda *_: calls.append(1))
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert mha_ext.swap_attention(model).replaced
    assert not calls
    x = torch.randn(N, S, E)
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))
    assert len(calls) == 8


def test_compiled_before(fresh_compiler):
    """Compiled code notices that the modules changed."""
    graphs = []
    model = encoder().eval()
    compiled = torch.compile(model, backend=lambda module, inputs: graphs.append(str(module.graph)) or module)
    x = torch.randn(N, S, E, dtype=torch.float64)
    expected = compiled(x)
    assert len(graphs) == 1 and "mha_ext" not in graphs[0]
    assert len(mha_ext.swap_attention(compiled).replaced) == 2
    torch.testing.assert_close(compiled(x), expected)
    assert len(graphs) == 2 and graphs[1].count("mha_ext.attention_fwd") == 2


def sharded(n):
    """FSDP2 after swap_attention gives the gradients of one process; before it, a clear refusal."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (n,))
    torch.manual_seed(0)
    alone = encoder()
    model = copy.deepcopy(alone)
    assert len(mha_ext.swap_attention(model).replaced) == 2
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1)
    x = torch.randn(2 * n, S, E, dtype=torch.float64)
    mine = x.chunk(n)[mesh.get_local_rank()]
    model(mine).square().mean().backward()
    alone(x).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, name=name: f"{name}: {m}")
    other = encoder()
    fully_shard(other.layers[0], mesh=mesh)
    try:
        mha_ext.swap_attention(other)
    except ValueError as error:
        return str(error), [type(layer.self_attn).__name__ for layer in other.layers]
    raise AssertionError("a sharded model was accepted")


def test_with_fully_shard():
    from processes import Processes

    processes = Processes(2)
    try:
        for text, kinds in processes.run(sharded, 2):
            assert "layers.0 is sharded already" in text and "before fully_shard" in text
            assert kinds == ["MultiheadAttention"] * 2
    finally:
        processes.stop()


def test_undo_refuses_what_was_wrapped_since():
    model = nn.MultiheadAttention(E, H)
    report = mha_ext.swap_attention(model)
    nn.utils.parametrizations.weight_norm(model, "in_proj_weight")  # changes the class
    with pytest.raises(ValueError, match=r"the model is a ParametrizedMultiheadAttention by now; accepted"):
        report.undo()


def test_not_a_module():
    with pytest.raises(TypeError, match=r"model is a dict; accepted: a torch.nn.Module"):
        mha_ext.swap_attention({})


# --- Models of torchvision and timm: .ci/run has them beside the later torch, which torchvision is built for ------------


def same_after_swap(model, image_size: int, expected: dict[str, str]) -> None:
    """Outputs in evaluation and gradients in training, before, after, and after undo."""
    x = torch.randn(2, 3, image_size, image_size, dtype=torch.float64)
    model = nonzero(model.double())

    def results():
        with torch.no_grad():
            out = model.eval()(x)
        loss = model.train()(x).square().sum()
        return [out, *torch.autograd.grad(loss, list(model.parameters()))]

    before = results()
    report = mha_ext.swap_attention(model)
    assert report.replaced == expected and report.kept == {}
    with torch.no_grad(), Ops() as ops:
        model(x)
    assert ops.ours() == len(expected) and not ops.torchs()
    for a, b in zip(results(), before, strict=True):
        torch.testing.assert_close(a, b)
    report.undo()
    for a, b in zip(results(), before, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_vision_transformer_of_torchvision():
    torchvision = pytest.importorskip("torchvision")
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48}
    model = torchvision.models.VisionTransformer(**sizes, num_classes=5)
    same_after_swap(
        model, 32, {f"encoder.layers.encoder_layer_{i}.self_attention": "torch.nn.MultiheadAttention" for i in (0, 1)}
    )


@pytest.mark.parametrize("name, options", [
    ("vit_tiny_patch16_224", {}), ("vit_tiny_patch16_224", {"qk_norm": True}), ("deit3_small_patch16_224", {}),
], ids=str)  # fmt: skip
def test_vision_transformer_of_timm(name, options):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=5, depth=2, img_size=32, **options)
    same_after_swap(model, 32, {f"blocks.{i}.attn": "timm.layers.attention.Attention" for i in (0, 1)})


def test_vision_attention_of_another_shape_is_kept():
    timm = pytest.importorskip("timm")
    report = mha_ext.swap_attention(timm.create_model("eva02_tiny_patch14_224", num_classes=5, depth=1))
    assert report.replaced == {}
    assert "EvaAttention has tensors of its own" in report.kept["blocks.0.attn"]
