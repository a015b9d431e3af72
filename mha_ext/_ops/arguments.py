"""What the ops take, by name.

A Call is the one description of a call of attention: the functions make it once (_call.py), and each op takes of it
what its schema, in csrc/torch/schemas.cpp, names. The formulas of an op read, save and answer its Arguments.
"""

from __future__ import annotations

import functools
import operator
from collections import namedtuple
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import MaskArgs
from . import library as _library  # noqa: F401  (loads the ops)


class Call(NamedTuple):
    """A call of attention, checked and lowered. The fields are the arguments of attention_fwd, in its order, and the mixes."""

    q: Tensor  # [B,H,Sq,D]; of packed sequences [1,H,T,D]. So k and v
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None  # this and the next nine: see MaskArgs
    begin: Tensor | None = None
    end: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    blocks: Tensor | None = None
    left: int | None = None
    right: int | None = None
    top_left: bool = False
    block_size: int = 0
    q_starts: Tensor | None = None  # of packed sequences, int64 [N+1]
    k_starts: Tensor | None = None
    max_q: int = 0  # bounds of their lengths
    max_k: int = 0
    sinks: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    rng_state: Tensor | None = None
    return_weights: bool = False
    deterministic: bool = False
    pre_mix: Tensor | None = None
    post_mix: Tensor | None = None


NOT_PACKED = None, None, 0, 0  # q_starts, k_starts, max_q, max_k


def between(names: Sequence[str], first: str, last: str) -> slice:
    return slice(names.index(first), names.index(last) + 1)


FIELDS: tuple[str, ...] = Call._fields
# Parts of a Call, of which the ops' schemas are put together.
PLAIN = between(FIELDS, "q", "deterministic")  # attention_fwd's arguments
QKV = between(FIELDS, "q", "v")
BIAS_AND_MASK = between(FIELDS, "bias", "block_size")
MASK = between(FIELDS, "mask", "block_size")
SCORES = between(FIELDS, "sinks", "softcap")
MODIFIERS = between(FIELDS, "bias", "rng_state")  # all that modifies attention of q, k, v
FLAGS = between(FIELDS, "return_weights", "deterministic")
MIXES = between(FIELDS, "pre_mix", "post_mix")


def mask_of(given: Any) -> MaskArgs:
    """The mask among an op's arguments."""
    return MaskArgs._make(getattr(given, name) for name in MaskArgs._fields)


def lengths_of(given: Any) -> tuple[Tensor, Tensor] | None:
    """Those of the packed sequences among an op's arguments."""
    return None if given.q_starts is None else (given.q_starts.diff(), given.k_starts.diff())


def packed_slices(qkv: Tensor, num_heads: int) -> list[Tensor]:
    """q [B,H,S,D], k and v [B,Hk,S,D] of qkv [B,S,H+2*Hk,D], as views."""
    num_kv_heads = (qkv.shape[2] - num_heads) // 2
    return [x.transpose(1, 2) for x in qkv.split((num_heads, num_kv_heads, num_kv_heads), 2)]


def names_of(op: str) -> tuple[str, ...]:
    return tuple(a.name for a in getattr(torch.ops.mha_ext, op).default._schema.arguments)


def _picking(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that gives what a tuple has at these places."""
    return operator.itemgetter(*places) if len(places) > 1 else lambda given: tuple(given[place] for place in places)


class Arguments:
    """The arguments of one op. unsaved: tensors that its backward does not look at."""

    def __init__(self, op: str, unsaved: Collection[str] = ()) -> None:
        self.op = getattr(torch.ops.mha_ext, op).default
        self.names = names_of(op)
        self.results = tuple(result.name for result in self.op._schema.returns)
        # The arguments by name, of the arguments in order.
        self.named: Callable[[Any], Any] = functools.partial(tuple.__new__, namedtuple(op, self.names))  # type: ignore[misc]
        self.place = {name: i for i, name in enumerate(self.names)}
        self.tensors = [i for i, a in enumerate(self.op._schema.arguments) if "Tensor" in str(a.type)]
        saved = [i for i in self.tensors if self.names[i] not in unsaved]
        numbers = [i for i in range(len(self.names)) if i not in self.tensors]
        order = [*saved, *numbers, *(self.place[name] for name in unsaved)]
        self._saved, self._numbers = _picking(saved), _picking(numbers)
        self._restore = _picking([order.index(i) for i in range(len(order))])
        if "q_starts" in self.names:  # an op of attention
            self.modifiers = between(self.names, "bias", "rng_state")
        self._count, self._unsaved = len(saved), (None,) * len(unsaved)

    def save(self, ctx: Any, inputs: tuple[Any, ...], *results: Tensor | None) -> None:
        """Saves the op's arguments, and some of its results."""
        ctx.save_for_backward(*self._saved(inputs), *results)
        ctx.numbers = self._numbers(inputs)

    def saved(self, ctx: Any) -> tuple[Any, tuple[Any, ...]]:
        """What was saved: (the arguments by name, the results)."""
        tensors = ctx.saved_tensors  # once: checkpointing lets nobody read it twice
        given = self._restore((*tensors[: self._count], *ctx.numbers, *self._unsaved))
        return self.named(given), tensors[self._count :]

    def needs(self, ctx: Any, name: str) -> bool:
        return ctx.needs_input_grad[self.place[name]]

    def gradients(self, ctx: Any, **found: Tensor | None) -> tuple[Tensor | None, ...]:
        """What backward returns: the gradients of these arguments, of those that need one."""
        by_input: list[Tensor | None] = [None] * len(self.names)
        for name, gradient in found.items():
            place = self.place[name]
            if ctx.needs_input_grad[place]:
                by_input[place] = gradient
        return tuple(by_input)


def _check() -> None:
    """That Call is what the schemas say."""
    kinds = {"Tensor | None": "Optional[Tensor]", "int | None": "Optional[int]"}
    named: dict[str, Any] = {name: getattr(kind, "__forward_arg__", kind) for name, kind in Call.__annotations__.items()}
    written = [(name, kinds.get(kind, kind)) for name, kind in named.items()]
    schemas = torch.ops.mha_ext
    plain = [(a.name, str(a.type)) for a in schemas.attention_fwd.default._schema.arguments]
    others = "attention_bwd", "attention_packed_fwd", "attention_packed_bwd", "attention_mixed_fwd", "attention_mixed_bwd"
    modifiers = [names[between(names, "bias", "rng_state")] for names in map(names_of, others)]
    cached = names_of("attention_cached")
    as_call = cached[between(cached, "bias", "softcap")] == FIELDS[BIAS_AND_MASK] + FIELDS[SCORES]
    if written[PLAIN] != plain or not as_call or any(names != FIELDS[MODIFIERS] for names in modifiers):
        raise ImportError(
            "mha_ext's compiled part has other arguments than its Python part; accepted: both of one version: build it anew with: "
            "pip install --no-build-isolation ."
        )
    assert FIELDS[MASK] == MaskArgs._fields, "Call and MaskArgs differ"


_check()
