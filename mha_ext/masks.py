"""Masks: what each query may see. True means "attend" everywhere in this module.

Shapes: B batch, H query heads, Sq query length, Sk key length. With the offset o = Sk - Sq, query i stands at key
position i + o ("bottom-right"), as when the queries are the last ones of a sequence. Masks combine with ``&``: a key is
visible only if every part shows it. All but Dense and the block masks cost O(S) memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _checks


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
    """Base of all masks. Subclasses define lower() and to_dense()."""

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


def _rows_and_keys(Sq: int, Sk: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    return torch.arange(Sq, device=device)[:, None], torch.arange(Sk, device=device)


class Causal(Mask):
    """Query i sees key j only if j <= i + o. ``align`` is "bottom_right" (o = Sk - Sq) or "top_left" (o = 0)."""

    def __init__(self, align: str = "bottom_right"):
        if align not in ("bottom_right", "top_left"):
            raise ValueError(f'align is {align!r}; Causal accepts "bottom_right" or "top_left".')
        self.align = align

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        return MaskArgs(top_left=True) if self.align == "top_left" else MaskArgs(right=0)

    def _visible(self, B: int, H: int, Sq: int, Sk: int) -> Tensor:
        i, j = _rows_and_keys(Sq, Sk)
        return j <= (i if self.align == "top_left" else i + (Sk - Sq))

    def __repr__(self) -> str:
        return f'Causal("{self.align}")'


class Window(Mask):
    """Query i sees keys i + o - left <= j <= i + o + right, with o = Sk - Sq. None means no limit on that side."""

    def __init__(self, left: int | None, right: int | None):
        for name, limit in (("left", left), ("right", right)):
            if limit is not None and (not isinstance(limit, int) or limit < 0):
                raise ValueError(f"{name} is {limit!r}; Window accepts an int >= 0, or None for no limit.")
        # Beyond any length a limit is none; sys.maxsize, say, would overflow where it is added to a position.
        self.left, self.right = (None if n is None or n >= 2**40 else n for n in (left, right))

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        return MaskArgs(left=self.left, right=self.right)

    def _visible(self, B: int, H: int, Sq: int, Sk: int) -> Tensor:
        i, j = _rows_and_keys(Sq, Sk)
        distance = j - i - (Sk - Sq)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            visible &= distance >= -self.left
        if self.right is not None:
            visible &= distance <= self.right
        return visible

    def __repr__(self) -> str:
        return f"Window({self.left}, {self.right})"


class _PerSequence(Mask):
    """A mask made of one integer per batch element, [B] or [1]."""

    def __init__(self, values: Tensor):
        self.values = _checks.integer_tensor(values, type(self).__name__, "[B]", 1)

    def _column(self, B: int, device: torch.device | None = None) -> Tensor:
        values = self.values
        name = type(self).__name__
        if values.shape[0] != B and values.shape[0] != 1:
            raise ValueError(
                f"{name} was given a tensor of shape {_checks.text(values.shape)}; it accepts [B] = [{B}]."
            )
        if device is not None:
            _checks.same_device(values, name, device)
        return values[:, None]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_checks.text(self.values.shape)})"


class Padding(_PerSequence):
    """Keys j < key_lengths[b] are visible: padding at the end. key_lengths: integer tensor [B]."""

    def __init__(self, key_lengths: Tensor):
        super().__init__(key_lengths)

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        return MaskArgs(end=self._column(B, device))

    def _visible(self, B: int, H: int, Sq: int, Sk: int) -> Tensor:
        return torch.arange(Sk, device=self.values.device) < self._column(B)[:, None, None]


class LeftPadding(_PerSequence):
    """Keys j >= starts[b] are visible: padding at the beginning. starts: integer tensor [B]."""

    def __init__(self, starts: Tensor):
        super().__init__(starts)

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        return MaskArgs(begin=self._column(B, device))

    def _visible(self, B: int, H: int, Sq: int, Sk: int) -> Tensor:
        return torch.arange(Sk, device=self.values.device) >= self._column(B)[:, None, None]


class Prefix(_PerSequence):
    """Prefix language model: key j is visible if j < lengths[b] or j <= i + o. lengths: integer tensor [B]."""

    def __init__(self, lengths: Tensor):
        super().__init__(lengths)

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        causal_end = torch.arange(Sq, device=device) + (_offset(Sq, Sk, lengths) + 1)
        return MaskArgs(end=torch.maximum(self._column(B, device), causal_end))

    def _visible(self, B: int, H: int, Sq: int, Sk: int) -> Tensor:
        i, j = _rows_and_keys(Sq, Sk, self.values.device)
        return (j < self._column(B)[:, None, None]) | (j <= i + (Sk - Sq))


class Intervals(Mask):
    """Query i sees the keys begin[b,i] <= j < end[b,i], none where end <= begin. Integer tensors [B,Sq]; 1 broadcasts."""

    def __init__(self, begin: Tensor, end: Tensor):
        self.begin = _checks.integer_tensor(begin, "Intervals", "[B,Sq]", 2)
        self.end = _checks.integer_tensor(end, "Intervals", "[B,Sq]", 2)

    def _check(self, B: int, Sq: int) -> None:
        for x in (self.begin, self.end):
            if x.shape[0] not in (1, B) or x.shape[1] not in (1, Sq):
                raise ValueError(
                    f"Intervals was given tensors of shapes {_checks.text(self.begin.shape)} and "
                    f"{_checks.text(self.end.shape)}; it accepts [B,Sq] = [{B},{Sq}]."
                )

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        self._check(B, Sq)
        _checks.same_device(self.begin, "Intervals", device)
        _checks.same_device(self.end, "Intervals", device)
        return MaskArgs(begin=self.begin, end=self.end)

    def _visible(self, B: int, H: int, Sq: int, Sk: int) -> Tensor:
        self._check(B, Sq)
        j = torch.arange(Sk, device=self.begin.device)
        return (j >= self.begin[:, None, :, None]) & (j < self.end[:, None, :, None])

    def __repr__(self) -> str:
        return f"Intervals({_checks.text(self.begin.shape)}, {_checks.text(self.end.shape)})"


class Documents(Mask):
    """Packed documents: a query sees the keys with its own id. ids: integer tensor [B,Sk] or [1,Sk].

    With Sq < Sk the queries are the last Sq positions. Combine with Causal() for packed language modelling.
    """

    def __init__(self, ids: Tensor):
        self.ids = _checks.integer_tensor(ids, "Documents", "[B,S]", 2)

    def _ids(self, B: int, Sq: int, Sk: int) -> tuple[Tensor, Tensor]:
        shape = self.ids.shape
        if (shape[0] != B and shape[0] != 1) or shape[1] != Sk or Sq > Sk:
            raise ValueError(
                f"Documents was given ids of shape {_checks.text(shape)} for {Sq} queries; it accepts [B,Sk] = "
                f"[{B},{Sk}] and no more queries than keys."
            )
        return self.ids[:, Sk - Sq :], self.ids

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        _checks.same_device(self.ids, "Documents", device)
        query_ids, key_ids = self._ids(B, Sq, Sk)
        if lengths is not None:
            place = torch.arange(Sq, device=device) + _offset(Sq, Sk, lengths)
            query_ids = key_ids.expand(B, Sk).gather(1, place.clamp(0, max(Sk - 1, 0)))
        return MaskArgs(query_ids=query_ids, key_ids=key_ids)

    def _visible(self, B: int, H: int, Sq: int, Sk: int) -> Tensor:
        return _same_document(*self._ids(B, Sq, Sk))

    def __repr__(self) -> str:
        return f"Documents({_checks.text(self.ids.shape)})"


class Dense(Mask):
    """Any bool tensor, True = attend: [Sq,Sk], or 4-d broadcastable to [B,H,Sq,Sk]. Read in place, by its strides."""

    def __init__(self, tensor: Tensor):
        _checks.bool_mask(tensor, "mask")
        self.tensor = tensor

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        _checks.same_device(self.tensor, "mask", device)
        return MaskArgs(mask=_checks.as_4d(self.tensor, "mask", B, H, Sq, Sk))

    def _visible(self, B: int, H: int, Sq: int, Sk: int) -> Tensor:
        return _checks.as_4d(self.tensor, "mask", B, H, Sq, Sk)

    def __repr__(self) -> str:
        return f"Dense({_checks.text(self.tensor.shape)})"


class _Blocks(Mask):
    """A mask of square blocks of block_size queries and keys, counted from the first query and the first key."""

    block_size: int

    def _blocks(
        self,
        B: int,
        H: int,
        Sq: int,
        Sk: int,
        device: torch.device | None,
        lengths: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """bool [B or 1, H or 1, ceil(Sq / block_size), ceil(Sk / block_size)]"""
        raise NotImplementedError

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        return MaskArgs(blocks=self._blocks(B, H, Sq, Sk, device, lengths), block_size=self.block_size)

    def _visible(self, B: int, H: int, Sq: int, Sk: int) -> Tensor:
        return blocks_to_dense(self._blocks(B, H, Sq, Sk, None), self.block_size, Sq, Sk)


class BlockSparse(_Blocks):
    """Key j is visible to query i if blocks[..., i // block_size, j // block_size]; hidden blocks cost no work.

    blocks: bool, True = attend, with n = ceil(S / block_size) blocks along each length: [nq,nk], or 4-d broadcastable
    to [B,H,nq,nk]. block_size: a positive int; multiples of 64 (CPU) or 128 (CUDA) need no test inside of tiles.
    """

    def __init__(self, blocks: Tensor, block_size: int):
        _checks.bool_mask(blocks, "blocks")
        self.blocks, self.block_size = blocks, _positive("block_size", block_size)

    def _blocks(
        self,
        B: int,
        H: int,
        Sq: int,
        Sk: int,
        device: torch.device | None,
        lengths: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        if device is not None:
            _checks.same_device(self.blocks, "BlockSparse", device)
        rows, columns = -(-Sq // self.block_size), -(-Sk // self.block_size)
        shape = self.blocks.shape
        if shape[-2:] == (rows, columns) and len(shape) == 2:
            return self.blocks[None, None]
        if len(shape) == 4 and shape[0] in (1, B) and shape[1] in (1, H) and shape[2:] == (rows, columns):
            return self.blocks
        raise ValueError(
            f"BlockSparse was given blocks of shape {_checks.text(shape)} of size {self.block_size} for {Sq} queries "
            f"and {Sk} keys; it accepts [{rows},{columns}], or four dimensions that broadcast to "
            f"[B,H,{rows},{columns}] with B = {B}, H = {H}."
        )

    def __repr__(self) -> str:
        return f"BlockSparse({_checks.text(self.blocks.shape)}, {self.block_size})"


class _BlockPattern(_Blocks):
    """A rule on the distance of blocks; the queries' offset o must be a whole number of blocks (on a GPU and in compiled
    code, that of packed sequences is trusted to be one, and rounded down otherwise)."""

    def _positions(self, Sq: int, Sk: int, device: torch.device | None, lengths: tuple[Tensor, Tensor] | None) -> Any:
        offset = _offset(Sq, Sk, lengths)
        if lengths is None:
            wrong: Any = (Sq, Sk) if offset % self.block_size else None
        else:
            odd: Any = (offset[:, 0] % self.block_size).nonzero() if _checks.values_known(offset) else ()
            wrong = [int(n[odd[0, 0]]) for n in lengths] if len(odd) else None
            offset = offset[:, :, None]
        if wrong is not None:
            raise ValueError(
                f"{self!r} was given {wrong[0]} queries and {wrong[1]} keys; it accepts lengths that differ by a multiple "
                f"of {self.block_size}: pad, or build a masks.BlockSparse."
            )
        i, j = _rows_and_keys(-(-Sq // self.block_size), -(-Sk // self.block_size), device)
        return i + offset // self.block_size, j


def _as_blocks(visible: Tensor) -> Tensor:
    """[nq,nk] or [B,nq,nk], the same for all heads, as four dimensions."""
    return visible.view(-1, 1, *visible.shape[-2:])


class Strided(_BlockPattern):
    """The block form of strided sparse attention (Child et al., "Generating long sequences with sparse Transformers",
    2019): a block of queries sees the ``local`` blocks up to its own, and of all blocks each ``stride``-th one (those
    numbered stride - 1, 2 stride - 1, ...). Combine with Causal() for language modelling."""

    def __init__(self, stride: int, local: int = 1, block_size: int = 64):
        self.stride, self.local = _positive("stride", stride), _positive("local", local)
        self.block_size = _positive("block_size", block_size)

    def _blocks(
        self,
        B: int,
        H: int,
        Sq: int,
        Sk: int,
        device: torch.device | None,
        lengths: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        i, j = self._positions(Sq, Sk, device, lengths)
        return _as_blocks(((i - j >= 0) & (i - j < self.local)) | (j % self.stride == self.stride - 1))

    def __repr__(self) -> str:
        return f"Strided({self.stride}, {self.local}, {self.block_size})"


class Dilated(_BlockPattern):
    """The block form of a dilated window (Beltagy et al., "Longformer", 2020): a block of queries sees the blocks at
    distances 0, dilation, ..., window * dilation on both sides."""

    def __init__(self, window: int, dilation: int, block_size: int = 64):
        if not isinstance(window, int) or window < 0:
            raise ValueError(f"window is {window!r}; accepted: an int >= 0.")
        self.window, self.dilation = window, _positive("dilation", dilation)
        self.block_size = _positive("block_size", block_size)

    def _blocks(
        self,
        B: int,
        H: int,
        Sq: int,
        Sk: int,
        device: torch.device | None,
        lengths: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        i, j = self._positions(Sq, Sk, device, lengths)
        distance = (i - j).abs()
        return _as_blocks((distance <= self.window * self.dilation) & (distance % self.dilation == 0))

    def __repr__(self) -> str:
        return f"Dilated({self.window}, {self.dilation}, {self.block_size})"


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


def _same_document(query_ids: Tensor, key_ids: Tensor | None) -> Tensor:
    assert key_ids is not None  # they come in pairs
    return query_ids[:, None, :, None] == key_ids[:, None, None, :]


def _positive(name: str, x: int) -> int:
    if not isinstance(x, int) or x < 1:
        raise ValueError(f"{name} is {x!r}; accepted: a positive int.")
    return x


def _offset(Sq: int, Sk: int, lengths: tuple[Tensor, Tensor] | None) -> Any:
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
        dense = _combine(dense, _same_document(b.query_ids, b.key_ids), torch.logical_and)
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


def lower(
    mask: Mask | Tensor | None, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
) -> MaskArgs:  # fmt: skip
    """The ops' arguments for what users pass as ``mask=``: a mask object, a bool tensor, or None."""
    if mask is None:
        return NO_MASK
    if isinstance(mask, Mask):
        return mask.lower(B, H, Sq, Sk, device, lengths)
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is a {type(mask).__name__}; accepted: a mask object of mha_ext.masks, or a bool tensor.")
    return Dense(mask).lower(B, H, Sq, Sk, device, lengths)


def visible_of(
    args: MaskArgs, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
) -> Tensor | None:
    """What op arguments let each query see: a bool tensor that broadcasts to [B,H,Sq,Sk], or None for everything.

    lengths: of packed sequences, as in Mask.lower; what lies past them is hidden.
    """
    i, j = _rows_and_keys(Sq, Sk, device)
    o = _offset(Sq, Sk, lengths)
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
        parts.append(_same_document(args.query_ids, args.key_ids))
    if args.blocks is not None:
        parts.append(blocks_to_dense(args.blocks, args.block_size, Sq, Sk))
    if args.mask is not None:
        parts.append(args.mask)
    visible = None
    for part in parts:
        visible = part if visible is None else visible & part
    return visible
