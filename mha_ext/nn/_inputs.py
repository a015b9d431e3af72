"""What the modules accept, of arguments that the functions below them do not see."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks


def factory(device: Any, dtype: Any) -> dict[str, Any]:
    """Keyword arguments that make parameters."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype is {_checks.given(dtype)}; accepted: a floating-point torch.dtype, or None.")
    return {"device": None if device is None else _checks.device(device), "dtype": dtype}


def pair(window: Any) -> tuple[int | None, int | None] | None:
    """The window of a module, as (left, right)."""
    if window is None:
        return None
    both = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    if len(both) != 2 or any(n is not None and (_checks.whole(n) is None or n < 0) for n in both):
        raise (ValueError if isinstance(window, (int, tuple)) else TypeError)(
            f"window is {_checks.given(window)}; accepted: an int >= 0, or a pair (left, right) of such ints or None."
        )
    return both


def base_of_angles(name: str, base: float) -> float:
    _checks.number(name, base)
    if not 0 < base < math.inf:
        raise ValueError(f"{name} is {base}; accepted: a positive number.")
    return base


def normed(norm: nn.RMSNorm | None, x: Tensor) -> Tensor:
    """norm(x) in x's type, computed in that of the norm's weight: under autocast x is narrower, for which torch has no fused
    norm and warns."""
    if norm is None:
        return x
    weight = norm.weight
    return norm(x) if x.dtype == weight.dtype else norm(x.to(weight.dtype)).to(x.dtype)


def sequences(x: Tensor, name: str, size: int, projection: Any) -> None:
    """Refuses x that is not [B,S,size], or that the projection does not take."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {_checks.given(x)}; accepted: a tensor [B,S,{size}].")
    if x.layout is not torch.strided and not x.is_nested:
        _checks.dense(x, name)
    if x.dim() != 3 or not x.is_nested and x.shape[-1] != size:
        raise ValueError(f"{name} has shape {_shape(x)}; accepted: [B,S,{size}].")
    weight = projection.weight
    if not isinstance(weight, Tensor):
        return  # torch's quantised layers: a method
    if x.dtype != weight.dtype or x.device != weight.device:
        simple = type(projection) is nn.Linear and not projection._forward_pre_hooks and "forward" not in vars(projection)
        fits_weight(x, name, weight if simple else None)


def fits_weight(x: Tensor, name: str, weight: Any) -> None:
    """Refuses x of a type or on a device that cannot be multiplied by weight; None: whose projection may convert it."""
    if x.dtype not in _checks.DTYPES:
        raise _checks.unsupported_dtype(name, x.dtype)
    if weight is None or type(weight) is not nn.Parameter or weight.dtype not in _checks.DTYPES or weight.is_meta:
        return  # quantised, sharded or offloaded: it knows better
    if x.device != weight.device:
        raise ValueError(
            f"{name} is on {x.device} but the module is on {weight.device}; accepted: one device: move one of them with .to()."
        )
    if x.dtype != weight.dtype and not (x.is_meta or _checks.autocasts(x)):
        raise TypeError(
            f"{name} is {_checks.name_of(x.dtype)} but the module's weights are {_checks.name_of(weight.dtype)}; accepted: "
            "one dtype: convert one of them, or use torch.autocast."
        )


def _shape(x: Tensor) -> str:
    return "that of nested sequences" if x.is_nested else _checks.text(x.shape)
