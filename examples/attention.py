"""The attention of the training examples on either backend, with parameters of the same names: weights move over."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_ext


class TorchSelfAttention(nn.Module):
    """What mha_ext.nn.SelfAttention computes, on torch's scaled_dot_product_attention."""

    def __init__(self, d_model: int, num_heads: int, *, num_kv_heads: int | None = None, rope=False, causal=False):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.rope, self.causal = num_heads, num_kv_heads or num_heads, rope, causal
        self.head_dim = d_model // num_heads
        self.qkv_proj = nn.Linear(d_model, (num_heads + 2 * self.num_kv_heads) * self.head_dim)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.rope:
            q, k = rotate(q), rotate(k)
        grouped = self.num_heads != self.num_kv_heads
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal, enable_gqa=grouped)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class TorchCrossAttention(nn.Module):
    """What mha_ext.nn.CrossAttention computes, on torch's scaled_dot_product_attention."""

    def __init__(self, d_model: int, num_heads: int):
        super().__init__()
        self.head_dim = d_model // num_heads
        self.q_proj, self.kv_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, 2 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = self.kv_proj(context).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).chunk(2, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(out.transpose(1, 2).flatten(2))


def rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary positions: feature d and feature d + D / 2 are a plane that turns with the position."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * base ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def padding(backend: str, lengths: Tensor, length: int):
    """The mask, as the backend takes it, that hides the keys beyond each sequence's length."""
    if backend == "mha_ext":
        return mha_ext.masks.Padding(lengths)
    return (torch.arange(length) < lengths[:, None])[:, None, None]


SELF = {"mha_ext": mha_ext.nn.SelfAttention, "torch": TorchSelfAttention}
CROSS = {"mha_ext": mha_ext.nn.CrossAttention, "torch": TorchCrossAttention}
