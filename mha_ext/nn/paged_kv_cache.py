"""A key/value cache in pages: sequences take memory as they grow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cached import attention_cached
from ..functional import attention
from ._cache_checks import is_int
from .kv_cache import KVCache, _bytes


class PagedKVCache(KVCache):
    """KVCache whose keys and values lie in a pool of pages, read in place (Kwon et al., "PagedAttention", 2023).

    Each sequence owns the pages that its length needs; append() takes them from the pool, truncate() and reset() give
    them back. Which page is whose is kept on the host as well: truncate(), reset() and reorder() wait for a GPU. Compiled
    code can only write and read: call reserve(S) before a compiled step that appends S positions.

    Args:
        batch, capacity, num_kv_heads, head_dim, value_dim, device, dtype, k_scale, v_scale: as KVCache's; the capacity
            is rounded up to whole pages.
        page_size: positions of a page; multiples of 64 are read as fast as a KVCache.
        pages: size of the pool; default: enough for all sequences at full capacity.

    Attributes:
        k, v: [pages,Hk,page_size,D], [pages,Hk,page_size,Dv].
        block_table: int64 [B, capacity / page_size], the page of each page_size positions; `pages` where there is none.
        lengths: int64 [B].
    """

    block_table: Tensor

    def __init__(
        self,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 64,
        pages: int | None = None,
        **options: Any,
    ) -> None:
        if options.get("window") is not None:
            raise ValueError("window was given; PagedKVCache has none: truncating at the front needs a KVCache.")
        sizes = {"batch": batch, "capacity": capacity, "page_size": page_size, "pages": 1 if pages is None else pages}
        for name, size in sizes.items():
            if not is_int(size) or size < 1:
                raise ValueError(f"{name} is {size!r}; PagedKVCache accepts a positive int.")
        columns = -(-capacity // page_size)
        pages = batch * columns if pages is None else pages
        self.page_size, self.pages = page_size, pages
        super().__init__(batch, columns * page_size, num_kv_heads, head_dim, **options)
        with torch.inference_mode(False):
            table = torch.full((batch, columns), pages, dtype=torch.int64, device=self.k.device)
        self.register_buffer("block_table", table, persistent=False)
        self._free = list(range(self.pages))[::-1]
        self._owned: list[list[int]] = [[] for _ in range(batch)]
        self._bounds = [0] * batch  # of the lengths

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def reserve(self, n: int) -> None:
        """Gives every sequence the pages for n positions more; append() does so itself, but not in compiled code.

        Raises:
            ValueError: the capacity or the pool is too small.
        """
        if not is_int(n) or n < 0:
            raise ValueError(f"n is {n!r}; reserve() accepts a number of positions, an int >= 0.")
        if self._lacks(n):
            self._give_back()
            if (lack := self._lacks(n)) is not None:
                raise ValueError(
                    f"{n} positions were to be appended to sequences of up to {max(self._bounds)}; {lack}: make a bigger "
                    "cache, or truncate() or reset() this one."
                )
        for b, owned in enumerate(self._owned):
            self._bounds[b] += n
            while len(owned) < self._pages_for(self._bounds[b]):
                owned.append(self._free.pop())
                self.block_table[b, len(owned) - 1] = owned[-1]

    def truncate(self, lengths: int | Tensor) -> None:
        super().truncate(lengths)
        self._give_back()

    def reset(self, sequences: Tensor | list[int] | int | None = None) -> None:
        super().reset(sequences)
        self._give_back()

    # --- Parts ----------------------------------------------------------------------------------------------------------

    def _storage(self) -> tuple[int, int]:
        return self.pages, self.page_size

    def _slots(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(self.block_table.gather(1, positions // self.page_size), positions % self.page_size)]

    def _attention(self, q: Tensor, *, pre_mix: Any, post_mix: Any, **options: Any) -> Tensor:
        if pre_mix is not None or post_mix is not None:
            return attention(q, *self._plain(q.dtype), pre_mix=pre_mix, post_mix=post_mix, **options)
        scales: dict[str, Any] = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return attention_cached(q, self.k, self.v, block_table=self.block_table, **scales, **options)

    def _plain(self, dtype: torch.dtype) -> list[Tensor]:
        table = self.block_table.clamp(max=self.pages - 1).flatten()
        shape = self.batch, -1
        pages = (_bytes(x).index_select(0, table).view(x.dtype) for x in super()._plain(dtype))
        return [x.unflatten(0, shape).transpose(1, 2).flatten(2, 3) for x in pages]

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _lacks(self, n: int) -> str | None:
        """What is too small for n positions more, or None."""
        if max(self._bounds) + n > self.capacity:
            return f"accepted: up to the capacity, {self.capacity}"
        wanted = sum(self._pages_for(bound + n) - len(owned) for bound, owned in zip(self._bounds, self._owned))
        if wanted > len(self._free):
            return f"{wanted} more pages are needed and {len(self._free)} of {self.pages} are free"
        return None

    def _reserve(self, n: int) -> None:
        if not torch.compiler.is_compiling():
            self.reserve(n)

    def _give_back(self) -> None:
        """Frees the pages that the lengths do not need."""
        self._bounds = self.lengths.tolist()
        for b, (length, owned) in enumerate(zip(self._bounds, self._owned)):
            kept = self._pages_for(length)
            if kept < len(owned):
                self._free += owned[kept:][::-1]
                del owned[kept:]
                self.block_table[b, kept:] = self.pages

    def _reorder_storage(self, indices: Tensor) -> None:
        self._give_back()
        sources = [self._owned[i] for i in indices.tolist()]
        if sum(map(len, sources)) > self.pages:
            raise ValueError(
                f"reorder() needs {sum(map(len, sources))} pages, as each sequence has its own; the pool has {self.pages}."
            )
        pages = torch.tensor([page for source in sources for page in source], dtype=torch.int64, device=self.k.device)
        contents = [_bytes(x).index_select(0, pages) for x in self._stored()]
        free = list(range(self.pages))[::-1]
        self._owned = [[free.pop() for _ in source] for source in sources]
        self._free, self._bounds = free, [self._bounds[i] for i in indices.tolist()]
        self.block_table.fill_(self.pages)
        for b, owned in enumerate(self._owned):
            self.block_table[b, : len(owned)] = torch.tensor(owned, dtype=torch.int64)
        pages = torch.tensor([page for owned in self._owned for page in owned], dtype=torch.int64, device=self.k.device)
        for x, content in zip(self._stored(), contents):
            _bytes(x).index_copy_(0, pages, content)
