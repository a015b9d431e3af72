"""Rotary position embedding (Su et al., "RoFormer", 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from . import _inputs
from ._torchs_ways import NotScriptable, be_a_leaf


class RotaryEmbedding(NotScriptable, torch.nn.Module):
    """Rotates queries or keys by angles by position: scores then depend on distances.

    Half-split convention: feature d turns with feature d + head_dim / 2, by position * base**(-2 d / head_dim).
    Computed in float32 (float64 for float64 inputs) whatever the input's type.

    Args:
        head_dim: the head size, even.
        base: the geometric series of wavelengths runs from 2 pi towards 2 pi * base.
    """

    def __init__(self, head_dim: int, base: float = 10000.0):
        super().__init__()
        _checks.size("head_dim", head_dim)
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; rotary embeddings accept an even head size: choose one.")
        self.head_dim, self.base = head_dim, _inputs.base_of_angles("base", base)
        be_a_leaf(self)

    def forward(self, x: Tensor, start: int | Tensor = 0) -> Tensor:
        """x [B,H,S,head_dim], rotated, in x's type. The positions are start, start + 1, ...; start is an int, or an
        integer tensor [B]."""
        _checks.one_tensor(x, "x", f"[B,H,S,{self.head_dim}]", 4, None)
        if x.shape[3] != self.head_dim:
            raise ValueError(f"x has shape {_checks.text(x.shape)}; accepted: [B,H,S,{self.head_dim}].")
        if isinstance(start, Tensor):
            start = _checks.integer_tensor(start, "start", "[B], or an int", 1)
        elif isinstance(start, bool) or not isinstance(start, (int, torch.SymInt)):
            raise TypeError(f"start is {_checks.given(start)}; accepted: an int, or an integer tensor [B].")
        half = self.head_dim // 2
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        frequencies = self.base ** (torch.arange(half, device=x.device, dtype=dtype) * (-1.0 / half))
        positions = torch.arange(x.shape[-2], device=x.device)
        positions = positions + (start[:, None, None] if isinstance(start, Tensor) else start)
        angles = positions[..., None].to(dtype) * frequencies  # [S,half], or [B,1,S,half]
        cos, sin = angles.cos(), angles.sin()
        low, high = x[..., :half].to(dtype), x[..., half:].to(dtype)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base}"
