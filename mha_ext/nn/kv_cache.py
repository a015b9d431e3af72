"""Key/value caches: what attention has seen so far, kept for the queries to come."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _checks, biases, masks
from .._call import cast_by_autocast, mix_arguments, score_arguments
from .._pytrees import tensors_in
from ..cached import QUANTISED, attention_cached, quantise, scales_of
from ..functional import attention
from ..masks.places import Lowered, Places, at
from ._cache_checks import (
    an_order,
    check_kind,
    check_new,
    check_queries,
    check_scale,
    in_range,
    per_sequence,
    positive,
    some_sequences,
)  # fmt: skip

_MANY_QUERIES = 1024  # with a mask or bias, which may become dense, so many are attended for at once


class KVCache(torch.nn.Module):
    """The keys and values of B sequences, each with a length of its own, in memory that is allocated once.

    One cache belongs to one attention layer: SelfAttention.forward(x, cache=cache) appends to it and attends to it.
    Slots that hold nothing yet have no influence, whatever lies there. All state is in buffers that are changed in
    place (and in one number that bounds the lengths, so that checking the capacity does not wait for a GPU): a compiled
    step serves all lengths. A cache is a module, so that to(device) moves it and torch.export knows its state, where it
    belongs to a model; state dicts leave it out. Caches carry no gradients: use them under torch.no_grad() or
    torch.inference_mode(). A call that is refused changes nothing; on a GPU and in compiled code, what depends on values
    (counts, lengths, numbers of sequences, there the capacity too) is asserted on the device.

    Args:
        batch: number of sequences B.
        capacity: positions that each sequence has room for. With a window, the positions that are kept: lengths are
            unlimited, and at most capacity - window positions can be taken back by truncate() (or appended at once).
        num_kv_heads, head_dim: Hk and D.
        value_dim: Dv; default D.
        window: each query sees so many positions before its own. Older ones are overwritten: a ring, kept twice so that
            every window lies in one piece, of 2 * capacity slots.
        device, dtype: of the tensors; the dtype is that of the queries, or torch.int8 or torch.float8_e4m3fn: then keys
            and values are quantised as they come and read as they are (attention_cached), for float32, bfloat16 and
            float16 queries.
        k_scale, v_scale: of a quantised cache, positive float32 [Hk] or [B,Hk]: the largest value that fits is 127 (int8)
            or 448 (e4m3) times that, larger ones are cut off. By default each key and each value has a scale of its own,
            by its largest element, so that nothing is cut off.

    Attributes:
        k, v: [B,Hk,slots,D], [B,Hk,slots,Dv]. A head's positions lie next to each other: decoding reads them 1.3x to
            1.8x as fast as those of [B,slots,Hk,D].
        k_scale, v_scale: of a quantised cache, float32 [B,Hk,slots]; NaN where a key or value had an element that was
            NaN or infinite: all that see it are NaN. None otherwise.
        lengths: int64 [B], the positions appended so far.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    lengths: Tensor
    _written: Tensor  # one past the last position that was ever written
    _fixed_k_scale: Tensor | None  # as given, [B,Hk]
    _fixed_v_scale: Tensor | None

    def __init__(
        self,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        window: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        owner, dtype = type(self).__name__, torch.get_default_dtype() if dtype is None else dtype
        batch, capacity, num_kv_heads, head_dim, value_dim = positive(
            owner, batch=batch, capacity=capacity, num_kv_heads=num_kv_heads, head_dim=head_dim,
            value_dim=head_dim if value_dim is None else value_dim,
        )  # fmt: skip
        check_kind(owner, capacity, window, dtype)
        self.batch, self.capacity, self.num_kv_heads, self.window = batch, capacity, num_kv_heads, window
        self.quantised = dtype in QUANTISED
        first, slots = self._storage()
        with torch.inference_mode(False):  # else it could not be changed outside of it
            new: dict[str, Tensor | None] = {
                "k": torch.empty(first, num_kv_heads, slots, head_dim, device=device, dtype=dtype),
                "v": torch.empty(first, num_kv_heads, slots, value_dim, device=device, dtype=dtype),
                "lengths": torch.zeros(batch, dtype=torch.int64, device=device),
                "_written": torch.zeros(batch, dtype=torch.int64, device=device),
            }
            for name, given in (("k_scale", k_scale), ("v_scale", v_scale)):
                fixed = check_scale(given, name, dtype, batch, num_kv_heads, device)
                scales = first, num_kv_heads, slots
                new[name] = torch.ones(scales, dtype=torch.float32, device=device) if self.quantised else None
                new[f"_fixed_{name}"] = fixed
        for name, x in new.items():
            self.register_buffer(name, x, persistent=False)
        self._bound = 0  # of the lengths

    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> None:
        """Appends k [B,Hk,S,D] and v [B,Hk,S,Dv]; with counts [B], only the first counts[b] positions of sequence b.

        The positions beyond counts need room too.

        Raises:
            ValueError, TypeError: shapes, types or devices that do not fit, counts that are not from 0 to S, or no room
                for S positions more.
        """
        k, v = cast_by_autocast(k, v)
        counts = check_new(self, k, v, counts)
        self._reserve(k.shape[2])
        self._write(k.detach(), v.detach(), counts)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        counts: Tensor | None = None,
        window: int | None = None,
        mask: masks.Mask | Tensor | None = None,
        bias: Tensor | biases.Bias | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        pre_mix: Tensor | None = None,
        post_mix: Tensor | None = None,
    ) -> Tensor:
        """Appends k and v, and returns the causal attention [B,H,S,Dv] of q [B,H,S,D], the queries of these positions.

        Step by step, a mask or bias does what it does to whole sequences at once, whatever the lengths are.

        Args:
            counts: as in append; queries beyond them give 0.
            window: each query sees so many positions before its own; default the cache's.
            mask, bias: apply besides. Positions count from each sequence's first. What has rows for queries (Intervals,
                a bool tensor, a dense bias) has one row, or one for each of these S queries; BlockSparse, Documents and
                columns are for all positions from 0 on: up to the last of these queries, or more.
            scale, softcap, sinks, pre_mix, post_mix: as in mha_ext.attention. With mixes, keys and values in pages or
                of 8 bits are copied to the queries' type first.

        Raises:
            ValueError, TypeError: as append; arguments that do not fit; and while gradients are recorded for any of these.
        """
        given = (q, k, v, *tensors_in(bias), sinks, pre_mix, post_mix)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given):
            raise ValueError(
                "a cache was given while gradients are recorded; accepted: under torch.no_grad() or "
                "torch.inference_mode()."
            )
        q, k, v = cast_by_autocast(q, k, v)
        counts = check_new(self, k, v, counts)
        check_queries(q, k)
        window = self._window(window)
        options = {"scale": scale, "softcap": softcap, "sinks": sinks, "pre_mix": pre_mix, "post_mix": post_mix}
        self._check_options(q, **options)
        S = q.shape[2]
        step = S if mask is None and bias is None else _MANY_QUERIES
        step = step if self.window is None else min(step, self.capacity - self.window)
        starts = [0] if S <= step else range(0, S, step)
        end = self._end(S, counts) if mask is not None or bias is not None else None
        parts = [self._seen(q, i, min(step, S - i), counts, window, mask, bias, end) for i in starts]
        if self.window is None:
            self._reserve(S)
        outs = []
        for i, (seen, placed) in zip(starts, parts):
            some = counts if S <= step or counts is None else (counts - i).clamp(0, step)
            some_q, some_k, some_v = (x if S <= step else x[:, :, i : i + step] for x in (q, k, v))
            self._write(some_k.detach(), some_v.detach(), some)
            outs.append(self._attention(some_q, mask=seen, bias=placed, **options))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    def truncate(self, lengths: int | Tensor) -> None:
        """Forgets the positions from lengths (a number >= 0, or [B] of them) on, as when a guess was wrong."""
        if isinstance(lengths, int) and not isinstance(lengths, bool):
            if lengths < 0:
                raise ValueError(f"lengths is {lengths}; truncate() accepts numbers >= 0: the positions that stay.")
            if _checks.at_least(0, lengths) is None:
                return  # nothing is as long
            shorter = self.lengths.clamp(max=lengths)
        else:
            lengths = per_sequence(self, lengths, "lengths")
            in_range(lengths, 0, None, "lengths", "numbers >= 0: the positions that stay")
            shorter = torch.minimum(self.lengths, lengths)
        if self.window is not None:
            kept = (shorter - self.window).clamp(min=0) >= self._written - self.capacity
            _checks.require(
                (kept | (shorter == self.lengths)).all(),
                f"truncate() was given lengths that go back too far; a ring of capacity {self.capacity} for a "
                f"window of {self.window} accepts up to {self.capacity - self.window} positions less than ever held.",
            )
        self.lengths.copy_(shorter)
        if isinstance(lengths, int) and not torch.compiler.is_compiling():
            self._bound = min(self._bound, lengths)

    def reorder(self, indices: Tensor) -> None:
        """Sequence i becomes a copy of what sequence indices[i] was: for beams, for a prompt that many answers begin with,
        and to leave out what is finished.

        Args:
            indices: integer [N], N >= 1, each any number of times: the cache holds N sequences from then on. Where N is the
                batch, buffers are changed in place; else they are replaced, which compiled code cannot do.

        Raises:
            ValueError, TypeError: indices of another kind, or that are no numbers of sequences.
        """
        indices = an_order(self, indices)
        self._reorder_storage(indices)
        for name in ("lengths", "_written", "_fixed_k_scale", "_fixed_v_scale"):
            self._take(name, indices)
        self.batch = indices.shape[0]

    def reset(self, sequences: Tensor | list[int] | int | None = None) -> None:
        """Empties the cache, or the given sequences of it: a number, numbers, or a bool tensor [B]."""
        index = slice(None) if sequences is None else some_sequences(self, sequences)
        self.lengths[index] = 0
        self._written[index] = 0
        if sequences is None:
            self._bound = 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of their scales."""
        return sum(x.nbytes for x in self._stored())

    def __repr__(self) -> str:
        kind = "" if self.window is None else f", window={self.window}"
        return (
            f"{type(self).__name__}(batch={self.batch}, capacity={self.capacity}, k={list(self.k.shape)}, "
            f"v={list(self.v.shape)}{kind}, {_checks.name_of(self.k.dtype)})"
        )

    # --- Parts ----------------------------------------------------------------------------------------------------------

    def _stored(self) -> list[Tensor]:
        """What is kept of each slot; the dimensions 0 and 2 are those of _storage()."""
        return [x for x in (self.k, self.v, self.k_scale, self.v_scale) if x is not None]

    def _storage(self) -> tuple[int, int]:
        """The dimensions 0 and 2 of k and v."""
        return self.batch, self.capacity if self.window is None else 2 * self.capacity

    def _slots(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Where to write positions [B,S] in the dimensions 0 and 2 of k and v; each of these gets them all."""
        rows = torch.arange(self.batch, device=positions.device)[:, None]
        if self.window is None:
            return [(rows, positions)]
        slots = positions % self.capacity
        return [(rows, slots), (rows, slots + self.capacity)]

    def _reorder_storage(self, indices: Tensor) -> None:
        known = _checks.values_known(self.lengths)
        end = int(self.lengths.max()) if known else self._storage()[1]  # beyond it there is nothing to keep
        for name in ("k", "v", "k_scale", "v_scale"):
            self._take(name, indices, end)

    def _take(self, name: str, indices: Tensor, end: int | None = None) -> None:
        """Makes row i of a buffer what row indices[i] was, or the slots before end of it."""
        x = getattr(self, name)
        if x is None:
            return
        part = slice(None) if end is None else (slice(None), slice(None), slice(end))
        taken = _bytes(x)[part].index_select(0, indices)
        if indices.shape[0] != self.batch:
            with torch.inference_mode(False):
                x = x.new_empty(indices.shape[0], *x.shape[1:])
            setattr(self, name, x)
        _bytes(x)[part].copy_(taken)

    def _resize(self, dim: int, size: int) -> None:
        """Makes dimension 0 or 2 of what is stored larger; what is there is copied."""
        for name in ("k", "v", "k_scale", "v_scale"):
            if (x := getattr(self, name)) is None:
                continue
            shape = [*x.shape]
            shape[dim] = size
            with torch.inference_mode(False):
                larger = x.new_empty(shape)
                _bytes(larger).narrow(dim, 0, x.shape[dim]).copy_(_bytes(x))
            setattr(self, name, larger)

    def _grow(self, capacity: int) -> None:
        """Room for sequences of so many positions, where there is no window."""
        self._resize(2, capacity)
        self.capacity = capacity

    def _reserve(self, n: int) -> None:
        """Makes sure that every sequence has room for n positions more."""
        if self.window is not None:
            if n > self.capacity - self.window:
                raise ValueError(
                    f"{n} positions were appended at once; a ring of capacity {self.capacity} for a window of "
                    f"{self.window} accepts {self.capacity - self.window}: append less at once."
                )
            return
        if torch.compiler.is_compiling():  # reading the bound would make code for each
            self._bound = self.capacity
            room = (self.lengths <= self.capacity - n).all()
            torch._assert_async(room, f"positions were appended beyond a cache's capacity, {self.capacity}.")
            return
        if self._bound + n > self.capacity:
            self._bound = int(self.lengths.max())  # the lengths may be less than assumed
            if self._bound + n > self.capacity:
                raise ValueError(
                    f"{n} positions were appended to sequences of up to {self._bound}; accepted: up to the capacity, "
                    f"{self.capacity}: make a bigger cache, or truncate() or reset() this one."
                )
        self._bound += n

    def _write(self, k: Tensor, v: Tensor, counts: Tensor | None) -> None:
        S = k.shape[2]
        new = [k, v]
        if self.k_scale is not None and self.v_scale is not None:
            scales = [scales_of(k, self.k.dtype, self._fixed_k_scale), scales_of(v, self.v.dtype, self._fixed_v_scale)]
            new = [quantise(x, scale, self.k.dtype) for x, scale in zip(new, scales)] + scales
        positions = self.lengths[:, None] + torch.arange(S, device=k.device)
        for index in self._slots(positions):
            for stored, x in zip(self._stored(), new):
                _bytes(stored).transpose(1, 2).index_put_(index, _bytes(x).transpose(1, 2))
        self._written.copy_(torch.maximum(self._written, self.lengths + S))
        self.lengths.add_(S if counts is None else counts)

    def _check_options(self, q: Tensor, *, scale: Any, softcap: Any, sinks: Any, pre_mix: Any, post_mix: Any) -> None:
        """What attention would refuse only after the keys were written."""
        B, H, S = q.shape[:3]
        score_arguments(None, scale, sinks, q, B, H, S, 0)
        _checks.softcap(softcap)
        mix_arguments(pre_mix, post_mix, q, H)

    def _end(self, S: int, counts: Tensor | None) -> int | None:
        """One past the last position of S more, if that can be known."""
        if not _checks.values_known(self.lengths):
            return None
        return int((self.lengths + (S if counts is None else counts)).max())

    def _seen(
        self, q: Tensor, row: int, S: int, counts: Tensor | None, window: int | None, mask: Any, bias: Any, end: int | None
    ) -> tuple[masks.Mask, Any]:  # fmt: skip
        """What S queries from `row` on see, as slots, and their bias. Before anything is written."""
        position = self.lengths[:, None] + torch.arange(row, row + S, device=q.device)
        first = torch.zeros_like(position) if window is None else (position - window).clamp(min=0)
        last, shift = position + 1, None
        if self.window is not None:  # all rows count from the slot of what the first one sees
            start = first[:, :1] if S > 0 else self.lengths[:, None]
            shift = start % self.capacity - start
            first, last = first + shift, last + shift
        if counts is not None:
            last = torch.where(torch.arange(row, row + S, device=q.device) < counts[:, None], last, 0)
        seen = masks.Intervals(first, last)
        if mask is None and bias is None:
            return seen, None
        n = self.lengths + (q.shape[2] if counts is None else counts)
        slots = self._storage()[1] if self.window is not None else self.capacity
        places = Places(position, q.shape[1], slots, end, n, row, q.shape[2], shift)
        if isinstance(bias, biases.Bias):
            bias = bias.at(places, _checks.accumulate_dtype(q.dtype))
        elif bias is not None:
            bias = places.dense_bias(bias, q.dtype)
        both = masks.And(seen, Lowered(at(mask, places)))
        return both, bias

    def _attention(self, q: Tensor, *, pre_mix: Any, post_mix: Any, **options: Any) -> Tensor:
        if pre_mix is not None or post_mix is not None:
            return attention(q, *self._plain(q.dtype), pre_mix=pre_mix, post_mix=post_mix, **options)
        return self._in_place(q, **options)

    def _in_place(self, q: Tensor, **options: Any) -> Tensor:
        if self.quantised:
            return attention_cached(q, self.k, self.v, k_scale=self.k_scale, v_scale=self.v_scale, **options)
        return attention(q, self.k, self.v, **options)

    def _plain(self, dtype: torch.dtype) -> list[Tensor]:
        """Keys and values [B,Hk,slots,.] in that type."""
        pairs = ((self.k, self.k_scale), (self.v, self.v_scale))
        return [x if scale is None else (x.float() * scale[..., None]).to(dtype) for x, scale in pairs]

    def _window(self, window: int | None) -> int | None:
        if window is not None and _checks.at_least(0, window) is None:
            raise ValueError(f"window is {window!r}; accepted: an int >= 0, or None for the cache's own.")
        if self.window is None or window is None:
            return self.window if window is None else window
        if window > self.window:
            raise ValueError(
                f"window is {window}; this cache keeps {self.window} positions: make one with a larger window."
            )
        return window

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KVCache:
        """to(), cuda(), half() and so on. Quantised keys and values, and scales, only change their device."""
        kept = [name for name, x in self.named_buffers() if "scale" in name or self.quantised]
        before = {name: getattr(self, name) for name in kept}
        with torch.inference_mode(False):
            super()._apply(fn, recurse)
            for name, x in before.items():
                setattr(self, name, x.to(self.lengths.device))
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        with torch.inference_mode(False):
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def _bytes(x: Tensor) -> Tensor:
    """x in a type whose elements torch moves on every device."""
    return x.view(torch.int8) if x.dtype in QUANTISED else x
