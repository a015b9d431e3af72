"""Attention of one packed projection of queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from . import _call, _checks, _foreign, _ops, biases, masks
from .functional import attention

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import Options


@overload
def attention_qkvpacked(
    qkv: Tensor, num_heads: int | None = ...,
    *, return_lse: Literal[False] = ..., return_weights: Literal[False] = ..., **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip


@overload
def attention_qkvpacked(
    qkv: Tensor, num_heads: int | None = ...,
    *, return_lse: Literal[True], return_weights: Literal[False] = ..., **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention_qkvpacked(
    qkv: Tensor, num_heads: int | None = ...,
    *, return_lse: Literal[False] = ..., return_weights: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention_qkvpacked(
    qkv: Tensor, num_heads: int | None = ...,
    *, return_lse: Literal[True], return_weights: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


@overload
def attention_qkvpacked(
    qkv: Tensor, num_heads: int | None = ..., *, return_lse: bool = ..., return_weights: bool = ..., **options: Unpack[Options]
) -> Tensor | tuple[Tensor, ...]: ...


def attention_qkvpacked(
    qkv: Tensor,
    num_heads: int | None = None,
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
    return_lse: bool = False,
    return_weights: bool = False,
    **foreign: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Self-attention of queries, keys and values that lie side by side in one tensor, as one linear layer makes them.

    They are read in place, and their gradient is written in place too: one tensor, which no concatenation makes.

    Args:
        qkv: [B,S,3,H,D], or [B,S,H + 2*Hk,D] with num_heads = H: the query heads, then those of the keys, then those of
            the values.
        num_heads: the number of query heads H; not needed for five dimensions.
        mask and the others: as in attention.

    Returns:
        out [B,S,H,D] (flatten(2) merges its heads without a copy), and lse [B,H,S], weights [B,H,S,S] as attention does.
        All are differentiable, twice. With return_weights, pre_mix, post_mix or a DTensor the gradient is concatenated.

    Raises:
        ValueError, TypeError: what does not fit, in one sentence with the fix.
    """
    if foreign:
        raise _foreign.refusal(attention_qkvpacked, foreign)
    if not isinstance(qkv, Tensor):
        return _checks.elsewhere(attention_qkvpacked, ("qkv",), locals())
    if return_lse is not False or return_weights is not False:
        _checks.flags(return_lse=return_lse, return_weights=return_weights)
    qkv, num_heads = _as_heads(qkv, num_heads)
    (qkv,) = _call.cast_by_autocast(qkv)
    q, k, v = _ops.packed_slices(qkv, num_heads)
    if return_weights or pre_mix is not None or post_mix is not None or _checks.is_dtensor(qkv):
        found = attention(
            q, k, v, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p, softcap=softcap, sinks=sinks, pre_mix=pre_mix,
            post_mix=post_mix, rng_state=rng_state, deterministic=deterministic, return_lse=return_lse,
            return_weights=return_weights,
        )  # fmt: skip
        return (found[0].transpose(1, 2), *found[1:]) if isinstance(found, tuple) else found.transpose(1, 2)
    call = _call.lower(
        q, k, v, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p, softcap=softcap, sinks=sinks,
        rng_state=rng_state, deterministic=deterministic,
    )  # fmt: skip
    if _call.listener is not None:
        _call.tell(call, "attention_qkvpacked", q, k, v, mask, bias)
    out, lse, _ = _ops.packed_results(call, qkv, num_heads)
    out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _as_heads(qkv: Tensor, num_heads: int | None) -> tuple[Tensor, int]:
    """(qkv [B,S,H + 2*Hk,D], H)"""
    _checks.dense(qkv, "qkv")
    heads = _checks.whole(num_heads)
    if qkv.dim() == 5 and qkv.shape[2] == 3 and (num_heads is None or heads == qkv.shape[3]):
        return qkv.flatten(2, 3), qkv.shape[3]
    if qkv.dim() == 4 and heads is not None and heads >= 0:
        num_heads, kv_heads, odd = heads, (qkv.shape[2] - heads) // 2, (qkv.shape[2] - heads) % 2
        if not odd and (kv_heads > 0 and num_heads % kv_heads == 0 or kv_heads == num_heads == 0):
            return qkv, num_heads
    raise ValueError(
        f"qkv has shape {_checks.text(qkv.shape)} and num_heads is {_checks.given(num_heads)}; accepted: [B,S,3,H,D], or [B,S,H + 2*Hk,D] "
        "with num_heads = H, a multiple of Hk: unflatten the last dimension of a projection."
    )
