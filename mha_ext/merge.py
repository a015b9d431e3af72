"""Merging partial attentions by their logsumexps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _checks


def merge_partials(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """What attention over all keys gives, from attentions of the same queries over disjoint parts of the keys.

    With part p's output o_p and logsumexp l_p (as attention(..., return_lse=True) gives them):
    lse = log(sum_p exp(l_p)) and out = sum_p exp(l_p - lse) o_p (Milakov and Gimelshein, "Online normalizer calculation
    for softmax", 2018). The weights come from differences to the largest l_p, so they hold at any size of lse. Without
    dropout only: weights that were dropped in the parts stay dropped.

    Args:
        outs: at least one tensor [...,Dv], usually [B,H,Sq,Dv]: a sequence, or stacked in one tensor [P,...,Dv].
        lses: as many tensors [...], usually [B,H,Sq]: natural logarithms, float32 (float64 for float64 outs). A row
            that saw no key in a part has -inf there (or inf, as flash-attention marks it), and what the part's output
            holds in that row has no influence. A row that saw NaN has NaN, and so have its results.

    Returns:
        (out, lse), in the shapes and types of one part; sums are taken in lse's type and rounded once. Rows that saw
        nothing in any part: out 0, lse -inf, zero gradients. Differentiable any number of times, also in compiled code.

    Raises:
        ValueError, TypeError: parts that do not fit together, in one sentence with the fix.
    """
    outs, lses = _parts(outs, "outs", "[P,...,Dv]"), _parts(lses, "lses", "[P,...]")
    _check(outs, lses)
    weights, seen, lse, _ = weights_of_parts([torch.where(x == torch.inf, -torch.inf, x) for x in lses])
    out: Any = 0
    for part, weight, row_seen in zip(outs, weights.unbind(0), seen.unbind(0)):
        out = out + weight[..., None] * torch.where(row_seen[..., None], part.to(lse.dtype), 0)
    return out.to(outs[0].dtype), lse


def weights_of_parts(lses: Sequence[Tensor], rests: Sequence[Tensor] | None = None) -> Any:
    """(weights [P,...], seen [P,...], lse, rest): what each part counts, whether it saw anything, and the merged lse.

    rests: what rounding took from each lse, as attention_fwd returns it; the result's rest is the same for its lse.
    """
    lse = torch.stack(tuple(lses))
    top = lse.detach().amax(0)  # it cancels in every result, so no derivative goes through it
    seen = lse != -torch.inf
    nothing = top == -torch.inf
    top = torch.where(nothing, 0, top)
    distance = torch.where(seen, lse - top, 0)
    if rests is not None:
        distance = distance + torch.stack(tuple(rests))
    terms = torch.where(seen, distance.exp(), 0)
    total = torch.where(nothing, 1, terms.sum(0))
    above = total.log()
    rounded = top + above
    rest = None
    if rests is not None:  # the exact error of that sum (Knuth's two-sum)
        kept = rounded - top
        rest = torch.where(nothing, 0, (top - (rounded - kept)) + (above - kept))
    return terms / total, seen, torch.where(nothing, -torch.inf, rounded), rest


def _parts(given: Sequence[Tensor] | Tensor, name: str, stacked: str) -> tuple[Tensor, ...]:
    if isinstance(given, Tensor):
        given = given.unbind(0) if given.dim() > 0 else ()
    else:
        given = tuple(given) if isinstance(given, Sequence) else (given,)
    wrong = next((x for x in given if not isinstance(x, Tensor)), None)
    if not given or wrong is not None:
        found = f"hold a {type(wrong).__name__}" if given else "hold no part"
        raise TypeError(f"{name} {found}; accepted: a sequence of at least one tensor, or one tensor {stacked}.")
    return given


def _check(outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> None:
    if len(outs) != len(lses):
        raise ValueError(f"outs hold {len(outs)} parts and lses {len(lses)}; accepted: one lse for each out.")
    out = outs[0]
    for x, y in zip(outs, lses):
        _checks.dense(x, "a part's out")
        _checks.dense(y, "a part's lse")
        if x.dim() < 1 or x.shape != out.shape or y.shape != out.shape[:-1]:
            raise ValueError(
                f"a part has an out of shape {_checks.text(x.shape)} and an lse of shape {_checks.text(y.shape)}, where "
                f"the first out has {_checks.text(out.shape)}; accepted: outs [...,Dv] of one shape, lses [...]."
            )
        if x.dtype not in _checks.DTYPES or x.dtype != out.dtype or y.dtype != _checks.accumulate_dtype(x.dtype):
            raise TypeError(
                f"a part has an out of {_checks.name_of(x.dtype)} and an lse of {_checks.name_of(y.dtype)}, where the "
                f"first out is {_checks.name_of(out.dtype)}; accepted: outs of one floating-point type, lses in float32 "
                "(float64 for float64 outs): take the lse from return_lse=True."
            )
        if x.device != out.device or y.device != out.device:
            raise ValueError(
                f"a part's out and lse are on {x.device} and {y.device}, where the first out is on {out.device}; "
                "accepted: one device: move them with .to()."
            )
