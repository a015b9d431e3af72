"""Autograd formulas of attention of a packed projection: forward takes one tensor, backward writes its one gradient. What
they save and compute is what those of attention in _ops.py do."""

from __future__ import annotations

import torch

from . import _ops

NOT_PACKED = None, None, 0, 0  # the ops' arguments for packed sequences, which have nothing to do with this


def _fwd_setup(ctx, inputs, output):
    qkv, num_heads, bias, *mask_tensors = inputs[:9]
    mask_numbers, sinks = inputs[9:13], inputs[17]
    *numbers, rng_state, deterministic = inputs[18:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(qkv, *output, bias, *mask_tensors, sinks, rng_state)
    ctx.num_heads, ctx.numbers, ctx.deterministic = num_heads, (mask_numbers, numbers), deterministic


def _fwd_backward(ctx, dout, dlse, _):
    if dout is None and dlse is None:
        return (None,) * 23
    qkv, out, lse, lse_rest, bias, *mask_tensors, sinks, rng_state = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    mask_numbers, numbers = ctx.numbers
    dqkv, dbias, dsinks = attention_packed_bwd(
        dout, dlse, None, *_ops.packed_slices(qkv, ctx.num_heads), out, lse, lse_rest, bias, *mask_tensors, *mask_numbers,
        *NOT_PACKED, sinks, *numbers, rng_state, ctx.needs_input_grad[2], ctx.deterministic,
    )  # fmt: skip
    by_input = (dqkv, None, dbias, *(None,) * 14, dsinks if sinks is not None else None, *(None,) * 5)
    return _ops._where_needed(by_input, ctx)


def _bwd_setup(ctx, inputs, output):
    _ops._attention_bwd_setup(ctx, inputs, output)
    ctx.num_heads = inputs[3].shape[1]


def _bwd_backward(ctx, ddqkv, ddbias, ddsinks):
    slices = (None,) * 3 if ddqkv is None else _ops.packed_slices(ddqkv, ctx.num_heads)
    return _ops._attention_bwd_backward(ctx, *slices, ddbias, ddsinks)


def _vmap(call, names, info, in_dims, *args):
    dropout_p = dict(zip(names, args))["dropout_p"]
    if dropout_p > 0:
        raise _ops._dropout_under_vmap(dropout_p)
    return _ops._vmap_by_looping(call, info, in_dims, *args)


attention_packed_fwd = _ops._callable("attention_packed_fwd", _fwd_setup, _fwd_backward, _vmap)
attention_packed_bwd = _ops._callable("attention_packed_bwd", _bwd_setup, _bwd_backward, _vmap)
