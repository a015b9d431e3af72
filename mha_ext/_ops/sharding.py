"""Attention on DTensors: how each op may be sharded. Imported with the first DTensor, or with mha_ext.distributed.

All ops are independent over the batch; without talking heads over heads, too, in whole groups of query heads with their
key/value head. Other shardings of the inputs (of the sequence, say) are changed into one of these by DTensor, which
communicates.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding

from .. import _checks
from ..masks import MaskArgs
from .arguments import Call, mask_of
from .rng import draw_rng_state, part_of_state

Sharding = tuple[list[Placement], list[Any]]  # of the outputs, of the inputs
BATCH, HEADS = 0, 1

# Dimensions 0 and 1 are the batch's and the heads', in full, or (second line) in full or 1.
_FULL = {"q", "k", "v", "out", "lse", "lse_rest", "dout", "dlse", "dweights", "scores"}
_BROADCAST = {"bias", "mask", "blocks"}
_PER_SEQUENCE = {"begin", "end", "query_ids", "key_ids", "block_table"}  # [B or 1, ...]
_SCALES = {"k_scale", "v_scale"}  # [B or 1, Hk], or as k without its last dimension


def _input_placement(name: str, given: dict[str, Any], dim: int) -> Placement:
    spec = given[name]
    paged = given.get("block_table") is not None
    if paged and dim == BATCH and (name in "kv" or (name in _SCALES and len(spec.shape) == 3)):  # any sequence may have any page
        return Replicate()
    if name in _SCALES:
        return Shard(dim) if spec.shape[dim] != 1 or dim == HEADS else Replicate()
    if name == "sinks":  # [H]
        return Shard(0) if dim == HEADS else Replicate()
    if name == "rng_state":  # [B,H,6], see below
        return Shard(dim)
    if name in _FULL or (name in _BROADCAST and spec.shape[dim] != 1):
        return Shard(dim)
    return Shard(BATCH) if name in _PER_SEQUENCE and dim == BATCH and spec.shape[BATCH] != 1 else Replicate()


def _output_placement(name: str, given: dict[str, Any], dim: int) -> Placement:
    if name == "dbias":
        if not given["need_dbias"]:
            return Replicate()  # an empty placeholder
        # Where the bias is one for all, every process has a part of the sum that is its gradient.
        return Shard(dim) if given["bias"].shape[dim] != 1 else Partial()
    if name in ("dpre_mix", "dpost_mix"):
        return Replicate() if given[name.removeprefix("d")] is None else Partial()
    if name == "dsinks":
        return Replicate() if given["sinks"] is None else Shard(0) if dim == HEADS else Partial()
    return Replicate() if name == "weights" and not given["return_weights"] else Shard(dim)


def _is_tensor(x: Any) -> bool:
    return getattr(x, "tensor_meta", None) is not None


def _whole_groups(given: dict[str, Any]) -> bool:
    """Whether every process gets whole groups of heads, if all that is not sharded over the batch is over heads."""
    if "k" not in given:
        return True
    placements = zip(*(x.placements for x in given.values() if _is_tensor(x)))
    mesh = given["k"].mesh
    processes = math.prod(
        mesh.size(i) for i, here in enumerate(placements) if any(p not in (Replicate(), Shard(BATCH)) for p in here)
    )
    return given["k"].shape[HEADS] % processes == 0


def _register_batch_and_heads(op: torch._ops.OpOverload) -> None:
    names = [a.name for a in op._schema.arguments]
    returns = [r.name for r in op._schema.returns]

    def shardings(*args: Any) -> list[Sharding]:
        given = dict(zip(names, args))
        tensors = [name if _is_tensor(x) else None for name, x in given.items()]
        found: list[Sharding] = [([Replicate()] * len(returns), [name and Replicate() for name in tensors])]
        packed = given.get("q_starts") is not None  # all sequences lie in batch element 0
        mixed = "pre_mix" in given  # a head of the weights needs all heads of the scores
        for dim in [BATCH] * (not packed) + [HEADS] * (not mixed and _whole_groups(given)):
            outputs = [_output_placement(name, given, dim) for name in returns]
            found.append((outputs, [name and _input_placement(name, given, dim) for name in tensors]))
        return found

    register_sharding(op)(shardings)


def _merge_heads_shardings(x: Any, mix: Any = None) -> list[Sharding]:
    """[B,H,S,D] -> [B,S,H*D]; with mix, a head of the result needs all heads of x."""
    pairs: list[tuple[Placement, Placement]] = [(Replicate(), Replicate()), (Shard(0), Shard(0)), (Shard(1), Shard(2))]
    if mix is None:
        return [([out], [given, None]) for out, given in [*pairs, (Shard(2), Shard(1))]]
    return [([out], [given, Replicate()]) for out, given in pairs]


def _register() -> None:
    ops = torch.ops.mha_ext
    names = [f"{name}_{way}" for name in ("attention", "attention_mixed", "masked_softmax") for way in ("fwd", "bwd")]
    for name in (*names, "attention_cached"):
        _register_batch_and_heads(getattr(ops, name).default)
    register_sharding(ops.merge_heads.default)(_merge_heads_shardings)


_register()


def replicated(x: Tensor | None, like: Any) -> Tensor | None:
    """x as a DTensor on like's mesh: a plain tensor is taken to be the same on every process."""
    if x is None or isinstance(x, DTensor):
        return x
    return DTensor.from_local(x, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def rng_state(state: Tensor | None, like: Any) -> Tensor:
    """The state of dropout for each batch element and head, [B,H,6]: a process that has some of them finds in the first of
    its own where they lie in the whole. One that is not given is drawn by the mesh's first process."""
    if state is None:
        replicate = [Replicate()] * like.device_mesh.ndim
        state = distribute_tensor(draw_rng_state(like.to_local()), like.device_mesh, replicate).to_local()  # broadcasts
    else:
        state = _checks.rng_state(state, like.device)
    B, H = like.shape[:2]
    states = part_of_state(state).repeat(B, H, 1)
    states[..., 2] += torch.arange(B, device=state.device)[:, None]
    states[..., 3] += torch.arange(H, device=state.device)
    return replicated(states, like)  # type: ignore[return-value]


def replicated_mask(args: MaskArgs, like: Any) -> MaskArgs:
    """The mask's arguments as DTensors."""
    begin: Any = args.begin
    end: Any = args.end
    if (begin is None) != (end is None):
        # DTensor remembers decisions by the tensors that it is given, not by which optional argument each one is.
        keys = torch.iinfo(torch.int64).max // 2
        begin = end.new_zeros(()).expand(1, 1) if begin is None else begin
        end = begin.new_full((1, 1), keys) if end is None else end
    args = args._replace(begin=begin, end=end)
    return MaskArgs._make(replicated(x, like) if isinstance(x, Tensor) else x for x in args)


def replicated_call(call: Call) -> Call:
    """A call whose q is a DTensor, with all that modifies it as DTensors."""
    mask = dict(zip(MaskArgs._fields, replicated_mask(mask_of(call), call.q)))
    given: dict[str, Any] = {**dict(zip(Call._fields, call)), **mask}
    others = {name: replicated(x, call.q) for name, x in given.items() if isinstance(x, Tensor) and name not in ("q", "k", "v")}
    return Call(**{**given, **others})


def split_heads(x: Tensor, num_heads: int, bias: Tensor | None) -> Tensor:
    """In views and a copy: the op would take num_heads as the number of heads that this process has."""
    if bias is not None:
        x = x + replicated(bias, x)  # type: ignore[operator]
    return x.unflatten(-1, (num_heads, x.shape[-1] // num_heads)).transpose(1, 2).contiguous()
