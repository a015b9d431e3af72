"""The state of dropout: how it is drawn, and where a part of a problem lies in its whole."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import CVmapInterpreterPtr, RandomnessType, TransformType

from .._checks import at_least, given
from .library import library

library.define(
    "draw_rng_state(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
)
dropout_mask = torch.ops.mha_ext.dropout_mask.default


@torch.library.impl(library, "draw_rng_state", "CompositeExplicitAutograd")
def _draw_rng_state(like: Tensor) -> Tensor:
    """int64[6] (seed, offset, and where dropout_part says that the problem lies) on like's device, from torch's default
    CPU generator: what torch.manual_seed seeds, what checkpointing saves and restores, and what compiled code draws from
    too."""
    state = torch.zeros(6, dtype=torch.int64, device="cpu")
    state[:2].random_(-(2**63), 2**63 - 1)
    place = _place_of(tuple(state[:2].tolist()))
    if place != _WHOLE:
        state[2:] = torch.tensor(place, device="cpu")
    return state.to(like.device)


def draw_rng_state(like: Tensor) -> Tensor:
    """A new state on like's device. The op itself sees tensors on the CPU, whose generator it draws from: where compiled code
    computes an op again (checkpointing), it puts back the generator of the device of the op's tensors."""
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        for each in torch._C._functorch.get_interpreter_stack() or ():
            if each.key() == TransformType.Vmap and CVmapInterpreterPtr(each).randomness() == RandomnessType.Error:
                raise _vmap_refusal()  # like may be no mapped tensor, which the op's rule would not see
    on_cpu = like if like.device.type == "cpu" else like.new_empty(0, device="cpu")
    state: Tensor = torch.ops.mha_ext.draw_rng_state.default(on_cpu)
    return state.to(like.device)


_WHOLE = 0, 0, 0, 0
_place = contextvars.ContextVar("place of a part in its whole", default=_WHOLE)
_drawn_in_parts: dict[tuple[int, ...], None] = {}  # the last of them, in order
_lock = threading.Lock()


def _place_of(drawn: tuple[int, ...]) -> tuple[int, ...]:
    """Where dropout_part says that the problem lies whose (seed, offset) was drawn. Checkpointing draws it again in backward,
    which must then run in the same part."""
    place = _place.get()
    if torch._C._current_graph_task_id() != -1:  # in backward
        if place == _WHOLE and torch._C._is_key_in_tls("context"):  # that of who called it, in autograd's threads for GPUs
            place = torch._C._get_obj_in_tls("context").get(_place, _WHOLE)
        if place == _WHOLE and drawn in _drawn_in_parts:
            raise ValueError(
                "dropout was drawn in a dropout_part, and is drawn again (by checkpointing, say) in a backward outside of it; "
                "accepted: both in it: call backward() inside of the same dropout_part."
            )
    elif place != _WHOLE or _drawn_in_parts:
        with _lock:
            _drawn_in_parts.pop(drawn, None)
            if place != _WHOLE:
                _drawn_in_parts[drawn] = None
            if len(_drawn_in_parts) > 2**14:
                del _drawn_in_parts[next(iter(_drawn_in_parts))]
    return place


@contextlib.contextmanager
def dropout_part(*, batch: int = 0, head: int = 0, query: int = 0, key: int = 0) -> Iterator[None]:
    """Says that calls of attention inside are parts of a larger problem, whose first batch element, query head, query and
    key are these (key a multiple of 4): from the same torch.manual_seed, dropout then drops what the whole would drop there.

    So a model gives the same result, to rounding, in one process and in several that share out batch, heads or sequence.
    Modules that HeadParallel shards, DTensors and ring_attention say so themselves. A given rng_state says where it is
    used as its numbers 2 to 5: (seed, offset, batch, head, query, key).

    Where activations are checkpointed, backward draws again, and has to be inside as well.

    Raises:
        ValueError: numbers below 0, or a key that is no multiple of 4; later, a backward outside that draws again.
    """
    place = batch, head, query, key
    if any(at_least(0, x) is None for x in place) or key % 4:
        raise ValueError(
            f"batch, head, query, key are {', '.join(map(given, place))}; accepted: numbers from 0, key a multiple of 4."
        )
    before = _place.set(place)
    try:
        yield
    finally:
        _place.reset(before)


def part_of_state(rng_state: Tensor, batch: int = 0, head: int = 0, query: int = 0, key: int = 0) -> Tensor:
    """A state of dropout, [2] or [6], for the part of its problem that begins there: [6]."""
    state = torch.cat((rng_state, rng_state.new_zeros(6 - len(rng_state))))
    return state + state.new_tensor([0, 0, batch, head, query, key])


@torch.library.register_fake("mha_ext::draw_rng_state", lib=library)
def _(like: Tensor) -> Tensor:
    return like.new_empty([6], dtype=torch.int64)


@torch.library.register_vmap("mha_ext::draw_rng_state", lib=library)
def _(info: Any, in_dims: Any, like: Tensor) -> Any:
    if info.randomness == "error":
        raise _vmap_refusal()
    return torch.ops.mha_ext.draw_rng_state(like), None  # the rules of the ops (vmap.py) tell the mapped problems apart


def _vmap_refusal() -> Exception:
    return ValueError(
        'dropout was asked for under vmap(randomness="error"); accepted there: randomness="different" or "same", or an rng_state.'
    )
