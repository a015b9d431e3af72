"""Independent truth: attention written out in plain torch (run in fp64 it is the reference, in the tested dtype it is the rival), Philox in
numpy, and the one rule for tolerances.

The rule: in each row, the error against the fp64 reference may be at most `factor` times the error that torch's own same-dtype code makes in
that row, plus a rounding floor. The floor is one rounding of the tested dtype and one rounding of the accumulate type per unit of score, both
relative to the sum of the absolute values of the terms that the result adds up (so it follows cancellation, masks and lengths by itself).
Below it lies what counts as 0: kernels of other types than fp64 know no denormal numbers.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F

FORWARD, GRADIENT = 2.0, 3.0  # times torch's own error


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def attention(
    q, k, v, *, seen=None, bias=None, scale=None, softcap=0.0, keep=None, dropout_p=0.0, sinks=None, dtype=torch.float64
):  # fmt: skip
    """(out, lse, weights) by the textbook, differentiable, computed in `dtype`."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    groups = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(dtype)
    if sinks is not None:  # one more key that every row sees and no value belongs to
        sink = sinks.to(dtype)[:, None, None].expand(*scores.shape[:3], 1)
        seen = torch.ones((), dtype=torch.bool, device=q.device) if seen is None else seen
        seen = F.pad(seen.expand(scores.shape), (0, 1), value=True)
        probabilities, lse = softmax(torch.cat([scores, sink], -1), seen)
        probabilities = probabilities[..., :-1]
    else:
        probabilities, lse = softmax(scores, seen)
    weights = probabilities
    if keep is not None:
        weights = probabilities * keep.to(dtype) * (0.0 if dropout_p == 1 else 1 / (1 - dropout_p))
    return weights @ v, lse, weights


def softmax(scores, seen=None):
    """(probabilities, lse) over the last dimension; a row that sees nothing gets 0 and -inf."""
    if seen is None:
        seen = torch.ones((), dtype=torch.bool, device=scores.device)
    seen = seen.expand(scores.shape)
    dead = ~seen.any(-1, keepdim=True)
    if scores.shape[-1] == 0:
        return scores, scores.sum(-1) - torch.inf
    safe = scores.masked_fill(~seen, -torch.inf).masked_fill(dead, 0.0)
    probabilities = torch.softmax(safe, -1).masked_fill(dead, 0.0)
    lse = torch.logsumexp(safe, -1).masked_fill(dead.squeeze(-1), -torch.inf)
    return probabilities, lse


@dataclasses.dataclass
class Truth:
    exact: torch.Tensor  # fp64
    rival: torch.Tensor | None  # torch's own, in the tested dtype
    magnitude: (
        torch.Tensor
    )  # fp64: sum of the absolute values of the terms behind each element, times (1 + largest score)
    dtype: torch.dtype


def _least(dtype: torch.dtype) -> float:
    """What counts as 0: the least number of the dtype and, for all but fp64, the least normal one of fp32."""
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    return least if dtype == torch.float64 else max(least, torch.finfo(torch.float32).smallest_normal)


def within_rule(name: str, actual: torch.Tensor, truth: Truth, factor: float) -> None:
    exact, dtype = truth.exact, truth.dtype
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    if exact.numel() == 0:
        return
    actual = actual.detach().double()
    infinite = exact.isinf()
    assert torch.equal(actual[infinite], exact[infinite]), f"{name}: infinities differ"
    exact = exact.masked_fill(infinite, 0.0)
    actual = actual.masked_fill(infinite, 0.0)
    assert torch.isfinite(actual).all(), f"{name}: {int((~torch.isfinite(actual)).sum())} values are not finite"
    error = (actual - exact).abs()
    rival_error = torch.zeros_like(error)
    if truth.rival is not None:
        rival_error = (truth.rival.detach().double().masked_fill(infinite, 0.0) - exact).abs()
        rival_error = torch.where(rival_error.isfinite(), rival_error, 0.0)
    magnitude = truth.magnitude.masked_fill(infinite, 0.0)
    if name == "out" and truth.rival is not None and error.numel() >= 64:
        # What is wrong everywhere by little hides below the floor of single rows, but not in the root mean square.
        rms = [t.square().mean().sqrt() for t in (error, rival_error, exact, magnitude)]
        eps = torch.finfo(dtype).eps
        limit = factor * rms[1] + eps * rms[2] + torch.finfo(accumulate_dtype(dtype)).eps * rms[3] + _least(dtype)
        assert rms[0] <= limit, (
            f"{name}: root mean square error {rms[0]:.3g}, torch's is {rms[1]:.3g}, limit {limit:.3g}"
        )
    if error.dim() and name != "lse":
        error, rival_error, magnitude = (t.amax(-1) for t in (error, rival_error, magnitude))
    info, accumulate = torch.finfo(dtype), torch.finfo(accumulate_dtype(dtype))
    floor = (info.eps + accumulate.eps) * magnitude + _least(dtype)
    if dtype == torch.float64:
        floor = 2 * floor  # the reference itself rounds as much
    bound = factor * rival_error + floor
    worst = (error / bound).argmax()
    assert (error <= bound).all(), (
        f"{name}: error {error.flatten()[worst]:.3g} where torch makes {rival_error.flatten()[worst]:.3g} and the floor is "
        f"{floor.flatten()[worst]:.3g}; {int((error > bound).sum())} of {error.numel()} rows are over, worst at "
        f"{tuple(int(x) for x in np.unravel_index(int(worst), error.shape))} of {tuple(error.shape)}"
    )


def _magnitudes(q, k, v, bias, dense_bias, sinks, seen, scale, softcap, keep, dropout_p, dout, dlse, dweights):
    """Sums of absolute values of the terms behind out, lse, weights and the gradients, each times (1 + the row's largest score)."""
    parameter = bias
    if dense_bias is not None:
        bias = dense_bias(bias.detach().double())
    least = _least(q.dtype) / torch.finfo(accumulate_dtype(q.dtype)).eps  # of a weight: smaller ones may count as 0
    with torch.no_grad():
        q, k, v, dout = (t.detach().double() for t in (q, k, v, dout))
        B, H, Sq, D = q.shape
        Hk, Sk = k.shape[1], k.shape[2]
        scale = D**-0.5 if scale is None else scale
        _, lse, weights = attention(q, k, v, seen=seen, bias=bias, scale=scale, softcap=softcap, sinks=sinks)
        weights = torch.where(weights > 0, weights + least, weights)
        kept = (
            torch.ones_like(weights)
            if keep is None
            else keep.double() * (0.0 if dropout_p == 1 else 1 / (1 - dropout_p))
        )
        kr, vr = (t.repeat_interleave(H // Hk, dim=1).abs() if Hk else t for t in (k, v))
        scores = abs(scale) * (q.abs() @ kr.transpose(-1, -2))
        if bias is not None:
            scores = scores + bias.detach().double().abs()
        if seen is not None:
            scores = scores.masked_fill(~seen, 0.0)
        row = 1 + (scores.amax(-1, keepdim=True) if Sk else scores.new_zeros(B, H, Sq, 1))  # [B,H,Sq,1]
        if sinks is not None:
            row = row + sinks.detach().double().abs()[:, None, None]
        dp = dout.abs() @ vr.transpose(-1, -2)
        if dweights is not None:
            dp = dp + dweights.detach().double().abs()
        dp = dp * kept
        ds = weights * (dp + (weights * dp).sum(-1, keepdim=True))
        if dlse is not None:
            ds = ds + weights * dlse.detach().double().abs().unsqueeze(-1)
        through_lse = row + lse.abs().masked_fill(lse.isinf(), 0.0).unsqueeze(
            -1
        )  # backward has the weights from the stored lse
        ds = ds * through_lse

        def per_kv_head(t):
            return t.unflatten(1, (Hk, H // Hk)).sum(2) if Hk else t

        result = {
            "out": ((weights * kept) @ vr) * row,
            "lse": row.squeeze(-1) + lse.abs(),
            "weights": weights * kept * row,
            "q": abs(scale) * (ds @ kr),
            "k": per_kv_head(abs(scale) * (ds.transpose(-1, -2) @ q.abs())),
            "v": per_kv_head(((weights * kept) * through_lse).transpose(-1, -2) @ dout.abs()),
        }
        if dense_bias is not None:  # linear in its parameter, all terms of one sign
            result["bias"] = torch.func.vjp(dense_bias, parameter.detach().double())[1](ds.sum(0, keepdim=True))[0].abs()
        elif bias is not None:
            result["bias"] = ds.sum_to_size((1,) * (4 - bias.dim()) + tuple(bias.shape)).view(bias.shape)
        if sinks is not None:
            through = (weights * dp).sum(-1) + (0 if dlse is None else dlse.detach().double().abs())
            sink_weight = torch.exp(sinks.detach().double()[:, None] - lse)
            result["sinks"] = (sink_weight * through * through_lse.squeeze(-1)).sum((0, 2))
        return result


def truths(
    q, k, v, *, dout, dlse=None, dweights=None, seen=None, bias=None, dense_bias=None, sinks=None, scale=None, softcap=0.0, keep=None,
    dropout_p=0.0,
):  # fmt: skip
    """What out, lse, weights and the gradients of q, k, v (and bias, sinks) are, as a dict of Truth. dlse and dweights: gradients of the lse
    and of the weights, where they are outputs that the loss uses. dense_bias: makes the bias [1,H,Sq,Sk] of the parameter `bias`."""
    dtype = q.dtype
    inputs = [t for t in (q, k, v, bias, sinks) if t is not None]
    names = ["q", "k", "v"] + [name for name, t in (("bias", bias), ("sinks", sinks)) if t is not None]

    def run(compute_dtype, fused):
        leaves = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in inputs]
        lq, lk, lv = leaves[:3]
        by_name = dict(zip(names, leaves))
        lbias = by_name.get("bias")
        if dense_bias is not None:
            lbias = dense_bias(lbias)
        if fused:
            joined = lbias.to(dtype) if lbias is not None else None
            if seen is not None:
                joined = torch.zeros((), dtype=dtype, device=q.device) if joined is None else joined
                joined = joined.masked_fill(~seen, -torch.inf)
            out = F.scaled_dot_product_attention(lq, lk, lv, joined, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
            values, lse, weights = (out,), None, None
            grads = torch.autograd.grad(out, leaves, dout)
        else:
            out, lse, weights = attention(
                lq,
                lk,
                lv,
                seen=seen,
                bias=lbias,
                scale=scale,
                softcap=softcap,
                keep=keep,
                dropout_p=dropout_p,
                sinks=by_name.get("sinks"),
                dtype=compute_dtype,
            )
            values, weighting = [out], [dout.to(out.dtype)]
            if dlse is not None:
                values, weighting = values + [lse], weighting + [dlse.to(lse.dtype).masked_fill(lse.isinf(), 0.0)]
            if dweights is not None:
                values, weighting = values + [weights], weighting + [dweights.to(weights.dtype)]
            grads = torch.autograd.grad(values, leaves, weighting)
        found = dict(zip(names, grads))
        found.update(out=out, lse=lse, weights=weights)
        return found

    if dtype == torch.float64:
        exact_run = run(torch.float64, False)
        rival_run = {}
    else:
        doubled = [t.detach().double() for t in inputs]
        inputs, original = doubled, inputs
        exact_run = run(torch.float64, False)
        inputs = original
        plain = not softcap and keep is None and dlse is None and dweights is None and sinks is None
        every_row_sees = q.shape[2] > 0 and k.shape[2] > 0 and (seen is None or bool(seen.any(-1).all()))
        fused = plain and every_row_sees and q.numel() > 0
        rival_run = run(dtype, fused)
        if fused:
            with torch.no_grad():
                dense = bias if dense_bias is None else dense_bias(bias)
                eager = attention(*inputs[:3], seen=seen, bias=dense, scale=scale, dtype=dtype)
            rival_run.update(lse=eager[1], weights=eager[2])
    magnitude = _magnitudes(q, k, v, bias, dense_bias, sinks, seen, scale, softcap, keep, dropout_p, dout, dlse, dweights)
    result = {}
    for name, exact in exact_run.items():
        rival = rival_run.get(name)
        kind = accumulate_dtype(dtype) if name == "lse" else dtype
        result[name] = Truth(exact.detach(), rival, magnitude[name], kind)
    return result


def check(actual: dict[str, torch.Tensor], expected: dict[str, Truth]) -> None:
    """Every tensor of `actual`, by name, against the rule: outputs are out, lse and weights, everything else is a gradient."""
    for name, value in actual.items():
        within_rule(name, value, expected[name], FORWARD if name in ("out", "lse", "weights") else GRADIENT)


def compare(name: str, actual, exact, rival, factor=FORWARD, magnitude=None) -> None:
    """The rule for any op: `exact` in fp64, `rival` torch's own in the tested dtype; magnitude defaults to the largest of each row."""
    exact, dtype = exact.detach().double(), actual.dtype
    if magnitude is None:
        magnitude = (
            exact.abs().amax(-1, keepdim=True).expand_as(exact) if exact.numel() and exact.dim() else exact.abs()
        )
    within_rule(name, actual, Truth(exact, rival, magnitude.double(), dtype), factor)


def philox4x32_10(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32 with 10 rounds, from the paper (Salmon et al. 2011): counter uint32 [..., 4] -> words uint32 [..., 4]."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, -1).astype(np.uint32)


def dropout_mask(rng_state, p: float, B: int, H: int, Sq: int, Sk: int) -> torch.Tensor:
    """True = kept, element by element from the definition in csrc/philox.h."""
    seed, x, *place = (int(x) % 2**64 for x in rng_state)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ x >> shift) * factor % 2**64
    key = ((seed ^ x) & 0xFFFFFFFF, (seed ^ x) >> 32)
    place = place or [0] * 4
    b, h, i, j = np.meshgrid(*(np.arange(n) + first for n, first in zip((B, H, Sq, Sk), place)), indexing="ij")
    counter = np.stack([j // 4, i, h, b], -1).astype(np.uint32)
    words = np.take_along_axis(philox4x32_10(counter, key), (j % 4)[..., None], -1)[..., 0]
    return torch.from_numpy(words.astype(np.float64) >= min(p * 2.0**32, 2.0**32))
