"""Masks of square blocks of queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks
from .base import Mask, MaskArgs, offset_of, rows_and_keys
from .places import Places

Sizes = tuple[int, int, int, int]  # B, H, Sq, Sk
Lengths = tuple[Tensor, Tensor] | None  # of packed sequences


class _Blocks(Mask):
    """A mask of square blocks of block_size queries and keys, counted from the first query and the first key."""

    block_size: int

    def _blocks(self, sizes: Sizes, device: torch.device | None, lengths: Lengths = None) -> Tensor:
        """bool [B or 1, H or 1, ceil(Sq / block_size), ceil(Sk / block_size)]"""
        raise NotImplementedError

    def lower(self, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: Lengths = None) -> MaskArgs:
        return MaskArgs(blocks=self._blocks((B, H, Sq, Sk), device, lengths), block_size=self.block_size)

    def at(self, places: Places) -> MaskArgs:
        """A dense mask, as queries and slots need not begin with a block."""
        size, device = self.block_size, places.position.device
        if places.shift is None:
            columns = torch.arange(-(-places.slots // size), device=device)[None]
            pairs = self._pairs(places, places.position // size, columns).repeat_interleave(size, 3)[..., : places.slots]
        else:
            pairs = self._pairs(places, places.position // size, places.positions_of_slots() // size)
        return MaskArgs(mask=pairs)

    def _pairs(self, places: Places, rows: Tensor, columns: Tensor) -> Tensor:
        """bool [B,H or 1,S,n]: whether queries in the blocks `rows` [B,S] see keys in the blocks `columns` [B or 1,n]"""
        raise NotImplementedError


class BlockSparse(_Blocks):
    """Key j is visible to query i if blocks[..., i // block_size, j // block_size]; hidden blocks cost no work.

    blocks: bool, True = attend, with n = ceil(S / block_size) blocks along each length: [nq,nk], or 4-d broadcastable
    to [B,H,nq,nk]. block_size: a positive int; multiples of 64 (CPU) or 128 (CUDA) need no test inside of tiles.
    """

    tensors = ("blocks",)

    def __init__(self, blocks: Tensor, block_size: int):
        _checks.bool_mask(blocks, "blocks")
        self.blocks, self.block_size = blocks, _positive("block_size", block_size)

    def _blocks(self, sizes: Sizes, device: torch.device | None, lengths: Lengths = None) -> Tensor:
        B, H, Sq, Sk = sizes
        if device is not None:
            _checks.same_device(self.blocks, "BlockSparse", device)
        rows, columns = -(-Sq // self.block_size), -(-Sk // self.block_size)
        shape = self.blocks.shape
        leading = len(shape) == 2 or (len(shape) == 4 and all(map(_checks.one_or, shape[:2], (B, H))))
        if leading and all(map(_checks.same, shape[-2:], (rows, columns))):
            return self.blocks if len(shape) == 4 else self.blocks[None, None]
        raise ValueError(
            f"BlockSparse was given blocks of shape {_checks.text(shape)} of size {self.block_size} for {Sq} queries "
            f"and {Sk} keys; it accepts [{rows},{columns}], or four dimensions that broadcast to "
            f"[B,H,{rows},{columns}] with B = {B}, H = {H}."
        )

    def _batch_and_heads(self) -> tuple[int, int]:
        return (self.blocks.shape[0], self.blocks.shape[1]) if self.blocks.dim() == 4 else (1, 1)

    def _pairs(self, places: Places, rows: Tensor, columns: Tensor) -> Tensor:
        places.check_queries_are_keys("BlockSparse")
        _checks.same_device(self.blocks, "BlockSparse", rows.device)
        blocks = _checks.as_4d(self.blocks, "blocks", places.batch, places.heads, *self.blocks.shape[-2:])
        places.check_covers(min(blocks.shape[2:]) * self.block_size, "BlockSparse")
        B, S, n, h = places.batch, rows.shape[1], columns.shape[1], blocks.shape[1]
        rows, columns = rows.clamp(0, blocks.shape[2] - 1), columns.clamp(0, blocks.shape[3] - 1)
        seen = blocks.expand(B, -1, -1, -1).gather(2, rows.view(B, 1, S, 1).expand(B, h, S, blocks.shape[3]))
        return seen.gather(3, columns[:, None, None].expand(B, h, S, n))

    def __repr__(self) -> str:
        return f"BlockSparse({_checks.text(self.blocks.shape)}, {self.block_size})"


class _BlockPattern(_Blocks):
    """A rule on the distance of blocks; the queries' offset o must be a whole number of blocks (on a GPU and in compiled
    code, that of packed sequences is trusted to be one, and rounded down otherwise)."""

    def _positions(self, sizes: Sizes, device: torch.device | None, lengths: Lengths) -> Any:
        Sq, Sk = sizes[2:]
        offset = offset_of(Sq, Sk, lengths)
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
        i, j = rows_and_keys(-(-Sq // self.block_size), -(-Sk // self.block_size), device)
        return i + offset // self.block_size, j

    def _rule(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether queries in block i see keys in block j."""
        raise NotImplementedError

    def _pairs(self, places: Places, rows: Tensor, columns: Tensor) -> Tensor:
        return self._rule(rows[:, :, None], columns[:, None])[:, None]


def _as_blocks(visible: Tensor) -> Tensor:
    """[nq,nk] or [B,nq,nk], the same for all heads, as four dimensions."""
    return visible[None, None] if visible.dim() == 2 else visible[:, None]


class Strided(_BlockPattern):
    """The block form of strided sparse attention (Child et al., "Generating long sequences with sparse Transformers",
    2019): a block of queries sees the ``local`` blocks up to its own, and of all blocks each ``stride``-th one (those
    numbered stride - 1, 2 stride - 1, ...). Combine with Causal() for language modelling."""

    def __init__(self, stride: int, local: int = 1, block_size: int = 64):
        self.stride, self.local = _positive("stride", stride), _positive("local", local)
        self.block_size = _positive("block_size", block_size)

    def _blocks(self, sizes: Sizes, device: torch.device | None, lengths: Lengths = None) -> Tensor:
        return _as_blocks(self._rule(*self._positions(sizes, device, lengths)))

    def _rule(self, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j >= 0) & (i - j < self.local)) | (j % self.stride == self.stride - 1)

    def __repr__(self) -> str:
        return f"Strided({self.stride}, {self.local}, {self.block_size})"


class Dilated(_BlockPattern):
    """The block form of a dilated window (Beltagy et al., "Longformer", 2020): a block of queries sees the blocks at
    distances 0, dilation, ..., window * dilation on both sides."""

    def __init__(self, window: int, dilation: int, block_size: int = 64):
        blocks = _checks.at_least(0, window)
        if blocks is None:
            raise ValueError(f"window is {_checks.given(window)}; accepted: an int >= 0.")
        self.window, self.dilation = blocks, _positive("dilation", dilation)
        self.block_size = _positive("block_size", block_size)

    def _blocks(self, sizes: Sizes, device: torch.device | None, lengths: Lengths = None) -> Tensor:
        return _as_blocks(self._rule(*self._positions(sizes, device, lengths)))

    def _rule(self, i: Tensor, j: Tensor) -> Tensor:
        distance = (i - j).abs()
        return (distance <= min(self.window * self.dilation, 2**62)) & (distance % self.dilation == 0)

    def __repr__(self) -> str:
        return f"Dilated({self.window}, {self.dilation}, {self.block_size})"


def _positive(name: str, x: int) -> int:
    n = _checks.at_least(1, x)
    if n is None:
        raise ValueError(f"{name} is {_checks.given(x)}; accepted: a positive int.")
    return n
