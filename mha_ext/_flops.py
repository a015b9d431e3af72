"""What torch.utils.flop_counter.FlopCounterMode counts for the ops: as for torch's own attention, the matrix products
over all pairs of a query and a key, whatever a mask hides (mha_ext.explain counts what is visible).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import _ops  # noqa: F401  (loads the ops)


def _pairs(q: Tensor, k: Tensor, q_starts: Tensor | None, k_starts: Tensor | None, max_q: int, max_k: int) -> int:
    """How many times a query meets a key, over batch and heads."""
    if q_starts is None or k_starts is None:
        return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if type(q_starts) is not Tensor or q_starts.is_meta:  # without values the bounds have to do
        return q.shape[1] * (q_starts.shape[0] - 1) * max_q * max_k
    return q.shape[1] * int((q_starts.diff() * k_starts.diff()).sum())


@register_flop_formula(torch.ops.mha_ext.attention_fwd, get_raw=True)
def attention_fwd_flops(q, k, v, *args, out_val=None, **kwargs) -> int:
    """q k^T and the weighted sum of v."""
    return 2 * _pairs(q, k, *args[11:15]) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.mha_ext.attention_bwd, get_raw=True)
def attention_bwd_flops(dout, dlse, dweights, q, k, v, *args, out_val=None, **kwargs) -> int:
    """q k^T again, dq and dk; dout v^T and dv."""
    return 2 * _pairs(q, k, *args[14:18]) * (3 * q.shape[3] + 2 * v.shape[3])


def _mix_flops(q: Tensor, pre_mix: Tensor | None, post_mix: Tensor | None) -> int:
    """Of one query and key in one head."""
    return 2 * q.shape[1] * ((pre_mix is not None) + (post_mix is not None))


@register_flop_formula(torch.ops.mha_ext.attention_mixed_fwd, get_raw=True)
def attention_mixed_fwd_flops(q, k, v, pre_mix, post_mix, *args, out_val=None, **kwargs) -> int:
    """What attention_fwd does, and the mixes."""
    return _pairs(q, k, *args[11:15]) * (2 * (q.shape[3] + v.shape[3]) + _mix_flops(q, pre_mix, post_mix))


@register_flop_formula(torch.ops.mha_ext.attention_mixed_bwd, get_raw=True)
def attention_mixed_bwd_flops(
    dout, dlse, dweights, q, k, v, lse, lse_rest, pre_mix, post_mix, *args, out_val=None, **kwargs
) -> int:
    """What attention_bwd does, and for each mix the mix itself, its transpose and its gradient."""
    mixes = 3 * _mix_flops(q, pre_mix, post_mix)
    return _pairs(q, k, *args[11:15]) * (2 * (3 * q.shape[3] + 2 * v.shape[3]) + mixes)


@register_flop_formula(torch.ops.mha_ext.merge_heads)
def merge_heads_flops(x_shape, mix_shape=None, *args, out_shape=None, **kwargs) -> int:
    """The mix of the heads, if any."""
    B, H, S, D = x_shape
    return 2 * B * S * H * H * D if mix_shape is not None else 0
