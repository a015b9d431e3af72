"""Fake kernels: the ops' results without data, that is their shapes, strides and types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._checks import accumulate_dtype
from .arguments import Arguments, packed_slices
from .library import library


def _in_order_of(x: Tensor, last: int) -> Tensor:
    """[n0,n1,n2,last], dense, the first three dimensions in the order that they have in x's memory."""
    sizes = [*x.shape[:3], last]
    order = sorted(range(3), key=x.stride, reverse=True)
    dense = x.new_empty([sizes[d] for d in order] + [last])
    return dense.permute([*(order.index(d) for d in range(3)), 3])


def _lse_of(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:3], dtype=accumulate_dtype(x.dtype))


def _sum_like(x: Tensor | None, sizes: list[int], like: Tensor) -> Tensor:
    """The gradient of x, summed in the accumulate type; empty without x."""
    return like.new_empty(sizes if x is not None else [0], dtype=accumulate_dtype(like.dtype))


def _dbias_of(bias: Tensor | None, need_dbias: bool, like: Tensor) -> Tensor:
    return bias.new_empty(bias.shape) if need_dbias and bias is not None else _sum_like(None, [], like)


def _weights_of(a: Any) -> Tensor:
    return a.q.new_empty([*a.q.shape[:3], a.k.shape[2]] if a.return_weights else [0])


def _fake(*ops: str) -> Callable[[Callable[[Any], Any]], None]:
    """Registers a function of the ops' arguments, by name."""

    def register(function: Callable[[Any], Any]) -> None:
        for op, named in ((op, Arguments(op).named) for op in ops):
            torch.library.register_fake(f"mha_ext::{op}", lambda *inputs, named=named: function(named(inputs)), lib=library)

    return register


@_fake("attention_fwd", "attention_mixed_fwd")
def _(a: Any) -> tuple[Tensor, ...]:
    return _in_order_of(a.q, a.v.shape[3]), _lse_of(a.q), _lse_of(a.q), _weights_of(a)


@_fake("attention_cached")
def _(a: Any) -> tuple[Tensor, ...]:
    return _in_order_of(a.q, a.v.shape[3]), _lse_of(a.q)


@_fake("attention_bwd")
def _(a: Any) -> tuple[Tensor, ...]:
    gradients = (_in_order_of(x, x.shape[3]) for x in (a.q, a.k, a.v))
    return *gradients, _dbias_of(a.bias, a.need_dbias, a.q), _sum_like(a.sinks, [a.q.shape[1]], a.q)


@_fake("attention_packed_fwd")
def _(a: Any) -> tuple[Tensor, ...]:
    q = packed_slices(a.qkv, a.num_heads)[0]
    return _in_order_of(q, q.shape[3]), _lse_of(q), _lse_of(q)


@_fake("attention_packed_bwd")
def _(a: Any) -> tuple[Tensor, ...]:
    B, H, S, D = a.q.shape
    dqkv = a.q.new_empty([B, S, H + 2 * a.k.shape[1], D])
    return dqkv, _dbias_of(a.bias, a.need_dbias, a.q), _sum_like(a.sinks, [H], a.q)


@_fake("attention_mixed_bwd")
def _(a: Any) -> tuple[Tensor, ...]:
    gradients = (_in_order_of(x, x.shape[3]) for x in (a.q, a.k, a.v))
    H = a.q.shape[1]
    sums = _sum_like(a.sinks, [H], a.q), *(_sum_like(x, [H, H], a.q) for x in (a.pre_mix, a.post_mix))
    return *gradients, _dbias_of(a.bias, a.need_dbias, a.q), *sums


@_fake("masked_softmax_fwd")
def _(a: Any) -> tuple[Tensor, ...]:
    return a.scores.new_empty(a.scores.shape), _lse_of(a.scores)


@_fake("masked_softmax_bwd")
def _(a: Any) -> tuple[Tensor, ...]:
    return a.scores.new_empty(a.scores.shape), _dbias_of(a.bias, a.need_dbias, a.scores)


@torch.library.register_fake("mha_ext::split_heads", lib=library)
def _(x: Tensor, num_heads: int, bias: Tensor | None = None) -> Tensor:
    return x.new_empty([x.shape[0], num_heads, x.shape[1], x.shape[2] // num_heads])


@torch.library.register_fake("mha_ext::merge_heads", lib=library)
def _(x: Tensor, mix: Tensor | None = None) -> Tensor:
    return x.new_empty([x.shape[0], x.shape[2], x.shape[1] * x.shape[3]])


@torch.library.register_fake("mha_ext::dropout_mask", lib=library)
def _(rng_state: Tensor, p: float, B: int, H: int, Sq: int, Sk: int) -> Tensor:
    return rng_state.new_empty([B, H, Sq, Sk], dtype=torch.bool)
