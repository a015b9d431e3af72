"""Attention with talking heads: the autograd formulas of its two ops, as those of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from . import vmap
from .arguments import Arguments
from .attention import for_reference
from .autograd import Gradient, differentiable, second_order, vjp

FORWARD = Arguments("attention_mixed_fwd")
BACKWARD = Arguments("attention_mixed_bwd", unsaved=("lse", "lse_rest"))


def _fwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, lse, lse_rest, _ = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse_rest)
    FORWARD.save(ctx, inputs, lse, lse_rest)


def _fwd_backward(ctx: Any, dout: Gradient, dlse: Gradient, _: Gradient, dweights: Gradient) -> tuple[Any, ...]:
    given, (lse, lse_rest) = FORWARD.saved(ctx)
    if not given.return_weights:
        dweights = None  # the empty placeholder's gradient
    if dout is None and dlse is None and dweights is None:
        return FORWARD.gradients(ctx)
    if dout is None:
        dout = given.q.new_zeros([*given.q.shape[:3], given.v.shape[3]])
    dq, dk, dv, dbias, dsinks, dpre_mix, dpost_mix = attention_mixed_bwd(
        dout, dlse, dweights, given.q, given.k, given.v, lse, lse_rest, given.pre_mix, given.post_mix, *given[FORWARD.modifiers],
        FORWARD.needs(ctx, "bias"), given.deterministic,
    )  # fmt: skip
    return FORWARD.gradients(
        ctx, q=dq, k=dk, v=dv, pre_mix=dpre_mix, post_mix=dpost_mix, bias=dbias, sinks=dsinks
    )


def _bwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    BACKWARD.save(ctx, inputs)


def _bwd_backward(
    ctx: Any, ddq: Gradient, ddk: Gradient, ddv: Gradient, ddbias: Gradient, ddsinks: Gradient, ddpre_mix: Gradient,
    ddpost_mix: Gradient,
) -> tuple[Any, ...]:  # fmt: skip
    given, _ = BACKWARD.saved(ctx)
    options = for_reference(given)

    def first_order(dout: Any, dlse: Any, dweights: Any, *tensors: Any) -> Any:
        def forward(q: Any, k: Any, v: Any, pre_mix: Any, post_mix: Any, bias: Any, sinks: Any) -> Any:
            return reference.attend(q, k, v, bias, sinks=sinks, pre_mix=pre_mix, post_mix=post_mix, **options)

        (_, lse, weights), pull = vjp(forward, tensors)
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        return pull((dout, dlse, torch.zeros_like(weights) if dweights is None else dweights))

    def of(x: Tensor | None, gradient: Gradient) -> Gradient:
        return gradient if x is not None else None

    wanted = (
        ddq, ddk, ddv, of(given.pre_mix, ddpre_mix), of(given.post_mix, ddpost_mix), ddbias if given.need_dbias else None,
        of(given.sinks, ddsinks),
    )  # fmt: skip
    names = "dout", "dlse", "dweights", "q", "k", "v", "pre_mix", "post_mix", "bias", "sinks"
    found = second_order(first_order, [getattr(given, name) for name in names], wanted)
    return BACKWARD.gradients(ctx, **dict(zip(names, found)))


attention_mixed_fwd = differentiable(FORWARD, _fwd_setup, _fwd_backward, vmap.by_looping)
attention_mixed_bwd = differentiable(BACKWARD, _bwd_setup, _bwd_backward, vmap.by_looping)
