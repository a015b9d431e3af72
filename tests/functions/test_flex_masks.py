"""masks.from_block_mask says what FlexAttention's block mask says."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, flex_attention

import mha_ext
from mha_ext import masks

DOCUMENTS = torch.arange(300).floor_divide(70)

MODS = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j <= 60),
    "prefix": lambda b, h, i, j: (j < 50) | (i >= j),
    "documents": lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j],
    "whole blocks": lambda b, h, i, j: (i // 64 + j // 64) % 2 == 0,
    "by batch and head": lambda b, h, i, j: (i >= j) & ((i + j + b + h) % 3 > 0),
    "nothing": lambda b, h, i, j: i < 0,
}


@pytest.mark.parametrize("size", [64, (64, 32), (32, 128)], ids=str)
@pytest.mark.parametrize("Sq, Sk", [(256, 256), (300, 200)])
@pytest.mark.parametrize("mod", MODS)
def test_same_pairs(mod, Sq, Sk, size):
    B, H = (2, 3) if "batch" in mod else (None, None)
    block_mask = create_block_mask(MODS[mod], B, H, Sq, Sk, device="cpu", BLOCK_SIZE=size)
    mask = masks.from_block_mask(block_mask)
    expected = create_mask(MODS[mod], B or 1, H or 1, Sq, Sk, device="cpu").expand(2, 3, -1, -1)
    assert torch.equal(mask.to_dense(2, 3, Sq, Sk).expand(2, 3, -1, -1), expected)
    in_blocks = mod == "nothing" or (mod == "whole blocks" and size == 64 and Sq == 256)
    assert isinstance(mask, masks.BlockSparse) >= in_blocks


def test_blocks_without_a_function():
    """from_kv_blocks: every block that it names is shown."""
    counts, indices = torch.tensor([[[1, 2]]]), torch.tensor([[[[1, 0, 0], [0, 2, 0]]]])
    mask = masks.from_block_mask(BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64))
    assert isinstance(mask, masks.BlockSparse)
    assert mask.blocks.tolist() == [[[[False, True, False], [True, False, True]]]]


def test_attention_as_by_flex():
    q, k, v = (torch.randn(1, 2, 200, 16, dtype=torch.float64) for _ in range(3))
    mod = and_masks(MODS["causal"], MODS["documents"])
    block_mask = create_block_mask(mod, None, None, 200, 200, device="cpu", BLOCK_SIZE=64)
    expected = flex_attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(mha_ext.attention(q, k, v, mask=masks.from_block_mask(block_mask)), expected)


def test_refusal():
    with pytest.raises(TypeError, match="block_mask is a Tensor; accepted: a BlockMask"):
        masks.from_block_mask(torch.ones(3, 3))
