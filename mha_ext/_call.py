"""From what users pass to the Call that the ops take: checks, autocast, the default scale, the lowering of masks and biases.

What the functions of attention have in common; explain and the modules use it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _checks, _ops, biases, masks
from ._ops import NOT_PACKED, Call

# Faster than asking for a device; true where torch doesn't tell.
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


class Given(NamedTuple):
    """A call in the words of the user, for those who tell of it."""

    name: str  # of the function
    q: Tensor
    k: Tensor
    v: Tensor
    mask: masks.Mask | Tensor | None
    bias: Tensor | biases.Bias | None
    keys: int | None = None  # of a cache: how many
    scales: tuple[Tensor, ...] = ()  # of a cache of 8 bits


# Is told of each call before it runs, if there is one: explain.py prints plans where MHA_EXT_LOG asks.
listener: Callable[[Given, Call], None] | None = None


def tell(call: Call, *given: Any) -> None:
    """given: the fields of Given. Functions ask for the listener first, which costs less."""
    if listener is not None and not torch.compiler.is_compiling():
        listener(Given(*given), call)


def lower(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: masks.Mask | Tensor | None = None,
    bias: Tensor | biases.Bias | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    pre_mix: Tensor | None = None,
    post_mix: Tensor | None = None,
    rng_state: Tensor | None = None,
    deterministic: bool | None = None,
    return_weights: bool = False,
    draw: bool = True,
) -> Call:
    """attention's arguments, of tensors q, k, v [B,H,S,D]. draw: whether dropout, if any, gets its state, drawn if need be."""
    if _any_autocast() and _checks.autocasts(q):
        q, k, v = autocast(q.device.type, q, k, v)
    B, H, Sq, Sk = _checks.attention_inputs(q, k, v, _ops.without_cuda)
    args = masks.NO_MASK if mask is None else masks.lower(mask, B, H, Sq, Sk, q.device)
    added, scale, sinks = score_arguments(bias, scale, sinks, q, B, H, Sq, Sk)
    if pre_mix is not None or post_mix is not None:
        pre_mix, post_mix = mix_arguments(pre_mix, post_mix, q, H)
    deterministic = switches(dropout_p, softcap, deterministic)
    state = state_of_dropout(rng_state, q) if draw and dropout_p != 0.0 else None
    call = Call(
        q, k, v, added, *args, *NOT_PACKED, sinks, scale, softcap, dropout_p, state, return_weights, deterministic, pre_mix,
        post_mix,
    )  # fmt: skip
    return sharding().replicated_call(call) if _checks.is_dtensor(q) else call


def bias_argument(bias: Tensor | biases.Bias, q: Tensor, B: int, H: int, Sq: int, Sk: int) -> Tensor:
    if isinstance(bias, biases.Bias):
        return bias.lower(H, Sq, Sk, _checks.accumulate_dtype(q.dtype), q.device)
    return _checks.bias_tensor(bias, q.dtype, q.device, B, H, Sq, Sk)


def score_arguments(
    bias: Tensor | biases.Bias | None,
    scale: float | None,
    sinks: Tensor | None,
    q: Tensor,
    B: int,
    H: int,
    Sq: int,
    Sk: int,
) -> Any:
    """(bias, scale, sinks) as the ops take them, for the types, device and head size of q [..., D]."""
    added = None if bias is None else bias_argument(bias, q, B, H, Sq, Sk)
    if scale is None:
        D = q.shape[-1]
        scale = D**-0.5 if D > 0 else 1.0
    else:
        scale = _checks.scale(scale)
    return added, scale, None if sinks is None else _checks.sinks(sinks, q, H)


def switches(dropout_p: float, softcap: float, deterministic: bool | None) -> bool:
    """Whether the call is to be repeatable; refuses these where they do not fit."""
    if type(dropout_p) is not float or dropout_p != 0.0:
        _checks.probability("dropout_p", dropout_p)
    if type(softcap) is not float or softcap != 0.0:
        _checks.softcap(softcap)
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    _checks.flag("deterministic", deterministic)
    return deterministic


def mix_arguments(pre_mix: Tensor | None, post_mix: Tensor | None, q: Tensor, H: int) -> Any:
    """(pre_mix, post_mix) as the ops take them."""
    return (
        None if pre_mix is None else _checks.mix(pre_mix, "pre_mix", q, H),
        None if post_mix is None else _checks.mix(post_mix, "post_mix", q, H),
    )


def state_of_dropout(rng_state: Tensor | None, like: Tensor) -> Tensor:
    if _checks.is_dtensor(like):
        return sharding().rng_state(rng_state, like)
    return _ops.draw_rng_state(like) if rng_state is None else _checks.rng_state(rng_state, like.device)


def sharding() -> Any:
    """The rules for DTensors."""
    from ._ops import sharding  # brings torch.distributed.tensor, which most programs do without

    return sharding


def autocast(device_type: str, *tensors: Tensor) -> list[Tensor]:
    """The tensors in the type of torch.autocast, which is on."""
    dtype = torch.get_autocast_dtype(device_type)
    return [x.to(dtype) if x.dtype.is_floating_point and x.dtype != torch.float64 else x for x in tensors]


def cast_by_autocast(*tensors: Any) -> list[Any]:
    """The tensors as torch.autocast wants them, if it is on for their device; what is no tensor stays."""
    first = next((x for x in tensors if isinstance(x, Tensor)), None)
    if first is None or not _any_autocast() or not _checks.autocasts(first):
        return list(tensors)
    return [autocast(first.device.type, x)[0] if isinstance(x, Tensor) else x for x in tensors]
