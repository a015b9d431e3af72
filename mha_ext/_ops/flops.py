"""What torch.utils.flop_counter.FlopCounterMode counts for the ops: as for torch's own attention, the matrix products
over all pairs of a query and a key, whatever a mask hides (mha_ext.explain counts what is visible).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .arguments import names_of, packed_slices


def _pairs(q: Tensor, k: Tensor, q_starts: Tensor | None, k_starts: Tensor | None, max_q: int, max_k: int) -> int:
    """How many times a query meets a key, over batch and heads."""
    if q_starts is None or k_starts is None:
        return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if type(q_starts) is not Tensor or q_starts.is_meta:  # without values the bounds have to do
        return q.shape[1] * (q_starts.shape[0] - 1) * max_q * max_k
    return q.shape[1] * int((q_starts.diff() * k_starts.diff()).sum())


def _attention_flops(names: Sequence[str], backward: bool, *args: Any, out_val: Any = None) -> int:
    """Forward: q k^T and the weighted sum of v; backward: q k^T again, dq and dk, dout v^T and dv.

    Mixing heads is a product over H for each pair; backward repeats it and has two products more.
    """
    given = dict(zip(names, args))
    if "block_table" in given:  # attention_cached
        keys = given["k"].shape[2] * (1 if given["block_table"] is None else given["block_table"].shape[1])
        return 2 * given["q"].shape[:3].numel() * keys * (given["q"].shape[3] + given["v"].shape[3])
    if "qkv" in given:
        given.update(zip("qkv", packed_slices(given["qkv"], given["num_heads"])))
    q, v = given["q"], given["v"]
    pairs = _pairs(q, given["k"], given["q_starts"], given["k_starts"], given["max_q"], given["max_k"])
    mixes = sum(given.get(name) is not None for name in ("pre_mix", "post_mix")) * q.shape[1]
    if backward:
        return 2 * pairs * (3 * q.shape[3] + 2 * v.shape[3] + 3 * mixes)
    return 2 * pairs * (q.shape[3] + v.shape[3] + mixes)


_NAMES = (f"attention_{kind}{way}" for kind in ("", "mixed_", "packed_") for way in ("fwd", "bwd"))
for _name in (*_NAMES, "attention_cached"):
    _op = getattr(torch.ops.mha_ext, _name)
    register_flop_formula(_op, get_raw=True)(functools.partial(_attention_flops, names_of(_name), _name.endswith("_bwd")))


@register_flop_formula(torch.ops.mha_ext.merge_heads)
def _merge_heads_flops(
    x_shape: Sequence[int], mix_shape: Sequence[int] | None = None, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """The mix of the heads, if any."""
    B, H, S, D = x_shape
    return 2 * B * S * H * H * D if mix_shape is not None else 0
