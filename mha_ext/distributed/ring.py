"""Attention over a sequence that is shared out over processes."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

from .. import _call, _checks, _ops, biases, masks
from .._ops import Call
from ..merge import weights_of_parts
from .agreement import FIELDS, lengths_if_agreed, wait
from .sequence import Piece, bias_of_block, check_layout, last_step, mask_of_block, pieces_of, refuse_other_masks

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._typing import RingOptions


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None = ...,
    *, return_lse: Literal[False] = ..., **options: Unpack[RingOptions],
) -> Tensor: ...  # fmt: skip


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None = ...,
    *, return_lse: Literal[True], **options: Unpack[RingOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None = ...,
    *, return_lse: bool = ..., **options: Unpack[RingOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    mask: masks.Mask | Tensor | None = None,
    bias: Tensor | biases.Bias | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    rng_state: Tensor | None = None,
    layout: str = "contiguous",
    deterministic: bool | None = None,
    return_lse: bool = False,
    timeout: datetime.timedelta | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """mha_ext.attention over a sequence of which each process of a group has a part.

    Keys and values travel around a ring of the processes, each of which attends to the part that it holds while the next
    one is on its way; the results are merged by their logsumexps (Liu et al., "Ring Attention with Blockwise
    Transformers", 2023). Backward sends keys and values around again, and their gradients after them. The ring stops
    where nobody sees what would come (under a window, say). All processes of the group make the call together, and run
    backward together.

    Args:
        q, k, v: this process's parts [B,H,Sq_local,D], [B,Hk,Sk_local,D], [B,Hk,Sk_local,Dv]. Lengths may differ between
            processes, and may be 0; all else is the same everywhere.
        group: the processes; default all.
        mask: as in attention, of the whole sequence, with the same values on every process; Sq and Sk are the sums of the
            processes' lengths. Block-sparse masks are refused.
        bias: a bias of the distance in the whole sequence, of mha_ext.biases; or a tensor for this process's queries and all
            keys in their order, [Sq_local,Sk], or 4-d broadcastable to [B,H,Sq_local,Sk].
        scale, dropout_p, softcap, sinks, rng_state, deterministic, return_lse: as in attention. Dropout drops what it would in
            one process that has the first one's rng_state; parts of the keys then have to begin at multiples of 4. The
            gradients of sinks and of a bias are those of this process's queries: sum them over the processes, like those of
            all parameters.
        layout: which positions a process has: "contiguous", a run each in the order of the ranks, or "zigzag" (see
            sequence_positions), which gives everybody the same work under a causal mask.
        timeout: how long to wait for the other processes, where the backend lets one call say so (gloo does); default
            the group's.

    Returns:
        out [B,H,Sq_local,Dv], or (out, lse [B,H,Sq_local]); differentiable once. torch.compile does not look inside.

    Raises:
        ValueError, TypeError: inputs that do not fit, in one process or between them, in one sentence. One exchange of a
            few numbers finds out before any data is sent, so that no process waits for another that gave up.
        RuntimeError: another process ended, refused its inputs, or did not answer in time.
    """
    ring = _Ring(group, timeout)
    form, problem, lengths, drawn = None, None, (0, 0), [0] * 6
    try:
        check_layout(layout)
        if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
            raise _checks.not_tensors("qkv", q, k, v)
        local = _call.lower(
            q, k, v, scale=scale, dropout_p=dropout_p, softcap=softcap, sinks=sinks, deterministic=deterministic, draw=False
        )
        q, k, v, sinks, factor = local.q, local.k, local.v, local.sinks, local.scale
        if _checks.is_dtensor(q):
            raise TypeError("q is a DTensor; accepted: this process's part as a plain tensor: use q.to_local().")
        lengths = q.shape[2], k.shape[2]
        bias, known_bias = _check_bias(bias, q)
        inputs = [x for x in (q, k, v, *pytree.tree_leaves(bias), sinks) if x is not None]
        needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        whole = masks.Dense(mask) if isinstance(mask, Tensor) else mask
        values = *q.shape[:2], k.shape[1], q.shape[3], v.shape[3], q.dtype, needs_gradients, sinks is not None
        state = _call.state_of_dropout(rng_state, q.new_empty(0, device="cpu")) if dropout_p != 0.0 else None
        drawn = drawn if state is None else _ops.part_of_state(state).tolist()
        form = dict(zip(FIELDS, (*values, float(factor), float(softcap), layout, repr(whole), known_bias, float(dropout_p))))
    except Exception as error:  # noqa: BLE001  (raised once the other processes know)
        problem = error
    everyones, drawn = lengths_if_agreed(form, lengths, drawn, group, timeout)
    if problem is not None:
        raise problem
    state = torch.tensor(drawn, device=q.device) if dropout_p != 0.0 else None
    plan = _plan(ring, q, whole, everyones, layout, (factor, softcap, dropout_p), local.deterministic, state)
    out, lse = _RingAttention.apply(q, k, v, _bias_of_whole(bias, plan, q), sinks, plan)
    return (out, lse) if return_lse else out


def _check_bias(bias: Tensor | biases.Bias | None, q: Tensor) -> tuple[Any, str]:
    """(the bias, what all processes must say of theirs), as far as one process can know what fits."""
    if bias is None or isinstance(bias, biases.Bias):
        if bias is not None:
            bias.lower(q.shape[1], 1, 1, q.dtype, q.device)
        return bias, repr(bias)
    keys = bias.shape[-1:].numel() if isinstance(bias, Tensor) else 0
    B, H, Sq = q.shape[:3]
    return _checks.bias_tensor(bias, q.dtype, q.device, B, H, Sq, keys), f"a tensor for {keys} keys"


def _bias_of_whole(bias: Any, plan: _Plan, q: Tensor) -> Tensor | None:
    """As the ops take it, of all distances, or of this process's queries and all keys."""
    if isinstance(bias, biases.Bias):
        return bias.lower(q.shape[1], plan.Sq, plan.Sk, _checks.accumulate_dtype(q.dtype), q.device)
    if bias is not None and bias.shape[3] not in (1, plan.Sk):
        raise ValueError(
            f"bias has shape {_checks.text(bias.shape)} and the keys of all processes are {plan.Sk}; accepted: this process's "
            f"queries and all keys, [B,H,{q.shape[2]},{plan.Sk}]."
        )
    return bias  # type: ignore[no-any-return]


class _Ring:
    """Messages between the processes of a group; ranks are those in the group."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: datetime.timedelta | None):
        self.group, self.timeout = group, timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group; accepted: a group that it belongs to.")

    def start(self, sent: Tensor, to: int, received: Tensor, source: int) -> tuple[Any, ...]:
        """Begins to send and to receive; what it returns is for finish(), and keeps the tensors alive until then."""
        pairs = (dist.isend, sent, to), (dist.irecv, received, source)
        messages = [
            dist.P2POp(function, x, self._global(rank), self.group) for function, x, rank in pairs if x.numel() > 0
        ]
        return (dist.batch_isend_irecv(messages) if messages else []), sent, received, (to, source)

    def finish(self, exchange: tuple[Any, ...]) -> Tensor:
        """What was received."""
        works, _, received, ranks = exchange
        wait(works, self.timeout, " or ".join(f"process {rank} of the group" for rank in dict.fromkeys(ranks)))
        return received

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


@dataclasses.dataclass
class _Plan:
    """Who attends to what, in which step: in step t, a process has the keys of the process t places before it."""

    ring: _Ring
    queries: list[Piece]  # of this process
    keys: list[list[Piece]]  # of each process
    Sq: int  # of the whole
    Sk: int
    mask: masks.MaskArgs  # of the whole
    steps: int
    numbers: tuple[float, float, float]  # scale, softcap, dropout_p
    deterministic: bool
    rng_state: Tensor | None  # [6], of the whole

    def block(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rows: Piece, columns: Piece, args: masks.MaskArgs
    ) -> Call:  # fmt: skip
        """The call of a block of this process's queries and a process's keys."""
        scale, softcap, dropout_p = self.numbers
        state = self.rng_state
        return Call(
            rows.of(q), columns.of(k), columns.of(v), bias_of_block(bias, rows, columns, self.Sq), *args, scale=scale,
            softcap=softcap, dropout_p=dropout_p, deterministic=self.deterministic,
            rng_state=None if state is None else _ops.part_of_state(state, query=rows.start, key=columns.start),
        )  # fmt: skip

    def source(self, step: int) -> int:
        return (self.ring.rank - step) % self.ring.size

    def blocks(self, source: int) -> Iterator[tuple[Piece, Piece, masks.MaskArgs]]:
        for queries in self.queries:
            for keys in self.keys[source]:
                args = mask_of_block(self.mask, queries, keys, self.Sk - self.Sq)
                if args is not None:
                    yield queries, keys, args

    def split(self, packed: Tensor, source: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of a process, from the one buffer that they travel in; other sizes as in this process's k and v."""
        length = sum(keys.length for keys in self.keys[source])
        shapes = [(*x.shape[:2], length, x.shape[3]) for x in (k, v)]
        size = k.shape[0] * k.shape[1] * length * k.shape[3]
        return packed[:size].view(shapes[0]), packed[size:].view(shapes[1])

    def buffer(self, source: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
        length = sum(keys.length for keys in self.keys[source])
        return k.new_empty(k.shape[0] * k.shape[1] * length * (k.shape[3] + v.shape[3]), dtype=dtype)

    def rotate(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(process, its k, its v), step by step, while the next ones are on their way."""
        ring = self.ring
        if self.steps == 1:
            yield ring.rank, k, v
            return
        packed = torch.cat((k.reshape(-1), v.reshape(-1)))
        for step in range(self.steps):
            coming = None
            if step + 1 < self.steps:
                room = self.buffer(self.source(step + 1), k, v, k.dtype)
                coming = ring.start(packed, (ring.rank + 1) % ring.size, room, self.source(1))
            yield self.source(step), *self.split(packed, self.source(step), k, v)
            if coming is not None:
                packed = ring.finish(coming)


def _plan(
    ring: _Ring, q: Tensor, mask: masks.Mask | None, lengths: list[tuple[int, int]], layout: str,
    numbers: tuple[float, float, float], deterministic: bool, rng_state: Tensor | None,
) -> _Plan:  # fmt: skip
    query_lengths, key_lengths = ([pair[i] for pair in lengths] for i in (0, 1))
    Sq, Sk = sum(query_lengths), sum(key_lengths)
    queries, keys = pieces_of(query_lengths, layout), pieces_of(key_lengths, layout)
    args = masks.lower(mask, q.shape[0], q.shape[1], Sq, Sk, q.device)
    refuse_other_masks(args, mask)
    steps = 1 + last_step(_hashable(queries), _hashable(keys), Sk - Sq, args.left, args.right, args.top_left)
    starts = [piece.start for pieces in keys for piece in pieces]
    if rng_state is not None and any(start % 4 for start in starts):
        raise ValueError(
            f"dropout_p is {numbers[2]} and the processes' parts of the keys begin at {_checks.text(starts)}; accepted with "
            "dropout: multiples of 4: share the sequence out in such parts."
        )
    return _Plan(ring, queries[ring.rank], keys, Sq, Sk, args, steps, numbers, deterministic, rng_state)


def _hashable(pieces: list[list[Piece]]) -> tuple[tuple[Piece, ...], ...]:
    return tuple(tuple(x) for x in pieces)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        out, lse, rest = _forward(plan, q, k, v, bias, sinks)
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse, rest)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError("ring_attention is differentiable once; call backward without create_graph=True.")
        q, k, v, bias, sinks, out, lse, rest = ctx.saved_tensors
        # Even where no gradient came: the other processes wait for this one.
        dout = torch.zeros_like(out) if dout is None else dout
        dsinks = _sinks_backward(sinks, dout, dlse, out, lse, rest) if ctx.needs_input_grad[4] else None
        accumulate = _checks.accumulate_dtype(q.dtype)
        dbias = torch.zeros(bias.shape, dtype=accumulate, device=q.device) if ctx.needs_input_grad[3] else None
        gradients = _backward(ctx.plan, dout, dlse, q, k, v, bias, out, lse, rest, dbias)
        return *gradients, None if dbias is None else dbias.to(bias.dtype), dsinks, None


def _forward(
    plan: _Plan, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, what rounding took from lse)."""
    accumulate = _checks.accumulate_dtype(q.dtype)
    out = _zeros_in_order_of(q, v.shape[3], accumulate)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulate)
    rest = torch.zeros_like(lse)
    begun = set()
    for source, keys, values in plan.rotate(k, v):
        for rows, columns, args in plan.blocks(source):
            block = plan.block(q, keys, values, bias, rows, columns, args)
            part = _ops.attention_results(block)[:3]
            sums = rows.of(out), rows.of(lse), rows.of(rest)
            if rows in begun:
                weights, _, *merged = weights_of_parts(*zip(sums[1:], part[1:]))
                old, new = weights.unsqueeze(-1).unbind(0)
                part = sums[0].mul_(old).addcmul_(part[0].to(accumulate), new), *merged
            begun.add(rows)
            for total, merged in zip(sums, part):
                total.copy_(merged)
    if sinks is not None:  # one more part: a key that every row sees, without a value
        sinks = sinks[:, None].expand_as(lse)
        weights, _, lse, rest = weights_of_parts((lse, sinks), (rest, torch.zeros_like(rest)))
        out *= weights[0].unsqueeze(-1)
    return out.to(q.dtype), lse, rest


def _backward(
    plan: _Plan, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor,
    lse: Tensor, rest: Tensor, dbias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Given the output and the lse of the whole, the gradients of each block are those of its part of the softmax.

    That of the bias is added to dbias, where there is one.
    """
    accumulate = _checks.accumulate_dtype(q.dtype)
    ring = plan.ring
    dq = _zeros_in_order_of(q, q.shape[3], accumulate)
    coming = None
    for step, (source, keys, values) in enumerate(plan.rotate(k, v)):
        packed = plan.buffer(source, k, v, accumulate).zero_()
        dk, dv = plan.split(packed, source, k, v)
        for rows, columns, args in plan.blocks(source):
            dq_part, dk_part, dv_part, dbias_part, _ = _ops.attention_gradients(
                plan.block(q, keys, values, bias, rows, columns, args), rows.of(dout), None if dlse is None else rows.of(dlse),
                rows.of(out), rows.of(lse), rows.of(rest), need_dbias=dbias is not None,
            )  # fmt: skip
            if dbias is not None:
                bias_of_block(dbias, rows, columns, plan.Sq).add_(dbias_part)
            for total, gradient in zip((rows.of(dq), columns.of(dk), columns.of(dv)), (dq_part, dk_part, dv_part)):
                total.add_(gradient)
        if coming is not None:
            packed += ring.finish(coming)
        # The sums follow their keys, one step behind; after the last step they go home.
        if step + 1 < plan.steps:
            room = plan.buffer(plan.source(step + 1), k, v, accumulate)
            coming = ring.start(packed, (ring.rank + 1) % ring.size, room, plan.source(1))
        elif step > 0:
            room = plan.buffer(ring.rank, k, v, accumulate)
            packed = ring.finish(ring.start(packed, source, room, (ring.rank + step) % ring.size))
    dk, dv = plan.split(packed, ring.rank, k, v)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _sinks_backward(
    sinks: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, rest: Tensor
) -> Tensor:
    weight = torch.exp((sinks[:, None] - lse) - rest)
    through = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).neg()
    if dlse is not None:
        through += dlse
    return (weight * through).sum((0, 2))


def _zeros_in_order_of(q: Tensor, last: int, dtype: torch.dtype) -> Tensor:
    """[B,H,Sq,last], in memory [B,Sq,H,last] where q is."""
    B, H, Sq = q.shape[:3]
    if q.stride(1) < q.stride(2):
        return q.new_zeros(B, Sq, H, last, dtype=dtype).transpose(1, 2)
    return q.new_zeros(B, H, Sq, last, dtype=dtype)
