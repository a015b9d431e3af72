"""The keyword arguments that attention functions share, for their overloads: what they return depends on return_lse and
return_weights. For type checkers only."""

from __future__ import annotations

import datetime
from typing import TypedDict

from torch import Tensor

from . import biases, masks


class ScoreOptions(TypedDict, total=False):
    mask: masks.Mask | Tensor | None
    bias: Tensor | biases.Bias | None
    scale: float | None
    softcap: float
    sinks: Tensor | None


class EagerOptions(ScoreOptions, total=False):
    dropout_p: float
    pre_mix: Tensor | None
    post_mix: Tensor | None
    rng_state: Tensor | None


class Options(EagerOptions, total=False):
    deterministic: bool | None


class PackedOptions(Options, total=False):
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class CachedOptions(ScoreOptions, total=False):
    block_table: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


class RingOptions(ScoreOptions, total=False):
    dropout_p: float
    rng_state: Tensor | None
    layout: str
    deterministic: bool | None
    timeout: datetime.timedelta | None
