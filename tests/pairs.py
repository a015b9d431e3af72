"""Attention pair by pair: products are made of visible pairs alone, so that NaN and infinity reach what sees them and nothing else, in
forward and (by autograd) in every gradient. Slow and in plain torch: the truth about what is not finite."""

from __future__ import annotations

import torch


def attention(q, k, v, *, seen, bias=None, scale=None, softcap=0.0, sinks=None, pre_mix=None, post_mix=None):
    """(out, lse, weights) in the type of q, with seen a bool tensor [B,H,Sq,Sk]."""
    dtype = q.dtype
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    some = seen.any(1, keepdim=True).expand_as(seen)  # by some head
    entering, leaving = some if pre_mix is not None else seen, some if post_mix is not None else seen

    def scores_of(pairs):
        left, right = (torch.where(pairs[..., None], t, 0) for t in (q[:, :, :, None], k[:, :, None]))
        x = (left * right).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap:
            x = softcap * torch.tanh(x / softcap)
        x = _mix(x, pre_mix)
        return x if bias is None else x + torch.where(seen, bias.to(dtype), 0)

    with torch.no_grad():  # a row whose visible scores are all -inf sees nothing
        dead = (scores_of(entering).masked_fill(~seen, -torch.inf) == -torch.inf).all(-1, keepdim=True)
        if sinks is not None:
            dead = dead & (sinks == -torch.inf)[:, None, None]
    seen = seen & ~dead
    if pre_mix is None and post_mix is None:
        entering = leaving = seen
    weights, lse = softmax(scores_of(entering), seen, sinks)
    weights = _mix(weights, post_mix)
    weights = torch.where(leaving, weights, 0)
    out = (weights[..., None] * torch.where(leaving[..., None], v[:, :, None], 0)).sum(-2)
    return torch.where(leaving.any(-1, keepdim=True), out, 0), lse, weights


def softmax(scores, seen, sinks=None):
    """(weights, lse) over the last dimension: hidden weights are 0, also in rows of NaN."""
    if scores.shape[-1] == 0:
        return scores, scores.sum(-1) - torch.inf
    scores = torch.where(seen, scores, -torch.inf)
    if sinks is not None:
        sinks = torch.where(sinks == -torch.inf, -torch.inf, sinks)  # that is no sink: nothing depends on it
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    top = scores.detach().amax(-1, keepdim=True)
    empty = top == -torch.inf
    exps = torch.exp(scores - torch.where(empty, 0, top))
    total = torch.where(empty, 1, exps.sum(-1, keepdim=True))
    lse = torch.where(empty, -torch.inf, top + total.log()).squeeze(-1)
    weights = exps / total
    return torch.where(seen, weights[..., : seen.shape[-1]], 0), lse


def _mix(x, mix):
    return x if mix is None else torch.einsum("bhij,hg->bgij", x, mix.to(x.dtype))
