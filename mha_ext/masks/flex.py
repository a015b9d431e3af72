"""FlexAttention's block masks as masks of this package."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .base import Mask
from .blocks import BlockSparse
from .positions import Dense


def from_block_mask(block_mask: Any) -> Mask:
    """What a BlockMask of torch.nn.attention.flex_attention says, as a mask.

    Blocks that it shows in full or hides are a BlockSparse, which costs no memory of size Sq x Sk. Where it shows parts of
    blocks, its mask_mod is evaluated once, on all of them: a Dense besides. Causal, Window, Prefix and Documents say what most
    mask_mods say, in O(S) memory.

    Args:
        block_mask: as create_block_mask makes them, for B or 1 batch elements and H or 1 heads; used with as many queries and
            keys as it was made for.

    Raises:
        TypeError: block_mask is none.
    """
    from torch.nn.attention.flex_attention import BlockMask, create_mask, noop_mask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"block_mask is a {type(block_mask).__name__}; accepted: a BlockMask, as torch.nn.attention.flex_attention."
            "create_block_mask makes."
        )
    Sq, Sk = block_mask.seq_lengths
    rows, columns = block_mask.BLOCK_SIZE
    partial = _blocks(block_mask.kv_num_blocks, block_mask.kv_indices, -(-Sk // columns))
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, -(-Sk // columns))
    if block_mask.mask_mod is noop_mask:
        full, partial = full | partial, torch.zeros_like(partial)
    size = math.gcd(rows, columns)  # ours are square
    in_squares = lambda x: _repeat(x, rows // size, columns // size)[..., : -(-Sq // size), : -(-Sk // size)]
    blocks = BlockSparse(in_squares(full | partial), size)
    if not bool(partial.any()):
        return blocks
    B, H = partial.shape[:2]
    inside = create_mask(block_mask.mask_mod, B, H, Sq, Sk, device=str(partial.device))
    return blocks & Dense(inside | _repeat(full, rows, columns)[..., :Sq, :Sk])


def _blocks(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """[B,H,n] how many blocks a row of blocks shows and [B,H,n,m] which, as bool [B,H,n,columns]."""
    there = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    shown = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=indices.device)
    shown.scatter_(-1, torch.where(there, indices, columns).long(), True)
    return shown[..., :columns]


def _repeat(x: Tensor, rows: int, columns: int) -> Tensor:
    return x.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
