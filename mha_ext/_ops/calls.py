"""The ops of attention, called with a Call: each takes of it what its schema names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import library
from .arguments import BIAS_AND_MASK, FLAGS, MIXES, MODIFIERS, PLAIN, QKV, SCORES, Call
from .attention import FORWARD, attention_bwd, attention_fwd, gradients_of, save
from .autograd import Gradient, apply_of, below_autograd, direct, transforms_active, where_needed
from .mixed import attention_mixed_fwd
from .packed import attention_packed_fwd

Parts = tuple[Any, ...]  # of a Call

_fwd = direct(FORWARD.op)
_cached = torch.ops.mha_ext.attention_cached.default


class _AttentionOut(torch.autograd.Function):
    """Attention of which nothing but the output is asked for, in eager code. What autograd does for a call grows with the
    arguments and results that it sees; these few save some 12 us of forward and backward."""

    @staticmethod
    def forward(ctx: Any, inputs: tuple[Any, ...], *differentiable: Gradient) -> Tensor:
        with below_autograd():
            output = _fwd(*inputs)
        save(ctx, inputs, output, False)
        return output[0]

    @staticmethod
    def backward(ctx: Any, dout: Gradient) -> tuple[Any, ...]:
        _, _, _, _, need_dbias, _ = ctx.needs_input_grad
        return where_needed((None, *gradients_of(ctx, need_dbias, dout, None, None)), ctx)


_attention_out = apply_of(_AttentionOut)


def attention_out(call: Call) -> Tensor:
    """The output of a call without mixes, of which nothing else is asked for."""
    parts: Parts = call
    inputs = parts[PLAIN]
    if torch.compiler.is_compiling() or transforms_active() or forward_ad._current_level >= 0:
        return attention_fwd(*inputs)[0]
    if torch.is_grad_enabled():
        differentiable = call.q, call.k, call.v, call.bias, call.sinks
        for x in differentiable:
            if x is not None and x.requires_grad:
                return _attention_out(inputs, *differentiable)
    with below_autograd():
        return _fwd(*inputs)[0]


def attention_results(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, what rounding took from lse, weights)"""
    parts: Parts = call
    if call.pre_mix is None and call.post_mix is None:
        return attention_fwd(*parts[PLAIN])
    return attention_mixed_fwd(*parts[QKV], *parts[MIXES], *parts[MODIFIERS], *parts[FLAGS])


def attention_gradients(
    call: Call, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, lse_rest: Tensor, *, need_dbias: bool = False
) -> tuple[Tensor, ...]:
    """(dq, dk, dv, dbias, dsinks) of a call without mixes, from what its forward gave."""
    parts: Parts = call
    dweights = None
    return attention_bwd(
        dout, dlse, dweights, *parts[QKV], out, lse, lse_rest, *parts[MODIFIERS], need_dbias, call.deterministic
    )


def packed_results(call: Call, qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, what rounding took from lse) of a call whose q, k, v are slices of qkv."""
    parts: Parts = call
    return attention_packed_fwd(qkv, num_heads, *parts[MODIFIERS], call.deterministic)


def cached_results(
    call: Call, block_table: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, page_size: int
) -> tuple[Tensor, Tensor]:
    """(out, lse) of keys and values of a cache. It has no gradient."""
    parts: Parts = call
    return _cached(*parts[QKV], block_table, k_scale, v_scale, page_size, *parts[BIAS_AND_MASK], *parts[SCORES])


def attention_kernels(call: Call) -> list[tuple[str, str | None]]:
    """What a call without mixes on a GPU would run, without running it, and backward after it: for each the kernel's name
    and why it is none of those for compute capability 9.0, or None. Empty for fake tensors."""
    parts: Parts = call
    library._C_cuda.note_kernels(call.deterministic)
    try:
        with torch.no_grad():
            _fwd(*parts[PLAIN])
    finally:
        kernels = library._C_cuda.noted_kernels()
    return [(name, why) for name, why in kernels if name is not None]
