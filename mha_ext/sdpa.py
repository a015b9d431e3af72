"""torch's scaled_dot_product_attention on these kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _call, _checks, masks, nested
from .functional import attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A drop-in for torch.nn.functional.scaled_dot_product_attention, with its semantics, on these kernels.

    Args:
        query, key, value: [..., H, Sq, D], [..., Hk, Sk, D], [..., Hk, Sk, Dv]; leading dimensions broadcast. Or nested
            tensors of layout torch.jagged, [B,H,j,D], without attn_mask.
        attn_mask: bool (True = attend) or floating-point (added to the scores; may require grad) tensor that broadcasts
            to [..., H, Sq, Sk]. Three dimensions of which the first is both the batch size and the number of heads are
            refused: say mask[None] or mask[:, None].
        dropout_p, scale: as in mha_ext.attention.
        is_causal: query i sees keys j <= i (top-left, as in torch). With attn_mask both apply.
        enable_gqa: let H be a multiple of Hk.

    Returns:
        [..., H, Sq, Dv]. Unlike torch, a row that sees no key gives 0 instead of NaN.

    Raises:
        ValueError, TypeError: what does not fit, in one sentence with the fix.
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return _checks.elsewhere(scaled_dot_product_attention, ("query", "key", "value"), locals())
    if is_causal is not False or enable_gqa is not False:
        _checks.flags(is_causal=is_causal, enable_gqa=enable_gqa)
    if query.is_nested or key.is_nested or value.is_nested:
        return _nested(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not (query.dim() == key.dim() == value.dim() == 4):
        return _any_rank(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    B, H = query.shape[:2]
    Hk = key.shape[1]
    if not enable_gqa and H != Hk and H != 1 and Hk != 1:
        raise _different_heads(query, key)
    if key.shape[:2] != (B, H) or value.shape[:2] != (B, H):
        query, key, value = _broadcast_batch_and_heads(query, key, value)
    mask: masks.Mask | None = masks.Causal("top_left") if is_causal else None
    bias = None
    if attn_mask is not None:
        attn_mask = _mask_4d(attn_mask, query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        if attn_mask.dtype != torch.bool:
            (bias,) = _call.cast_by_autocast(attn_mask)
        else:
            mask = masks.Dense(attn_mask) if mask is None else mask & masks.Dense(attn_mask)
    return attention(query, key, value, mask=mask, bias=bias, dropout_p=dropout_p, scale=scale)


def _mask_4d(mask: Tensor, B: int, H: int, Sq: int, Sk: int) -> Tensor:
    """A mask of any rank that broadcasts to [B,H,Sq,Sk], as a 4-d one."""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        raise TypeError(
            f"attn_mask is {_checks.given(mask)}; accepted: a bool tensor (True = attend) or a floating-point one: convert it."
        )
    _checks.dense(mask, "attn_mask")
    shape, full = mask.shape, (B, H, Sq, Sk)
    if len(shape) == 3 and shape[0] > 1 and shape[0] == B and shape[0] == H:
        raise ValueError(
            f"attn_mask has shape {_checks.text(shape)}, which may be per batch element or per head of [B,H,Sq,Sk] = "
            f"{_checks.text(full)}: use attn_mask[:, None] for one per batch element, attn_mask[None] for one per head."
        )
    if len(shape) <= 4 and all(n == 1 or n == m for n, m in zip(reversed(shape), reversed(full))):
        return mask.view(*(1,) * (4 - len(shape)), *shape) if len(shape) < 4 else mask
    raise ValueError(
        f"attn_mask has shape {_checks.text(shape)}; accepted: a shape that broadcasts to [B,H,Sq,Sk] = "
        f"{_checks.text(full)}."
    )


def _broadcast_batch_and_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Expands (without a copy) batch and head dimensions of size 1 as a matrix product would."""
    for x, name in ((q, "query"), (k, "key"), (v, "value")):
        _checks.dense(x, name)
    batch = _broadcast_size(q.shape[0], k.shape[0], v.shape[0])
    kv_heads = _broadcast_size(k.shape[1], v.shape[1])
    q = q.expand(batch, kv_heads if q.shape[1] == 1 else -1, -1, -1)
    return q, k.expand(batch, kv_heads, -1, -1), v.expand(batch, kv_heads, -1, -1)


def _broadcast_size(*sizes: int) -> int:
    """What sizes broadcast to, or -1 (expand leaves the dimension alone) if they do not: later checks refuse them."""
    others = [n for n in sizes if n != 1]
    return others[0] if others and all(n == others[0] for n in others) else -1


def _different_heads(query: Tensor, key: Tensor) -> Exception:
    return ValueError(
        f"query has {query.shape[1]} heads and key has {key.shape[1]} (shapes {_checks.text(query.shape)}, "
        f"{_checks.text(key.shape)}); accepted: equal head counts, or H a multiple of Hk with enable_gqa=True."
    )


def _nested(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    if attn_mask is not None:
        raise ValueError(
            "attn_mask was given and query, key, value are nested; accepted: is_causal, or mha_ext.attention with a mask "
            "of mha_ext.masks."
        )
    jagged = query.layout == key.layout == torch.jagged
    if jagged and query.dim() == key.dim() == 4 and not enable_gqa and query.shape[1] != key.shape[1]:
        raise _different_heads(query, key)
    mask = masks.Causal("top_left") if is_causal else None
    return nested.attention(query, key, value, 2, mask=mask, dropout_p=dropout_p, scale=scale)


def _any_rank(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Leading dimensions become one batch; where there are none, they are added."""
    tensors = (query, key, value)
    for x, name in zip(tensors, ("query", "key", "value")):
        _checks.dense(x, name)
    rank = max(x.dim() for x in tensors)
    try:
        lead = torch.broadcast_shapes((1,), *(x.shape[:-3] for x in tensors))
    except RuntimeError:
        lead = None
    if lead is None or min(x.dim() for x in tensors) < 2:
        raise ValueError(
            f"query, key, value have shapes {', '.join(_checks.text(x.shape) for x in tensors)}; accepted: "
            "[..., H, Sq, D], [..., Hk, Sk, D], [..., Hk, Sk, Dv] whose leading dimensions broadcast."
        )

    def one_batch(x: Tensor) -> Tensor:
        x = x.view(*(1,) * (3 - x.dim()), *x.shape) if x.dim() < 3 else x
        return x.expand(*lead, *x.shape[-3:]).flatten(0, len(lead) - 1)

    q, k, v = map(one_batch, tensors)
    if isinstance(attn_mask, Tensor) and attn_mask.dim() > 3:
        mask_lead = attn_mask.shape[:-3]
        if len(mask_lead) > len(lead) or any(n not in (1, m) for n, m in zip(reversed(mask_lead), reversed(lead))):
            raise ValueError(
                f"attn_mask has shape {_checks.text(attn_mask.shape)}; accepted: a shape that broadcasts to "
                f"[..., H, Sq, Sk] = {_checks.text((*lead, q.shape[1], q.shape[2], k.shape[2]))}."
            )
        attn_mask = one_batch(attn_mask)
    out = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out.reshape((*lead, *out.shape[1:])[-rank:])
