"""Attention of a packed projection: forward takes one tensor, backward writes its one gradient. What the formulas of its two
ops save and compute is what those of attention do."""

from __future__ import annotations

from typing import Any

import torch

from . import vmap
from .arguments import Arguments, packed_slices
from .attention import bwd_backward
from .autograd import Gradient, differentiable

FORWARD = Arguments("attention_packed_fwd")
BACKWARD = Arguments("attention_packed_bwd", unsaved=("out", "lse", "lse_rest"))


def _fwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, lse_rest = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse_rest)
    FORWARD.save(ctx, inputs, *output)


def _fwd_backward(ctx: Any, dout: Gradient, dlse: Gradient, _: Gradient) -> tuple[Any, ...]:
    if dout is None and dlse is None:
        return FORWARD.gradients(ctx)
    given, (out, lse, lse_rest) = FORWARD.saved(ctx)
    dout, dweights = torch.zeros_like(out) if dout is None else dout, None
    dqkv, dbias, dsinks = attention_packed_bwd(
        dout, dlse, dweights, *packed_slices(given.qkv, given.num_heads), out, lse, lse_rest, *given[FORWARD.modifiers],
        FORWARD.needs(ctx, "bias"), given.deterministic,
    )  # fmt: skip
    return FORWARD.gradients(ctx, qkv=dqkv, bias=dbias, sinks=dsinks if given.sinks is not None else None)


def _bwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    BACKWARD.save(ctx, inputs)


def _bwd_backward(ctx: Any, ddqkv: Gradient, ddbias: Gradient, ddsinks: Gradient) -> tuple[Any, ...]:
    given, _ = BACKWARD.saved(ctx)
    ddq, ddk, ddv = [None] * 3 if ddqkv is None else packed_slices(ddqkv, given.q.shape[1])
    ddout, ddlse, ddweights, dq, dk, dv, dbias, dsinks = bwd_backward(given, ddq, ddk, ddv, ddbias, ddsinks)
    return BACKWARD.gradients(
        ctx, dout=ddout, dlse=ddlse, dweights=ddweights, q=dq, k=dk, v=dv, bias=dbias, sinks=dsinks
    )


attention_packed_fwd = differentiable(FORWARD, _fwd_setup, _fwd_backward, vmap.by_looping)
attention_packed_bwd = differentiable(BACKWARD, _bwd_setup, _bwd_backward, vmap.by_looping)
