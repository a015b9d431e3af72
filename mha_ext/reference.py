"""What attention is, in plain differentiable torch code: the truth that kernels are tested against, in any precision.

It stores whole [B,H,Sq,Sk] matrices. The ops use it for double backward; users may use it to check a result. Statistics
are kept in fp32, or in fp64 for fp64 inputs.

Unlike in the kernels, NaN or infinity in a key or value spreads to all queries, also those it is hidden from, unless it
is hidden from every query: plain matrix products cannot leave out single pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import torch
from torch import Tensor

from . import _checks, biases, masks

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import EagerOptions

_MASK32 = 0xFFFFFFFF


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor,
    *, return_lse: Literal[False] = ..., return_weights: Literal[False] = ..., **options: Unpack[EagerOptions],
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor,
    *, return_lse: Literal[True], return_weights: Literal[False] = ..., **options: Unpack[EagerOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor,
    *, return_lse: Literal[False] = ..., return_weights: Literal[True], **options: Unpack[EagerOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor,
    *, return_lse: Literal[True], return_weights: Literal[True], **options: Unpack[EagerOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = ..., return_weights: bool = ..., **options: Unpack[EagerOptions]
) -> Tensor | tuple[Tensor, ...]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: masks.Mask | Tensor | None = None,
    bias: Tensor | biases.Bias | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    pre_mix: Tensor | None = None,
    post_mix: Tensor | None = None,
    rng_state: Tensor | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """The same as mha_ext.attention, on any device and for inputs of any floating-point type.

    Raises:
        ValueError: dropout without an rng_state, which is not drawn here; or a mask that does not fit. Other arguments that do
            not fit end in torch's own errors.
    """
    (B, H, Sq, D), Sk = q.shape, k.shape[2]
    visible = _visible(mask, B, H, Sq, Sk, q.device)
    if scale is None:
        scale = D**-0.5 if D > 0 else 1.0
    keep = _kept(rng_state, dropout_p, B, H, Sq, Sk)
    if isinstance(bias, biases.Bias):
        bias = bias.lower(H, Sq, Sk, _checks.accumulate_dtype(q.dtype), q.device)
    out, lse, weights = attend(q, k, v, bias, visible, scale, softcap, dropout_p, keep, sinks, None, pre_mix, post_mix)
    extra = ([lse] if return_lse else []) + ([weights] if return_weights else [])
    return (out, *extra) if extra else out


def masked_softmax(
    scores: Tensor,
    mask: masks.Mask | Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
) -> Tensor:
    """The same as mha_ext.masked_softmax for scores [B,H,Sq,Sk]."""
    B, H, Sq, Sk = scores.shape
    visible = _visible(mask, B, H, Sq, Sk, scores.device)
    return softmax(scores, bias, visible, scale, dropout_p, _kept(rng_state, dropout_p, *scores.shape))


class Packed(NamedTuple):
    """Packed sequences, and how to lay them out one per batch element."""

    q_starts: Tensor  # int64 [B+1]
    k_starts: Tensor  # int64 [B+1]
    max_q: int
    max_k: int

    def lengths(self) -> tuple[Tensor, Tensor]:
        return self.q_starts.diff(), self.k_starts.diff()

    @staticmethod
    def pad(x: Tensor, starts: Tensor, longest: int) -> Tensor:
        """[1,H,T,D] -> [B,H,longest,D], 0 past the lengths"""
        if x.shape[2] == 0:
            return x.new_zeros(len(starts) - 1, x.shape[1], longest, x.shape[3])
        place = starts[:-1, None] + torch.arange(longest, device=x.device)
        inside = (place < starts[1:, None])[:, None, :, None]
        rows = x[0][:, place.clamp(max=x.shape[2] - 1)].transpose(0, 1)
        return torch.where(inside, rows, 0)

    def unpad(self, x: Tensor, T: int) -> Tensor:
        """[B,H,max_q,...] -> [1,H,T,...] of the queries"""
        row = torch.arange(T, device=x.device)
        sequence = torch.searchsorted(self.q_starts, row, right=True) - 1
        return x[sequence, :, row - self.q_starts[sequence]].transpose(0, 1)[None]


def _dense_bias(bias: Tensor, Sq: int, Sk: int, lengths: tuple[Tensor, Tensor] | None) -> Tensor:
    """A relative bias [b,h,Sq+Sk-1] as [b,h,Sq,Sk]."""
    i, j = torch.arange(Sq, device=bias.device)[:, None], torch.arange(Sk, device=bias.device)
    if lengths is None:
        return bias[:, :, j - i + (Sq - 1)]
    shift = (lengths[1] - lengths[0])[:, None, None]  # [B,1,1]
    place = (j - i - shift + (Sk - 1)).clamp(0, bias.shape[-1] - 1)
    per_sequence = bias.expand(len(shift), -1, -1)
    return torch.stack([x[:, at] for x, at in zip(per_sequence, place)])


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, visible: Tensor | None, scale: float, softcap: float,
    dropout_p: float, keep: Tensor | None, sinks: Tensor | None = None, packed: Packed | None = None,
    pre_mix: Tensor | None = None, post_mix: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, weights). visible: bool, broadcasts to [B,H,Sq,Sk], or None; keep: dropout_mask, or None without."""
    if packed is not None:
        T = q.shape[2]
        q = packed.pad(q, packed.q_starts, packed.max_q)
        k, v = (packed.pad(x, packed.k_starts, packed.max_k) for x in (k, v))
        if bias is not None and bias.dim() == 3:
            bias = _dense_bias(bias, packed.max_q, packed.max_k, packed.lengths())
        out, lse, weights = attend(
            q, k, v, bias, visible, scale, softcap, dropout_p, keep, sinks, None, pre_mix, post_mix
        )
        return packed.unpad(out, T), packed.unpad(lse, T), weights
    if bias is not None and bias.dim() == 3:
        bias = _dense_bias(bias, q.shape[2], k.shape[2], None)
    (B, H, Sq, _), Hk, Sk = q.shape, k.shape[1], k.shape[2]
    dtype = _checks.accumulate_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        if visible is not None:
            seen = visible if pre_mix is None and post_mix is None else visible.any(1, keepdim=True)  # by some head
            q, k, v = _without_unseen_rows(q, k, v, seen.expand(B, H, Sq, Sk))
        group = H // Hk if Hk else 1
        keys, values = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
        scores = q.to(dtype) @ keys.mT * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = _mix(scores, pre_mix)
        weights, lse = _softmax_and_lse(scores, bias, visible, sinks)
        weights = _dropout(_mix(weights, post_mix), dropout_p, keep)
        return (weights @ values).to(q.dtype), lse, weights.to(q.dtype)


def softmax(
    scores: Tensor, bias: Tensor | None, visible: Tensor | None, scale: float, dropout_p: float, keep: Tensor | None
) -> Tensor:
    """The masked softmax over the last dimension, then dropout; visible and keep as in attend."""
    weights, _ = _softmax_and_lse(scores.to(_checks.accumulate_dtype(scores.dtype)) * scale, bias, visible)
    return _dropout(weights, dropout_p, keep).to(scores.dtype)


def _softmax_and_lse(
    scores: Tensor, bias: Tensor | None, visible: Tensor | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if visible is not None:
        scores = torch.where(visible, scores, float("-inf"))
    if sinks is not None:  # one more key, whose weight is then left out
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights, lse = _softmax_and_lse(torch.cat([scores, sink], -1), None, None)
        return weights[..., :-1], lse
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], float("-inf"))
    top = scores.detach().amax(-1, keepdim=True)
    empty = top == float("-inf")  # rows that see nothing: every weight is 0, and no gradient may become NaN
    exps = torch.exp(scores - torch.where(empty, 0.0, top))
    total = torch.where(empty, 1.0, exps.sum(-1, keepdim=True))
    lse = torch.where(empty, float("-inf"), total.log() + top)
    return exps / total, lse.squeeze(-1)


def _without_unseen_rows(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeroes queries that see no key, and keys and values that no query sees: NaN there must stay out of products."""
    seeing = visible.any(3)[..., None]
    seen = visible.any(2)
    if k.shape[1] > 0:
        seen = seen.unflatten(1, (k.shape[1], q.shape[1] // k.shape[1])).any(2)
    seen = seen[..., None]
    return torch.where(seeing, q, 0), torch.where(seen, k, 0), torch.where(seen, v, 0)


def _mix(x: Tensor, mix: Tensor | None) -> Tensor:
    return x if mix is None else torch.einsum("bhij,hg->bgij", x, mix.to(x.dtype))


def _dropout(weights: Tensor, p: float, keep: Tensor | None) -> Tensor:
    if p == 1:
        return weights * 0
    return weights if keep is None else torch.where(keep, weights / (1 - p), 0)


def _kept(rng_state: Tensor | None, p: float, B: int, H: int, Sq: int, Sk: int) -> Tensor | None:
    if p == 0:
        return None
    if rng_state is None:
        raise ValueError(f"dropout_p is {p} and rng_state is None; accepted here: an rng_state, int64 [2] (seed, offset).")
    return dropout_mask(rng_state, p, B, H, Sq, Sk)


def dropout_mask(rng_state: Tensor, p: float, B: int, H: int, Sq: int, Sk: int) -> Tensor:
    """bool [B,H,Sq,Sk], True = kept: the same bits as mha_ext.dropout_mask, computed with tensor arithmetic."""
    device = rng_state.device
    quads = (Sk + 3) // 4
    key_quad = torch.arange(quads, device=device)
    query = torch.arange(Sq, device=device)[:, None]
    head = torch.arange(H, device=device)[:, None, None]
    batch = torch.arange(B, device=device)[:, None, None, None]
    seed, offset, *place = rng_state.reshape(-1, rng_state.shape[-1])[0].unbind()
    if place:
        batch, head, query, key_quad = batch + place[0], head + place[1], query + place[2], key_quad + place[3] // 4
    key = seed ^ _mix_bits(offset)
    words = torch.stack(
        _philox4x32_10(key_quad, query, head, batch, key & _MASK32, key >> 32 & _MASK32), dim=-1
    )
    threshold = min(int(p * 2**32), _MASK32)
    kept = words.expand(B, H, Sq, quads, 4).flatten(3)[..., :Sk] >= threshold
    return kept & (p < 1)


def _mix_bits(x: Tensor) -> Tensor:
    """mix_bits of csrc/philox.h."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * (factor - 2**64 if factor >= 2**63 else factor)
    return x


def _philox4x32_10(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key0: Tensor, key1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in int64 tensors."""
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # the low 64 bits: int64 wraps around
        c0, c1, c2, c3 = (
            (product1 >> 32 & _MASK32) ^ c1 ^ key0,
            product1 & _MASK32,
            (product0 >> 32 & _MASK32) ^ c3 ^ key1,
            product0 & _MASK32,
        )
        key0, key1 = key0 + 0x9E3779B9 & _MASK32, key1 + 0xBB67AE85 & _MASK32
    return c0, c1, c2, c3


def _visible(
    mask: masks.Mask | Tensor | None, B: int, H: int, Sq: int, Sk: int, device: torch.device
) -> Tensor | None:  # fmt: skip
    if mask is None:
        return None
    return (mask if isinstance(mask, masks.Mask) else masks.Dense(mask)).to_dense(B, H, Sq, Sk, device=device)
