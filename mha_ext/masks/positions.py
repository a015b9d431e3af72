"""Masks that are one interval of keys for each query, documents, and dense tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from .base import Mask, MaskArgs, offset_of
from .places import Places


class Causal(Mask):
    """Query i sees key j only if j <= i + o. ``align`` is "bottom_right" (o = Sk - Sq) or "top_left" (o = 0)."""

    def __init__(self, align: str = "bottom_right"):
        if not isinstance(align, str) or align not in ("bottom_right", "top_left"):
            raise ValueError(f'align is {_checks.given(align)}; Causal accepts "bottom_right" or "top_left".')
        self.align = align

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        return MaskArgs(top_left=True) if self.align == "top_left" else MaskArgs(right=0)

    def at(self, places: Places) -> MaskArgs:
        if self.align == "top_left":
            places.check_queries_are_keys("Causal")
        return MaskArgs(end=places.slot(places.position + 1))

    def __repr__(self) -> str:
        return f'Causal("{self.align}")'


class Window(Mask):
    """Query i sees keys i + o - left <= j <= i + o + right, with o = Sk - Sq. None means no limit on that side.

    Its own position counts besides: with right=0, a query sees left + 1 keys."""

    def __init__(self, left: int | None, right: int | None):
        self.left, self.right = _limit("left", left), _limit("right", right)

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        return MaskArgs(left=self.left, right=self.right)

    def at(self, places: Places) -> MaskArgs:
        i = places.position
        return MaskArgs(
            begin=None if self.left is None else places.slot(i - self.left),
            end=None if self.right is None else places.slot(i + (self.right + 1)),
        )

    def __repr__(self) -> str:
        return f"Window({self.left}, {self.right})"


def _limit(name: str, given: int | None) -> int | None:
    if given is None:
        return None
    limit = _checks.whole(given)
    if limit is None or limit < 0:
        raise ValueError(f"{name} is {_checks.given(given)}; Window accepts an int >= 0, or None for no limit.")
    # Beyond any length a limit is none; sys.maxsize, say, would overflow where it is added to a position.
    return None if _checks.known(limit >= 2**40) else limit


def with_batch(x: Tensor, dim: int) -> Tensor:
    """x of dim dimensions, the first of which torch.vmap takes from an object that has one entry per mapped problem: then it
    holds for all of that problem's batch."""
    return x[None] if x.dim() == dim - 1 else x


class _PerSequence(Mask):
    """A mask made of one integer per batch element, [B] or [1]."""

    tensors = ("values",)

    def __init__(self, values: Tensor):
        self.values = _checks.integer_tensor(values, type(self).__name__, "[B]", 1)

    def _column(self, B: int, device: torch.device | None = None) -> Tensor:
        values = with_batch(self.values, 1)
        name = type(self).__name__
        if not _checks.one_or(values.shape[0], B):
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

    def at(self, places: Places) -> MaskArgs:
        return MaskArgs(end=places.slot(self._column(places.batch, places.position.device)))


class LeftPadding(_PerSequence):
    """Keys j >= starts[b] are visible: padding at the beginning. starts: integer tensor [B]."""

    def __init__(self, starts: Tensor):
        super().__init__(starts)

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        return MaskArgs(begin=self._column(B, device))

    def at(self, places: Places) -> MaskArgs:
        return MaskArgs(begin=places.slot(self._column(places.batch, places.position.device)))


class Prefix(_PerSequence):
    """Prefix language model: key j is visible if j < lengths[b] or j <= i + o. lengths: integer tensor [B]."""

    def __init__(self, lengths: Tensor):
        super().__init__(lengths)

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        causal_end = torch.arange(Sq, device=device) + (offset_of(Sq, Sk, lengths) + 1)
        return MaskArgs(end=torch.maximum(self._column(B, device), causal_end))

    def at(self, places: Places) -> MaskArgs:
        lengths = self._column(places.batch, places.position.device)
        return MaskArgs(end=places.slot(torch.maximum(lengths, places.position + 1)))


class Intervals(Mask):
    """Query i sees the keys begin[b,i] <= j < end[b,i], none where end <= begin. Integer tensors [B,Sq]; 1 broadcasts."""

    tensors = "begin", "end"

    def __init__(self, begin: Tensor, end: Tensor):
        self.begin = _checks.integer_tensor(begin, "Intervals", "[B,Sq]", 2)
        self.end = _checks.integer_tensor(end, "Intervals", "[B,Sq]", 2)

    def _both(self, B: int, Sq: int) -> tuple[Tensor, Tensor]:
        begin, end = with_batch(self.begin, 2), with_batch(self.end, 2)
        for x in (begin, end):
            if not (_checks.one_or(x.shape[0], B) and _checks.one_or(x.shape[1], Sq)):
                raise ValueError(
                    f"Intervals was given tensors of shapes {_checks.text(self.begin.shape)} and "
                    f"{_checks.text(self.end.shape)}; it accepts [B,Sq] = [{B},{Sq}]."
                )
        return begin, end

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        begin, end = self._both(B, Sq)
        _checks.same_device(begin, "Intervals", device)
        _checks.same_device(end, "Intervals", device)
        return MaskArgs(begin=begin, end=end)

    def at(self, places: Places) -> MaskArgs:
        both = self._both(places.batch, places.rows)
        for x in both:
            _checks.same_device(x, "Intervals", places.position.device)
        begin, end = (places.slot(places.own(x, 1)) for x in both)
        return MaskArgs(begin=begin, end=end)

    def __repr__(self) -> str:
        return f"Intervals({_checks.text(self.begin.shape)}, {_checks.text(self.end.shape)})"


class Documents(Mask):
    """Packed documents: a query sees the keys with its own id. ids: integer tensor [B,Sk] or [1,Sk].

    With Sq < Sk the queries are the last Sq positions. Combine with Causal() for packed language modelling.
    """

    tensors = ("ids",)

    def __init__(self, ids: Tensor):
        self.ids = _checks.integer_tensor(ids, "Documents", "[B,S]", 2)

    def _ids(self, B: int, Sq: int, Sk: int) -> tuple[Tensor, Tensor]:
        ids = with_batch(self.ids, 2)
        shape = ids.shape
        if not (_checks.one_or(shape[0], B) and _checks.same(shape[1], Sk)) or Sq > Sk:
            raise ValueError(
                f"Documents was given ids of shape {_checks.text(shape)} for {Sq} queries; it accepts [B,Sk] = "
                f"[{B},{Sk}] and no more queries than keys."
            )
        return ids[:, Sk - Sq :], ids

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        _checks.same_device(self.ids, "Documents", device)
        query_ids, key_ids = self._ids(B, Sq, Sk)
        if lengths is not None:
            place = torch.arange(Sq, device=device) + offset_of(Sq, Sk, lengths)
            query_ids = key_ids.expand(B, Sk).gather(1, place.clamp(0, max(Sk - 1, 0)))
        return MaskArgs(query_ids=query_ids, key_ids=key_ids)

    def at(self, places: Places) -> MaskArgs:
        _checks.same_device(self.ids, "Documents", places.position.device)
        if self.ids.shape[0] not in (1, places.batch):
            raise ValueError(
                f"Documents was given ids of shape {_checks.text(self.ids.shape)}; it accepts [B,positions] with "
                f"B = {places.batch}."
            )
        n = self.ids.shape[1]
        places.check_covers(n, "Documents")
        if n == 0:
            return MaskArgs(end=places.position.new_zeros(1, 1))
        own = self.ids.expand(places.batch, n).gather(1, places.position.clamp(0, n - 1))
        key_ids = self.ids.expand(-1, places.slots) if n == 1 else places.at_slots(self.ids, "Documents", 0)
        return MaskArgs(query_ids=own, key_ids=key_ids)

    def __repr__(self) -> str:
        return f"Documents({_checks.text(self.ids.shape)})"


class Dense(Mask):
    """Any bool tensor, True = attend: [Sq,Sk], or 4-d broadcastable to [B,H,Sq,Sk]. Read in place, by its strides."""

    tensors = ("tensor",)

    def __init__(self, tensor: Tensor):
        _checks.bool_mask(tensor, "mask")
        self.tensor = tensor

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        _checks.same_device(self.tensor, "mask", device)
        return MaskArgs(mask=_checks.as_4d(self.tensor, "mask", B, H, Sq, Sk))

    def _batch_and_heads(self) -> tuple[int, int]:
        return (self.tensor.shape[0], self.tensor.shape[1]) if self.tensor.dim() == 4 else (1, 1)

    def at(self, places: Places) -> MaskArgs:
        _checks.same_device(self.tensor, "mask", places.position.device)
        return MaskArgs(mask=places.dense_mask(self.tensor))

    def __repr__(self) -> str:
        return f"Dense({_checks.text(self.tensor.shape)})"


def as_mask(mask: Mask | Tensor | None) -> Mask | None:
    """What users pass as ``mask=``, a mask object, a bool tensor or None, as a mask."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is a {type(mask).__name__}; accepted: a mask object of mha_ext.masks, or a bool tensor.")
    return Dense(mask)
