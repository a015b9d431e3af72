"""Attention of packed sequences: what attention_varlen and nested tensors come to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _call, _checks, _ops, biases, masks
from ._ops import Call


def attention_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None, max_seqlen_k: int | None, *, mask: masks.Mask | Tensor | None = None,
    bias: Tensor | biases.Bias | None = None, scale: float | None = None, dropout_p: float = 0.0,
    softcap: float = 0.0, sinks: Tensor | None = None, pre_mix: Tensor | None = None,
    post_mix: Tensor | None = None, rng_state: Tensor | None = None, deterministic: bool | None = None,
    return_lse: bool = False,
) -> Any:  # fmt: skip
    """attention_varlen, for tensors that aren't nested."""
    for x, name in zip((q, k, v), "qkv"):
        _checks.dense(x, name)
    if not q.dim() == k.dim() == v.dim() == 3:
        shapes = ", ".join(_checks.text(x.shape) for x in (q, k, v))
        raise ValueError(f"q, k, v have shapes {shapes}; accepted: packed q [Tq,H,D], k [Tk,Hk,D], v [Tk,Hk,Dv].")
    given = q, k, v, mask, bias
    q, k, v = _call.cast_by_autocast(q, k, v)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    _checks.attention_inputs(q, k, v, _ops.without_cuda)
    starts = _starts(cu_seqlens_q, "cu_seqlens_q", q), _starts(cu_seqlens_k, "cu_seqlens_k", k)
    B, H = starts[0].shape[0] - 1, q.shape[1]
    if starts[1].shape[0] != B + 1:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k have shapes [{B + 1}] and {_checks.text(starts[1].shape)}; accepted: one "
            "entry more than there are sequences in both."
        )
    lengths = starts[0].diff(), starts[1].diff()
    Sq, Sk = _longest(lengths[0], max_seqlen_q, "q"), _longest(lengths[1], max_seqlen_k, "k")
    args = masks.lower(mask, B, H, Sq, Sk, q.device, lengths)
    added, scale, sinks = _call.score_arguments(bias, scale, sinks, q, B, H, Sq, Sk)
    pre_mix, post_mix = _call.mix_arguments(pre_mix, post_mix, q, H)
    deterministic = _call.switches(dropout_p, softcap, deterministic)
    rng_state = _call.state_of_dropout(rng_state, q) if dropout_p != 0.0 else None
    call = Call(
        q, k, v, added, *args, *starts, Sq, Sk, sinks=sinks, scale=scale, softcap=softcap, dropout_p=dropout_p,
        rng_state=rng_state, deterministic=deterministic, pre_mix=pre_mix, post_mix=post_mix,
    )  # fmt: skip
    if _call.listener is not None:
        _call.tell(call, "attention_varlen", *given)
    if _checks.is_dtensor(q):
        call = _call.sharding().replicated_call(call)
    if not return_lse and pre_mix is None and post_mix is None:
        return _ops.attention_out(call)[0].transpose(0, 1)
    out, lse, _, _ = _ops.attention_results(call)
    out = out[0].transpose(0, 1)
    return (out, lse[0]) if return_lse else out


def _starts(x: Tensor | None, name: str, packed: Tensor) -> Tensor:
    """Where the sequences of packed [1,H,T,D] start and end; checked where that costs nothing."""
    if x is None:
        raise ValueError(f"{name} is missing; accepted: an integer tensor [sequences + 1], or nested q, k and v.")
    starts = _checks.integer_tensor(x, name, "[sequences + 1]", 1)
    if starts.shape[0] == 0:
        raise ValueError(f"{name} is empty; accepted: an integer tensor [sequences + 1] that begins with 0.")
    _checks.same_device(starts, name, packed.device)
    if _checks.values_known(starts):
        T, first, last = packed.shape[2], int(starts[0]), int(starts[-1])
        if first != 0 or last != T:
            raise ValueError(f"{name} goes from {first} to {last}; accepted: from 0 to the {T} rows that are packed.")
        if bool((starts.diff() < 0).any()):
            n = int((starts.diff() < 0).nonzero()[0])
            raise ValueError(
                f"{name} goes from {int(starts[n])} to {int(starts[n + 1])} at sequence {n}; accepted: numbers that do "
                "not decrease."
            )
    return starts


def _longest(lengths: Tensor, given: int | None, side: str) -> int:
    """The bound of the lengths."""
    name = f"max_seqlen_{side}"
    if given is None and (lengths.shape[0] == 0 or torch.compiler.is_compiling()):
        return int(lengths.max()) if lengths.shape[0] > 0 else 0
    if given is None:
        try:
            return int(lengths.max())
        except RuntimeError as error:  # mapped, fake or meta tensors
            raise ValueError(
                f"{name} is missing and cu_seqlens_{side} has no values here ({str(error).splitlines()[0]}); accepted: a bound "
                f"of the lengths: give {name}."
            ) from error
    bound = _checks.at_least(0, given)
    if bound is None:
        raise ValueError(f"{name} is {_checks.given(given)}; accepted: an int >= 0, or None.")
    if lengths.shape[0] > 0 and _checks.values_known(lengths) and int(lengths.max()) > bound:
        raise ValueError(
            f"{name} is {given} but cu_seqlens_{side} has a sequence of {int(lengths.max())}; accepted: a bound of all "
            "lengths."
        )
    return bound
