"""Autograd formulas of attention of a packed projection: forward takes one tensor, backward writes its one gradient. What
they save and compute is what those of attention in attention.py do."""

from __future__ import annotations

from typing import Any

import torch

from . import attention as _ops
from . import vmap
from .attention import Gradient
from .library import packed_slices

NOT_PACKED = None, None, 0, 0  # the ops' arguments for packed sequences, which have nothing to do with this


def _fwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    qkv, num_heads, bias, *mask_tensors = inputs[:9]
    mask_numbers, sinks = inputs[9:13], inputs[17]
    *numbers, rng_state, deterministic = inputs[18:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(qkv, *output, bias, *mask_tensors, sinks, rng_state)
    ctx.num_heads, ctx.numbers, ctx.deterministic = num_heads, (mask_numbers, numbers), deterministic


def _fwd_backward(ctx: Any, dout: Gradient, dlse: Gradient, _: Gradient) -> tuple[Any, ...]:
    if dout is None and dlse is None:
        return (None,) * 23
    qkv, out, lse, lse_rest, bias, *mask_tensors, sinks, rng_state = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    mask_numbers, numbers = ctx.numbers
    dqkv, dbias, dsinks = attention_packed_bwd(
        dout, dlse, None, *packed_slices(qkv, ctx.num_heads), out, lse, lse_rest, bias, *mask_tensors, *mask_numbers,
        *NOT_PACKED, sinks, *numbers, rng_state, ctx.needs_input_grad[2], ctx.deterministic,
    )  # fmt: skip
    by_input = (dqkv, None, dbias, *(None,) * 14, dsinks if sinks is not None else None, *(None,) * 5)
    return _ops._where_needed(by_input, ctx)


def _bwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _ops._attention_bwd_setup(ctx, inputs, output)
    ctx.num_heads = inputs[3].shape[1]


def _bwd_backward(ctx: Any, ddqkv: Gradient, ddbias: Gradient, ddsinks: Gradient) -> tuple[Any, ...]:
    slices = (None,) * 3 if ddqkv is None else packed_slices(ddqkv, ctx.num_heads)
    return _ops._attention_bwd_backward(ctx, *slices, ddbias, ddsinks)


attention_packed_fwd = _ops._callable("attention_packed_fwd", _fwd_setup, _fwd_backward, vmap.by_looping)
attention_packed_bwd = _ops._callable("attention_packed_bwd", _bwd_setup, _bwd_backward, vmap.by_looping)
