"""The ways to compute attention that the benchmark compares, all as `(q, k, v, ...) -> out` on [B, H, S, D]."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mha_ext


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    queries: int
    head_dim: int
    causal: bool = False
    kv_heads: int | None = None
    keys: int | None = None

    @property
    def Hk(self) -> int:
        return self.kv_heads or self.heads

    @property
    def Sk(self) -> int:
        return self.keys or self.queries

    def flops(self, backward: bool, pairs: float | None = None) -> float:
        """Of the two (backward: seven) matrix products over the visible pairs; the softmax is not counted."""
        if pairs is None:
            pairs = self.queries * (self.queries + 1) / 2 if self.causal else self.queries * self.Sk
        return (14 if backward else 4) * self.batch * self.heads * pairs * self.head_dim

    @property
    def scores_bytes(self) -> int:
        """What the textbook's scores take in fp32: the 4*B*H*S^2 of the claims."""
        return 4 * self.batch * self.heads * self.queries * self.Sk

    def inputs(self, dtype: torch.dtype, requires_grad: bool = False) -> list[Tensor]:
        torch.manual_seed(0)
        B, D = self.batch, self.head_dim
        sizes = (B, self.heads, self.queries, D), (B, self.Hk, self.Sk, D), (B, self.Hk, self.Sk, D)
        return [torch.randn(size).to(dtype).requires_grad_(requires_grad) for size in sizes]

    def __str__(self) -> str:
        heads = f"H{self.heads}" if self.Hk == self.heads else f"H{self.heads}/{self.Hk}"
        length = f"S{self.queries}" if self.Sk == self.queries else f"Sq{self.queries} Sk{self.Sk}"
        return f"B{self.batch} {heads} {length} D{self.head_dim}" + (" causal" if self.causal else "")


@cache
def hidden_by_causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu_(1)


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    hidden: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """The textbook: scores, mask, softmax, dropout, weighted sum, each a call of torch."""
    if k.shape[1] != q.shape[1]:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        hidden = hidden_by_causal(q.shape[2])
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1)
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    return weights @ v


def talking_heads(q: Tensor, k: Tensor, v: Tensor, pre_mix: Tensor, post_mix: Tensor) -> Tensor:
    """The textbook of talking heads, in the einsums of its paper."""
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    weights = torch.einsum("bhij,hg->bgij", scores, pre_mix).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", torch.einsum("bhij,hg->bgij", weights, post_mix), v)


def loop(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """One head after the other."""
    groups = q.shape[1] // k.shape[1]
    heads = []
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h // groups].transpose(-2, -1) * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(hidden_by_causal(q.shape[2]), float("-inf"))
        heads.append(scores.softmax(-1) @ v[:, h // groups])
    return torch.stack(heads, 1)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **kwargs: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1], **kwargs)


def ours(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **kwargs: Any) -> Tensor:
    if causal:
        kwargs["mask"] = mha_ext.masks.Causal()
    return mha_ext.attention(q, k, v, **kwargs)


@cache
def compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 64  # each shape and dtype is a specialised kernel
    return torch.compile(flex_attention, dynamic=False)


def flex(q: Tensor, k: Tensor, v: Tensor, visible: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """FlexAttention's compiled kernel for these inputs, as a call without arguments (no backward on CPU)."""
    from torch.nn.attention.flex_attention import create_block_mask

    block_mask = None
    if visible is not None:
        block_mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device=q.device)
    return lambda: compiled_flex()(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])


def training(forward: Callable[..., Any], inputs: list[Tensor], dout: Tensor) -> Callable[..., Any]:
    """Forward and backward: the output and the gradients of the inputs."""

    def step() -> tuple[Tensor, ...]:
        out = forward()
        return out.detach(), *torch.autograd.grad(out, inputs, dout)

    return step
