"""Attention of packed sequences of different lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from . import _checks, _foreign, _ops, biases, masks, nested
from .functional import (
    LOG_PLANS,
    _autocast,
    _rng_state,
    attention_op,
    dtensor_rules,
    log_plan,
    mix_arguments,
    score_arguments,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import PackedOptions


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ...,
    *, return_lse: Literal[False] = ..., **options: Unpack[PackedOptions],
) -> Tensor: ...  # fmt: skip


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ...,
    *, return_lse: Literal[True], **options: Unpack[PackedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ...,
    *, return_lse: bool = ..., **options: Unpack[PackedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
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
    return_lse: bool = False,
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention within each of N sequences that lie one after the other, without padding.

    Each sequence is computed as if it were alone: no other one changes a bit of what it gives. On the CPU they are taken
    one after the other, each on all threads.

    Args:
        q: queries [Tq,H,D], the sequences' rows one after the other; any strides with a contiguous last dimension.
        k: keys [Tk,Hk,D].
        v: values [Tk,Hk,Dv]. Or all three nested tensors of layout torch.jagged, [N,j,H,D], without cu_seqlens.
        cu_seqlens_q, cu_seqlens_k: integer tensors [N+1], where the sequences start and end: 0, ..., Tq (Tk). On a GPU they
            are trusted, since looking at them would wait for it.
        max_seqlen_q, max_seqlen_k: bounds of the sequences' lengths. By default they are looked up, which on a GPU waits for
            it, and cannot be captured or compiled without a graph break.
        mask, bias: as in attention, with the batch size N, Sq = max_seqlen_q and Sk = max_seqlen_k: Padding takes [N]
            lengths, Dense [N or 1,H or 1,Sq,Sk] (sequences use its upper left corner), Documents [N,Sk]. Where a mask or a
            bias speaks of the offset o = Sk - Sq, each sequence has its own.
        scale, dropout_p, softcap, sinks, pre_mix, post_mix, rng_state, deterministic: as in attention; dropout draws for
            sequence n what attention draws for batch element n.
        return_lse: also return the logsumexp [H,Tq].

    Returns:
        out [Tq,H,Dv], or (out, lse). Differentiable, twice. For nested inputs nested, [N,j,H,Dv] and [N,j,H].

    Raises:
        ValueError, TypeError: what does not fit, in one sentence with the fix; on the CPU that includes the values of
            cu_seqlens (RuntimeError in compiled code).
    """
    if foreign:
        raise _foreign.refusal(attention_varlen, foreign)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return _checks.elsewhere(attention_varlen, "qkv", locals())
    if return_lse is not False:
        _checks.flags(return_lse=return_lse)
    options: dict[str, Any] = {
        "mask": mask, "bias": bias, "scale": scale, "dropout_p": dropout_p, "softcap": softcap, "sinks": sinks,
        "pre_mix": pre_mix, "post_mix": post_mix, "rng_state": rng_state, "deterministic": deterministic, "return_lse": return_lse,
    }  # fmt: skip
    if q.is_nested or k.is_nested or v.is_nested:
        if any(x is not None for x in (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)):
            raise ValueError(
                "q, k, v are nested and cu_seqlens or max_seqlen was given; accepted: one of them: leave out the latter."
            )
        return nested.attention(q, k, v, 1, **options)
    return attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)


def attention_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None, max_seqlen_k: int | None, *, mask: masks.Mask | Tensor | None = None,
    bias: Tensor | biases.Bias | None = None, scale: float | None = None, dropout_p: float = 0.0,
    softcap: float = 0.0, sinks: Tensor | None = None, pre_mix: Tensor | None = None,
    post_mix: Tensor | None = None, rng_state: Tensor | None = None, deterministic: bool | None = None,
    return_lse: bool = False,
) -> Any:  # fmt: skip
    """attention_varlen for tensors that aren't nested."""
    for x, name in zip((q, k, v), "qkv"):
        _checks.dense(x, name)
    if not q.dim() == k.dim() == v.dim() == 3:
        shapes = ", ".join(_checks.text(x.shape) for x in (q, k, v))
        raise ValueError(f"q, k, v have shapes {shapes}; accepted: packed q [Tq,H,D], k [Tk,Hk,D], v [Tk,Hk,Dv].")
    given = q, k, v, mask, bias
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q.device.type, q, k, v)
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
    longest = [_longest(n, given, side) for n, given, side in zip(lengths, (max_seqlen_q, max_seqlen_k), "qk")]
    args = masks.lower(mask, B, H, longest[0], longest[1], q.device, lengths)
    bias, scale, sinks = score_arguments(bias, scale, sinks, q, B, H, *longest)
    mixes = mix_arguments(pre_mix, post_mix, q, H)
    _checks.probability("dropout_p", dropout_p)
    if type(softcap) is not float or softcap != 0.0:
        _checks.softcap(softcap)
    rng_state = _rng_state(rng_state, q) if dropout_p != 0.0 else None
    _checks.flag("deterministic", deterministic)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if LOG_PLANS:
        lowered = bias, args, sinks, mixes, (scale, softcap, dropout_p), deterministic
        log_plan("attention_varlen", given, (q, k, v), lowered, packed=(*starts, *longest))
    if _checks.is_dtensor(q):
        args, bias, sinks, *others = dtensor_rules().modifiers(q, args, bias, sinks, *starts, *(mixes or ()))
        starts, mixes = others[:2], others[2:] or None
    modifiers = bias, *args, *starts, *longest, sinks, scale, softcap, dropout_p, rng_state, False, deterministic
    if mixes is None and not return_lse:
        return _ops.attention_out(q, k, v, *modifiers)[0].transpose(0, 1)
    out, lse, _, _ = attention_op(q, k, v, mixes, modifiers)
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
    if given is None:
        return int(lengths.max()) if lengths.shape[0] > 0 else 0
    name = f"max_seqlen_{side}"
    if isinstance(given, bool) or not isinstance(given, (int, torch.SymInt)) or given < 0:
        raise ValueError(f"{name} is {_checks.given(given)}; accepted: an int >= 0, or None.")
    if lengths.shape[0] > 0 and _checks.values_known(lengths) and int(lengths.max()) > given:
        raise ValueError(
            f"{name} is {given} but cu_seqlens_{side} has a sequence of {int(lengths.max())}; accepted: a bound of all "
            "lengths."
        )
    return given
