"""How the ops are mapped by torch.vmap: the mapped dimension is folded into the batch, or they are called in a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import Arguments
from .library import library
from .rng import part_of_state

Rule = Callable[..., tuple[Any, Any]]  # (what calls the op, its arguments, info, in_dims, *args) -> (outputs, dims)

# Their first dimension may be 1 where the others' is B.
_BROADCASTING = {"bias", "mask", "begin", "end", "query_ids", "key_ids", "blocks"}


def _fold(x: Tensor, dim: int | None, n: int, B: int) -> Tensor:
    """[n*B, ...] from a tensor whose mapped dimension is dim (None: not mapped) and whose first other one is B or 1."""
    x = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
    return x.expand(n, B, *x.shape[2:]).reshape(n * B, *x.shape[2:])


def by_folding(
    call: Callable[..., Any], arguments: Arguments, info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[Any, Any]:
    n, dims, given = info.batch_size, dict(zip(arguments.names, in_dims)), dict(zip(arguments.names, args))
    # Where the first dimension isn't all of the batch, or all mapped problems drop the same (under randomness="error" a given
    # state is no randomness, and they do what they would in a loop), or each has a state.
    own_states = given.get("dropout_p", 0.0) > 0 and (info.randomness != "different" or dims["rng_state"] is not None)
    if given.get("q_starts") is not None or given.get("sinks") is not None or own_states:
        return by_looping(call, arguments, info, in_dims, *args)
    main = "q" if "q" in given else "scores"
    B = given[main].movedim(dims[main], 0).shape[1] if dims[main] is not None else given[main].shape[0]
    need_dbias = given.get("need_dbias", False)

    def fold(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or name == "rng_state":
            return x
        shared = dims[name] is None and name in _BROADCASTING and x.shape[0] == 1
        return x if shared and not (name == "bias" and need_dbias) else _fold(x, dims[name], n, B)

    outputs = list(call(*(fold(name, x) for name, x in given.items())))
    for i, x in enumerate(outputs):
        if x.dim() > 1:  # not a placeholder
            outputs[i] = x.unflatten(0, (n, B))
    if need_dbias and B != 1 and given["bias"].shape[1 if dims["bias"] == 0 else 0] == 1:
        dbias = arguments.results.index("dbias")
        outputs[dbias] = outputs[dbias].sum(1, keepdim=True)
    return tuple(outputs), tuple(0 if x.dim() > 1 else None for x in outputs)


def by_looping(
    call: Callable[..., Any], arguments: Arguments, info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[Any, Any]:
    def problem(i: int) -> dict[str, Any]:
        given = {name: x if d is None else x.select(d, i) for name, x, d in zip(arguments.names, args, in_dims)}
        shared = given.get("dropout_p", 0.0) > 0 and in_dims[arguments.place["rng_state"]] is None
        if shared and info.randomness == "different":  # as in one batch of all of them
            starts = given.get("q_starts")
            B = given["q" if "q" in given else "scores"].shape[0] if starts is None else len(starts) - 1
            given["rng_state"] = part_of_state(given["rng_state"], batch=i * B)
        return given

    if info.batch_size == 0:
        raise ValueError("torch.vmap was given no problems, a dimension of size 0; accepted here: at least one.")
    results = [call(*problem(i).values()) for i in range(info.batch_size)]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results))), (0,) * len(results[0])


def heads(
    call: Callable[..., Any], arguments: Arguments, info: Any, in_dims: Sequence[int | None], x: Tensor, *args: Any
) -> tuple[Any, Any]:
    if in_dims[0] is not None and not any(d is not None for d in in_dims[1:]):
        x = x.movedim(in_dims[0], 0)
        return call(x.flatten(0, 1), *args).unflatten(0, x.shape[:2]), 0
    return by_looping(call, arguments, info, in_dims, x, *args)


def _register_loops(*ops: str) -> None:
    """For ops that have no formulas of gradients, with which the others are registered."""
    for arguments in map(Arguments, ops):
        rule = functools.partial(by_looping, arguments.op, arguments)
        torch.library.register_vmap(arguments.op.name(), rule, lib=library)


_register_loops("attention_cached", "dropout_mask")
