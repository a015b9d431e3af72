"""Biases that depend on the distance of query and key alone: the kernels read them from one row of Sq + Sk - 1 numbers
per head, and no tensor of size Sq x Sk exists. Passed to attention as ``bias=``; gradients reach their parameters.

The distance of key j from query i is j - (i + o), with o = Sk - Sq: negative for keys before the query.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from . import _checks
from ._pytrees import Container, Self, Sequence
from .masks.places import Places


class Bias(Container):
    """Base of the biases, and of your own: name the attributes that hold parameters in ``tensors``, heads in the first
    dimension of the first one (or define _heads()), and say in of_distance what a distance adds. Gradients, any masks, torch.compile
    and caches come with it.

        class Gaussian(biases.Bias):  # -(distance / width)^2, a width per head
            tensors = ("width",)

            def __init__(self, width):
                self.width = width

            def of_distance(self, distance):
                return -((distance / self.width[:, None]) ** 2)

    Biases of the distance add up: ``ALiBi(slopes) + T5Relative(table)``.
    """

    def of_distance(self, distance: Tensor) -> Tensor:
        """int64 [n] -> [H,n], what is added to the scores of each head at these distances; parameters are float32 or wider."""
        raise NotImplementedError(
            f"{type(self).__name__} has no of_distance(distance); a bias defines it: int64 [n] -> floating-point [H,n]."
        )

    def __add__(self, other: Bias) -> Bias:
        if not isinstance(other, Bias):
            raise TypeError(
                f"{type(self).__name__} was added to {_checks.given(other)}; accepted: another bias of the distance: for one tensor of both, "
                "add bias.to_dense(Sq, Sk)."
            )
        return Sum(self, other)

    def __radd__(self, other: Any) -> Bias:
        return self + other

    def _heads(self) -> int:
        return self._parameter().shape[0]

    def lower(self, H: int, Sq: int, Sk: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[1,H,Sq+Sk-1] in dtype: of the distances from 1 - Sk to Sq - 1, as the ops take it."""
        self._check(H, device)
        return self._in(dtype).of_distance(torch.arange(1 - Sk, max(Sq, 1 - Sk), device=device)).to(dtype)[None]

    def _in(self: Self, dtype: torch.dtype) -> Self:
        """The same with parameters of this type or a wider one: in half types, a slope times a distance would be off by
        whole units. Gradients come in the parameters' own type."""
        return self._map(lambda x: x.to(torch.promote_types(x.dtype, dtype)))

    def at(self, places: Places, dtype: torch.dtype) -> Bias:
        """For queries at these places of a cache: one row of numbers per sequence."""
        self._check(places.heads, places.position.device)
        S, first = places.position.shape[1], places.slot(places.position[:, :1])  # [B,1]; S may be 0
        first = first if S > 0 else places.lengths[:, None]
        distance = torch.arange(1 - S, max(places.slots, 1 - S), device=first.device) - first
        values = self._in(dtype).of_distance(distance.flatten()).to(dtype)
        return Lowered(values.unflatten(1, distance.shape).transpose(0, 1))

    def to_dense(self, Sq: int, Sk: int) -> Tensor:
        """The bias as a tensor [H,Sq,Sk], float32 (float64 for parameters of float64)."""
        device = self._parameter().device
        i, j = torch.arange(Sq, device=device)[:, None], torch.arange(Sk, device=device)
        distance = j - i - (Sk - Sq)
        return self._in(torch.float32).of_distance(distance.flatten()).unflatten(1, distance.shape)

    def _parameter(self) -> Tensor:
        if not self.tensors:
            raise NotImplementedError(f"{type(self).__name__} names no tensors; a bias does: tensors = (\"name\",).")
        return getattr(self, self.tensors[0])  # type: ignore[no-any-return]

    def _check(self, H: int, device: torch.device) -> None:
        name = type(self).__name__
        if self._heads() != H:
            raise ValueError(f"{name} is for {self._heads()} heads but q has {H}; accepted: one value per query head.")
        _checks.same_device(self._parameter(), name, device)


class Lowered(Bias):
    """A bias that is the ops' argument already."""

    tensors = ("values",)

    def __init__(self, values: Tensor):
        self.values = values

    def lower(self, H: int, Sq: int, Sk: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.values


class ALiBi(Bias):
    """-slopes[h] * |distance| (Press et al., "Train short, test long", 2022). slopes: floating-point [H], may require grad.

    alibi_slopes(H) gives the paper's.
    """

    tensors = ("slopes",)

    def __init__(self, slopes: Tensor):
        self.slopes = _floating(slopes, "ALiBi", "slopes", "[H]", 1)

    def of_distance(self, distance: Tensor) -> Tensor:
        return -self.slopes[:, None] * distance.abs()

    def __repr__(self) -> str:
        return f"ALiBi({_checks.text(self.slopes.shape)})"


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slopes of the ALiBi paper, float32 [num_heads]: 2^(-8/n), 2^(-16/n), ... for n heads, a power of two; for other
    numbers, those of the next lower power of two and then every second one of the next higher. device: as for torch.tensor."""
    num_heads, where = _checks.size("num_heads", num_heads, 0), None if device is None else _checks.device(device)
    n = 2 ** math.floor(math.log2(num_heads)) if num_heads > 0 else 0
    exponents = [-8 * (h + 1) / n for h in range(n)] + [-4 * (2 * h + 1) / n for h in range(num_heads - n)]
    return torch.tensor([2.0**e for e in exponents], dtype=torch.float32, device=where)


class T5Relative(Bias):
    """table[bucket(distance), h] (Raffel et al., "Exploring the limits of transfer learning", 2020).

    Half of the buckets hold one distance each, the others logarithmically more up to max_distance; beyond it all share
    the last. With bidirectional, keys before and after the query have half of the buckets each; without, all keys after
    it share bucket 0.

    Args:
        table: floating-point [num_buckets,H], may require grad (nn.Embedding(num_buckets, H).weight).
        num_buckets, max_distance, bidirectional: as in T5.
    """

    tensors = ("table",)

    def __init__(self, table: Tensor, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True):
        self.table = _floating(table, "T5Relative", "table", "[num_buckets,H]", 2)
        num_buckets, max_distance = _checks.size("num_buckets", num_buckets), _checks.size("max_distance", max_distance)
        _checks.flags(bidirectional=bidirectional)
        each_side = num_buckets // 2 if bidirectional else num_buckets
        if table.shape[0] != num_buckets or each_side < 2 or max_distance <= each_side // 2:
            raise ValueError(
                f"T5Relative was given a table of shape {_checks.text(table.shape)}, num_buckets {num_buckets} and "
                f"max_distance {max_distance}; it accepts [num_buckets,H], at least "
                f"{4 if bidirectional else 2} buckets, and a max_distance that exceeds the {each_side // 2} distances "
                "with a bucket of their own."
            )
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, int64."""
        buckets, first = self.num_buckets, torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            first = torch.where(distance > 0, buckets, 0)
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        # The same operations in the same precision as T5, whose buckets depend on how they round.
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (buckets - exact)).to(torch.int64)).clamp(max=buckets - 1)
        return first + torch.where(distance < exact, distance, far)

    def of_distance(self, distance: Tensor) -> Tensor:
        return torch.nn.functional.embedding(self.bucket(distance), self.table).t()

    def _heads(self) -> int:
        return self.table.shape[1]

    def __repr__(self) -> str:
        return f"T5Relative({_checks.text(self.table.shape)}, {self.max_distance}, {self.bidirectional})"


class ClippedRelative(Bias):
    """table[h, clip(distance, -m, m) + m] with m = (n - 1) / 2: a learned number per head and distance, all distances beyond m
    sharing the last (Shaw et al., "Self-attention with relative position representations", 2018; here a number is added to the
    score where they add a vector to the key).

    table: floating-point [H,n], n odd, from the distance -m (keys before the query) to m; may require grad.
    """

    tensors = ("table",)

    def __init__(self, table: Tensor):
        self.table = _floating(table, "ClippedRelative", "table", "[H,n]", 2)
        if table.shape[1] % 2 == 0:
            raise ValueError(
                f"ClippedRelative was given a table of shape {_checks.text(table.shape)}; it accepts [H,n] with an odd n, the "
                "distances from -(n - 1) / 2 to (n - 1) / 2."
            )

    def of_distance(self, distance: Tensor) -> Tensor:
        m = self.table.shape[1] // 2
        return self.table.index_select(1, distance.clamp(-m, m) + m)

    def __repr__(self) -> str:
        return f"ClippedRelative({_checks.text(self.table.shape)})"


class Sum(Sequence, Bias):
    """Several biases of the distance at once; written ``a + b``."""

    parts: tuple[Bias, ...]

    def __init__(self, *parts: Bias):
        self.parts = tuple(p for part in parts for p in (part.parts if isinstance(part, Sum) else (part,)))
        heads = [part._heads() for part in self.parts]
        if len(set(heads)) > 1:
            raise ValueError(f"biases for {', '.join(map(str, heads))} heads were added; accepted: for one number of heads.")
        for part in self.parts:
            _checks.same_device(part._parameter(), type(part).__name__, self._parameter().device)

    def of_distance(self, distance: Tensor) -> Tensor:
        return functools.reduce(torch.add, (part.of_distance(distance) for part in self.parts))

    def _heads(self) -> int:
        return self.parts[0]._heads()

    def _parameter(self) -> Tensor:
        return self.parts[0]._parameter()

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))


def _floating(x: Tensor, owner: str, name: str, shape: str, dim: int) -> Tensor:
    if isinstance(x, Tensor):
        _checks.dense(x, name)
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point or x.dim() != dim:
        raise TypeError(f"{owner} was given {_checks.given(x)} as {name}; it accepts a floating-point tensor {shape}.")
    return x
