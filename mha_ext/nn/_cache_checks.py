"""What the caches accept. Everything is checked before anything is written: a refusal leaves a cache as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _checks
from ..cached import QUANTISED

if TYPE_CHECKING:
    from .kv_cache import KVCache


def positive(owner: str, **sizes: Any) -> list[int]:
    for name, size in sizes.items():
        if _checks.at_least(1, size) is None:
            raise ValueError(f"{name} is {size!r}; {owner} accepts a positive int.")
    return [int(size) for size in sizes.values()]  # also numpy's


def check_kind(owner: str, capacity: int, window: Any, dtype: Any) -> None:
    if window is not None and (_checks.at_least(0, window) is None or window >= capacity):
        raise ValueError(
            f"window is {window!r} and capacity {capacity}; {owner} accepts a window from 0 to capacity - 1, or None."
        )
    if dtype not in _checks.DTYPES and dtype not in QUANTISED:
        accepted = ", ".join(_checks.name_of(x) for x in (*_checks.DTYPES, *QUANTISED))
        raise TypeError(f"dtype is {dtype!r}; {owner} accepts one of {accepted}.")


def check_options(in_pages: bool, options: dict[str, Any]) -> None:
    """What make_cache() was given for a cache, in pages or not."""
    accepted = {"value_dim", "device", "dtype", "k_scale", "v_scale"}
    accepted |= {"pages"} if in_pages else {"window"}
    for name in options:
        if name == "pages" and name not in accepted:
            raise ValueError(
                "pages was given without page_size; make_cache() accepts both, for a PagedKVCache, or neither."
            )
        if name == "window" and name not in accepted and options[name] is not None:
            raise ValueError(
                "window was given with page_size; make_cache() accepts one of them: pages keep all positions, and the module's "
                "own window holds with them."
            )
        if name not in accepted | {"window"}:
            raise TypeError(
                f"make_cache() has no argument {name}; accepted: batch, capacity, page_size, {', '.join(sorted(accepted))}."
            )


def check_scale(x: Any, name: str, dtype: torch.dtype, B: int, Hk: int, device: Any) -> Tensor | None:
    """A given scale as float32 [B,Hk]."""
    if x is None:
        return None
    if dtype not in QUANTISED:
        raise ValueError(f"{name} was given with dtype={dtype}; accepted: with int8 or float8_e4m3fn.")
    try:
        x = torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} is a {type(x).__name__}; accepted: a tensor [Hk] or [B,Hk].") from None
    if x.shape not in ((), (Hk,), (B, Hk)):
        raise ValueError(f"{name} has shape {_checks.text(x.shape)}; accepted: [Hk] or [B,Hk] = [{B},{Hk}].")
    if x.dtype.is_complex or (_checks.values_known(x) and not bool(((x > 0) & x.isfinite()).all())):
        raise ValueError(f"{name} has numbers that are not positive and finite; accepted: the size of one step.")
    return x.to(device, torch.float32).expand(B, Hk).clone()


def _tensor(x: Any, name: str, accepted: str) -> Tensor:
    """A tensor, or a number or numbers as one."""
    if not isinstance(x, Tensor):
        try:
            x = torch.as_tensor(x)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise TypeError(f"{name} is a {type(x).__name__}; accepted: {accepted}.") from None
        x = x if x.numel() else x.to(torch.int64)  # torch takes what no number is for floats
    _checks.dense(x, name)
    return x


def _integers(x: Any, name: str, accepted: str, fits: Callable[[Tensor], bool]) -> Tensor:
    x = _tensor(x, name, accepted)
    if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool or not fits(x):
        raise ValueError(f"{name} is {_checks.given(x)}; accepted: {accepted}.")
    return x.to(torch.int64)


def per_sequence(cache: KVCache, x: Any, name: str) -> Tensor:
    """Integers [B] on the cache's device."""
    B = cache.batch
    x = _integers(x, name, f"an integer tensor [B] = [{B}]", lambda x: x.shape == (B,))
    _checks.same_device(x, name, cache.lengths.device)
    return x


def an_order(cache: KVCache, x: Any) -> Tensor:
    """Numbers of sequences, as many as there are to be, as int64 [N] on the cache's device."""
    x = _integers(x, "indices", "an integer tensor [N], N >= 1", lambda x: x.dim() == 1 and x.shape[0] > 0)
    if x.shape[0] != cache.batch and torch.compiler.is_compiling():
        raise ValueError(
            f"indices has length {x.shape[0]} and the cache {cache.batch} sequences; compiled code accepts one for each: "
            "call reorder() outside of it."
        )
    _checks.same_device(x, "indices", cache.lengths.device)
    in_range(x, 0, cache.batch - 1, "indices", f"numbers of sequences, 0 to {cache.batch - 1}")
    return x


def in_range(x: Tensor, low: int, high: int | None, name: str, accepted: str) -> None:
    fits = x >= low if high is None else (x >= low) & (x <= high)
    values = f"are {x.tolist()}" if _checks.values_known(x) else "do not fit"
    _checks.require(fits.all(), f"{name} {values}; accepted: {accepted}.")


def some_sequences(cache: KVCache, x: Any) -> Tensor:
    """Numbers of sequences, or a bool tensor [B], as an index."""
    B, device = cache.batch, cache.lengths.device
    accepted = f"a number, numbers of sequences, or a bool tensor [B] = [{B}]"
    x = _tensor(x, "sequences", accepted)
    if x.dtype != torch.bool:
        x = _integers(x, "sequences", accepted, lambda x: x.dim() <= 1)
        in_range(x, 0, B - 1, "sequences", f"numbers of sequences, 0 to {B - 1}")
    elif x.shape != (B,):
        raise ValueError(f"sequences is {_checks.given(x)}; accepted: {accepted}.")
    if x.is_meta and device.type != "meta":
        _checks.same_device(x, "sequences", device)
    return x.to(device)


def check_new(cache: KVCache, k: Any, v: Any, counts: Any) -> Tensor | None:
    """Keys, values and counts that are to be appended; returns counts as int64."""
    if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise TypeError(f"k, v are a {type(k).__name__}, a {type(v).__name__}; a cache accepts two tensors.")
    for x, name in ((k, "k"), (v, "v")):
        _checks.dense(x, name)
    B, Hk, D, Dv = cache.batch, cache.num_kv_heads, cache.k.shape[3], cache.v.shape[3]
    if k.dim() != 4 or v.dim() != 4 or k.shape != (B, Hk, k.shape[2], D) or v.shape != (B, Hk, k.shape[2], Dv):
        raise ValueError(
            f"k, v have shapes {_checks.text(k.shape)}, {_checks.text(v.shape)}; this cache accepts "
            f"[B,Hk,S,D] = [{B},{Hk},S,{D}] and [B,Hk,S,Dv] = [{B},{Hk},S,{Dv}]."
        )
    if k.device != cache.k.device or v.device != cache.k.device:
        raise ValueError(f"k, v are on {k.device}, {v.device} and the cache on {cache.k.device}; accepted: one device.")
    names = f"k, v are {_checks.name_of(k.dtype)}, {_checks.name_of(v.dtype)}"
    if cache.quantised:
        if k.dtype != v.dtype or k.dtype not in _checks.DTYPES or k.dtype == torch.float64:
            raise TypeError(f"{names}; a quantised cache accepts float32, bfloat16 or float16.")
    elif k.dtype != cache.k.dtype or v.dtype != cache.k.dtype:
        raise TypeError(
            f"{names} and the cache is {_checks.name_of(cache.k.dtype)}; accepted: one dtype: make the cache with "
            f"dtype={k.dtype}."
        )
    if counts is None:
        return None
    counts = per_sequence(cache, counts, "counts")
    in_range(counts, 0, k.shape[2], "counts", f"numbers from 0 to the {k.shape[2]} positions given")
    return counts


def check_queries(q: Any, k: Tensor) -> None:
    if not isinstance(q, Tensor):
        raise TypeError(f"q is a {type(q).__name__}; accepted: a tensor [B,H,S,D].")
    _checks.dense(q, "q")
    B, Hk, S, D = k.shape
    if q.dim() != 4 or q.shape != (B, q.shape[1], S, D) or q.shape[1] % Hk or q.shape[1] == 0:
        raise ValueError(
            f"q has shape {_checks.text(q.shape)} and the new keys {_checks.text(k.shape)}; accepted: [B,H,S,D] with the same "
            f"B = {B}, S = {S}, D = {D}, and H a multiple of Hk = {Hk}: one query for each new key."
        )
    if q.dtype != k.dtype:
        raise TypeError(
            f"q is {_checks.name_of(q.dtype)} and k {_checks.name_of(k.dtype)}; accepted: one dtype: convert one."
        )
    if q.device != k.device:
        raise ValueError(f"q is on {q.device} and the cache on {k.device}; accepted: one device.")
