"""Rotary position embedding (Su et al., "RoFormer", 2021), and what scales it to longer sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from . import _inputs
from ._torchs_ways import NotScriptable, be_a_leaf


@dataclass(frozen=True)
class RopeScaling:
    """Base of the ways to stretch rotary embeddings over sequences longer than those of training, by factor >= 1.

    Frozen dataclasses of numbers, which are positive (factor at least 1).
    """

    factor: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "attention_factor" and value is None:
                continue
            _checks.number(name, value)
            low = 1 if name == "factor" else 0
            if not low <= value < math.inf or value == 0:
                accepted = "a number >= 1" if name == "factor" else "a positive number"
                raise ValueError(f"{name} is {value}; {type(self).__name__} accepts {accepted}.")

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        """The angle per position of each pair of features, given those without scaling: [head_dim / 2] to the same."""
        raise NotImplementedError(
            f"{type(self).__name__} has no frequencies(plain, base); a scaling defines it: [head_dim / 2] to the same."
        )

    @property
    def magnitude(self) -> float:
        """What rotated queries and keys are multiplied by."""
        return 1.0

    @staticmethod
    def of(parameters: Mapping[str, Any] | None) -> RopeScaling | None:
        """What rope_parameters (before version 5 rope_scaling) of a configuration of transformers says; None for no scaling.

        Raises:
            ValueError: a kind that there is not here ("dynamic" and "longrope" depend on the length of each call).
        """
        given = dict(parameters or {})
        kind = given.get("rope_type", given.get("type", "default"))
        if kind == "default":
            return None
        if kind == "linear":
            return LinearScaling(given["factor"])
        if kind == "llama3":
            lengths = given["original_max_position_embeddings"]
            return Llama3Scaling(given["factor"], lengths, given["low_freq_factor"], given["high_freq_factor"])
        if kind == "yarn" and not any(given.get(name) for name in ("mscale", "mscale_all_dim")) and given.get("truncate", True):
            names = {"beta_fast": "fast", "beta_slow": "slow", "attention_factor": "attention_factor"}
            options = {name: given[theirs] for theirs, name in names.items() if given.get(theirs) is not None}
            return YaRNScaling(given["factor"], given["original_max_position_embeddings"], **options)
        raise ValueError(
            f"rope_parameters are {given}; accepted: rope_type default, linear, llama3 or yarn (without mscale, mscale_all_dim "
            "and truncate=False): rotate outside, and pass the heads to mha_ext.attention."
        )


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Positions divided by factor (Chen et al., "Extending context window of large language models via positional
    interpolation", 2023)."""

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        return plain / self.factor


@dataclass(frozen=True)
class NTKScaling(RopeScaling):
    """A larger base, so that the slowest pair of features is divided by factor and the fastest stays ("NTK-aware"
    interpolation, described by Peng et al., "YaRN", 2023, section 3.1)."""

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        half = plain.shape[0]
        pair = torch.arange(half, device=plain.device, dtype=plain.dtype)
        return plain * self.factor ** (pair * (-1.0 / max(half - 1, 1)))


@dataclass(frozen=True)
class YaRNScaling(RopeScaling):
    """Pairs that turn less than slow times within the original length are divided by factor, those that turn more than fast
    times stay, and those between are mixed; queries and keys grow by 0.1 ln(factor) + 1, or by attention_factor (Peng et
    al., "YaRN: Efficient context window extension of large language models", 2023)."""

    original_length: int
    fast: float = 32.0
    slow: float = 1.0
    attention_factor: float | None = None

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        half = plain.shape[0]

        def pair_that_turns(times: float) -> float:
            return half * math.log(self.original_length / (times * 2 * math.pi)) / math.log(base)

        first = max(math.floor(pair_that_turns(self.fast)), 0)
        last = min(math.ceil(pair_that_turns(self.slow)), 2 * half - 1)
        pair = torch.arange(half, device=plain.device, dtype=plain.dtype)
        scaled = ((pair - first) / max(last - first, 0.001)).clamp(0, 1)
        return plain / self.factor * scaled + plain * (1 - scaled)

    @property
    def magnitude(self) -> float:
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Pairs whose wavelength is longer than original_length / low are divided by factor, those shorter than original_length /
    high stay, and those between are mixed (Grattafiori et al., "The Llama 3 herd of models", 2024; in the models since 3.1)."""

    original_length: int = 8192
    low: float = 1.0
    high: float = 4.0

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        turns = plain * (self.original_length / (2 * math.pi))  # within the original length
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain / self.factor * (1 - kept) + plain * kept

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high <= self.low:
            raise ValueError(f"low, high are {self.low}, {self.high}; Llama3Scaling accepts high > low.")


class RotaryEmbedding(NotScriptable, torch.nn.Module):
    """Rotates queries or keys by angles by position: scores then depend on distances.

    Half-split convention: feature d turns with feature d + head_dim / 2, by position * base**(-2 d / head_dim).
    Computed in float32 (float64 for float64 inputs) whatever the input's type.

    Args:
        head_dim: the head size, even.
        base: the geometric series of wavelengths runs from 2 pi towards 2 pi * base.
        scaling: for sequences longer than those of training: LinearScaling, NTKScaling, YaRNScaling or Llama3Scaling.
    """

    def __init__(self, head_dim: int, base: float = 10000.0, scaling: RopeScaling | None = None):
        super().__init__()
        _checks.size("head_dim", head_dim)
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; rotary embeddings accept an even head size: choose one.")
        if scaling is not None and not isinstance(scaling, RopeScaling):
            raise TypeError(
                f"scaling is {_checks.given(scaling)}; accepted: LinearScaling, NTKScaling, YaRNScaling, Llama3Scaling, or "
                "None: RopeScaling.of(rope_parameters) reads a configuration of transformers."
            )
        self.head_dim, self.base, self.scaling = head_dim, _inputs.base_of_angles("base", base), scaling
        be_a_leaf(self)

    def forward(self, x: Tensor, start: int | Tensor = 0, position_ids: Tensor | None = None) -> Tensor:
        """x [B,H,S,head_dim], rotated, in x's type. The positions are start, start + 1, ...; start is an int, or an
        integer tensor [B]. Or they are position_ids, integer [S] or [B,S].

        Raises:
            ValueError, TypeError: shapes, types or devices that do not fit, in one sentence.
        """
        _checks.one_tensor(x, "x", f"[B,H,S,{self.head_dim}]", 4, None)
        if x.shape[3] != self.head_dim:
            raise ValueError(f"x has shape {_checks.text(x.shape)}; accepted: [B,H,S,{self.head_dim}].")
        positions = self._counted(x, start) if position_ids is None else self._given(x, position_ids)
        half = self.head_dim // 2
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        frequencies = self.base ** (torch.arange(half, device=x.device, dtype=dtype) * (-1.0 / half))
        if self.scaling is not None:
            frequencies = self.scaling.frequencies(frequencies, self.base)
        angles = positions[..., None].to(dtype) * frequencies  # [S,half], or [B,1,S,half]
        cos, sin = angles.cos(), angles.sin()
        if self.scaling is not None:
            cos, sin = cos * self.scaling.magnitude, sin * self.scaling.magnitude
        low, high = x[..., :half].to(dtype), x[..., half:].to(dtype)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)

    def _counted(self, x: Tensor, start: int | Tensor) -> Tensor:
        """[S], or [B,1,S]"""
        if isinstance(start, Tensor):
            start = _checks.integer_tensor(start, "start", "[B], or an int", 1)
            if not _checks.one_or(start.shape[0], x.shape[0]):
                raise ValueError(f"start has shape {_checks.text(start.shape)}; accepted: [B] = [{x.shape[0]}], or an int.")
            _checks.same_device(start, "start", x.device)
            start = start[:, None, None]
        elif _checks.at_least(-(2**63), start) is None:
            raise TypeError(f"start is {_checks.given(start)}; accepted: an int, or an integer tensor [B].")
        return torch.arange(x.shape[-2], device=x.device) + start

    def _given(self, x: Tensor, position_ids: Tensor) -> Tensor:
        B, S, accepted = x.shape[0], x.shape[2], "[S] or [B,S]"
        dims = 2 if getattr(position_ids, "ndim", 1) == 2 else 1
        ids = _checks.integer_tensor(position_ids, "position_ids", accepted, dims)
        if not _checks.same(ids.shape[-1], S) or (dims == 2 and not (ids.shape[0] == 1 or _checks.same(ids.shape[0], B))):
            raise ValueError(
                f"position_ids has shape {_checks.text(ids.shape)}; accepted: {accepted} = [{_checks.text((B, S))[1:-1]}]."
            )
        _checks.same_device(ids, "position_ids", x.device)
        return ids if dims == 1 else ids[:, None]

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base}" + (f", scaling={self.scaling}" if self.scaling is not None else "")
