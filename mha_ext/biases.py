"""Biases that depend on the distance of query and key alone: the kernels read them from one row of Sq + Sk - 1 numbers
per head, and no tensor of size Sq x Sk exists. Passed to attention as ``bias=``; gradients reach their parameters.

The distance of key j from query i is j - (i + o), with o = Sk - Sq: negative for keys before the query.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _checks
from ._pytrees import Container, Self


class Bias(Container):
    """Base of the biases. Subclasses say what a distance adds, and name the attributes that hold tensors in ``tensors``."""

    def of_distance(self, distance: Tensor) -> Tensor:
        """int64 [n] -> [H,n], what is added to the scores of each head at these distances, in the parameters' type."""
        raise NotImplementedError

    def _heads(self) -> int:
        raise NotImplementedError

    def lower(self, H: int, Sq: int, Sk: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[1,H,Sq+Sk-1] in dtype: of the distances from 1 - Sk to Sq - 1, as the ops take it."""
        name = type(self).__name__
        if self._heads() != H:
            raise ValueError(f"{name} is for {self._heads()} heads but q has {H}; accepted: one value per query head.")
        _checks.same_device(self._parameter(), name, device)
        return self._in(dtype).of_distance(torch.arange(1 - Sk, max(Sq, 1 - Sk), device=device)).to(dtype)[None]

    def _in(self: Self, dtype: torch.dtype) -> Self:
        """The same with parameters of this type or a wider one: in half types, a slope times a distance would be off by
        whole units. Gradients come in the parameters' own type."""
        return self._map(lambda x: x.to(torch.promote_types(x.dtype, dtype)))

    def to_dense(self, Sq: int, Sk: int) -> Tensor:
        """The bias as a tensor [H,Sq,Sk], float32 (float64 for parameters of float64)."""
        device = self._parameter().device
        i, j = torch.arange(Sq, device=device)[:, None], torch.arange(Sk, device=device)
        distance = j - i - (Sk - Sq)
        return self._in(torch.float32).of_distance(distance.flatten()).unflatten(1, distance.shape)

    def _parameter(self) -> Tensor:
        raise NotImplementedError


class ALiBi(Bias):
    """-slopes[h] * |distance| (Press et al., "Train short, test long", 2022). slopes: floating-point [H], may require grad.

    alibi_slopes(H) gives the paper's.
    """

    tensors = ("slopes",)

    def __init__(self, slopes: Tensor):
        self.slopes = _floating(slopes, "ALiBi", "slopes", "[H]", 1)

    def of_distance(self, distance: Tensor) -> Tensor:
        return -self.slopes[:, None] * distance.abs()

    def _heads(self) -> int:
        return self.slopes.shape[0]

    def _parameter(self) -> Tensor:
        return self.slopes

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

    def _parameter(self) -> Tensor:
        return self.table

    def __repr__(self) -> str:
        return f"T5Relative({_checks.text(self.table.shape)}, {self.max_distance}, {self.bidirectional})"


def _floating(x: Tensor, owner: str, name: str, shape: str, dim: int) -> Tensor:
    if isinstance(x, Tensor):
        _checks.dense(x, name)
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point or x.dim() != dim:
        given = (
            f"a {_checks.name_of(x.dtype)} tensor of shape {_checks.text(x.shape)}"
            if isinstance(x, Tensor)
            else f"a {type(x).__name__}"
        )
        raise TypeError(f"{owner} was given {given} as {name}; it accepts a floating-point tensor {shape}.")
    return x
