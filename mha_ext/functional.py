"""The functions: what they are given becomes a Call (_call.py), which the ops run.

Shapes: B batch, H query heads, Hk key/value heads (H % Hk == 0), Sq and Sk lengths, D query/key head size, Dv value
head size. Types: float64, float32, bfloat16, float16; under torch.autocast inputs are cast to its type (float64 stays).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from . import _call, _checks, _foreign, _ops, biases, masks, nested

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import Options


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor,
    *, return_lse: Literal[False] = ..., return_weights: Literal[False] = ..., **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor,
    *, return_lse: Literal[True], return_weights: Literal[False] = ..., **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor,
    *, return_lse: Literal[False] = ..., return_weights: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor,
    *, return_lse: Literal[True], return_weights: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = ..., return_weights: bool = ..., **options: Unpack[Options]
) -> Tensor | tuple[Tensor, ...]: ...


def attention(
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
    return_lse: bool = False,
    return_weights: bool = False,
    **foreign: Any,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(softcap(scale * q k^T) + bias, masked) v, without storing anything of size Sq x Sk.

    Multi-head attention is due to Vaswani et al. ("Attention is all you need", 2017), grouped heads to Ainslie et al.
    ("GQA", 2023), the blocked algorithm to Dao et al. ("FlashAttention", 2022).

    Args:
        q: queries [B,H,Sq,D]. Any strides; a last dimension that is not contiguous costs a copy. So for k and v.
        k: keys [B,Hk,Sk,D]; query head h reads key/value head h // (H / Hk).
        v: values [B,Hk,Sk,Dv]. Or all three nested tensors of layout torch.jagged, [B,H,j,D], as from transposing
            [B,j,H,D]: they are computed as packed sequences (see attention_varlen, for masks too), without padding.
        mask: a mask object of mha_ext.masks, or a bool tensor, True = attend: [Sq,Sk], or 4-d broadcastable to
            [B,H,Sq,Sk]. A row that sees no key gives 0; what a hidden key or value holds, NaN too, has no influence.
        bias: floating-point tensor of the same shapes, added to the scaled (and soft-capped) scores; may require grad.
            Or a bias of the distance, of mha_ext.biases, which costs no Sq x Sk memory.
        scale: factor of the scores; default 1 / sqrt(D).
        dropout_p: probability of dropping a weight; kept weights are scaled by 1 / (1 - dropout_p).
        softcap: c > 0 limits scores to c * tanh(score / c); 0 does not.
        sinks: [H] logits, one more per softmax denominator, which no key and no value belongs to (Xiao et al.,
            "Efficient streaming language models with attention sinks", 2024); may require grad. A row that sees no key
            still gives 0, and lse is then the sink.
        pre_mix, post_mix: talking heads (Shazeer et al., "Talking-heads attention", 2020): [H,H], of q's type, float32 (or
            float64 for float64 inputs); may require grad. The scores of head g become sum_h score[h] * pre_mix[h,g], after
            the soft cap and before bias, mask and sinks; its weights sum_h weight[h] * post_mix[h,g], before dropout. What
            a key that is hidden from all heads holds has no influence. Memory stays linear in the lengths.
        rng_state: int64 tensor [2] (seed, offset) that makes dropout reproducible on any device, or [6] for a part of a
            larger problem (see dropout_part); by default it is drawn from torch's default generator.
        deterministic: True, False, or None for torch's own setting. On the CPU the result is always the same.
        return_lse: also return the natural logarithm of the softmax's denominators, [B,H,Sq], float32 (float64 for
            float64 inputs; of half types within 1e-5), -inf for rows that see no key.
        return_weights: also return the weights [B,H,Sq,Sk] that made the output, after dropout, in q's type.

    Returns:
        out [B,H,Sq,Dv], its dimensions in the order that q has in memory; or (out, lse), (out, weights),
        (out, lse, weights). All of them are differentiable, twice. For nested inputs nested.

    Raises:
        ValueError, TypeError: shapes, types or devices that do not fit, in one sentence with the fix.
    """
    if foreign:
        raise _foreign.refusal(attention, foreign)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return _checks.elsewhere(attention, "qkv", locals())
    if return_lse is not False or return_weights is not False:
        _checks.flags(return_lse=return_lse, return_weights=return_weights)
    if q.is_nested:
        return nested.attention(
            q, k, v, 2, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p, softcap=softcap, sinks=sinks,
            pre_mix=pre_mix, post_mix=post_mix, rng_state=rng_state, deterministic=deterministic, return_lse=return_lse,
            return_weights=return_weights,
        )  # fmt: skip
    call = _call.lower(
        q, k, v, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p, softcap=softcap, sinks=sinks, pre_mix=pre_mix,
        post_mix=post_mix, rng_state=rng_state, deterministic=deterministic, return_weights=return_weights,
    )  # fmt: skip
    if _call.listener is not None:
        _call.tell(call, "attention", q, k, v, mask, bias)
    if not (return_lse or return_weights) and pre_mix is None and post_mix is None:
        return _ops.attention_out(call)
    out, lse, _, weights = _ops.attention_results(call)
    if return_lse:
        return (out, lse, weights) if return_weights else (out, lse)
    return (out, weights) if return_weights else out


def split_heads(x: Tensor, num_heads: int, bias: Tensor | None = None) -> Tensor:
    """[B,S,H*D] -> [B,H,S,D] contiguous, with bias [H*D] added on the way if given.

    Attention does not need this copy: x.unflatten(-1, (H, D)).transpose(1, 2) is read in place.

    Args:
        x: any strides; float64, float32, bfloat16 or float16.
        num_heads: H.
        bias: of x's type (under torch.autocast it is cast to it); may require grad, as x may.

    Raises:
        ValueError, TypeError: shapes, types or devices that do not fit, in one sentence with the fix.
    """
    if not isinstance(x, Tensor):
        return _checks.elsewhere(split_heads, "x", locals())
    _checks.one_tensor(x, "x", "[B,S,H*D]", 3, _ops.without_cuda)
    num_heads = _checks.size("num_heads", num_heads)
    if x.shape[2] % num_heads:
        raise ValueError(
            f"x has shape {_checks.text(x.shape)} and num_heads is {num_heads}; accepted: [B,S,H*D] with "
            "H = num_heads >= 1."
        )
    if bias is not None:
        bias = _parameter(bias, "bias", (x.shape[2],), x)
    if _checks.is_dtensor(x):
        return _call.sharding().split_heads(x, num_heads, bias)
    return _ops.split_heads(x, num_heads, bias)


def merge_heads(x: Tensor, mix: Tensor | None = None) -> Tensor:
    """[B,H,S,D] -> [B,S,H*D] contiguous; with mix [H,H], head g of the result is sum_h mix[h,g] * (head h of x).

    Args:
        x: any strides; float64, float32, bfloat16 or float16.
        mix: of x's type (under torch.autocast it is cast to it); may require grad, as x may.

    Raises:
        ValueError, TypeError: shapes, types or devices that do not fit, in one sentence with the fix.
    """
    if not isinstance(x, Tensor):
        return _checks.elsewhere(merge_heads, "x", locals())
    _checks.one_tensor(x, "x", "[B,H,S,D]", 4, _ops.without_cuda)
    if mix is not None:
        mix = _parameter(mix, "mix", (x.shape[1], x.shape[1]), x)
    if _checks.is_dtensor(x):
        mix = _call.sharding().replicated(mix, x)
    return _ops.merge_heads(x, mix)


def masked_softmax(
    scores: Tensor,
    mask: masks.Mask | Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
) -> Tensor:
    """softmax(scale * scores + bias, masked) over the last dimension, then dropout; in one pass over memory.

    Args:
        scores: [B,H,Sq,Sk] or [Sq,Sk], any strides; float64, float32, bfloat16 or float16; may require grad.
        mask, bias, dropout_p, rng_state: as in attention; the bias is a tensor.
        scale: factor of the scores, a finite number.

    Returns:
        The weights, in scores' shape and type, contiguous. A row that sees no key is 0. Differentiable, twice.

    Raises:
        ValueError, TypeError: what does not fit, in one sentence with the fix.
    """
    if not isinstance(scores, Tensor):
        return _checks.elsewhere(masked_softmax, ("scores",), locals())
    if scores.dim() == 2:
        _checks.dense(scores, "scores")
        return masked_softmax(
            scores[None, None], mask, bias=bias, scale=scale, dropout_p=dropout_p, rng_state=rng_state
        )[0, 0]
    _checks.one_tensor(scores, "scores", "[B,H,Sq,Sk] or [Sq,Sk]", 4, _ops.without_cuda)
    B, H, Sq, Sk = scores.shape
    scale = _checks.scale(scale)
    args = masks.lower(mask, B, H, Sq, Sk, scores.device)
    if bias is not None:
        bias = _checks.bias_tensor(bias, scores.dtype, scores.device, B, H, Sq, Sk)
    _checks.probability("dropout_p", dropout_p)
    if _checks.is_dtensor(scores):
        rules = _call.sharding()
        args, bias = rules.replicated_mask(args, scores), rules.replicated(bias, scores)
    rng_state = _call.state_of_dropout(rng_state, scores) if dropout_p != 0.0 else None
    return _ops.masked_softmax_fwd(scores, bias, *args, scale, dropout_p, rng_state)[0]


def dropout_mask(
    rng_state: Tensor, p: float, B: int, H: int, Sq: int, Sk: int, device: torch.device | str | None = None
) -> Tensor:
    """The bool tensor [B,H,Sq,Sk] (True = kept) of the weights that attention and masked_softmax keep for rng_state.

    Whether weight (b,h,i,j) is kept depends on rng_state, p and (b, h, i, j) only: not on the device, the number of
    threads, B, H or the lengths. The bits are those of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", 2011).

    Args:
        rng_state: int64 [2] or [6], as in attention.
        p: probability of dropping a weight.
        device: default that of rng_state.

    Raises:
        ValueError, TypeError: what does not fit, in one sentence with the fix.
    """
    _checks.probability("p", p)
    for name, n in (("B", B), ("H", H), ("Sq", Sq), ("Sk", Sk)):
        _checks.size(name, n, 0)
    where: Any = _checks.device(device) if device is not None else getattr(rng_state, "device", None)
    state = _checks.rng_state(rng_state, where)
    if _ops.without_cuda is not None and state.is_cuda:
        raise _checks.no_cuda(_ops.without_cuda)
    return _ops.dropout_mask(state, p, B, H, Sq, Sk)


def _parameter(x: Tensor, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """bias or mix, checked; under autocast it follows like's type."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {_checks.given(x)}; accepted: a tensor {_checks.text(shape)}.")
    if x.is_nested:
        _checks.dense(x, name)
    if x.shape != shape:
        raise ValueError(f"{name} has shape {_checks.text(x.shape)}; accepted: {_checks.text(shape)}.")
    _checks.same_device(x, name, like.device)
    if x.dtype != like.dtype:
        if not _checks.autocasts(like):
            raise TypeError(
                f"{name} is {_checks.name_of(x.dtype)} but x is {_checks.name_of(like.dtype)}; accepted: one "
                "dtype: convert it."
            )
        x = x.to(like.dtype)
    return x
