"""The masked softmax: the autograd formulas of its two ops."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import masks, reference
from . import vmap
from .arguments import Arguments, mask_of
from .autograd import Gradient, differentiable, second_order, vjp
from .rng import dropout_mask

FORWARD = Arguments("masked_softmax_fwd")
BACKWARD = Arguments("masked_softmax_bwd", unsaved=("lse",))


def _fwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, lse = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse)
    FORWARD.save(ctx, inputs, lse)


def _fwd_backward(ctx: Any, dout: Gradient, _: Gradient) -> tuple[Any, ...]:
    if dout is None:
        return FORWARD.gradients(ctx)
    given, (lse,) = FORWARD.saved(ctx)
    scores, *modifiers = given
    dscores, dbias = masked_softmax_bwd(dout, scores, lse, *modifiers, FORWARD.needs(ctx, "bias"))
    return FORWARD.gradients(ctx, scores=dscores, bias=dbias)


def _bwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    BACKWARD.save(ctx, inputs)


def _bwd_backward(ctx: Any, ddscores: Gradient, ddbias: Gradient) -> tuple[Any, ...]:
    given, _ = BACKWARD.saved(ctx)
    (B, H, Sq, Sk), scale, p = given.scores.shape, given.scale, given.dropout_p
    visible = masks.visible_of(mask_of(given), Sq, Sk, given.scores.device)
    keep = dropout_mask(given.rng_state, p, B, H, Sq, Sk) if p > 0 else None

    def first_order(dout: Tensor, scores: Tensor, bias: Tensor | None) -> Any:
        def forward(scores: Tensor, bias: Tensor | None) -> Tensor:
            return reference.softmax(scores, bias, visible, scale, p, keep)

        return vjp(forward, (scores, bias))[1](dout)

    wanted = ddscores, ddbias if given.need_dbias else None
    ddout, dscores, dbias = second_order(first_order, (given.dout, given.scores, given.bias), wanted)
    return BACKWARD.gradients(ctx, dout=ddout, scores=dscores, bias=dbias)


masked_softmax_fwd = differentiable(FORWARD, _fwd_setup, _fwd_backward, vmap.by_folding)
masked_softmax_bwd = differentiable(BACKWARD, _bwd_setup, _bwd_backward, vmap.by_folding)
