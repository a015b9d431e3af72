"""use_for_sdpa in programs that were not written for it: their results and gradients are those of torch's kernels, in float64 to
rounding, and their attention runs on ours."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_use_for_sdpa import kernels_of
from torch import nn

import mha_ext
from mha_ext import _aten


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(_aten, "_FEW", {})
    monkeypatch.setattr(_aten, "_FEW_OF_ONE_QUERY", 0)


def same_in_use(model: nn.Module, run, calls: int) -> None:
    """run() in evaluation, and its gradients in training, without and with the use, in which attention runs `calls` times."""
    model = model.double()

    def results():
        with torch.no_grad():
            model.eval()
            out = run()
        leaves = [p for p in model.parameters() if p.requires_grad]
        loss = run().sin().sum()  # in evaluation: no dropout
        return [out, *torch.autograd.grad(loss, leaves, allow_unused=True)]

    expected = results()
    with mha_ext.use_for_sdpa():
        found, kernels = kernels_of(results)
    assert kernels == {"attention_fwd": 2 * calls, "attention_bwd": calls}
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            # Another order of sums differs in the last digits, another formula in the first.
            limit = torch.finfo(torch.float64).eps ** 0.5 * max(1.0, float(b.abs().max()))
            torch.testing.assert_close(a, b, rtol=0, atol=limit)


@pytest.mark.parametrize("name, calls", [
    ("LlamaForCausalLM", 2), ("BertForMaskedLM", 2), ("ViTModel", 2), ("WhisperForConditionalGeneration", 6),
    ("T5ForConditionalGeneration", 6),
])  # fmt: skip
def test_transformers(name, calls):
    """Their "sdpa", on padded batches."""
    transformers = pytest.importorskip("transformers")
    from test_transformers import config_of

    kind = {"L": "llama", "B": "bert", "V": "vit", "W": "whisper", "T": "t5"}[name[0]]
    model = getattr(transformers, name)._from_config(config_of(kind), attn_implementation="sdpa")
    ids = torch.randint(2, 61, (2, 11))
    padding = torch.ones(2, 11, dtype=torch.int64)
    padding[1, -4:] = 0
    match kind:
        case "vit":
            inputs = {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
        case "whisper":
            features = torch.randn(2, 8, 24, dtype=torch.float64)
            inputs = {"input_features": features, "decoder_input_ids": ids, "decoder_attention_mask": padding}
        case "t5":
            inputs = {"input_ids": ids, "attention_mask": padding, "decoder_input_ids": ids.flip(1)[:, :7]}
        case _:
            inputs = {"input_ids": ids, "attention_mask": padding}
    options = {} if kind in ("vit", "bert") else {"use_cache": False}
    same_in_use(model, lambda: model(**inputs, **options)[0], calls)


def test_transformers_generates_the_same():
    transformers = pytest.importorskip("transformers")
    from test_transformers import config_of

    model = transformers.LlamaForCausalLM._from_config(config_of("llama"), attn_implementation="sdpa").double().eval()
    ids = torch.randint(2, 61, (2, 7))
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **options)
    with mha_ext.use_for_sdpa():
        found, kernels = kernels_of(lambda: model.generate(ids, **options))
    assert torch.equal(found, expected) and kernels["attention_fwd"] == 2 * 8


def test_diffusion_transformers():
    """Joint attention of text and image (Stable Diffusion 3), and cross-attention (PixArt)."""
    diffusers = pytest.importorskip("diffusers")
    small = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "sample_size": 8, "patch_size": 2, "in_channels": 4}
    joint = diffusers.SD3Transformer2DModel(
        **small, joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=12, out_channels=4, pos_embed_max_size=8
    )
    image, text, pooled = (torch.randn(n, dtype=torch.float64) for n in ((2, 4, 8, 8), (2, 5, 16), (2, 12)))
    time = torch.tensor([3, 40])
    same_in_use(joint, lambda: joint(image, text, pooled, time)[0], 2)
    cross = diffusers.PixArtTransformer2DModel(**small, out_channels=4, cross_attention_dim=16, caption_channels=16, norm_num_groups=4)
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    more = {"resolution": None, "aspect_ratio": None}
    same_in_use(cross, lambda: cross(image, text, time, more, encoder_attention_mask=mask)[0], 4)


def test_diffusion_autoencoder():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.AutoencoderKL(block_out_channels=(16,), norm_num_groups=4, latent_channels=2)
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    same_in_use(model, lambda: model(x).sample, 2)


def test_torchtune():
    """Grouped heads and a mask [B,S,S]."""
    modules = pytest.importorskip("torchtune.modules", exc_type=ImportError)
    E, H, Hk, D = 32, 4, 2, 8
    model = modules.MultiHeadAttention(
        embed_dim=E, num_heads=H, num_kv_heads=Hk, head_dim=D, q_proj=nn.Linear(E, H * D), k_proj=nn.Linear(E, Hk * D),
        v_proj=nn.Linear(E, Hk * D), output_proj=nn.Linear(E, E), is_causal=True,
    )  # fmt: skip
    x = torch.randn(2, 9, E, dtype=torch.float64)
    same_in_use(model, lambda: model(x, x), 1)
    mask = torch.ones(2, 9, 9, dtype=torch.bool).tril()
    same_in_use(model, lambda: model(x, x, mask=mask), 1)


class Gpt(nn.Module):
    """As people write it."""

    def __init__(self, E=32, H=4):
        super().__init__()
        self.H, self.embedding, self.head = H, nn.Embedding(61, E), nn.Linear(E, 61)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(E), nn.Linear(E, 3 * E), nn.Linear(E, E), nn.LayerNorm(E), nn.Linear(E, E)])
            for _ in range(2)
        )

    def forward(self, ids):
        x = self.embedding(ids)
        B, S, E = x.shape
        for norm, qkv, proj, norm2, mlp in self.layers:
            q, k, v = (t.view(B, S, self.H, E // self.H).transpose(1, 2) for t in qkv(norm(x)).split(E, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
            x = x + proj(y.transpose(1, 2).contiguous().view(B, S, E))
            x = x + mlp(F.gelu(norm2(x)))
        return self.head(x)


def test_gpt():
    model = Gpt()
    ids = torch.randint(61, (2, 20))
    same_in_use(model, lambda: model(ids), 2)


def test_gpt_trains_compiled(fresh_compiler):
    model, ids = Gpt(), torch.randint(61, (2, 64))

    def gradients(step):
        loss = F.cross_entropy(step(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
        return torch.autograd.grad(loss, list(model.parameters()))

    model.double()
    expected = gradients(model)
    with mha_ext.use_for_sdpa():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        gradients(compiled)
        found, kernels = kernels_of(lambda: gradients(compiled))
    assert kernels == {"attention_fwd": 2, "attention_bwd": 2}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_vision_transformer_of_torchvision():
    torchvision = pytest.importorskip("torchvision")
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48}
    model = torchvision.models.VisionTransformer(**sizes, num_classes=5)
    nn.init.normal_(model.heads.head.weight)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    same_in_use(model, lambda: model(x), 2)


@pytest.mark.parametrize("name, options", [
    ("vit_tiny_patch16_224", {"depth": 2}), ("eva02_tiny_patch14_224", {"depth": 2, "img_size": 28}),
    ("vit_relpos_small_patch16_224", {"depth": 2}),
], ids=str)  # fmt: skip
def test_vision_transformer_of_timm(name, options):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=5, **{"img_size": 32, **options})
    x = torch.randn(2, 3, model.patch_embed.img_size[0], model.patch_embed.img_size[1], dtype=torch.float64)
    same_in_use(model, lambda: model(x), 2)
