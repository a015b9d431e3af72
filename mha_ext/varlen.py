"""Attention of packed sequences of different lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, _ops, masks
from .functional import _autocast, _rng_state, dtensor_rules, score_arguments


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: masks.Mask | Tensor | None = None,
    bias=None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    rng_state: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
):
    """attention within each of N sequences that lie one after the other, without padding.

    Each sequence is computed as if it were alone: no other one changes a bit of what it gives. On the CPU they are taken
    one after the other, each on all threads.

    Args:
        q: queries [Tq,H,D], the sequences' rows one after the other; any strides with a contiguous last dimension.
        k: keys [Tk,Hk,D].
        v: values [Tk,Hk,Dv].
        cu_seqlens_q, cu_seqlens_k: integer tensors [N+1], where the sequences start and end: 0, ..., Tq (Tk). On a GPU they
            are trusted, since looking at them would wait for it.
        max_seqlen_q, max_seqlen_k: bounds of the sequences' lengths. By default they are looked up, which on a GPU waits for
            it, and cannot be captured or compiled without a graph break.
        mask, bias: as in attention, with the batch size N, Sq = max_seqlen_q and Sk = max_seqlen_k: Padding takes [N]
            lengths, Dense [N or 1,H or 1,Sq,Sk] (sequences use its upper left corner), Documents [N,Sk]. Where a mask or a
            bias speaks of the offset o = Sk - Sq, each sequence has its own.
        scale, dropout_p, softcap, sinks, rng_state, deterministic: as in attention; dropout draws for sequence n what
            attention draws for batch element n.
        return_lse: also return the logsumexp [H,Tq].

    Returns:
        out [Tq,H,Dv], or (out, lse). Differentiable, twice.

    Raises:
        ValueError, TypeError: what does not fit, in one sentence with the fix; RuntimeError: cu_seqlens (on the CPU) that
            do not cover all rows, or lengths above the bounds.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise _checks.not_tensors("q, k, v", q, k, v)
    if not q.dim() == k.dim() == v.dim() == 3:
        shapes = ", ".join(_checks.text(x.shape) for x in (q, k, v))
        raise ValueError(f"q, k, v have shapes {shapes}; accepted: packed q [Tq,H,D], k [Tk,Hk,D], v [Tk,Hk,Dv].")
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q.device.type, q, k, v)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    _checks.attention_inputs(q, k, v, _ops.without_cuda)
    starts = [
        _starts(x, name, q) for x, name in ((cu_seqlens_q, "cu_seqlens_q"), (cu_seqlens_k, "cu_seqlens_k"))
    ]
    B, H = starts[0].shape[0] - 1, q.shape[1]
    if starts[1].shape[0] != B + 1:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k have shapes [{B + 1}] and {_checks.text(starts[1].shape)}; accepted: one "
            "entry more than there are sequences in both."
        )
    lengths = starts[0].diff(), starts[1].diff()
    longest = [
        int(n.max()) if given is None and B > 0 else given or 0
        for n, given in zip(lengths, (max_seqlen_q, max_seqlen_k))
    ]
    args = masks.lower(mask, B, H, *longest, q.device, lengths)
    bias, scale, sinks = score_arguments(bias, scale, sinks, q, B, H, *longest)
    _checks.probability("dropout_p", dropout_p)
    if softcap != 0.0:
        _checks.softcap(softcap)
    rng_state = _rng_state(rng_state, q) if dropout_p != 0.0 else None
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if _checks.is_dtensor(q):
        args, bias, sinks, *starts = dtensor_rules().modifiers(q, dropout_p, args, bias, sinks, *starts)
    out, lse, _, _ = _ops.attention_fwd(
        q, k, v, bias, *args, *starts, *longest, sinks, scale, softcap, dropout_p, rng_state, False, deterministic
    )
    out = out[0].transpose(0, 1)
    return (out, lse[0]) if return_lse else out


def _starts(x: Tensor, name: str, q: Tensor) -> Tensor:
    starts = _checks.integer_tensor(x, name, "[sequences + 1]", 1)
    if starts.shape[0] == 0:
        raise ValueError(f"{name} is empty; accepted: an integer tensor [sequences + 1] that begins with 0.")
    _checks.same_device(starts, name, q.device)
    return starts
