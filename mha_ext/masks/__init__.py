"""Masks: what each query may see. True means "attend" everywhere in this module.

Shapes: B batch, H query heads, Sq query length, Sk key length. With the offset o = Sk - Sq, query i stands at key
position i + o ("bottom-right"), as when the queries are the last ones of a sequence. Masks combine with ``&`` (a key is
visible only if every part shows it), ``|`` (if any does) and ``~`` (if it does not); bool tensors may be parts (torch.compile
takes ``masks.Dense(tensor)`` and ``masks.Not(mask)`` only). All but Dense, ``|``, ``~`` and the block masks cost O(S) memory.

Masks are pytrees of their tensors: they may be arguments of compiled, exported and vmapped functions, and ``mask.to(device)``
moves them. Numbers, say a window's, belong to the structure: a function that is to serve many takes the number, and makes
the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import NO_MASK, And, Mask, MaskArgs, Not, Or, visible_of
from .blocks import BlockSparse, Dilated, Strided
from .flex import from_block_mask
from .positions import Causal, Dense, Documents, Intervals, LeftPadding, Padding, Prefix, Window, as_mask

__all__ = [
    "NO_MASK",
    "And",
    "BlockSparse",
    "Causal",
    "Dense",
    "Dilated",
    "Documents",
    "Intervals",
    "LeftPadding",
    "Mask",
    "MaskArgs",
    "Not",
    "Or",
    "Padding",
    "Prefix",
    "Strided",
    "Window",
    "from_block_mask",
    "lower",
    "visible_of",
]


def lower(
    mask: Mask | Tensor | None, B: int, H: int, Sq: int, Sk: int, device: torch.device, lengths: tuple[Tensor, Tensor] | None = None
) -> MaskArgs:  # fmt: skip
    """The ops' arguments for what users pass as ``mask=``: a mask object, a bool tensor, or None."""
    given = as_mask(mask)
    return NO_MASK if given is None else given.lower(B, H, Sq, Sk, device, lengths)
