"""What all masks share: how they reach the ops, and how they combine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


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


class Mask:
    """Base of all masks. Subclasses define lower() and _visible()."""

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise TypeError(
                f"a mask was combined with {type(other).__name__}; & accepts mask objects: wrap a bool tensor in "
                "masks.Dense(tensor)."
            )
        return And(self, other)

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:  # fmt: skip
        """The arguments that the ops take. Never looks at values, so it neither synchronises nor breaks a graph.

        lengths: of the B packed sequences' queries and keys, int64 [B] each, of which Sq and Sk are bounds.
        """
        raise NotImplementedError

    def to_dense(self, B: int, H: int, Sq: int, Sk: int) -> Tensor:
        """The mask as a bool tensor [B,H,Sq,Sk] (perhaps an expanded view), True = attend."""
        return self._visible(B, H, Sq, Sk).expand(B, H, Sq, Sk)

    def _visible(self, B: int, H: int, Sq: int, Sk: int) -> Tensor:
        raise NotImplementedError


class And(Mask):
    """Several masks at once; written ``a & b``."""

    def __init__(self, *parts: Mask):
        self.parts: tuple[Mask, ...] = tuple(
            p for part in parts for p in (part.parts if isinstance(part, And) else (part,))
        )

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        args = NO_MASK
        for part in self.parts:
            args = _both(args, part.lower(B, H, Sq, Sk, device, lengths), Sq, Sk)
        return args

    def _visible(self, B: int, H: int, Sq: int, Sk: int) -> Tensor:
        visible = self.parts[0]._visible(B, H, Sq, Sk)
        for part in self.parts[1:]:
            visible = visible & part._visible(B, H, Sq, Sk)
        return visible

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.parts))


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
