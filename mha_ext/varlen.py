"""Attention of packed sequences of different lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from . import _checks, _foreign, biases, masks, nested
from ._sequences import attention_packed

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
