"""Key/value caches: what attention has seen so far, kept for the queries to come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks, masks
from ..cached import QUANTISED, attention_cached, quantise
from ..functional import attention


class KVCache:
    """The keys and values of B sequences, each with a length of its own, in memory that is allocated once.

    One cache belongs to one attention layer: SelfAttention.forward(x, cache=cache) appends to it and attends to it.
    Slots that hold nothing yet have no influence, whatever lies there. All state is in tensors that are changed in
    place (and in one number that bounds the lengths, so that checking the capacity does not wait for a GPU): a compiled
    step serves all lengths. Caches carry no gradients: use them under torch.no_grad() or torch.inference_mode().

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
        k_scale, v_scale: of a quantised cache, float32 [Hk] or [B,Hk]: the largest value that fits is 127 (int8) or 448
            (e4m3) times that, larger ones are cut off. By default each sequence's first append sets them, so that twice
            its head's largest value fits.

    Attributes:
        k, v: [B,Hk,slots,D], [B,Hk,slots,Dv]. A head's positions lie next to each other: decoding reads them 1.3x to
            1.8x as fast as those of [B,slots,Hk,D].
        lengths: int64 [B], the positions appended so far.
    """

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
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"batch": batch, "capacity": capacity, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, size in (sizes | {"value_dim": value_dim}).items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}; KVCache accepts a positive int.")
        if window is not None and (not isinstance(window, int) or not 0 <= window < capacity):
            raise ValueError(
                f"window is {window!r} and capacity {capacity}; KVCache accepts a window from 0 to capacity - 1, or None."
            )
        self.batch, self.capacity, self.num_kv_heads, self.window = batch, capacity, num_kv_heads, window
        first, slots = self._storage()
        self.k = torch.empty(first, num_kv_heads, slots, head_dim, device=device, dtype=dtype)
        self.v = torch.empty(first, num_kv_heads, slots, value_dim, device=device, dtype=dtype)
        self.quantised = self.k.dtype in QUANTISED
        self.k_scale, self.v_scale = (self._scale(x, n) for x, n in ((k_scale, "k_scale"), (v_scale, "v_scale")))
        self._scales_given = k_scale is not None, v_scale is not None
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=self.k.device)
        self._written = torch.zeros_like(self.lengths)  # one past the last position that was ever written
        self._bound = 0  # of the lengths

    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> None:
        """Appends k [B,Hk,S,D] and v [B,Hk,S,Dv]; with counts [B], only the first counts[b] positions of sequence b.

        The positions beyond counts need room too.

        Raises:
            ValueError, TypeError: shapes, types or devices that do not fit, or no room for S positions more.
        """
        self._check_new(k, v, counts)
        S = k.shape[2]
        self._reserve(S)
        positions = self.lengths[:, None] + torch.arange(S, device=k.device)
        k, v = k.detach(), v.detach()
        if self.quantised:
            k, v = self._quantised(k, v, counts)
        for index in self._slots(positions):
            for cached, new in ((self.k, k), (self.v, v)):
                _bytes(cached).transpose(1, 2).index_put_(index, _bytes(new).transpose(1, 2))
        self._written.copy_(torch.maximum(self._written, self.lengths + S))
        self.lengths.add_(S if counts is None else counts)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        counts: Tensor | None = None,
        window: int | None = None,
        mask: masks.Mask | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Appends k and v, and returns the causal attention [B,H,S,Dv] of q [B,H,S,D], the queries of these positions.

        Args:
            counts: as in append; queries beyond them give 0.
            window: each query sees so many positions before its own; default the cache's.
            mask, bias: apply besides, with Sk = capacity keys, one per slot; not with a ring.
            scale, softcap, sinks: as in mha_ext.attention.

        Raises:
            ValueError, TypeError: as append; and while gradients are recorded for any of these.
        """
        given = (q, k, v, bias, sinks)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given):
            raise ValueError(
                "a cache was given while gradients are recorded; accepted: under torch.no_grad() or "
                "torch.inference_mode()."
            )
        window = self._window(window, mask, bias)
        S, step = q.shape[2], q.shape[2] if self.window is None else self.capacity - self.window
        options = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks}
        if S <= step:
            return self._attend(q, k, v, counts, window, options)
        outs = []
        for i in range(0, S, step):
            some = None if counts is None else (counts - i).clamp(0, step)
            some_q, some_k, some_v = (x[:, :, i : i + step] for x in (q, k, v))
            outs.append(self._attend(some_q, some_k, some_v, some, window, options))
        return torch.cat(outs, dim=2)

    def truncate(self, lengths: int | Tensor) -> None:
        """Forgets the positions from lengths (a number, or [B]) on, as when a guess was wrong."""
        if isinstance(lengths, Tensor):
            lengths = self._per_sequence(lengths, "lengths")
        else:
            self._bound = min(self._bound, max(lengths, 0))
        shorter = self.lengths.clamp(max=lengths).clamp(min=0)
        if self.window is not None:
            lost = (shorter - self.window).clamp(min=0) < self._written - self.capacity
            if bool((lost & (shorter < self.lengths)).any()):
                raise ValueError(
                    f"truncate() was given lengths that go back too far; a ring of capacity {self.capacity} for a "
                    f"window of {self.window} accepts up to {self.capacity - self.window} positions less than ever held."
                )
        self.lengths.copy_(shorter)

    def reorder(self, indices: Tensor) -> None:
        """Sequence b becomes a copy of what sequence indices[b] was, as beam search wants it. indices: [B]."""
        indices = self._per_sequence(indices, "indices")
        if not torch.compiler.is_compiling() and bool(((indices < 0) | (indices >= self.batch)).any()):
            raise ValueError(f"indices are {indices.tolist()}; accepted: numbers of sequences, 0 to {self.batch - 1}.")
        self._reorder_storage(indices)
        for x in (self.lengths, self._written, self.k_scale, self.v_scale):
            if x is not None:
                x.copy_(x.index_select(0, indices))

    def reset(self, sequences: Tensor | list[int] | int | None = None) -> None:
        """Empties the cache, or the given sequences of it."""
        index = slice(None) if sequences is None else sequences
        self.lengths[index] = 0
        self._written[index] = 0
        if sequences is None:
            self._bound = 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.k.nbytes + self.v.nbytes

    def __repr__(self) -> str:
        kind = "" if self.window is None else f", window={self.window}"
        return (
            f"{type(self).__name__}(batch={self.batch}, capacity={self.capacity}, k={list(self.k.shape)}, "
            f"v={list(self.v.shape)}{kind}, {_checks.name_of(self.k.dtype)})"
        )

    # --- Parts ----------------------------------------------------------------------------------------------------------

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
        for x in (self.k, self.v):
            _bytes(x).copy_(_bytes(x).index_select(0, indices))

    def _scale(self, x: Tensor | None, name: str) -> Tensor | None:
        if not self.quantised:
            if x is not None:
                raise ValueError(f"{name} was given with dtype={self.k.dtype}; accepted: with int8 or float8_e4m3fn.")
            return None
        x = torch.ones((), device="cpu") if x is None else torch.as_tensor(x)
        if x.shape not in ((), (self.num_kv_heads,), (self.batch, self.num_kv_heads)):
            raise ValueError(
                f"{name} has shape {_checks.text(x.shape)}; accepted: [Hk] or [B,Hk] = "
                f"[{self.batch},{self.num_kv_heads}]."
            )
        return x.to(self.k.device, torch.float32).expand(self.batch, self.num_kv_heads).clone()

    def _quantised(self, k: Tensor, v: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        quantised = []
        scale: Any  # a tensor: the cache is quantised
        for x, scale, given in ((k, self.k_scale, self._scales_given[0]), (v, self.v_scale, self._scales_given[1])):
            if not given and x.shape[2] > 0:
                sizes = x.float().abs()
                if counts is not None:
                    valid = torch.arange(x.shape[2], device=x.device) < counts[:, None]
                    sizes = torch.where(valid[:, None, :, None], sizes, 0)
                largest = sizes.amax((2, 3)) * (2 / QUANTISED[self.k.dtype])
                first = (self.lengths == 0)[:, None]
                scale.copy_(torch.where(first, torch.where(largest > 0, largest, 1), scale))
            quantised.append(quantise(x, scale, self.k.dtype))
        return quantised[0], quantised[1]

    def _reserve(self, n: int) -> None:
        """Makes sure that every sequence has room for n positions more."""
        if self.window is not None:
            if n > self.capacity - self.window:
                raise ValueError(
                    f"{n} positions were appended at once; a ring of capacity {self.capacity} for a window of "
                    f"{self.window} accepts {self.capacity - self.window}: append less at once."
                )
            return
        if self._bound + n > self.capacity:
            self._bound = int(self.lengths.max())  # the lengths may be less than assumed
            if self._bound + n > self.capacity:
                raise ValueError(
                    f"{n} positions were appended to sequences of up to {self._bound}; accepted: up to the capacity, "
                    f"{self.capacity}: make a bigger cache, or truncate() or reset() this one."
                )
        self._bound += n

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, counts: Tensor | None, window: int | None, options: Any
    ) -> Tensor:
        start = self.lengths.clone()
        self.append(k, v, counts)
        seen = self._seen(start, q.shape[2], counts, window)
        mask = options["mask"]
        options = options | {"mask": seen if mask is None else seen & mask}
        return self._attention(q, **options)

    def _attention(self, q: Tensor, **options: Any) -> Tensor:
        if self.quantised:
            return attention_cached(q, self.k, self.v, k_scale=self.k_scale, v_scale=self.v_scale, **options)
        return attention(q, self.k, self.v, **options)

    def _seen(self, start: Tensor, S: int, counts: Tensor | None, window: int | None) -> masks.Mask:
        """What the queries at positions start .. start + S see, as slots: one interval each."""
        position = start[:, None] + torch.arange(S, device=start.device)
        first = torch.zeros_like(position) if window is None else (position - window).clamp(min=0)
        end = position + 1
        if self.window is not None:  # all rows count from the slot of what the first one sees
            shift = first[:, :1] % self.capacity - first[:, :1]
            first, end = first + shift, end + shift
        if counts is not None:
            end = torch.where(torch.arange(S, device=start.device) < counts[:, None], end, 0)
        return masks.Intervals(first, end)

    def _window(self, window: int | None, mask: masks.Mask | Tensor | None, bias: Tensor | None) -> int | None:
        if self.window is None:
            return window
        if mask is not None or bias is not None:
            raise ValueError("mask or bias was given with a ring, whose slots change their positions: leave it out.")
        if window is not None and window > self.window:
            raise ValueError(
                f"window is {window}; this cache keeps {self.window} positions: make one with a larger window."
            )
        return self.window if window is None else window

    def _per_sequence(self, x: Tensor, name: str) -> Tensor:
        x = _checks.integer_tensor(x, name, "[B]", 1)
        if x.shape[0] != self.batch:
            raise ValueError(f"{name} has shape {_checks.text(x.shape)}; accepted: [B] = [{self.batch}].")
        _checks.same_device(x, name, self.lengths.device)
        return x

    def _check_new(self, k: Tensor, v: Tensor, counts: Tensor | None) -> None:
        B, Hk, D, Dv = self.batch, self.num_kv_heads, self.k.shape[3], self.v.shape[3]
        if k.dim() != 4 or v.dim() != 4 or k.shape != (B, Hk, k.shape[2], D) or v.shape != (B, Hk, k.shape[2], Dv):
            raise ValueError(
                f"k, v have shapes {_checks.text(k.shape)}, {_checks.text(v.shape)}; this cache accepts "
                f"[B,Hk,S,D] = [{B},{Hk},S,{D}] and [B,Hk,S,Dv] = [{B},{Hk},S,{Dv}]."
            )
        if k.device != self.k.device or v.device != self.k.device:
            raise ValueError(
                f"k, v are on {k.device}, {v.device} and the cache on {self.k.device}; accepted: one device."
            )
        self._check_dtype(k, v)
        if counts is not None:
            self._per_sequence(counts, "counts")

    def _check_dtype(self, k: Tensor, v: Tensor) -> None:
        if self.quantised:
            if k.dtype != v.dtype or k.dtype not in _checks.DTYPES or k.dtype == torch.float64:
                raise TypeError(
                    f"k, v are {_checks.name_of(k.dtype)}, {_checks.name_of(v.dtype)}; a quantised cache accepts "
                    "float32, bfloat16 or float16."
                )
        elif k.dtype != self.k.dtype or v.dtype != self.k.dtype:
            raise TypeError(
                f"k, v are {_checks.name_of(k.dtype)}, {_checks.name_of(v.dtype)} and the cache is "
                f"{_checks.name_of(self.k.dtype)}; accepted: one dtype: make the cache with dtype={k.dtype}."
            )


def _bytes(x: Tensor) -> Tensor:
    """x in a type whose elements torch moves on every device."""
    return x.view(torch.int8) if x.dtype in QUANTISED else x
