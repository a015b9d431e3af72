"""Attention: the autograd formulas of its two ops.

Attention saves its inputs, the output and the logsumexp; backward recomputes the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import masks, reference
from . import vmap
from .arguments import Arguments, lengths_of, mask_of
from .autograd import Gradient, differentiable, second_order, vjp
from .rng import dropout_mask

FORWARD = Arguments("attention_fwd")
BACKWARD = Arguments("attention_bwd", unsaved=("out", "lse", "lse_rest"))


def save(ctx: Any, inputs: tuple[Any, ...], output: Any, return_weights: bool) -> None:
    out, lse, lse_rest, weights = output
    ctx.set_materialize_grads(False)
    FORWARD.save(ctx, inputs, out, lse, lse_rest, weights if return_weights else None)


def gradients_of(ctx: Any, need_dbias: bool, dout: Gradient, dlse: Gradient, dweights: Gradient) -> list[Gradient]:
    """Those of q, k, v, bias and sinks."""
    given, (out, lse, lse_rest, weights) = FORWARD.saved(ctx)
    if dout is None and dlse is None and dweights is None:
        return [None] * 5
    if dout is None:
        dout = torch.zeros_like(out)
    if weights is None:
        dweights = None  # the empty placeholder's gradient
    if dweights is not None:
        # A weight of 0 contributes nothing, whatever its gradient holds.
        product = torch.where(weights == 0, 0, weights.to(lse.dtype) * dweights)
        dlse = -product.sum(-1) if dlse is None else dlse - product.sum(-1)
    modifiers = given[FORWARD.modifiers]
    return list(
        attention_bwd(
            dout, dlse, dweights, given.q, given.k, given.v, out, lse, lse_rest, *modifiers, need_dbias, given.deterministic
        )
    )


def _fwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    save(ctx, inputs, output, FORWARD.named(inputs).return_weights)
    _, _, lse_rest, _ = output
    ctx.mark_non_differentiable(lse_rest)


def _fwd_backward(ctx: Any, dout: Gradient, dlse: Gradient, _: Gradient, dweights: Gradient) -> tuple[Any, ...]:
    dq, dk, dv, dbias, dsinks = gradients_of(ctx, FORWARD.needs(ctx, "bias"), dout, dlse, dweights)
    return FORWARD.gradients(ctx, q=dq, k=dk, v=dv, bias=dbias, sinks=dsinks)


def _bwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    BACKWARD.save(ctx, inputs)


def bwd_backward(given: Any, dq: Gradient, dk: Gradient, dv: Gradient, dbias: Gradient, dsinks: Gradient) -> list[Gradient]:
    """The gradients of dout, dlse, dweights, q, k, v, bias and sinks, given those of what attention_bwd(*given) returns."""
    options = for_reference(given)

    def first_order(dout: Any, dlse: Any, dweights: Any, *tensors: Any) -> Any:
        def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> Any:
            return reference.attend(q, k, v, bias, sinks=sinks, **options)

        (_, lse, weights), pull = vjp(forward, tensors)
        if dweights is None:
            return pull((dout, torch.zeros_like(lse) if dlse is None else dlse, torch.zeros_like(weights)))
        # The op takes -rowsum(weights * dweights) as a part of dlse; here autograd finds that term itself.
        product = (weights.to(lse.dtype) * dweights).sum(-1)
        return pull((dout, product if dlse is None else dlse + product, dweights))

    wanted = dq, dk, dv, dbias if given.need_dbias else None, dsinks if given.sinks is not None else None
    tensors = given.dout, given.dlse, given.dweights, given.q, given.k, given.v, given.bias, given.sinks
    return second_order(first_order, tensors, wanted)


def _bwd_backward(ctx: Any, *gradients: Gradient) -> tuple[Any, ...]:
    given, _ = BACKWARD.saved(ctx)
    ddout, ddlse, ddweights, dq, dk, dv, dbias, dsinks = bwd_backward(given, *gradients)
    return BACKWARD.gradients(
        ctx, dout=ddout, dlse=ddlse, dweights=ddweights, q=dq, k=dk, v=dv, bias=dbias, sinks=dsinks
    )


def for_reference(given: Any) -> dict[str, Any]:
    """What reference.attend takes besides tensors that it differentiates, of an op's arguments."""
    packed, B, Sq, Sk = None, given.q.shape[0], given.q.shape[2], given.k.shape[2]
    if given.q_starts is not None:
        packed = reference.Packed(given.q_starts, given.k_starts, given.max_q, given.max_k)
        B, Sq, Sk = len(given.q_starts) - 1, given.max_q, given.max_k
    visible = masks.visible_of(mask_of(given), Sq, Sk, given.q.device, lengths_of(given))
    p = given.dropout_p
    keep = dropout_mask(given.rng_state, p, B, given.q.shape[1], Sq, Sk) if p > 0 else None
    numbers = {"scale": given.scale, "softcap": given.softcap, "dropout_p": p}
    return {"visible": visible, "keep": keep, "packed": packed, **numbers}


attention_fwd = differentiable(FORWARD, _fwd_setup, _fwd_backward, vmap.by_folding)
attention_bwd = differentiable(BACKWARD, _bwd_setup, _bwd_backward, vmap.by_folding)
