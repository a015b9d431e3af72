"""Attention over keys and values as caches hold them: in pages, or quantised to 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _call, _checks, _foreign, _ops, biases, masks
from ._ops import NOT_PACKED, Call
from ._pytrees import tensors_in

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import CachedOptions

QUANTISED = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # and the largest value of each


@overload
def attention_cached(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[CachedOptions]
) -> Tensor: ...


@overload
def attention_cached(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[CachedOptions]
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_cached(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = ..., **options: Unpack[CachedOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    mask: masks.Mask | Tensor | None = None,
    bias: Tensor | biases.Bias | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """mha_ext.attention for inference, with keys and values read where and as a cache holds them.

    Pages are due to Kwon et al. ("Efficient memory management for large language model serving with PagedAttention",
    2023). It has no gradient: call it under torch.no_grad() or torch.inference_mode().

    Args:
        q: queries [B,H,Sq,D].
        k, v: [B,Hk,Sk,D] and [B,Hk,Sk,Dv]; with a block_table pages of page_size keys, [pages,Hk,page_size,D] and
            [pages,Hk,page_size,Dv]. Of q's type, or both int8 or float8_e4m3fn: then k * k_scale and v * v_scale are
            meant, and q is float32, bfloat16 or float16.
        block_table: integer [B,n] (int64 is read as it is, others are converted), key j of sequence b is row j % page_size
            of page block_table[b, j // page_size];
            Sk = n * page_size. Entries for keys that no query sees may be anything. On the CPU, pages are read without
            loss of speed where page_size is a multiple of 64.
        k_scale, v_scale: float32 [B,Hk] or [1,Hk], one per head; or one per head and key, [B,Hk,Sk] or
            [pages,Hk,page_size]. What sees a key or value whose scale is NaN is NaN.
        mask, bias, scale, softcap, sinks, return_lse: as in mha_ext.attention.

    Returns:
        out [B,H,Sq,Dv], or (out, lse) with lse [B,H,Sq].

    Raises:
        ValueError, TypeError: arguments that do not fit, or that require grad. RuntimeError: on the CPU, an entry of
            block_table for visible keys that is no page. (On a GPU, such keys count as NaN.)
    """
    if foreign:
        raise _foreign.refusal(attention_cached, foreign)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return _checks.elsewhere(attention_cached, "qkv", locals())
    if return_lse is not False:
        _checks.flags(return_lse=return_lse)
    if block_table is not None:
        block_table = _checks.integer_tensor(block_table, "block_table", "[B,n]", 2)
    tensors = (q, k, v, *tensors_in(bias), sinks, k_scale, v_scale)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        raise ValueError(
            "attention_cached was given a tensor that requires grad; accepted: calls under torch.no_grad() or "
            "torch.inference_mode(): attention has gradients."
        )
    if forward_ad._current_level >= 0 and any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise _ops.forward_mode_refusal()
    _check(q, k, v, block_table)
    page_size, Sk = (0, k.shape[2]) if block_table is None else (k.shape[2], block_table.shape[1] * k.shape[2])
    (B, H, Sq), device = q.shape[:3], q.device
    given = q, k, v, mask, bias
    args = masks.lower(mask, B, H, Sq, Sk, device)
    added, scale, sinks = _call.score_arguments(bias, scale, sinks, q, B, H, Sq, Sk)
    if type(softcap) is not float or softcap != 0.0:
        _checks.softcap(softcap)
    k_scale, v_scale = _scale(k_scale, "k_scale", k, B), _scale(v_scale, "v_scale", k, B)
    call = Call(q, k, v, added, *args, *NOT_PACKED, sinks, scale, softcap)
    if _call.listener is not None:
        scales = tuple(x for x in (k_scale, v_scale) if x is not None)
        _call.tell(call, "attention_cached", *given, Sk, scales)
    if _checks.is_dtensor(q):
        rules = _call.sharding()
        call = rules.replicated_call(call)
        block_table, k_scale, v_scale = (rules.replicated(x, q) for x in (block_table, k_scale, v_scale))
    out, lse = _ops.cached_results(call, block_table, k_scale, v_scale, page_size)
    return (out, lse) if return_lse else out


def scales_of(x: Tensor, dtype: torch.dtype, fixed: Tensor | None = None) -> Tensor:
    """float32 [B,Hk,S], what each key or value of x [B,Hk,S,D] is divided by, so that its largest element just fits; or
    fixed [B,Hk]. NaN where an element is NaN or infinite: neither format holds that, and it is to show."""
    largest = x.float().abs().amax(-1)
    scale = (largest / QUANTISED[dtype]).clamp(min=torch.finfo(torch.float32).tiny) if fixed is None else fixed[..., None]
    return torch.where(largest.isfinite(), scale, torch.nan)


def quantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [B,Hk,S,D] / scale [B,Hk] or [B,Hk,S], rounded to dtype; what lies beyond its range becomes its largest value,
    and NaN 0."""
    largest = QUANTISED[dtype]
    scale = scale[..., None] if scale.dim() == 3 else scale[..., None, None]
    scaled = (x.float() / scale).nan_to_num(0).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None) -> None:
    if q.is_nested or k.is_nested or v.is_nested:  # shapes are asked for below; the op refuses other layouts
        for tensor, argument in zip((q, k, v), "qkv"):
            _checks.dense(tensor, argument)
    paged = block_table is not None
    accepted = "[pages,Hk,page_size,D], [pages,Hk,page_size,Dv]" if paged else "[B,Hk,Sk,D], [B,Hk,Sk,Dv]"
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and k.shape[3] == q.shape[3]
    if not fits or not (paged or k.shape[0] == q.shape[0]) or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        shapes = f"{_checks.text(q.shape)}, {_checks.text(k.shape)}, {_checks.text(v.shape)}"
        raise ValueError(f"q, k, v have shapes {shapes}; accepted: q [B,H,Sq,D] and k, v {accepted} with H a multiple of Hk.")
    if q.dtype not in _checks.DTYPES:
        raise _checks.unsupported_dtype("q", q.dtype)
    if k.dtype != v.dtype or not (k.dtype == q.dtype or (k.dtype in QUANTISED and q.dtype != torch.float64)):
        names = ", ".join(_checks.name_of(x.dtype) for x in (q, k, v))
        raise TypeError(
            f"q, k, v have dtypes {names}; accepted: one dtype, or k and v int8 or float8_e4m3fn and q float32, "
            "bfloat16 or float16."
        )
    _checks.same_device(k, "k", q.device)
    _checks.same_device(v, "v", q.device)
    if block_table is not None:
        _checks.same_device(block_table, "block_table", q.device)
    if q.is_cuda and _ops.without_cuda is not None:
        raise _checks.no_cuda(_ops.without_cuda)
    if block_table is not None and block_table.shape[0] != q.shape[0]:
        raise ValueError(
            f"block_table is {_checks.given(block_table)}; accepted: an integer tensor [B,n] with B = {q.shape[0]}."
        )


def _scale(x: Tensor | None, name: str, k: Tensor, B: int) -> Tensor | None:
    if (x is not None) != (k.dtype in QUANTISED):
        raise ValueError(
            f"{name} is {'missing' if x is None else 'given'} for keys and values of {_checks.name_of(k.dtype)}; "
            "accepted: scales for int8 and float8_e4m3fn, none for others."
        )
    if x is None:
        return None
    per_head = isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] == k.shape[1] and x.shape[0] in (1, B)
    fits = isinstance(x, Tensor) and not x.is_nested and (per_head or x.shape == k.shape[:3])
    if not fits or x.dtype != torch.float32:
        raise (ValueError if isinstance(x, Tensor) else TypeError)(
            f"{name} is {_checks.given(x)}; accepted: float32 [B,Hk] or [1,Hk] with B = {B}, Hk = {k.shape[1]}, or one per "
            f"key, {_checks.text(k.shape[:3])}."
        )
    _checks.same_device(x, name, k.device)
    return x
