"""Random histories of caches against attention that is computed anew: appended, attended to, taken back, forked, emptied, in
ragged steps, with masks and biases, in every kind of storage, and with calls in between that are refused."""

from __future__ import annotations

import random
from collections.abc import Callable

import cases
import pytest
import torch
from torch import Tensor

from mha_ext import biases, masks, nn
from mha_ext.cached import QUANTISED, quantise, scales_of

B, H, HK, D, DV = 2, 4, 2, 6, 5
MOST = 5  # sequences after a reorder
LONGEST = 160  # positions that masks and biases know


class Sequences:
    """What the cache should hold, as lists, and the attention to it by its definition, in float64."""

    def __init__(self, stored: torch.dtype):
        self.stored = stored
        self.k: list[list[Tensor]] = [[] for _ in range(B)]  # of each position [HK,D]
        self.v: list[list[Tensor]] = [[] for _ in range(B)]
        self.written = [0] * B
        self.pages: list[list[object]] = [[] for _ in range(B)]  # of a paged cache; forks have the same objects

    def lengths(self) -> list[int]:
        return [len(x) for x in self.k]

    def pages_after(self, S: int, page_size: int) -> list[list[object]]:
        """The pages of each sequence where S positions were to be written."""
        pages = [x[: -(-n // page_size)] for x, n in zip(self.pages, self.lengths())]
        for b, n in enumerate(self.lengths()):
            if S > 0 and n % page_size and sum(x is pages[b][-1] for other in pages for x in other) > 1:
                pages[b][-1] = object()
            pages[b] += [object() for _ in range(-(-(n + S) // page_size) - len(pages[b]))]
        return pages

    def keep_pages(self, page_size: int) -> None:
        for pages, n in zip(self.pages, self.lengths()):
            del pages[-(-n // page_size) :]

    def append(self, k: Tensor, v: Tensor, counts: list[int], at_once: int = LONGEST) -> None:
        if self.stored in QUANTISED:
            k, v = (quantise(x, scales_of(x, self.stored), self.stored).double() * scales_of(x, self.stored).double()[..., None] for x in (k, v))  # fmt: skip
        for b, n in enumerate(counts):
            for i in range(
                0, k.shape[2], at_once
            ):  # what is beyond the count is written, too, and overwrites the oldest
                end = len(self.k[b]) + min(i, n) + min(at_once, k.shape[2] - i)
                self.written[b] = max(self.written[b], end)
            for held, x in ((self.k, k), (self.v, v)):
                held[b] += list(x[b, :, :n].double().unbind(1))

    def attend(self, b: int, q: Tensor, visible: Tensor, bias: Tensor | None, window: int | None) -> Tensor:
        """q [H,n,D], the last n positions of sequence b; visible and bias [H,n,length] -> [H,n,DV]"""
        k, v = (torch.stack(x[b], 1).repeat_interleave(H // HK, 0) for x in (self.k, self.v))
        n, length = q.shape[1], k.shape[1]
        i, j = torch.arange(length - n, length)[:, None], torch.arange(length)
        visible = visible & (j <= i) & (j >= i - (length if window is None else window))
        scores = q.double() @ k.mT * D**-0.5 + (0 if bias is None else bias)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0)
        return weights @ v


def modifiers(gen: torch.Generator) -> tuple[dict[str, Callable], dict[str, Callable]]:
    """For each mask and bias: (b, length) -> what all queries of sequence b see, [1,H,length,length]; and what a call is
    given for queries at `positions` [B,S]."""
    ids = torch.randint(0, 3, (MOST, LONGEST), generator=gen)
    blocks = torch.rand(MOST, H, 20, 20, generator=gen) < 0.7
    dense = torch.rand(MOST, H, LONGEST, LONGEST, generator=gen) < 0.7
    first = torch.arange(LONGEST) - torch.randint(0, 30, (MOST, LONGEST), generator=gen)
    starts, ends = torch.tensor([3, 0, 7, 1, 0]), torch.tensor([30, 11, 20, 0, 4])
    of_all = {
        "window": masks.Window(4, 1), "top-left": masks.Causal("top_left"), "strided": masks.Strided(3, 1, 4),
        "dilated": masks.Dilated(2, 3, 2),
    }  # fmt: skip
    found: dict[str, tuple] = {n: (lambda b, s, m=m: m, lambda p, m=m: m) for n, m in of_all.items()}
    found["documents"] = (lambda b, s: masks.Documents(ids[b : b + 1, :s]), lambda p: masks.Documents(ids[: len(p)]))
    found["padding"] = (lambda b, s: masks.Padding(ends[b : b + 1]), lambda p: masks.Padding(ends[: len(p)]))
    found["left padding"] = (
        lambda b, s: masks.LeftPadding(starts[b : b + 1]),
        lambda p: masks.LeftPadding(starts[: len(p)]),
    )
    found["prefix"] = (lambda b, s: masks.Prefix(ends[b : b + 1]), lambda p: masks.Prefix(ends[: len(p)]))

    def blocks_of(b, s):
        n = -(-s // 8)
        return masks.BlockSparse(blocks[b : b + 1, :, :n, :n], 8)

    found["blocks"] = (blocks_of, lambda p: masks.BlockSparse(blocks[: len(p)], 8))

    def rows(x, p):  # of x [MOST,h,LONGEST,n], those at positions p [batch,S]
        return torch.stack([x[b][:, p[b].clamp(max=LONGEST - 1)] for b in range(len(p))])

    found["dense"] = (lambda b, s: masks.Dense(dense[b : b + 1, :, :s, :s]), lambda p: rows(dense, p))
    found["intervals"] = (
        lambda b, s: masks.Intervals(first[b : b + 1, :s], torch.full((1, 1), LONGEST)),
        lambda p: masks.Intervals(rows(first[:, None, :, None], p)[:, 0, :, 0], torch.full((1, 1), LONGEST)),
    )
    table, full = (cases.randn(gen, *shape, dtype=torch.float64) for shape in ((32, H), (MOST, H, LONGEST, LONGEST)))
    by_distance = {
        "alibi": biases.ALiBi(biases.alibi_slopes(H).double()), "t5": biases.T5Relative(table, bidirectional=False)
    }  # fmt: skip
    added: dict[str, tuple] = {
        n: (lambda b, s, x=x: x.to_dense(s, s), lambda p, x=x: x) for n, x in by_distance.items()
    }
    added["dense"] = (lambda b, s: full[b, :, :s, :s], lambda p: rows(full, p))
    return found, added


KINDS = {
    "contiguous": {"capacity": 40},
    "ring": {"capacity": 16, "window": 9},
    "paged": {"capacity": 40, "page_size": 4},
}


class History:
    def __init__(self, kind: str, stored: torch.dtype, seed: int):
        self.choose, self.gen = random.Random(seed), cases.generator(seed)
        options = dict(KINDS[kind]) | {"value_dim": DV, "dtype": stored}
        make = nn.PagedKVCache if kind == "paged" else nn.KVCache
        self.cache = make(B, options.pop("capacity"), HK, D, **options)
        self.dtype = torch.float32 if stored in QUANTISED else stored
        if stored not in QUANTISED:
            self.cache.k.fill_(torch.nan)
            self.cache.v.fill_(torch.nan)
        self.expected = Sequences(stored)
        self.masks, self.biases = modifiers(self.gen)

    def lengths(self) -> list[int]:
        return self.expected.lengths()

    @property
    def batch(self) -> int:
        return len(self.expected.k)

    def lacks_pages(self, S: int) -> bool:
        """Whether the pool is too small for S positions more; if not, they are taken from it."""
        if not isinstance(self.cache, nn.PagedKVCache):
            return False
        pages = self.expected.pages_after(S, self.cache.page_size)
        if len({x for some in pages for x in some}) > self.cache.pages:
            return True
        self.expected.pages = pages
        return False

    def count_pages(self) -> None:
        if isinstance(self.cache, nn.PagedKVCache):
            self.cache.truncate(self.cache.lengths)  # gives back what was reserved beyond counts
            self.expected.keep_pages(self.cache.page_size)
            used = {x for some in self.expected.pages for x in some}
            assert self.cache.pages - self.cache.free_pages == len(used)

    def room(self) -> int:
        return min(12, (LONGEST if self.cache.window is not None else self.cache.capacity) - max(self.lengths()))

    def new(self, S: int) -> list[Tensor]:
        return [cases.randn(self.gen, self.batch, h, S, d, dtype=self.dtype) for h, d in ((H, D), (HK, D), (HK, DV))]

    def counts(self, S: int) -> list[int] | None:
        return [self.choose.randint(0, S) for _ in range(self.batch)] if self.choose.random() < 0.4 else None

    def append(self) -> None:
        n = self.room() if self.cache.window is None else min(self.room(), self.cache.capacity - self.cache.window)
        S = self.choose.randint(0, n)
        _, k, v = self.new(S)
        counts = self.counts(S)
        given = None if counts is None else torch.tensor(counts)
        if self.lacks_pages(S):
            return self.refused(lambda: self.cache.append(k, v, given))
        self.cache.append(k, v, given)
        self.expected.append(k, v, counts or [S] * self.batch)

    def attend(self) -> None:
        S = self.choose.randint(0, self.room())
        q, k, v = self.new(S)
        counts, before = self.counts(S), torch.tensor(self.lengths())
        positions = before[:, None] + torch.arange(S)
        names = self.choose.sample(list(self.masks), self.choose.choice((0, 0, 1, 1, 2)))
        added = self.choose.choice((None, None, *self.biases))
        window = self.choose.choice((None, None, 0, 5))
        mask = None
        for name in names:
            part = self.masks[name][1](positions)
            part = masks.Dense(part) if isinstance(part, Tensor) else part
            mask = part if mask is None else mask & part
        bias = None if added is None else self.biases[added][1](positions)
        if isinstance(bias, Tensor):
            bias = bias.to(self.dtype)
        given = None if counts is None else torch.tensor(counts)
        if self.lacks_pages(S):
            return self.refused(lambda: self.cache.attend(q, k, v, counts=given, window=window, mask=mask, bias=bias))
        out = self.cache.attend(q, k, v, counts=given, window=window, mask=mask, bias=bias)
        at_once = LONGEST if self.cache.window is None else self.cache.capacity - self.cache.window
        self.expected.append(k, v, counts or [S] * self.batch, at_once)
        seen_back = self.cache.window if window is None else window
        for b, (n, length) in enumerate(zip(counts or [S] * self.batch, self.lengths())):
            assert not out[b, :, n:].any()
            if n == 0:
                continue
            visible = torch.ones(H, length, length, dtype=torch.bool)
            for name in names:
                visible = visible & self.masks[name][0](b, length).to_dense(1, H, length, length)[0]
            dense = None if added is None else self.biases[added][0](b, length)[:, length - n :]
            right = self.expected.attend(b, q[b, :, :n], visible[:, length - n :], dense, seen_back)
            close = {} if self.dtype == torch.float64 else {"atol": 2e-5, "rtol": 2e-5}
            torch.testing.assert_close(out[b, :, :n].double(), right, **close, msg=lambda m: f"{names}, {added}: {m}")

    def truncate(self) -> None:
        lengths = self.lengths()
        shorter = [max(0, n - self.choose.choice((0, 0, 1, 3, 7, n))) for n in lengths]
        too_far = self.cache.window is not None and any(
            max(0, m - self.cache.window) < w - self.cache.capacity and m < n
            for m, n, w in zip(shorter, lengths, self.expected.written)
        )
        if too_far:
            return self.refused(lambda: self.cache.truncate(torch.tensor(shorter)))
        self.cache.truncate(torch.tensor(shorter))
        for held in (self.expected.k, self.expected.v):
            for b, n in enumerate(shorter):
                del held[b][n:]
        self.count_pages()

    def reorder(self) -> None:
        n = self.choose.choice((self.batch, B, self.choose.randint(1, MOST)))
        order = [self.choose.randrange(self.batch) for _ in range(n)]
        self.cache.reorder(torch.tensor(order))
        e = self.expected
        e.keep_pages(getattr(self.cache, "page_size", 1))
        e.k, e.v, e.pages = ([list(x[b]) for b in order] for x in (e.k, e.v, e.pages))
        e.written = [e.written[b] for b in order]
        self.count_pages()

    def reset(self) -> None:
        some = [b for b in range(self.batch) if self.choose.random() < 0.5]
        flags = torch.tensor([b in some for b in range(self.batch)])
        which = self.choose.choice((None, self.batch - 1, some, flags))
        self.cache.reset(which)
        for b in range(self.batch) if which is None else (which,) if isinstance(which, int) else some:
            self.expected.k[b], self.expected.v[b], self.expected.written[b] = [], [], 0
        self.count_pages()

    def bad_call(self) -> None:
        q, k, v = self.new(3)
        c, n = self.cache, self.batch
        zeros = [0] * (n - 1)
        self.refused(self.choose.choice((
            lambda: c.append(k, v, torch.tensor([4, *zeros])),
            lambda: c.append(k, v, torch.tensor([*zeros, -1])),
            lambda: c.append(k, v[:, :, :2]),
            lambda: c.attend(q, k, v, window=-1),
            lambda: c.attend(q[:, :, :2], k, v),
            lambda: c.attend(q, k, v, mask=masks.Padding(torch.arange(n + 1))),
            lambda: c.attend(q, k, v, mask=torch.ones(2, LONGEST) > 0),
            lambda: c.attend(q, k, v, bias=biases.ALiBi(torch.ones(3))),
            lambda: c.attend(q, k, v, sinks=torch.zeros(1)),
            lambda: c.append(*(x.repeat(1, 1, 50, 1) for x in (k, v))),
            lambda: c.truncate(-1),
            lambda: c.truncate(1.5),
            lambda: c.reorder(torch.tensor([0, n])),
            lambda: c.reset(n),
        )))  # fmt: skip

    def refused(self, call: Callable) -> None:
        with pytest.raises((ValueError, TypeError)):
            call()
        assert self.cache.lengths.tolist() == self.lengths()


def run(kind: str, stored: torch.dtype, seed: int) -> None:
    history = History(kind, stored, seed)
    h = history
    actions = [h.append] + [h.attend] * 4 + [h.truncate] * 2 + [h.reorder, h.reorder, h.reset, h.bad_call, h.bad_call]
    for _ in range(25):
        history.choose.choice(actions)()
        assert history.cache.lengths.tolist() == history.lengths()


@pytest.mark.random(seconds=1.5)
@pytest.mark.parametrize("stored", [torch.float64, *QUANTISED], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_any_history(kind, stored, seeds):
    for seed in seeds:
        run(kind, stored, seed)
