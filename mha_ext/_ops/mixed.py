"""Attention with talking heads: the autograd formulas of its two ops, as those of attention in attention.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import masks, reference
from . import attention as _ops
from . import vmap
from .attention import Gradient


def _fwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, pre_mix, post_mix, bias, *mask_tensors = inputs[:12]
    *mask_numbers, q_starts, k_starts, max_q, max_k, sinks = inputs[12:21]
    scale, softcap, dropout_p, rng_state, return_weights, deterministic = inputs[21:]
    _, lse, lse_rest, _ = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse_rest)
    ctx.save_for_backward(
        q, k, v, lse, lse_rest, pre_mix, post_mix, bias, *mask_tensors, q_starts, k_starts, sinks, rng_state
    )
    ctx.numbers = mask_numbers, (max_q, max_k), (scale, softcap, dropout_p)
    ctx.return_weights, ctx.deterministic = return_weights, deterministic


def _fwd_backward(
    ctx: Any, dout: Gradient, dlse: Gradient, _: Gradient, dweights: Gradient
) -> tuple[Any, ...]:
    q, k, v, lse, lse_rest, pre_mix, post_mix, *modifiers = ctx.saved_tensors
    *bias_and_mask, q_starts, k_starts, sinks, rng_state = modifiers
    nothing = (None,) * 27
    if not ctx.return_weights:
        dweights = None  # the empty placeholder's gradient
    if dout is None and dlse is None and dweights is None:
        return nothing
    if dout is None:
        dout = q.new_zeros([*q.shape[:3], v.shape[3]])
    mask_numbers, longest, numbers = ctx.numbers
    dq, dk, dv, dbias, dsinks, dpre_mix, dpost_mix = attention_mixed_bwd(
        dout, dlse, dweights, q, k, v, lse, lse_rest, pre_mix, post_mix, *bias_and_mask, *mask_numbers, q_starts,
        k_starts, *longest, sinks, *numbers, rng_state, ctx.needs_input_grad[5], ctx.deterministic,
    )  # fmt: skip
    gradients = (dq, dk, dv, dpre_mix, dpost_mix, dbias) + nothing[6:20] + (dsinks,) + nothing[21:]
    return _ops._where_needed(gradients, ctx)


def _bwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    dout, dlse, dweights, q, k, v, _, _, pre_mix, post_mix, bias, *mask_tensors = inputs[:17]
    *mask_numbers, q_starts, k_starts, max_q, max_k, sinks = inputs[17:26]
    scale, softcap, dropout_p, rng_state, need_dbias, _ = inputs[26:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        dout, dlse, dweights, q, k, v, pre_mix, post_mix, bias, sinks, *mask_tensors, q_starts, k_starts, rng_state
    )
    ctx.numbers = mask_numbers, (max_q, max_k), (scale, softcap, dropout_p)
    ctx.need_dbias = need_dbias


def _bwd_backward(
    ctx: Any, ddq: Gradient, ddk: Gradient, ddv: Gradient, ddbias: Gradient, ddsinks: Gradient, ddpre_mix: Gradient,
    ddpost_mix: Gradient,
) -> tuple[Any, ...]:  # fmt: skip
    *inputs, mask, begin, end, query_ids, key_ids, blocks, q_starts, k_starts, rng_state = ctx.saved_tensors
    q, k, _, pre_mix, post_mix, _, sinks = inputs[3:]
    mask_numbers, (max_q, max_k), (scale, softcap, dropout_p) = ctx.numbers
    args = masks.MaskArgs(mask, begin, end, query_ids, key_ids, blocks, *mask_numbers)
    packed, visible, keep = _ops._reference_modifiers(
        args, q, k, q_starts, k_starts, max_q, max_k, dropout_p, rng_state
    )

    def first_order(dout: Any, dlse: Any, dweights: Any, *tensors: Any) -> Any:
        def forward(q: Any, k: Any, v: Any, pre_mix: Any, post_mix: Any, bias: Any, sinks: Any) -> Any:
            return reference.attend(
                q, k, v, bias, visible, scale, softcap, dropout_p, keep, sinks, packed, pre_mix, post_mix
            )

        (_, lse, weights), pull = _ops._vjp(forward, tensors)
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        return pull((dout, dlse, torch.zeros_like(weights) if dweights is None else dweights))

    def given(gradient: Gradient, x: Tensor | None) -> Gradient:
        return gradient if x is not None else None

    wanted = (
        ddq, ddk, ddv, given(ddpre_mix, pre_mix), given(ddpost_mix, post_mix), ddbias if ctx.need_dbias else None,
        given(ddsinks, sinks),
    )  # fmt: skip
    *gradients, dpre_mix, dpost_mix, dbias, dsinks = _ops._second_order(first_order, inputs, wanted)
    nothing = (None,) * 14
    by_input = (*gradients, None, None, dpre_mix, dpost_mix, dbias, *nothing, dsinks, *nothing[:6])
    return _ops._where_needed(by_input, ctx)


attention_mixed_fwd = _ops._callable("attention_mixed_fwd", _fwd_setup, _fwd_backward, vmap.by_looping)
attention_mixed_bwd = _ops._callable("attention_mixed_bwd", _bwd_setup, _bwd_backward, vmap.by_looping)
