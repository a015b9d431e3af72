"""The head split and merge: the autograd formulas of their ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import accumulate_dtype
from . import vmap
from .arguments import Arguments
from .autograd import differentiable, where_needed


def _split_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, bias = inputs
    ctx.has_bias = bias is not None


def _split_backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    # Without a bias the dispatcher may drop that argument, and its flag.
    need_dx, _, *need_dbias = ctx.needs_input_grad
    dx = merge_heads(dout, None) if need_dx else None
    return dx, None, dout.sum((0, 2)).flatten() if ctx.has_bias and any(need_dbias) else None


def _merge_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, mix = inputs
    ctx.heads = x.shape[1], x.shape[3]
    ctx.save_for_backward(x if mix is not None else None, mix)


def _merge_backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    x, mix = ctx.saved_tensors
    by_head = dout.unflatten(-1, ctx.heads).transpose(1, 2)
    if mix is None:
        return by_head, None
    dx = merge_heads(by_head, mix.t()).unflatten(-1, ctx.heads).transpose(1, 2)
    rows = (t.to(accumulate_dtype(x.dtype)).flatten(2) for t in (x, by_head))  # [B,H,S*D]
    dmix = torch.matmul(next(rows), next(rows).mT).sum(0).to(mix.dtype)
    return where_needed((dx, dmix), ctx)


split_heads = differentiable(Arguments("split_heads"), _split_setup, _split_backward, vmap.heads)
merge_heads = differentiable(Arguments("merge_heads"), _merge_setup, _merge_backward, vmap.heads)
