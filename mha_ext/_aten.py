"""torch's own attention ops, aten::*, on these kernels: what use_for_sdpa registers. Beside _ops/, it is the only user of
torch.library.

    scaled_dot_product_attention                     what F.scaled_dot_product_attention calls
    _scaled_dot_product_flash_attention_for_cpu      what torch makes of it where we left it to torch: under torch.func, in
                                                     DTensors, in exported and compiled programs
    _native_multi_head_attention                     the fast path of torch's modules
    _flash_attention_forward                         torch.nn.attention.varlen

The kernels stay registered once they are, since other threads may be about to call them; while no use is active they call
torch's own.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from . import _call, _ops, masks
from ._ops import Call
from ._sequences import attention_packed
from .functional import attention
from .sdpa import scaled_dot_product_attention

active = False  # whether a use is

_aten = torch.ops.aten
_composite = functools.partial(
    _aten.scaled_dot_product_attention.default._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd
)
_flash_is_allowed = torch._C._get_flash_sdp_enabled
_NOT_CHOSEN = "torch.nn.attention.sdpa_kernel chose backends without FLASH_ATTENTION"
_FASTER = "it is faster for so few queries and keys"
_PLAIN = {Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor}
# Fewer pairs of a query and a key, over batch and heads, are faster on torch's kernels: by the Python between the two, and for
# one query while keys and values are in the cache. From 176 shapes timed on 2 cores of an AMD EPYC (Zen 4) at head sizes of 64,
# then lowered by reasoning when a call cost less Python; not timed again.
_FEW = {torch.float32: 2048, torch.float64: 2048, torch.bfloat16: 64, torch.float16: 64}
_FEW_OF_ONE_QUERY = 32768  # in float32

_library: Any = None
_own: dict[tuple[str, str], Any] = {}  # torch's kernels, by op and dispatch key
_told: dict[str, object] = {}


def register() -> None:
    """Puts the kernels in place; once."""
    global _library
    if _library is not None:
        return
    library = torch.library.Library("aten", "IMPL")
    cuda = _ops.without_cuda is None and torch.version.cuda is not None
    for key in ("CPU", "CUDA") if cuda else ("CPU",):
        for each in (key, f"Autograd{key}"):
            library.impl("scaled_dot_product_attention", _sdpa, each)
        for name, kernel in _KERNELS.items():
            if key == "CUDA" and "for_cpu" in name:
                continue
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                _own[name, key] = torch.library.get_kernel(f"aten::{name}", key)
            with warnings.catch_warnings():  # that there is a kernel already
                warnings.simplefilter("ignore", UserWarning)
                library.impl(name, _choice(name, key, kernel), key, with_keyset=True)
    _library = library


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if active:
        why = _why_not(query, key, value, attn_mask, dropout_p)
        if why is None:
            try:
                return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            except (ValueError, TypeError) as refusal:
                if key.dim() == value.dim() == 4 and key.shape[2] != value.shape[2]:
                    raise  # torch does not look, and reads beyond the values
                why = str(refusal)
        if _call.listener is not None:
            _tell("scaled_dot_product_attention", why)
    return _composite(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _why_not(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float) -> str | None:
    if not _flash_is_allowed():
        return _NOT_CHOSEN
    if attn_mask is None and dropout_p == 0.0 and query.dim() == key.dim() == 4 and query.shape[1] == key.shape[1]:
        B, H, Sq, _ = query.shape
        if _is_small(B * H * Sq * key.shape[2], Sq, query):
            return _FASTER
    if type(query) in _PLAIN and type(key) in _PLAIN and type(value) in _PLAIN:
        if attn_mask is None or type(attn_mask) in _PLAIN:
            if not _ops.transforms_active() and forward_ad._current_level < 0:
                return None
            return "torch.func and forward-mode differentiation take torch's formulas, whose parts may run on these kernels"
    names = ", ".join(dict.fromkeys(type(x).__name__ for x in (query, key, value, attn_mask) if x is not None))
    return f"tensors of type {names} take torch's formulas, whose parts may run on these kernels"


def _is_small(pairs: int, queries: int, like: Tensor) -> bool:
    """Whether torch's kernel is faster for so many pairs of a query and a key, over batch and heads; never while shapes are
    symbolic, since compiled code would then hold for a part of them."""
    if type(pairs) is not int or not like.is_cpu:
        return False
    if queries == 1 and like.dtype == torch.float32:
        return pairs < _FEW_OF_ONE_QUERY
    return pairs < _FEW.get(like.dtype, 0)


def _tell(what: str, why: str) -> None:
    mine = object()
    if _told.setdefault(why, mine) is mine:  # in one step: other threads may be here too
        print(f"mha_ext: {what} runs on torch's own kernel: {why}", file=sys.stderr, flush=True)


# --- Kernels below autograd -------------------------------------------------------------------------------------------


def _choice(name: str, key: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """What the dispatcher calls: our kernel, or torch's where ours is not in use or refuses."""
    own = _own.get((name, key))

    def choose(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if active and _flash_is_allowed():
            try:
                with torch.no_grad():
                    found = kernel(*args, **kwargs)
                if found is not None:  # else torch's is faster
                    return found
            except (ValueError, TypeError) as refusal:
                if own is None:
                    raise
                if _call.listener is not None:
                    _tell(name, str(refusal))
        if own is None:
            raise NotImplementedError(
                f"aten::{name} has no kernel on {key} in torch; accepted: calls while mha_ext.use_for_sdpa() is in use."
            )
        return own.call_boxed(keyset, *args, **kwargs)

    return choose


def _mask_and_bias(attn_mask: Tensor | None, is_causal: bool) -> tuple[masks.Mask | None, Tensor | None]:
    causal = masks.Causal("top_left") if is_causal else None
    if attn_mask is None or attn_mask.dtype != torch.bool:
        return causal, attn_mask
    return masks.Dense(attn_mask) if causal is None else causal & masks.Dense(attn_mask), None


def _small(query: Tensor, key: Tensor, attn_mask: Tensor | None) -> bool:
    B, H, Sq, _ = query.shape
    return attn_mask is None and _is_small(B * H * Sq * key.shape[2], Sq, query)


def _rows_first(x: Tensor) -> Tensor:
    """[B,H,S,...] in the order [B,S,H,...], as torch's kernel gives it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _flash_for_cpu(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    if dropout_p != 0.0 or _small(query, key, attn_mask):
        return None
    mask, bias = _mask_and_bias(attn_mask, is_causal)
    out, lse = attention(query, key, value, mask=mask, bias=bias, scale=scale, return_lse=True)
    if attn_mask is not None:
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # torch's, of rows that see no key
    return out, _rows_first(lse)


def _flash_for_cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, dropout_p: float, is_causal: bool,
    *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    if dropout_p != 0.0 or _small(query, key, attn_mask):
        return None
    mask, bias = _mask_and_bias(attn_mask, is_causal)
    call = _call.lower(query, key, value, mask=mask, bias=bias, scale=scale)
    return [_rows_first(x) for x in _gradients(call, grad_out, out, logsumexp)]


def _gradients(call: Call, dout: Tensor, out: Tensor, lse: Tensor) -> Any:
    """Those of q, k and v, given torch's logsumexp, which has no second part."""
    lse = lse.contiguous()
    dq, dk, dv, _, _ = _ops.attention_gradients(call, dout, None, out, lse, torch.zeros_like(lse))
    return dq, dk, dv


def _native_multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> Any:  # fmt: skip
    """Of torch.nn.MultiheadAttention in inference: query, key, value [B,S,E]; mask, True = hidden, [Sq,Sk] (mask_type 0),
    [B,Sk] (1) or [B,H,Sq,Sk] (2)."""
    heads = (num_head, embed_dim // num_head)
    if query is key and key is value:
        q, k, v = F.linear(query, qkv_weight, qkv_bias).unflatten(-1, (3, *heads)).permute(2, 0, 3, 1, 4)
    else:
        each = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3))
        q, k, v = (F.linear(x, w, b).unflatten(-1, heads).transpose(1, 2) for x, w, b in each)
    if _small(q, k, mask):
        return None
    visible = None
    if mask is not None:
        visible = mask.logical_not()
        if mask_type == 1:
            visible = visible[:, None, None]
    found: Any = attention(q, k, v, mask=visible, return_weights=need_weights)
    out, weights = found if need_weights else (found, None)
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    return F.linear(out.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


def _varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Tensor | None = None, alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None,
) -> Any:  # fmt: skip
    _refuse_unlike_packed(cum_seq_q, cum_seq_k, dropout_p, seqused_k, alibi_slopes, block_table)
    mask = _window(is_causal, window_size_left, window_size_right)
    out, lse = attention_packed(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, mask=mask, scale=scale, return_lse=True
    )
    return out, lse, *(query.new_empty(n, dtype=dtype) for n, dtype in ((2, torch.uint64), (0, torch.uint64), (0, query.dtype)))


def _varlen_forward_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    found, lse, *_ = _varlen_forward(*args, **kwargs)
    out.copy_(found)
    return lse


def _varlen_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor,
    cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor,
    *, scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> Any:  # fmt: skip
    _refuse_unlike_packed(cum_seq_q, cum_seq_k, dropout_p, None, None, None)
    q_starts, k_starts = cum_seq_q.to(torch.int64), cum_seq_k.to(torch.int64)
    dout, q, k, v, out = (x.transpose(0, 1)[None] for x in (grad_out, query, key, value, out))
    mask, sizes = _window(is_causal, window_size_left, window_size_right), (q_starts.shape[0] - 1, q.shape[1], max_q, max_k)
    args = masks.lower(mask, *sizes, q.device, (q_starts.diff(), k_starts.diff()))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = Call(
        q, k, v, None, *args, q_starts, k_starts, max_q, max_k, scale=scale,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return [x[0].transpose(0, 1) for x in _gradients(call, dout, out, logsumexp[None])]


def _refuse_unlike_packed(
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, dropout_p: float, seqused_k: Tensor | None, alibi_slopes: Tensor | None,
    block_table: Tensor | None,
) -> None:  # fmt: skip
    others = {"dropout_p": dropout_p or None, "seqused_k": seqused_k, "alibi_slopes": alibi_slopes, "block_table": block_table}
    given = [name for name, x in others.items() if x is not None]
    if given or cum_seq_q is None or cum_seq_k is None:
        what = ", ".join(given) or "no cu_seqlens"
        raise ValueError(f"{what} was given to torch's varlen attention; accepted: packed sequences: use mha_ext.attention_cached.")


def _window(is_causal: bool, left: int | None, right: int | None) -> masks.Mask | None:
    """None and negative numbers: no limit."""
    left, right = (None if n is None or n < 0 else n for n in (left, right))
    if is_causal:
        right = 0
    if left is None and right is None:
        return None
    return masks.Causal() if left is None and right == 0 else masks.Window(left, right)


_KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _flash_for_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_for_cpu_backward,
    "_native_multi_head_attention": _native_multi_head_attention,
    "_flash_attention_forward": _varlen_forward,
    "_flash_attention_forward_no_dropout_inplace": _varlen_forward_into,
    "_flash_attention_backward": _varlen_backward,
}
