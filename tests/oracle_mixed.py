"""The truth for talking heads, by the textbook and by the rule for tolerances of oracle.py."""

from __future__ import annotations

import cases
import oracle
import torch

KINDS = {"both": ("pre_mix", "post_mix"), "pre": ("pre_mix",), "post": ("post_mix",)}


def mixes(c: cases.Case, kind: str) -> dict[str, torch.Tensor]:
    """The matrices of a kind, leaves in the accumulate type, far from symmetric and from the identity."""
    gen = cases.generator(c.id + kind)
    dtype = oracle.accumulate_dtype(c.dtype)
    return {
        name: cases.surrounded((torch.eye(c.H) + 0.5 * cases.randn(gen, c.H, c.H)).to(dtype)).requires_grad_()
        for name in KINDS[kind]
    }


def mix(x: torch.Tensor, matrix: torch.Tensor | None) -> torch.Tensor:
    """new[g] = sum over h of old[h] * matrix[h,g]"""
    return x if matrix is None else torch.einsum("bhij,hg->bgij", x, matrix.to(x.dtype))


def attention(
    q, k, v, *, pre_mix=None, post_mix=None, seen=None, bias=None, scale=None, softcap=0.0, keep=None, dropout_p=0.0, sinks=None,
    dtype=torch.float64,
):  # fmt: skip
    """(out, lse, weights, probabilities before post_mix) in `dtype`."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = mix(softcap * torch.tanh(scores / softcap) if softcap else scores, pre_mix)
    if bias is not None:
        scores = scores + bias.to(dtype)
    seen = (torch.ones((), dtype=torch.bool) if seen is None else seen).expand(scores.shape)
    if sinks is not None:
        sink = sinks.to(dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores, seen = torch.cat([scores, sink], -1), torch.nn.functional.pad(seen, (0, 1), value=True)
    probabilities, lse = oracle.softmax(scores, seen)
    probabilities = probabilities[..., : k.shape[2]]
    weights = mix(probabilities, post_mix)
    if keep is not None:
        weights = weights * keep.to(dtype) * (0.0 if dropout_p == 1 else 1 / (1 - dropout_p))
    return weights @ v, lse, weights, probabilities


def truths(c: cases.Case, x: cases.Inputs, given: dict, keep, dlse=None, dweights=None) -> dict[str, oracle.Truth]:
    """As oracle.truths, for the case's inputs and the matrices `given`."""
    leaves = {**x.leaves(), **given}
    dense_bias = x.definition().get("dense_bias", lambda b: b)

    def run(dtype):
        inner = {
            name: t.detach().to(torch.float64 if dtype == torch.float64 else t.dtype).requires_grad_() for name, t in leaves.items()
        }
        options = {name: inner.get(name) for name in ("pre_mix", "post_mix", "sinks")}
        bias = dense_bias(inner["bias"]) if "bias" in inner else None
        out, lse, weights, _ = attention(
            inner["q"], inner["k"], inner["v"], seen=x.seen, bias=bias, keep=keep, dtype=dtype, **options, **c.options()
        )
        values, weighting = [out], [x.dout.to(out.dtype)]
        if dlse is not None:
            values, weighting = values + [lse], weighting + [dlse.to(lse.dtype).masked_fill(lse.isinf(), 0.0)]
        if dweights is not None:
            values, weighting = values + [weights], weighting + [dweights.to(weights.dtype)]
        gradients = torch.autograd.grad(values, list(inner.values()), weighting)
        return {"out": out, "lse": lse, "weights": weights, **dict(zip(inner, gradients))}

    exact = run(torch.float64)
    rival = {} if c.dtype == torch.float64 else run(c.dtype)
    terms = magnitudes(c, x, given, keep, dlse, dweights)
    return {
        name: oracle.Truth(t.detach(), rival.get(name), terms[name], oracle.accumulate_dtype(c.dtype) if name == "lse" else c.dtype)
        for name, t in exact.items()
    }  # fmt: skip


def magnitudes(c, x, given, keep, dlse, dweights) -> dict[str, torch.Tensor]:
    """Sums of absolute values of the terms behind each result, each times (1 + the row's largest score)."""
    with torch.no_grad():
        q, k, v, dout = (t.detach().double() for t in (x.q, x.k, x.v, x.dout))
        bias, sinks = x.bias_leaf(), x.sinks
        dense = x.definition().get("dense_bias", lambda b: b)(bias.detach().double()) if bias is not None else None
        matrices = {name: t.detach().double() for name, t in given.items()}
        pre, post = (m.abs() if m is not None else None for m in map(matrices.get, ("pre_mix", "post_mix")))
        scale = abs(c.D**-0.5 if c.scale is None else c.scale)
        _, lse, _, probabilities = attention(
            q, k, v, seen=x.seen, bias=dense, sinks=sinks, scale=c.scale, softcap=c.softcap, **matrices
        )
        kept = 1.0 if keep is None else keep.double() * (0.0 if c.dropout_p == 1 else 1 / (1 - c.dropout_p))
        kr, vr = (t.repeat_interleave(c.H // c.Hk, dim=1).abs() for t in (k, v))
        capped = scale * (q.abs() @ kr.mT)
        scores = mix(capped, pre) + (0 if dense is None else dense.abs())
        if x.seen is not None:
            scores = scores.masked_fill(~x.seen, 0.0)
            capped = capped.masked_fill(~x.seen.any(1, keepdim=True), 0.0)
        row = 1 + scores.amax(-1, keepdim=True) + (0 if sinks is None else sinks.detach().double().abs()[:, None, None])
        finite_lse = lse.masked_fill(lse.isinf(), 0.0).abs().unsqueeze(-1)
        dweights = 0 if dweights is None else dweights.detach().double().abs()
        dlse = 0 if dlse is None else dlse.detach().double().abs().unsqueeze(-1)
        dw = (dout.abs() @ vr.mT + dweights) * kept
        dp = mix(dw, None if post is None else post.t())
        through = (probabilities * dp).sum(-1, keepdim=True) + dlse
        weighted = probabilities * (row + finite_lse)
        ds = weighted * (dp + through)
        dc = mix(ds, None if pre is None else pre.t())
        weights = mix(probabilities * row, post) * kept

        def per_kv_head(t):
            return t.unflatten(1, (c.Hk, c.H // c.Hk)).sum(2)

        result = {
            "out": weights @ vr, "lse": row.squeeze(-1) + lse.abs(), "weights": weights, "q": scale * (dc @ kr),
            "k": per_kv_head(scale * (dc.mT @ q.abs())), "v": per_kv_head((mix(weighted, post) * kept).mT @ dout.abs()),
            "pre_mix": torch.einsum("bhij,bgij->hg", capped, ds), "post_mix": torch.einsum("bhij,bgij->hg", weighted, dw),
        }  # fmt: skip
        if "dense_bias" in x.definition():
            pull = torch.func.vjp(x.definition()["dense_bias"], bias.detach().double())[1]
            result["bias"] = pull(ds.sum(0, keepdim=True))[0].abs()
        elif bias is not None:
            result["bias"] = ds.sum_to_size((1,) * (4 - bias.dim()) + tuple(bias.shape)).view(bias.shape)
        if sinks is not None:
            sink_weight = torch.exp(sinks.detach().double()[:, None, None] - lse.unsqueeze(-1))
            result["sinks"] = (sink_weight * through * (row + finite_lse)).sum((0, 2, 3))
        return result
