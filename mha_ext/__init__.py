"""Multi-head attention for PyTorch: kernels with any mask and bias, forward and backward, in O(S) memory."""

import importlib
from typing import Any

from . import biases, masks, nn, reference
from ._ops import build_info, dropout_part
from .cached import attention_cached
from .explain import Plan, explain
from .functional import (
    attention,
    dropout_mask,
    masked_softmax,
    merge_heads,
    split_heads,
)
from .merge import merge_partials
from .nn._torchs_ways import not_scriptable
from .packed import attention_qkvpacked
from .sdpa import scaled_dot_product_attention
from .swap import SwapReport, swap_attention
from .use_for_sdpa import SdpaUse, use_for_sdpa
from .varlen import attention_varlen

not_scriptable(
    attention, attention_cached, attention_qkvpacked, attention_varlen, dropout_mask, masked_softmax, merge_heads, merge_partials,
    scaled_dot_product_attention, split_heads,
)  # fmt: skip

__version__ = build_info["version"]

__all__ = [
    "Plan",
    "SdpaUse",
    "SwapReport",
    "attention",
    "attention_cached",
    "attention_qkvpacked",
    "attention_varlen",
    "biases",
    "dropout_mask",
    "dropout_part",
    "explain",
    "masked_softmax",
    "masks",
    "merge_heads",
    "merge_partials",
    "nn",
    "reference",
    "scaled_dot_product_attention",
    "split_heads",
    "swap_attention",
    "use_for_sdpa",
]


def __getattr__(name: str) -> Any:
    if name == "distributed":  # on first use: it brings torch.distributed.tensor, which costs half a second
        return importlib.import_module(".distributed", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
