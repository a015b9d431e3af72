"""What all masks share: how they reach the ops, and how they combine."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from .._pytrees import Container, Sequence

if TYPE_CHECKING:
    from .places import Places


class MaskArgs(NamedTuple):
    """A mask as the ops take it; see the ops' schemas. All parts apply together."""

    mask: Tensor | None = None  # bool, 4-d, each dimension full or 1
    begin: Tensor | None = None  # int64 [B or 1, Sq or 1]
    end: Tensor | None = None  # int64 [B or 1, Sq or 1]
    query_ids: Tensor | None = None  # int64 [B or 1, Sq]
    key_ids: Tensor | None = None  # int64 [B or 1, Sk]
    blocks: Tensor | None = None  # bool [B or 1, H or 1, ceil(Sq / block_size), ceil(Sk / block_size)]
    left: int | None = None
    right: int | None = None
    top_left: bool = False
    block_size: int = 0  # 0 without blocks


NO_MASK = MaskArgs()


class Mask(Container):
    """Base of all masks. Subclasses define lower(), and name the attributes that hold tensors in ``tensors``."""

    def __and__(self, other: Mask | Tensor) -> Mask:
        return And(self, _as_mask(other, "&"))

    def __rand__(self, other: Mask | Tensor) -> Mask:
        return And(_as_mask(other, "&"), self)

    def __or__(self, other: Mask | Tensor) -> Mask:
        return Or(self, _as_mask(other, "|"))

    def __ror__(self, other: Mask | Tensor) -> Mask:
        return Or(_as_mask(other, "|"), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:  # fmt: skip
        """The arguments that the ops take. Never looks at values, so it neither synchronises nor breaks a graph.

        lengths: of the B packed sequences' queries and keys, int64 [B] each, of which Sq and Sk are bounds.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no lower(); a mask defines it: from B, H, Sq, Sk, device and lengths to MaskArgs."
        )

    def at(self, places: Places) -> MaskArgs:
        """The arguments for queries at these places of a cache: what whole sequences' mask (o = 0) says for them."""
        raise ValueError(
            f"{type(self).__name__} was given with a cache; accepted: the masks of mha_ext.masks: give masks.Dense(rows) with "
            "what these queries see of the positions from 0 on."
        )

    def to_dense(self, *sizes: int, device: torch.device | str | None = None) -> Tensor:
        """The mask as a bool tensor [B,H,Sq,Sk] (perhaps an expanded view), True = attend.

        sizes: B, H, Sq, Sk; or Sq, Sk: then B and H are what the mask's tensors have, or 1. device: default that of the mask's
        tensors; torch's default device where it has none.
        """
        if len(sizes) not in (2, 4):
            raise TypeError(f"to_dense was given {len(sizes)} sizes; accepted: Sq, Sk, or B, H, Sq, Sk.")
        B, H, Sq, Sk = sizes if len(sizes) == 4 else (*self._batch_and_heads(), *sizes)
        found = pytree.tree_leaves(self)
        where = torch.empty(0, device=device if device is not None or not found else found[0].device).device
        visible = visible_of(self.lower(B, H, Sq, Sk, where), Sq, Sk, where)
        if visible is None:
            visible = torch.ones((), dtype=torch.bool, device=where)
        return visible.expand(B, H, Sq, Sk)

    def plot(self, Sq: int, Sk: int, *, batch: int = 0, head: int = 0, ax: Any = None) -> Any:
        """Draws what each query (a row) of a batch entry and head sees, dark where it attends, on matplotlib's axes ax or new
        ones, and returns them."""
        if ax is None:
            from matplotlib import pyplot

            ax = pyplot.figure().add_subplot()
        seen = self.to_dense(Sq, Sk)
        ax.imshow(seen[batch, head].cpu().numpy(), cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
        ax.set(title=repr(self), xlabel="key", ylabel="query")
        return ax

    def _batch_and_heads(self) -> tuple[int, int]:
        """Those of its tensors, which may be 1 for any number."""
        return max((getattr(self, name).shape[0] for name in self.tensors), default=1), 1


class _Combined(Sequence, Mask):
    """Of several masks."""

    parts: tuple[Mask, ...]

    def __init__(self, *parts: Mask):
        self.parts = tuple(p for part in parts for p in (part.parts if type(part) is type(self) else (part,)))  # type: ignore[attr-defined]

    def _batch_and_heads(self) -> tuple[int, int]:
        batches, heads = zip(*(part._batch_and_heads() for part in self.parts))
        return max(batches), max(heads)


class And(_Combined):
    """Several masks at once; written ``a & b``."""

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        args = NO_MASK
        for part in self.parts:
            args = _both(args, part.lower(B, H, Sq, Sk, device, lengths), Sq, Sk)
        return args

    def at(self, places: Places) -> MaskArgs:
        args = NO_MASK
        for part in self.parts:
            args = _both(args, part.at(places), places.position.shape[1], places.slots)
        return args

    def __repr__(self) -> str:
        return " & ".join(f"({part!r})" if isinstance(part, Or) else repr(part) for part in self.parts)


class Or(_Combined):
    """What any of several masks shows; written ``a | b``. It becomes a dense mask, as large as what its parts vary over: at
    most B * H * Sq * Sk bytes, B * Sk where all are of the keys alone."""

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        seen = [visible_of(part.lower(B, H, Sq, Sk, device, lengths), Sq, Sk, device, lengths) for part in self.parts]
        if any(x is None for x in seen):
            return NO_MASK
        return _dense(functools.reduce(torch.logical_or, seen))  # type: ignore[arg-type]

    def at(self, places: Places) -> MaskArgs:
        seen = [_seen_at(part, places) for part in self.parts]
        if any(x is None for x in seen):
            return NO_MASK
        return _dense(functools.reduce(torch.logical_or, seen))  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


class Not(_Combined):
    """What a mask hides; written ``~a``. It becomes a dense mask, as ``a | b`` does."""

    def __init__(self, part: Mask):
        self.parts = (part,)

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        seen = visible_of(self.parts[0].lower(B, H, Sq, Sk, device, lengths), Sq, Sk, device, lengths)
        nothing = torch.zeros((), dtype=torch.bool, device=device)
        return _dense(nothing if seen is None else ~seen)

    def at(self, places: Places) -> MaskArgs:
        seen = _seen_at(self.parts[0], places)
        nothing = torch.zeros((), dtype=torch.bool, device=places.position.device)
        return _dense(nothing if seen is None else ~seen)

    def __invert__(self) -> Mask:
        return self.parts[0]

    def __repr__(self) -> str:
        part = self.parts[0]
        return f"~({part!r})" if isinstance(part, _Combined) else f"~{part!r}"


def _as_mask(x: Any, sign: str) -> Mask:
    if isinstance(x, Mask):
        return x
    if not isinstance(x, Tensor):
        raise TypeError(
            f"a mask was combined with {type(x).__name__}; {sign} accepts mask objects and bool tensors (as of masks.Dense)."
        )
    from .positions import Dense  # which itself imports this module

    return Dense(x)


def _seen_at(mask: Mask, places: Places) -> Tensor | None:
    return visible_of(mask.at(places), places.position.shape[1], places.slots, places.position.device)


def _dense(visible: Tensor) -> MaskArgs:
    """visible: of up to four dimensions, each full or 1"""
    return MaskArgs(mask=visible[(None,) * (4 - visible.dim())])


def visible_of(
    args: MaskArgs, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
) -> Tensor | None:
    """What op arguments let each query see: a bool tensor that broadcasts to [B,H,Sq,Sk], or None for everything.

    lengths: of packed sequences, as in Mask.lower; what lies past them is hidden.
    """
    i, j = rows_and_keys(Sq, Sk, device)
    o = offset_of(Sq, Sk, lengths)
    parts = []
    if lengths is not None:
        o = o[:, None, :, None]  # [B,1,1,1]
        parts += [i < lengths[0][:, None, None, None], j < lengths[1][:, None, None, None]]
    if args.left is not None:
        parts.append(j >= i + (o - args.left))
    if args.right is not None:
        parts.append(j <= i + (o + args.right))
    if args.top_left:
        parts.append(j <= i)
    if args.begin is not None:
        parts.append(j >= args.begin[:, None, :, None])
    if args.end is not None:
        parts.append(j < args.end[:, None, :, None])
    if args.query_ids is not None:
        parts.append(same_document(args.query_ids, args.key_ids))
    if args.blocks is not None:
        parts.append(blocks_to_dense(args.blocks, args.block_size, Sq, Sk))
    if args.mask is not None:
        parts.append(args.mask)
    visible = None
    for part in parts:
        visible = part if visible is None else visible & part
    return visible


def same_document(query_ids: Tensor, key_ids: Tensor | None) -> Tensor:
    assert key_ids is not None  # they come in pairs
    return query_ids[:, None, :, None] == key_ids[:, None, None, :]


def rows_and_keys(Sq: int, Sk: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    return torch.arange(Sq, device=device)[:, None], torch.arange(Sk, device=device)


def offset_of(Sq: int, Sk: int, lengths: tuple[Tensor, Tensor] | None) -> Any:
    """o = Sk - Sq; of packed sequences, one per sequence: int64 [B,1]."""
    return Sk - Sq if lengths is None else (lengths[1] - lengths[0])[:, None]


def blocks_to_dense(blocks: Any, block_size: int, Sq: int, Sk: int) -> Tensor:
    """[b,h,nq,nk] -> [b,h,Sq,Sk]"""
    return blocks.repeat_interleave(block_size, 2)[:, :, :Sq].repeat_interleave(block_size, 3)[..., :Sk]


def _both_blocks(a: MaskArgs, b: MaskArgs, Sq: int, Sk: int) -> tuple[Tensor | None, int]:
    if a.blocks is None or b.blocks is None:
        return (b.blocks, b.block_size) if a.blocks is None else (a.blocks, a.block_size)
    size = math.gcd(a.block_size, b.block_size)
    rows, columns = -(-Sq // size), -(-Sk // size)
    first, second = (blocks_to_dense(x.blocks, x.block_size // size, rows, columns) for x in (a, b))
    return first & second, size


def _combine(a: Any, b: Any, function: Callable[..., Any]) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return function(a, b)


def _both(a: MaskArgs, b: MaskArgs, Sq: int, Sk: int) -> MaskArgs:
    dense = _combine(a.mask, b.mask, torch.logical_and)
    query_ids, key_ids = (b.query_ids, b.key_ids) if a.query_ids is None else (a.query_ids, a.key_ids)
    if a.query_ids is not None and b.query_ids is not None:  # the ops take one pair of ids
        dense = _combine(dense, same_document(b.query_ids, b.key_ids), torch.logical_and)
    blocks, block_size = _both_blocks(a, b, Sq, Sk)
    return MaskArgs(
        mask=dense,
        begin=_combine(a.begin, b.begin, torch.maximum),
        end=_combine(a.end, b.end, torch.minimum),
        query_ids=query_ids,
        key_ids=key_ids,
        blocks=blocks,
        block_size=block_size,
        left=_combine(a.left, b.left, min),
        right=_combine(a.right, b.right, min),
        top_left=a.top_left or b.top_left,
    )
