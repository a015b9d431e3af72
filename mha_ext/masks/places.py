"""Where a cache has the keys, and where the queries of one call stand among them: what a mask or a bias must know to be the
same step by step as over whole sequences, whose queries are as many as their keys (o = 0)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks
from .base import NO_MASK, Mask, MaskArgs


class Places(NamedTuple):
    """S of the `rows` queries of a call, from `row` on."""

    position: Tensor  # int64 [B,S], the queries' positions
    heads: int  # H
    slots: int  # n, the keys that attention is given
    end: int | None  # one past the last position that any query may see; None: only known as `lengths`
    lengths: Tensor  # int64 [B], likewise, of each sequence
    row: int
    rows: int
    shift: Tensor | None = None  # int64 [B,1]: position j is in slot j + shift; None: 0
    queries_are_keys: bool = True  # self-attention: query i is at position i

    @property
    def batch(self) -> int:
        return self.position.shape[0]

    def slot(self, position: Tensor) -> Tensor:
        """[B or 1, n] -> the same as slots."""
        return position if self.shift is None else position + self.shift

    def positions_of_slots(self) -> Tensor:
        """int64 [B or 1, n]"""
        j = torch.arange(self.slots, device=self.position.device)[None]
        return j if self.shift is None else j - self.shift

    def own(self, x: Tensor, dim: int) -> Tensor:
        """x, which has one row for all queries of the call or one for each, for these."""
        S = self.position.shape[1]
        return x if x.shape[dim] == 1 or self.rows == S else x.narrow(dim, self.row, S)

    def dense_mask(self, x: Tensor) -> Tensor:
        """A dense mask, whose columns are the positions from 0 on, for these queries and all slots."""
        columns = x.shape[-1] if x.dim() else 1
        x = _checks.as_4d(x, "mask", self.batch, self.heads, self.rows, max(columns, 1))
        return self.at_slots(self.own(x, 2), "mask", False)

    def dense_bias(self, x: Any, dtype: torch.dtype) -> Tensor:
        """The same for a bias of queries of that type."""
        columns = x.shape[-1] if isinstance(x, Tensor) and x.dim() else 1
        sizes = self.batch, self.heads, self.rows, max(columns, 1)
        x = _checks.bias_tensor(x, dtype, self.position.device, *sizes)
        return self.at_slots(self.own(x, 2), "bias", 0)

    def check_queries_are_keys(self, name: str) -> None:
        if not self.queries_are_keys:
            raise ValueError(
                f"{name} counts queries from the first one and was given with positions= among a context; accepted: masks of "
                "positions: give masks.Dense(rows) with what these queries see."
            )

    def check_covers(self, positions: int, name: str) -> None:
        """That what is given for so many positions says something for all that these queries may see."""
        if self.end is None:
            torch._assert_async((self.lengths <= positions).all(), f"{name} covers fewer positions than the cache has.")
        elif positions < self.end:
            raise ValueError(
                f"{name} covers {positions} positions and the cache has {self.end}; accepted: all positions up to those of "
                "this call's queries."
            )

    def at_slots(self, x: Tensor, name: str, fill: Any) -> Tensor:
        """x [B or 1, ..., positions or 1], of positions, as a tensor of slots [B or 1, ..., n or 1]."""
        positions = x.shape[-1]
        if positions == 1:
            return x
        self.check_covers(positions, name)
        if self.shift is None:
            return x if positions == self.slots else pad(x, self.slots, fill)
        x = x.expand(self.batch, *x.shape[1:])
        index = self.positions_of_slots().clamp(0, positions - 1)
        return x.gather(-1, index.view(self.batch, *(1,) * (x.dim() - 2), -1).expand(*x.shape[:-1], -1))


def pad(x: Tensor, length: int, fill: Any) -> Tensor:
    """The last dimension cut or filled up to that length."""
    if x.shape[-1] >= length:
        return x[..., :length]
    return torch.cat([x, x.new_full((*x.shape[:-1], length - x.shape[-1]), fill)], -1)


class Lowered(Mask):
    """A mask that is the ops' arguments already."""

    def __init__(self, args: MaskArgs):
        self.args = args

    def lower(
        self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
    ) -> MaskArgs:
        return self.args


def at(mask: Mask | Tensor | None, places: Places) -> MaskArgs:
    """The ops' arguments for what users pass as ``mask=`` with a cache."""
    from .positions import as_mask  # which imports this module

    given = as_mask(mask)
    return NO_MASK if given is None else given.at(places)


def depends_on_position(mask: Mask | None) -> bool:
    """Whether what a query sees depends on where it stands among others, not only on its row."""
    from .base import _Combined
    from .positions import Dense, Intervals, LeftPadding, Padding

    if isinstance(mask, _Combined):
        return any(map(depends_on_position, mask.parts))
    return mask is not None and not isinstance(mask, (Dense, Intervals, LeftPadding, Padding))
