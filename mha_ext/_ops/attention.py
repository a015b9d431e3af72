"""The autograd formulas of attention, the masked softmax and the heads, and the ops that have them.

Attention saves its inputs, the output and the logsumexp; backward recomputes the rest. The backward ops are
differentiable too: their formulas go through the reference.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import masks, reference
from .._checks import accumulate_dtype
from . import vmap
from .library import dropout_mask, library

Gradient = Tensor | None


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, bias, *mask_tensors = inputs[:10]
    left, right, top_left, block_size, q_starts, k_starts, max_q, max_k, sinks = inputs[10:19]
    scale, softcap, dropout_p, rng_state, return_weights, deterministic = inputs[19:]
    out, lse, lse_rest, weights = output
    ctx.set_materialize_grads(False)
    weights = weights if return_weights else None
    ctx.save_for_backward(
        q, k, v, out, lse, lse_rest, weights, bias, *mask_tensors, q_starts, k_starts, sinks, rng_state
    )
    ctx.numbers = (left, right, top_left, block_size), (max_q, max_k), (scale, softcap, dropout_p)
    ctx.deterministic = deterministic


def _attention_gradients(ctx: Any, need_dbias: bool, dout: Gradient, dlse: Gradient, dweights: Gradient) -> list[Gradient]:
    """Those of q, k, v, bias and sinks."""
    saved = ctx.saved_tensors  # once: checkpointing lets nobody read it twice
    q, k, v, out, lse, lse_rest, weights, bias, *mask_tensors = saved[:14]
    q_starts, k_starts, sinks, rng_state = saved[14:]
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
    mask_numbers, longest, numbers = ctx.numbers
    modifiers = bias, *mask_tensors, *mask_numbers, q_starts, k_starts, *longest, sinks, *numbers, rng_state
    return list(
        attention_bwd(dout, dlse, dweights, q, k, v, out, lse, lse_rest, *modifiers, need_dbias, ctx.deterministic)
    )


def _attention_fwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _save_attention(ctx, inputs, output)
    ctx.mark_non_differentiable(output[2])


def _attention_fwd_backward(
    ctx: Any, dout: Gradient, dlse: Gradient, _: Gradient, dweights: Gradient
) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad
    *gradients, dsinks = _attention_gradients(ctx, needed[3], dout, dlse, dweights)
    return _where_needed(gradients, ctx) + (None,) * 14 + (dsinks if needed[18] else None,) + (None,) * 6


def _attention_bwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    dout, dlse, dweights, q, k, v, _, _, _, bias, *mask_tensors = inputs[:16]
    left, right, top_left, block_size, q_starts, k_starts, max_q, max_k, sinks = inputs[16:25]
    scale, softcap, dropout_p, rng_state, need_dbias, _ = inputs[25:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dout, dlse, dweights, q, k, v, sinks, bias, *mask_tensors, q_starts, k_starts, rng_state)
    ctx.numbers = (left, right, top_left, block_size), (max_q, max_k), (scale, softcap, dropout_p)
    ctx.need_dbias = need_dbias


def _attention_bwd_backward(ctx: Any, *gradients: Gradient) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    dout, dlse, dweights, q, k, v, sinks, bias, *mask_tensors = saved[:14]
    q_starts, k_starts, rng_state = saved[14:]
    mask_numbers, (max_q, max_k), (scale, softcap, dropout_p) = ctx.numbers
    args = masks.MaskArgs(*mask_tensors, *mask_numbers)
    packed, visible, keep = _reference_modifiers(args, q, k, q_starts, k_starts, max_q, max_k, dropout_p, rng_state)

    def first_order(dout: Any, dlse: Any, dweights: Any, *tensors: Any) -> Any:
        def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> Any:
            return reference.attend(q, k, v, bias, visible, scale, softcap, dropout_p, keep, sinks, packed)

        (_, lse, weights), pull = _vjp(forward, tensors)
        if dweights is None:
            return pull((dout, torch.zeros_like(lse) if dlse is None else dlse, torch.zeros_like(weights)))
        # The op takes -rowsum(weights * dweights) as a part of dlse; here autograd finds that term itself.
        product = (weights.to(lse.dtype) * dweights).sum(-1)
        return pull((dout, product if dlse is None else dlse + product, dweights))

    dq, dk, dv, dbias, dsinks = gradients
    wanted = dq, dk, dv, dbias if ctx.need_dbias else None, dsinks if sinks is not None else None
    *found, dbias, dsinks = _second_order(first_order, (dout, dlse, dweights, q, k, v, bias, sinks), wanted)
    by_input = (*found, None, None, None, dbias, *(None,) * 14, dsinks, *(None,) * 6)
    return _where_needed(by_input, ctx)


def _reference_modifiers(
    args: masks.MaskArgs, q: Tensor, k: Tensor, q_starts: Tensor | None, k_starts: Tensor | None, max_q: int, max_k: int,
    dropout_p: float, rng_state: Tensor | None,
) -> tuple[reference.Packed | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(packed, visible, keep) as reference.attend takes them."""
    packed, B, Sq, Sk = None, q.shape[0], q.shape[2], k.shape[2]
    if q_starts is not None and k_starts is not None:
        packed, B, Sq, Sk = reference.Packed(q_starts, k_starts, max_q, max_k), len(q_starts) - 1, max_q, max_k
    visible = masks.visible_of(args, Sq, Sk, q.device, None if packed is None else packed.lengths())
    keep = dropout_mask(rng_state, dropout_p, B, q.shape[1], Sq, Sk) if dropout_p > 0 else None
    return packed, visible, keep


def _masked_softmax_fwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    scores, *modifiers, rng_state = inputs
    lse = output[1]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(scores, lse, *modifiers[:7], rng_state)
    ctx.numbers = modifiers[7:]


def _masked_softmax_fwd_backward(ctx: Any, dout: Gradient, _: Gradient) -> tuple[Any, ...]:
    if dout is None:
        return (None,) * 15
    scores, lse, *modifiers, rng_state = ctx.saved_tensors
    dscores, dbias = masked_softmax_bwd(dout, scores, lse, *modifiers, *ctx.numbers, rng_state, ctx.needs_input_grad[1])
    return _where_needed((dscores, dbias), ctx) + (None,) * 13


def _masked_softmax_bwd_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    dout, scores, _, bias, *mask_tensors = inputs[:10]
    *mask_numbers, scale, dropout_p, rng_state, need_dbias = inputs[10:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dout, scores, bias, *mask_tensors, rng_state)
    ctx.numbers = *mask_numbers, scale, dropout_p
    ctx.need_dbias = need_dbias


def _masked_softmax_bwd_backward(ctx: Any, ddscores: Gradient, ddbias: Gradient) -> tuple[Any, ...]:
    dout, scores, bias, *mask_tensors, rng_state = ctx.saved_tensors
    *mask_numbers, scale, dropout_p = ctx.numbers
    args = masks.MaskArgs(*mask_tensors, *mask_numbers)
    visible = masks.visible_of(args, scores.shape[2], scores.shape[3], scores.device)
    keep = dropout_mask(rng_state, dropout_p, *scores.shape) if dropout_p > 0 else None

    def first_order(dout: Tensor, scores: Tensor, bias: Tensor | None) -> Any:
        def forward(scores: Tensor, bias: Tensor | None) -> Tensor:
            return reference.softmax(scores, bias, visible, scale, dropout_p, keep)

        return _vjp(forward, (scores, bias))[1](dout)

    wanted = ddscores, ddbias if ctx.need_dbias else None
    ddout, dscores, dbias = _second_order(first_order, (dout, scores, bias), wanted)
    return _where_needed((ddout, dscores, None, dbias), ctx) + (None,) * 14


def _vjp(function: Callable[..., Any], inputs: Sequence[Tensor | None]) -> tuple[Any, Callable[[Any], list[Gradient]]]:
    """torch.func.vjp for inputs of which some are None; the gradients of those are None."""
    there = [i for i, x in enumerate(inputs) if x is not None]

    def full(values: Sequence[Tensor]) -> list[Gradient]:
        filled: list[Gradient] = [None] * len(inputs)
        for i, value in zip(there, values):
            filled[i] = value
        return filled

    outputs, pull = torch.func.vjp(lambda *given: function(*full(given)), *(inputs[i] for i in there))[:2]
    return outputs, lambda cotangents: full(pull(cotangents))


def _second_order(
    first_order: Callable[..., Any], inputs: Sequence[Tensor | None], cotangents: Sequence[Gradient]
) -> list[Gradient]:
    """The gradients of inputs, given those (or None) of what first_order computes from them."""
    wanted = [i for i, c in enumerate(cotangents) if c is not None]
    if not wanted:
        return [None] * len(inputs)

    def differentiable(*values: Any) -> tuple[Tensor, ...]:
        results = first_order(*values)
        return tuple(results[i] for i in wanted)

    return _vjp(differentiable, inputs)[1](tuple(cotangents[i] for i in wanted))


def _where_needed(gradients: Sequence[Any], ctx: Any) -> tuple[Any, ...]:
    return tuple(g if need else None for g, need in zip(gradients, ctx.needs_input_grad))


def _split_heads_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.has_bias = inputs[2] is not None


def _split_heads_backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    dx = merge_heads(dout, None) if ctx.needs_input_grad[0] else None
    # Without a bias the dispatcher may drop that argument, and its flag.
    dbias = dout.sum((0, 2)).flatten() if ctx.has_bias and ctx.needs_input_grad[2] else None
    return dx, None, dbias


def _merge_heads_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, mix = inputs
    ctx.heads = x.shape[1], x.shape[3]
    ctx.save_for_backward(x if mix is not None else None, mix)


def _merge_heads_backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    x, mix = ctx.saved_tensors
    by_head = dout.unflatten(-1, ctx.heads).transpose(1, 2)
    if mix is None:
        return by_head, None
    dx = merge_heads(by_head, mix.t()).unflatten(-1, ctx.heads).transpose(1, 2)
    rows = (t.to(accumulate_dtype(x.dtype)).flatten(2) for t in (x, by_head))  # [B,H,S*D]
    dmix = torch.matmul(next(rows), next(rows).mT).sum(0).to(mix.dtype)
    return _where_needed((dx, dmix), ctx)


# --- The ops as the package calls them --------------------------------------------------------------------------------

_below_autograd = getattr(torch._C, "_AutoDispatchBelowAutograd", contextlib.nullcontext)
transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def _direct(op: Any) -> Callable[..., Any]:
    """What op() calls, a Python frame further down."""
    return getattr(op, "_op", op)


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise forward_mode_refusal()


def forward_mode_refusal() -> Exception:
    return NotImplementedError(
        "forward-mode differentiation (jvp, jacfwd, make_dual) was asked of a function of mha_ext; accepted: reverse mode "
        "(backward, vjp, jacrev): use the functions of mha_ext.reference for forward mode."
    )


def _callable(
    name: str, setup: Callable[..., None], backward: Callable[..., tuple[Any, ...]], rule: vmap.Rule
) -> Callable[..., Any]:
    """Gives an op its formulas, and returns the function that calls it.

    The formulas are registered with the dispatcher, for compiled code. Eager code goes through an autograd.Function of
    the same formulas: torch.func only differentiates those, and a call costs some 50 us less. Where torch lets it, it
    then skips the dispatcher's autograd kernel, for another 5 us, and outside of torch.func the part of
    autograd.Function.apply that only torch.func needs (it inspects the signature), for another 15 us.
    """
    op = getattr(torch.ops.mha_ext, name).default
    direct = _direct(op)
    tensors = [i for i, a in enumerate(op._schema.arguments) if "Tensor" in str(a.type)]
    torch.library.register_autograd(op.name(), backward, setup_context=setup, lib=library)

    def without_autograd(*args: Any) -> Any:
        with _below_autograd():
            return direct(*args)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(*args)
        if transforms_active() or forward_ad._current_level >= 0:
            return function.apply(*args)  # refuses forward-mode differentiation
        if torch.is_grad_enabled():
            for i in tensors:
                if args[i] is not None and args[i].requires_grad:
                    return apply(*args)
        return without_autograd(*args)

    mapped = functools.partial(rule, call, [a.name for a in op._schema.arguments])
    torch.library.register_vmap(op.name(), mapped, lib=library)
    methods: dict[str, Any] = {
        "forward": without_autograd, "setup_context": setup, "backward": backward, "vmap": mapped, "jvp": _refuse_forward_mode
    }  # fmt: skip
    function: Any = type(name, (torch.autograd.Function,), {key: staticmethod(method) for key, method in methods.items()})
    apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]  # the C part's, without the checks
    return call


attention_fwd = _callable("attention_fwd", _attention_fwd_setup, _attention_fwd_backward, vmap.by_folding)
attention_bwd = _callable("attention_bwd", _attention_bwd_setup, _attention_bwd_backward, vmap.by_folding)
masked_softmax_fwd = _callable(
    "masked_softmax_fwd", _masked_softmax_fwd_setup, _masked_softmax_fwd_backward, vmap.by_folding
)
masked_softmax_bwd = _callable(
    "masked_softmax_bwd", _masked_softmax_bwd_setup, _masked_softmax_bwd_backward, vmap.by_folding
)
split_heads = _callable("split_heads", _split_heads_setup, _split_heads_backward, vmap.heads)
merge_heads = _callable("merge_heads", _merge_heads_setup, _merge_heads_backward, vmap.heads)


class _AttentionOut(torch.autograd.Function):
    """Attention of which nothing but the output is asked for, in eager code. What autograd does for a call grows with the
    arguments and results that it sees; these few save some 12 us of forward and backward."""

    @staticmethod
    def forward(ctx: Any, modifiers: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *_: Gradient) -> Tensor:
        with _below_autograd():
            output = _attention_fwd(q, k, v, *modifiers)
        _save_attention(ctx, (q, k, v, *modifiers), output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, dout: Gradient) -> tuple[Any, ...]:
        need_dbias = ctx.needs_input_grad[4]
        return _where_needed((None, *_attention_gradients(ctx, need_dbias, dout, None, None)), ctx)


_attention_fwd = _direct(torch.ops.mha_ext.attention_fwd.default)
_attention_out = super(torch.autograd.Function, _AttentionOut).apply  # type: ignore[misc]  # as in _callable


def attention_out(q: Tensor, k: Tensor, v: Tensor, *modifiers: Any) -> Tensor:
    """attention_fwd's first result."""
    if torch.compiler.is_compiling() or transforms_active() or forward_ad._current_level >= 0:
        return attention_fwd(q, k, v, *modifiers)[0]
    if torch.is_grad_enabled():
        bias, sinks = modifiers[0], modifiers[15]
        for x in (q, k, v, bias, sinks):
            if x is not None and x.requires_grad:
                return _attention_out(modifiers, q, k, v, bias, sinks)
    with _below_autograd():
        return _attention_fwd(q, k, v, *modifiers)[0]
