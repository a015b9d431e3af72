"""A key/value cache in pages: sequences take memory as they grow."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from ..cached import attention_cached
from ._cache_checks import positive
from .kv_cache import KVCache, _bytes


class PagedKVCache(KVCache):
    """KVCache whose keys and values lie in a pool of pages, read in place (Kwon et al., "PagedAttention", 2023).

    append() takes pages from the pool as sequences grow, truncate(), reset() and reorder() give back what no sequence needs.
    reorder() copies no keys: a sequence and its copies have the pages that were written in common. Before one of them
    writes to its last page, partly filled, it gets a copy of it, but for the last that has it. So N answers to a prompt
    take its pages once, and N beams what they have in common:

        cache.reorder(torch.tensor([0, 1, 2, 0]))              # a fourth sequence, like the first,
        cache.truncate(torch.tensor([c, c, c, prefix]))        # as far as they are the same

    Which page is whose is kept on the host as well: truncate(), reset() and reorder() wait for a GPU and are not for
    compiled code, which can only write and read: call reserve(S) before a compiled step that appends S positions.

    Args:
        batch, capacity, num_kv_heads, head_dim, value_dim, device, dtype, k_scale, v_scale: as KVCache's; the capacity
            is rounded up to whole pages.
        page_size: positions of a page; multiples of 64 are read as fast as a KVCache.
        pages: size of the pool, which stays as it is; default: enough for `batch` sequences at full capacity.

    Attributes:
        k, v: [pages,Hk,page_size,D], [pages,Hk,page_size,Dv].
        block_table: int64 [B, capacity / page_size], the page of each page_size positions; `pages` where there is none.
        lengths: int64 [B].
    """

    block_table: Tensor
    _ready: Tensor  # int64 [B], positions for which there are pages that no other sequence has, or nothing to write

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
        batch, capacity, page_size = positive("PagedKVCache", batch=batch, capacity=capacity, page_size=page_size)
        columns = -(-capacity // page_size)
        (pages,) = positive("PagedKVCache", pages=batch * columns if pages is None else pages)
        self.page_size, self.pages = page_size, pages
        super().__init__(batch, columns * page_size, num_kv_heads, head_dim, **options)
        with torch.inference_mode(False):
            table = torch.full((batch, columns), pages, dtype=torch.int64, device=self.k.device)
            ready = torch.zeros(batch, dtype=torch.int64, device=self.k.device)
        self.register_buffer("block_table", table, persistent=False)
        self.register_buffer("_ready", ready, persistent=False)
        self._free = list(range(self.pages))[::-1]
        self._users = [0] * self.pages  # how many sequences have each page
        self._owned: list[list[int]] = [[] for _ in range(batch)]
        self._bounds = [0] * batch  # of the lengths

    @property
    def free_pages(self) -> int:
        """Pages of the pool that no sequence has."""
        return len(self._free)

    def reserve(self, n: int) -> None:
        """Gives every sequence pages of its own for n positions more; append() does so itself, but not in compiled code.

        Raises:
            ValueError: the capacity or the pool is too small.
        """
        if _checks.at_least(0, n) is None:
            raise ValueError(f"n is {n!r}; reserve() accepts a number of positions, an int >= 0.")
        if self._lacks(n):
            self._give_back()
            if (lack := self._lacks(n)) is not None:
                raise ValueError(
                    f"{n} positions were to be appended to sequences of up to {max(self._bounds)}; {lack}: make a bigger "
                    "cache, or truncate() or reset() this one."
                )
        copied: list[tuple[int, int]] = []  # from, to
        changed: list[tuple[int, int, int]] = []  # sequence, column, page
        for b, owned in enumerate(self._owned):
            if n > 0 and (page := self._shared_end(b)) is not None:
                column = self._bounds[b] // self.page_size
                owned[column] = self._new_page()
                self._users[page] -= 1
                copied.append((page, owned[column]))
                changed.append((b, column, owned[column]))
            self._bounds[b] += n
            while len(owned) < self._pages_for(self._bounds[b]):
                owned.append(self._new_page())
                changed.append((b, len(owned) - 1, owned[-1]))
        if changed:
            self._copy_pages(copied)
            rows, columns, pages = torch.tensor(changed, device=self.k.device).unbind(1)
            self.block_table[rows, columns] = pages
            self._tell_what_is_ready()

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

    def _in_place(self, q: Tensor, **options: Any) -> Tensor:
        scales: dict[str, Any] = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return attention_cached(q, self.k, self.v, block_table=self.block_table, **scales, **options)

    def _plain(self, dtype: torch.dtype) -> list[Tensor]:
        table = self.block_table.clamp(max=self.pages - 1).flatten()
        shape = self.batch, -1
        pages = (_bytes(x).index_select(0, table).view(x.dtype) for x in super()._plain(dtype))
        return [x.unflatten(0, shape).transpose(1, 2).flatten(2, 3) for x in pages]

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _shared_end(self, b: int) -> int | None:
        """The page that sequence b would write to next, if it is partly filled and others have it, too. (Where the bound is
        no length, there was a reserve() since they last had a page in common: what it writes to is its own.)"""
        column, filled = divmod(self._bounds[b], self.page_size)
        page = self._owned[b][column] if filled else None
        return page if page is not None and self._users[page] > 1 else None

    def _new_page(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _copy_pages(self, copied: list[tuple[int, int]]) -> None:
        if copied:
            source, target = torch.tensor(copied, device=self.k.device).unbind(1)
            for x in self._stored():
                _bytes(x).index_copy_(0, target, _bytes(x).index_select(0, source))

    def _tell_what_is_ready(self) -> None:
        ready = [
            (len(owned) if self._shared_end(b) is None else self._bounds[b] // self.page_size) * self.page_size
            for b, owned in enumerate(self._owned)
        ]
        self._ready.copy_(torch.tensor(ready))

    def _lacks(self, n: int) -> str | None:
        """What is too small for n positions more, or None."""
        if max(self._bounds) + n > self.capacity:
            return f"accepted: up to the capacity, {self.capacity}"
        if (wanted := self._wanted(n)) > len(self._free):
            return f"{wanted} more pages are needed and {len(self._free)} of {self.pages} are free"
        return None

    def _wanted(self, n: int) -> int:
        """How many pages n positions more take from the pool."""
        wanted = sum(self._pages_for(bound + n) - len(owned) for bound, owned in zip(self._bounds, self._owned))
        if n > 0:
            writers = Counter(self._shared_end(b) for b in range(self.batch))
            wanted += sum(min(m, self._users[page] - 1) for page, m in writers.items() if page is not None)
        return wanted

    def _grow(self, capacity: int) -> None:
        more = self._pages_for(capacity) - self.block_table.shape[1]
        with torch.inference_mode(False):
            self.block_table = torch.nn.functional.pad(self.block_table, (0, more), value=self.pages)
        self.capacity += more * self.page_size

    def _grow_pool(self, pages: int) -> None:
        self._resize(0, pages)
        self.block_table.masked_fill_(self.block_table == self.pages, pages)
        self._free = list(range(self.pages, pages))[::-1] + self._free
        self._users += [0] * (pages - self.pages)
        self.pages = pages

    def _reserve(self, n: int) -> None:
        if torch.compiler.is_compiling():
            room = (self.lengths <= self._ready - n).all()
            torch._assert_async(room, f"{n} positions were appended to a PagedKVCache without reserve({n}) before.")
        else:
            self.reserve(n)

    def _give_back(self) -> None:
        """Frees the pages that the lengths do not need."""
        self._bounds = self.lengths.tolist()
        for b, (length, owned) in enumerate(zip(self._bounds, self._owned)):
            kept = self._pages_for(length)
            if kept < len(owned):
                self._release(owned[kept:][::-1])
                del owned[kept:]
                self.block_table[b, kept:] = self.pages
        self._tell_what_is_ready()

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)

    def _reorder_storage(self, indices: Tensor) -> None:
        self._give_back()
        before, order = self._owned, indices.tolist()
        self._owned, self._bounds = [list(before[i]) for i in order], [self._bounds[i] for i in order]
        for page in (page for owned in self._owned for page in owned):
            self._users[page] += 1
        for owned in before:
            self._release(owned)
        self._take("block_table", indices)
        self._take("_ready", indices)
        self._tell_what_is_ready()
