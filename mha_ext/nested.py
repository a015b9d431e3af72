"""torch's nested tensors (layout torch.jagged) as packed sequences, and back. No data is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _checks
from ._sequences import attention_packed


def attention(
    q: Tensor, k: Tensor, v: Tensor, ragged_dim: int, *, return_lse: bool = False, **options: Any
) -> Any:
    """attention_varlen of jagged q, k, v [N,j,H,D] (ragged_dim 1) or [N,H,j,D] (ragged_dim 2), with nested results: the
    output in q's shape, and the logsumexp [N,j,H] or [N,H,j]."""
    if options.pop("return_weights", False):
        raise no_weights("q, k, v are")
    (q, q_starts, q_longest), (k, k_starts, k_longest), (v, v_starts, _) = (
        _packed(x, name, ragged_dim) for x, name in ((q, "q"), (k, "k"), (v, "v"))
    )
    if v_starts is not k_starts and _checks.values_known(v_starts) and not torch.equal(v_starts, k_starts):
        raise ValueError("k and v are nested tensors of different lengths; accepted: one length for each key and value.")
    out, lse = attention_packed(q, k, v, q_starts, k_starts, q_longest, k_longest, return_lse=True, **options)
    lse = lse.t()

    def as_nested(x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if ragged_dim == 2 else x
        return torch.nested.nested_tensor_from_jagged(x, q_starts, jagged_dim=ragged_dim, max_seqlen=q_longest)

    return (as_nested(out), as_nested(lse)) if return_lse else as_nested(out)


def no_weights(what: str) -> ValueError:
    return ValueError(
        f"return_weights is true and {what} nested; accepted: false: sequences of different lengths have no weights of one "
        "shape."
    )


def attend(q: Tensor, k: Tensor, v: Tensor, x: Any, context: Any, **options: Any) -> Tensor:
    """For modules: heads [1,H,T,D] of the values of nested x (queries) and context (keys, values) to [1,H,T,Dv]. Modules
    project values, not nested tensors, of which torch differentiates few operations."""
    q, k, v = (heads[0].transpose(0, 1) for heads in (q, k, v))
    (q_starts, q_longest), (k_starts, k_longest) = (
        (t.offsets(), getattr(t, "_maybe_max_seqlen", None)) for t in (x, context)
    )
    return attention_packed(q, k, v, q_starts, k_starts, q_longest, k_longest, **options).transpose(0, 1)[None]


def values_of(x: Any, name: str) -> Tensor:
    """[1,T,features] of a nested x [N,j,features]"""
    if x.layout != torch.jagged or x.dim() != 3 or x._ragged_idx != 1 or x.lengths() is not None:
        raise ValueError(
            f"{name} is a nested tensor of layout {x.layout} and {x.dim()} dimensions; accepted: layout torch.jagged, "
            "[N,j,features], its sequences one after the other: make it with torch.nested.nested_tensor or contiguous()."
        )
    return x.values()[None]


def like(values: Tensor, x: Any) -> Tensor:
    """values [1,T,features] as a nested tensor with the lengths of x"""
    return torch.nested.nested_tensor_from_jagged(values[0], x.offsets(), max_seqlen=getattr(x, "_maybe_max_seqlen", None))


def _packed(x: Any, name: str, ragged_dim: int) -> tuple[Tensor, Tensor, int | None]:
    """(values [T,H,D], starts [N+1], a bound of the lengths if it is known)"""
    accepted = "[N,j,H,D]" if ragged_dim == 1 else "[N,H,j,D]"
    if not x.is_nested or x.layout != torch.jagged:
        raise TypeError(
            f"{name} is {_checks.given(x)} and another of q, k, v is nested; accepted: all three nested, of layout torch.jagged: "
            "make them with torch.nested.nested_tensor(..., layout=torch.jagged)."
        )
    if x.dim() != 4 or x._ragged_idx != ragged_dim:
        raise ValueError(
            f"{name} is a nested tensor of shape {_checks.text(x.shape)}; accepted: {accepted}, j the lengths: transpose "
            "it."
        )
    if x.lengths() is not None:  # rows between the sequences that belong to none
        x = x.contiguous()
    values = x.values()
    return values.transpose(0, 1) if ragged_dim == 2 else values, x.offsets(), getattr(x, "_maybe_max_seqlen", None)
