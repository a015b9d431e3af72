"""What a call of attention will do, and what it costs."""

from __future__ import annotations

import html
import os
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import _call, _checks, _ops, biases, masks
from ._call import Given
from ._checks import accumulate_dtype, name_of, text
from ._ops import Call
from .masks.base import offset_of


@dataclass
class Plan:
    """What mha_ext.attention will do for some inputs; print it. Sizes in bytes, work in floating-point operations."""

    call: str  # the problem: shapes, type, mask
    kernel: str  # the kernel, the instruction set that it is compiled for, what it computes products in
    threads: int
    refusals: dict[str, str]  # what is not used, with the reason
    copies: list[str]  # what has to be copied first, with the reason
    flops: int  # of the forward pass, for the scores that bands and intervals leave visible
    flops_dense: int  # the same without a mask
    flops_exact: bool  # false where documents, a dense mask, or lengths on the meta device may hide more than was counted
    bytes_moved: int  # every input and output once
    memory: int  # outputs, what backward keeps besides the inputs, copies, and the forward workspace
    memory_unfused: int  # one fp32 matrix of scores, 4*B*H*Sq*Sk, as the textbook way stores it
    keys_per_query: tuple[int, int]  # the fewest and the most that bands and intervals let a query see
    # Of the CPU kernels:
    blocks: tuple[int, int] | None = None  # how many queries and keys are worked on together
    tasks: tuple[int, int] | None = None  # what the threads share, forward and backward
    workspace: tuple[int, int] | None = None  # what lives during the call only, forward and backward
    # How much of their time threads work, by their number: for those in use and for 64. Predicted, forward and backward,
    # from the pairs that bands leave visible: the kernels' own dealing of tasks is played through, waiting for turns
    # included. 0 where it is not known.
    efficiency: dict[int, tuple[float, float]] | None = None
    advice: list[str] = field(default_factory=list)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        share = (
            f" ({100 * self.flops / self.flops_dense:.0f} % of the unmasked)" if self.flops < self.flops_dense else ""
        )
        most = "" if self.flops_exact else "at most "
        few, many = self.keys_per_query
        seen = f"{many if few == many or most else f'{few} to {many}'} keys"
        unfused = f"unfused scores alone would take {_amount(self.memory_unfused, 'B')}"
        blocks = workspace = ""
        if self.blocks is not None and self.tasks is not None and self.workspace is not None:
            blocks = "; blocks of {} queries x {} keys, {} tasks forward, {} backward".format(*self.blocks, *self.tasks)
            workspace = ", {} of it workspace ({} in backward)".format(*(_amount(n, "B") for n in self.workspace))
        lines = [
            self.call,
            f"  kernel       {self.kernel}, {self.threads} thread{'s' if self.threads != 1 else ''}",
            *(f"  not used     {name}: {reason}" for name, reason in self.refusals.items()),
            *(f"  copy         {copy}" for copy in self.copies or ["none"]),
            f"  work         {most}{_amount(self.flops, 'FLOP', 1000)} forward{share}{blocks}",
            *(
                [f"               each query sees {most}{seen}"]
                if self.flops < self.flops_dense or not self.flops_exact
                else []
            ),
            *([f"  threads      {_busy(self.efficiency)}"] if self.efficiency else []),
            f"  memory       reads and writes {_amount(self.bytes_moved, 'B')}; {unfused}",
            f"               allocates {_amount(self.memory, 'B')}{workspace}",
            *(f"  advice       {advice}" for advice in self.advice),
        ]
        return "\n".join(lines)


def explain(
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
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Plan:
    """Says what attention would do with the same arguments, without doing it.

    It may look at the values of masks and of a bias, to give advice.

    Raises:
        ValueError, TypeError: what attention would raise.
    """
    if not all(isinstance(x, Tensor) for x in (q, k, v)):
        raise _checks.not_tensors("qkv", q, k, v)
    _checks.flags(return_lse=return_lse, return_weights=return_weights)
    for x, name in zip((q, k, v), "qkv"):
        _checks.dense(x, name)
    call = _call.lower(
        q, k, v, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p, softcap=softcap, sinks=sinks, pre_mix=pre_mix,
        post_mix=post_mix, deterministic=deterministic, return_weights=return_weights, draw=False,
    )  # fmt: skip
    if dropout_p != 0.0 and rng_state is not None:
        _checks.rng_state(rng_state, q.device)
    return plan_of(Given("attention", q, k, v, mask, bias), call)


def _sizes(given: Given, call: Call) -> tuple[int, int, int]:
    """B, Sq, Sk; of packed sequences their number, and bounds of their lengths"""
    if call.q_starts is not None:
        return len(call.q_starts) - 1, call.max_q, call.max_k
    return call.q.shape[0], call.q.shape[2], call.k.shape[2] if given.keys is None else given.keys


def _in_words(given: Given, call: Call) -> str:
    (name, q, k, v, mask, bias, keys, _), (B, Sq, Sk) = given, _sizes(given, call)
    words = (
        f"{name} of q {text(q.shape)}, k {text(k.shape)}, v {text(v.shape)} in {name_of(call.q.dtype)} on {q.device}"
    )
    if call.q_starts is not None:
        words += f", {B} sequences of up to {Sq} queries and {Sk} keys"
    elif keys is not None:
        words += f", up to {keys} keys in {name_of(k.dtype)}"
    words += f", mask {_describe(mask)}" if mask is not None else ""
    return words + (
        f", bias {text(bias.shape) if isinstance(bias, Tensor) else repr(bias)}" if bias is not None else ""
    )


def plan_of(given: Given, call: Call) -> Plan:
    """What the call will do. It may look at values."""
    q, k, v = call.q, call.k, call.v
    (B, Sq, Sk), H, D, Dv = _sizes(given, call), q.shape[1], q.shape[3], v.shape[3]
    mixes = [x for x in (call.pre_mix, call.post_mix) if x is not None]
    kernel, threads, refusals, numbers = _kernel(given, call)
    if mixes:
        refusals["attention_fwd"] = (
            "it takes one head at a time; pre_mix and post_mix need all heads of a query at once"
        )
    args, lengths = _ops.mask_of(call), _ops.lengths_of(call)
    pairs, per_query, exact = _visible_pairs(args, B, Sq, Sk, lengths)
    all_pairs = B * Sq * Sk if lengths is None else int((lengths[0] * lengths[1]).sum())
    copies, copied = _copies(given, (q, k, v))
    rows = q.shape[0] * H * q.shape[2]
    statistics = 2 * rows * accumulate_dtype(q.dtype).itemsize  # the logsumexp, and what rounding took from it
    output = rows * Dv * q.element_size() + statistics
    if call.return_weights:
        output += rows * Sk * q.element_size()
    inputs = q, call.bias, call.sinks, *mixes, *args
    keys = _bytes(k) + _bytes(v) if given.keys is None else B * k.shape[1] * Sk * (D + Dv) * k.element_size()
    keys += sum(4 * B * k.shape[1] * Sk if x.dim() == 3 else _bytes(x) for x in given.scales)  # one of each key, or of each head
    work = 2 * H * (D + Dv + H * len(mixes))  # of one pair of query and key
    return Plan(
        call=_in_words(given, call),
        kernel=kernel,
        threads=threads,
        refusals=refusals,
        copies=copies,
        flops=work * pairs,
        flops_dense=work * all_pairs,
        flops_exact=exact,
        bytes_moved=sum(_bytes(x) for x in inputs if isinstance(x, Tensor)) + keys + output,
        memory=output + copied + numbers.get("workspace", (0,))[0],
        memory_unfused=4 * H * all_pairs,
        advice=_layout_advice(given, call) + _advice(given, args, call.bias, Sq, Sk, call.return_weights),
        keys_per_query=per_query,
        **numbers,
    )


def _kernel(given: Given, call: Call) -> tuple[str, int, dict[str, str], dict[str, Any]]:
    """(kernel, threads, refusals, the numbers of Plan that the CPU kernels have)"""
    q, k, v = call.q, call.k, call.v
    mixed, dropped = call.pre_mix is not None or call.post_mix is not None, call.dropout_p != 0.0
    op = "attention_cached" if given.name == "attention_cached" else "attention_mixed_fwd" if mixed else "attention_fwd"
    numbers: dict[str, Any] = {}
    if q.device.type == "cpu":
        threads, kernel, refusals = torch.get_num_threads(), f"{op} on the CPU, {_ops.cpu_isa()}", _cpu_refusals()
        if op != "attention_cached":
            B, Sq, Sk = _sizes(given, call)
            B = B if call.q_starts is None else 1  # one sequence at a time
            sizes = B, q.shape[1], k.shape[1], Sq, Sk, q.shape[3], v.shape[3]
            band = _band(call, Sq, Sk)
            summed = [*call.bias.shape] if call.bias is not None and call.bias.requires_grad else None
            plans = {
                n: _ops.attention_plan(name_of(q.dtype), sizes, dropped, mixed, n, band, summed) for n in (threads, 64)
            }
            plan = plans[threads]
            kernel += f", products in {plan['arithmetic']}"
            numbers["blocks"] = plan["block_rows"], plan["tile_keys"]
            for name in ("tasks", "workspace"):
                numbers[name] = plan[f"forward_{name}"], plan[f"backward_{name}"]
            numbers["efficiency"] = {n: (p["forward_efficiency"], p["backward_efficiency"]) for n, p in plans.items()}
        return kernel, threads, refusals, numbers
    if q.device.type == "cuda" and op == "attention_fwd":
        state = torch.zeros(2, dtype=torch.int64, device=q.device) if dropped else None
        chosen = _ops.attention_kernels(call._replace(rng_state=state, return_weights=False))
        if chosen:
            refusals = {f"*_sm90 {when}": why for when, (_, why) in zip(("forward", "backward"), chosen) if why}
            return " and ".join(name for name, _ in chosen), 1, refusals, numbers
    return f"{op} on {q.device.type}", 1, {}, numbers


_logged: set[tuple[Any, ...]] = set()
_logging = threading.Lock()


def log(given: Given, call: Call) -> None:
    """Prints the plan of a call to stderr, once for each kind of call; MHA_EXT_LOG=1 has all functions of attention do so.

    Not for what has no values to look at: tensors that are traced, transformed, sharded, on the meta device, or part of a
    captured CUDA graph.
    """
    tensors = given.q, given.k, given.v
    if _ops.transforms_active() or not all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors):
        return
    if call.q.is_meta or call.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    strides, mixed = tuple(x.stride() for x in tensors), call.pre_mix is not None or call.post_mix is not None
    autocast = torch.is_autocast_enabled(call.q.device.type)
    kind = _in_words(given, call), strides, call.dropout_p, call.return_weights, mixed, autocast
    with _logging:
        first = kind not in _logged
        _logged.add(kind)
    if first:
        print(f"mha_ext: {plan_of(given, call)}", file=sys.stderr)


if os.environ.get("MHA_EXT_LOG", "0") not in ("", "0"):
    _call.listener = log


def _band(call: Call, Sq: int, Sk: int) -> tuple[int | None, int | None]:
    """The smallest and the largest j - i of keys j that query i sees."""
    o = int(offset_of(Sq, Sk, None))
    right = None if call.right is None else o + call.right
    if call.top_left:
        right = min(0, right) if right is not None else 0
    return None if call.left is None else o - call.left, right


def _busy(efficiency: dict[int, tuple[float, float]]) -> str:
    """In words"""
    shares = [
        "on {}: {} forward, {} backward".format(n, *(f"{100 * x:.0f} %" if x > 0 else "?" for x in both))
        for n, both in sorted(efficiency.items())
    ]
    return f"predicted to be busy, {'; '.join(shares)}"


def _cpu_refusals() -> dict[str, str]:
    available, absent = _ops.available_isas(), "this machine, or its operating system, does not have it"
    isas = _ops.built_isas()
    better = isas[isas.index(_ops.cpu_isa()) + 1 :]
    refusals = {isa: "MHA_EXT_CPU_ISA names another" if isa in available else absent for isa in better}
    refusals["cuda"] = _ops.without_cuda or "the tensors are on the CPU"
    return refusals


def _copies(given: Given, used: tuple[Tensor, ...]) -> tuple[list[str], int]:
    copies, size = [], 0
    for name, x, y in zip("qkv", (given.q, given.k, given.v), used):
        if y.dtype != x.dtype:
            copies.append(f"{name}: autocast from {name_of(x.dtype)} to {name_of(y.dtype)}")
            size += y.numel() * y.element_size()
        if y.stride(-1) != 1 and y.shape[-1] > 1:
            copies.append(f"{name}: its last dimension is not contiguous (strides {text(y.stride())})")
            size += y.numel() * y.element_size()
    return copies, size


def _visible_pairs(
    args: masks.MaskArgs, B: int, Sq: int, Sk: int, lengths: tuple[Tensor, Tensor] | None
) -> tuple[int, tuple[int, int], bool]:
    """How many (batch, query, key) triples bands and intervals leave, the fewest and the most of a query, and whether nothing
    else hides any."""
    if lengths is not None:
        lengths = lengths[0].cpu(), lengths[1].cpu()
    i, o = torch.arange(Sq, device="cpu")[None], offset_of(Sq, Sk, lengths)
    begin, end = torch.zeros_like(i), torch.full_like(i, Sk)
    if lengths is not None:
        end = torch.where(i < lengths[0][:, None], lengths[1][:, None], 0)
    if args.left is not None:
        begin = begin.maximum(i + (o - args.left))
    if args.right is not None:
        end = end.minimum(i + (o + args.right + 1))
    if args.top_left:
        end = end.minimum(i + 1)
    unknown = any(x is not None and x.is_meta for x in (args.begin, args.end))
    if args.begin is not None and not unknown:
        begin = begin.maximum(args.begin.cpu())
    if args.end is not None and not unknown:
        end = end.minimum(args.end.cpu())
    visible = (end - begin).clamp(min=0).expand(B, Sq)
    exact = args.mask is None and args.query_ids is None and args.blocks is None and not unknown
    of_queries = visible if lengths is None else visible[(i < lengths[0][:, None]).expand(B, Sq)]
    extremes = (int(of_queries.min()), int(of_queries.max())) if of_queries.numel() else (0, 0)
    return int(visible.sum()), extremes, exact


def _layout_advice(given: Given, call: Call) -> list[str]:
    """Where there are as many key heads as query heads, more of them than queries, and the queries a multiple of the keys as
    heads are of key heads, [B,S,H,D] was probably meant."""
    (_, H, Sq, _), (_, Hk, Sk, _) = call.q.shape, call.k.shape
    if call.q_starts is not None or given.keys is not None or H != Hk or not (H > Sq > 1 and Sk > 0 and Sq % Sk == 0):
        return []
    return [
        f"q has {H} heads of {Sq} queries: where that is [B,S,H,D], give q.transpose(1, 2), which is read in place, and so k, v"
    ]


def _advice(given: Given, args: masks.MaskArgs, bias: Any, Sq: int, Sk: int, return_weights: bool) -> list[str]:
    advice = []
    dense = args.mask
    if dense is not None and dense.numel() > 1 and not dense.is_meta:
        if dense.shape[2:] == (Sq, Sk) and Sq > 1:
            for name, o in (("masks.Causal()", Sk - Sq), ('masks.Causal("top_left")', 0)):
                if bool((dense == torch.ones(Sq, Sk, dtype=torch.bool, device=dense.device).tril(o)).all()):
                    advice.append(f"the dense mask is causal: {name} says so without memory")
                    break
        elif dense.shape[1:3] == (1, 1):
            row = dense[:, 0, 0]
            if bool((row[:, :-1] >= row[:, 1:]).all()):
                advice.append("the dense mask is padding at the end: masks.Padding(mask.sum(-1).flatten()) is smaller")
            elif bool((row[:, :-1] <= row[:, 1:]).all()):
                advice.append("the dense mask is padding at the beginning: masks.LeftPadding(starts) is smaller")
    constant = bias is not None and bias.dim() == 4 and bias.numel() > 0 and not (bias.requires_grad or bias.is_meta)
    if constant and bool(((bias == 0) | (bias == float("-inf"))).all()):
        advice.append("the bias holds 0 and -inf only: mask=(bias == 0) is smaller")
    if return_weights:
        advice.append("return_weights stores Sq x Sk weights per head: leave it out where they are not looked at")
    for name, x in zip("qkv", (given.q, given.k, given.v)):
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            advice.append(f"{name}: transpose heads, not features, so that its last dimension stays contiguous")
    return advice


def _describe(mask: masks.Mask | Tensor) -> str:
    return repr(mask if isinstance(mask, masks.Mask) else masks.Dense(mask))


def _bytes(x: Tensor) -> int:
    """Bytes that x takes in memory: dimensions of stride 0 count once."""
    size = x.element_size()
    for n, stride in zip(x.shape, x.stride()):
        size *= n if stride != 0 else min(n, 1)
    return size


def _amount(n: float, unit: str, base: int = 1024) -> str:
    prefixes = ("", "K", "M", "G", "T", "P")
    i = 0
    while n >= base and i < len(prefixes) - 1:
        n, i = n / base, i + 1
    return f"{n:.3g} {prefixes[i]}{'i' if base == 1024 and i else ''}{unit}"
