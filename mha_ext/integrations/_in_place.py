"""Attention to keys and values where the caches of transformers models hold them."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import masks
from ..cached import attention_cached
from ..nn.kv_cache import KVCache
from ..nn.paged_kv_cache import PagedKVCache
from ..varlen import attention_varlen


def stand_ins(held: KVCache, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tensors without data that lead to a cache, in the shape of its first keys and values."""
    pair = []
    for x in (held.k, held.v):
        found: Any = torch.empty(held.batch, held.num_kv_heads, length, x.shape[3], dtype=dtype, device="meta")
        found.mha_ext_held = held
        pair.append(found)
    return pair[0], pair[1]


def held_by(key: Tensor) -> KVCache | None:
    """The cache that a key leads to, if it is one of stand_ins()."""
    return getattr(key, "mha_ext_held", None)


def plain(held: KVCache, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Keys and values [B,Hk,length,.] in that type."""
    return [x[:, :, :length] for x in held._plain(dtype)]


def attend(
    q: Tensor, held: KVCache, length: int, mask: masks.Mask | None, bias: Tensor | None, **options: Any
) -> Tensor:
    """The attention of q [B,H,Sq,D] to the first positions of a cache; the mask and bias are for these."""
    if not isinstance(held, PagedKVCache):
        k, v = held.k[:, :, :length], held.v[:, :, :length]
        for name in ("k_scale", "v_scale"):
            if (scale := getattr(held, name)) is not None:
                options[name] = scale[:, :, :length]
        return attention_cached(q, k, v, mask=mask, bias=bias, **options)
    columns = -(-length // held.page_size)
    beyond = columns * held.page_size - length
    if beyond > 0:
        within = masks.Padding(torch.full((q.shape[0],), length, device=q.device))
        mask = within if mask is None else _longer(mask, beyond) & within
        bias = bias if bias is None or bias.shape[-1] == 1 else F.pad(bias, (0, beyond))
    return attention_cached(
        q, held.k, held.v, block_table=held.block_table[:, :columns], k_scale=held.k_scale, v_scale=held.v_scale,
        mask=mask, bias=bias, **options,
    )  # fmt: skip


def _longer(mask: masks.Mask, beyond: int) -> masks.Mask:
    """Dense parts with so many columns more; intervals say the same of any number of keys."""
    if isinstance(mask, masks.Dense) and mask.tensor.shape[-1] > 1:
        return masks.Dense(F.pad(mask.tensor, (0, beyond)))
    if isinstance(mask, masks.And):
        parts = [_longer(part, beyond) for part in mask.parts]
        return functools.reduce(operator.and_, parts)
    return mask


def attend_to_requests(
    query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any], window: int | None, **options: Any
) -> Tensor:
    """What continuous batching asks for: requests side by side, each with queries that are its last positions.

    Args:
        query: [1,H,total,D].
        key, value: [1,Hk,total_k,D]: what the requests have seen; where there is a block_table, what is new.
        given: cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k; or where each request has one query, its pages:
            block_table, k_cache and v_cache [pages,page_size,Hk,D], which are yet to be written.
        window: how many keys a query sees, its own among them.

    Returns:
        [1,total,H,Dv]
    """
    starts, table = given["cu_seq_lens_k"], given.get("block_table")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if table is None:
        mask = masks.Causal() if window is None else masks.Window(window - 1, 0)
        return attention_varlen(
            q, k, v, given["cu_seq_lens_q"], starts, max_seqlen_q=given["max_length_q"],
            max_seqlen_k=given["max_length_k"], mask=mask, **options,
        )[None]  # fmt: skip
    k_pages, v_pages = given["k_cache"], given["v_cache"]
    lengths = starts.diff().to(torch.int64)
    page_size, last, table = k_pages.shape[1], lengths - 1, table.to(torch.int64)
    page = table.gather(1, (last // page_size)[:, None])[:, 0]
    k_pages[page, last % page_size] = k
    v_pages[page, last % page_size] = v
    first = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
    out = attention_cached(
        q[:, :, None], k_pages.transpose(1, 2), v_pages.transpose(1, 2), block_table=table,
        mask=masks.Intervals(first[:, None], lengths[:, None]), **options,
    )  # fmt: skip
    return out[None, :, :, 0]
