"""How a sequence is shared out over processes, and what a mask of the whole says about one block of it."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._checks import text
from ..masks import NO_MASK, Mask, MaskArgs

LAYOUTS = "contiguous", "zigzag"


class Piece(NamedTuple):
    """A run of a sequence on one process."""

    start: int  # position in the whole sequence of its first element
    local: int  # position in the process's own part
    length: int

    def of(self, x: Tensor, dim: int = 2) -> Tensor:
        return x.narrow(dim, self.local, self.length)


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; accepted: {' or '.join(map(repr, LAYOUTS))}.")


def share_out(length: int, processes: int, layout: str) -> list[list[Piece]]:
    """The pieces of each process of a sequence that is cut evenly (up to one element)."""
    if layout == "contiguous":
        bounds = [p * length // processes for p in range(processes + 1)]
        return pieces_of([b - a for a, b in itertools.pairwise(bounds)], layout)
    bounds = [c * length // (2 * processes) for c in range(2 * processes + 1)]
    result = []
    for p in range(processes):
        first, last = ((bounds[c], bounds[c + 1] - bounds[c]) for c in (p, 2 * processes - 1 - p))
        result.append([Piece(first[0], 0, first[1]), Piece(last[0], first[1], last[1])])
    return result


def pieces_of(lengths: list[int], layout: str) -> list[list[Piece]]:
    """The pieces of each process, from the length of its part."""
    if layout == "contiguous":
        starts = [sum(lengths[:p]) for p in range(len(lengths))]
        return [[Piece(start, 0, length)] for start, length in zip(starts, lengths)]
    result = share_out(sum(lengths), len(lengths), layout)
    expected = [sum(piece.length for piece in pieces) for pieces in result]
    if expected != lengths:
        raise ValueError(
            f"the parts of a sequence of {sum(lengths)} have lengths {text(lengths)}; accepted in the layout 'zigzag': "
            f"{text(expected)}: take x.index_select(dim, sequence_positions(length, group, layout='zigzag'))."
        )
    return result


def sequence_positions(length: int, group: dist.ProcessGroup | None = None, *, layout: str = "contiguous") -> Tensor:
    """The positions, int64, of a sequence of this length that this process has: x.index_select(dim, positions) is its part.

    "contiguous": a run each, in the order of the ranks, lengths differing by at most one. "zigzag": the sequence is cut
    into two runs per process, and process r of n takes runs r and 2n-1-r, so that a causal mask gives everybody the same
    work (Brandon et al., "Striped Attention", 2023, balance it likewise by stripes).

    Raises:
        ValueError: another layout.
    """
    check_layout(layout)
    pieces = share_out(length, dist.get_world_size(group), layout)[dist.get_rank(group)]
    return torch.cat([torch.arange(piece.start, piece.start + piece.length) for piece in pieces])


def mask_of_block(args: MaskArgs, queries: Piece, keys: Piece, offset: int) -> MaskArgs | None:
    """What a mask of the whole says about the queries and keys of two pieces; None if they see nothing of each other.

    offset: Sk - Sq of the whole sequences. Nothing depends on the values of tensors.
    """
    nq, nk = queries.length, keys.length
    if nq == 0 or nk == 0:
        return None
    # Query i of the piece sees keys i + (nk - nq) - left <= j <= i + (nk - nq) + right of the piece.
    corner = queries.start - keys.start - (nk - nq)
    left = None if args.left is None else args.left - (corner + offset)
    right = None if args.right is None else args.right + (corner + offset)
    if args.top_left:
        right = corner if right is None else min(right, corner)
    if (right is not None and right <= -nk) or (left is not None and left <= -nq):
        return None
    rows, columns = (slice(piece.start, piece.start + piece.length) for piece in (queries, keys))

    def cut(x: Tensor | None, dim: int, where: slice) -> Any:
        return x if x is None or x.shape[dim] == 1 else x.narrow(dim, where.start, where.stop - where.start)

    return NO_MASK._replace(
        mask=cut(cut(args.mask, 2, rows), 3, columns),
        begin=None if args.begin is None else cut(args.begin, 1, rows) - keys.start,
        end=None if args.end is None else cut(args.end, 1, rows) - keys.start,
        query_ids=None if args.query_ids is None else args.query_ids[:, rows],
        key_ids=None if args.key_ids is None else args.key_ids[:, columns],
        left=None if left is None or left >= nk - 1 else left,
        right=None if right is None or right >= nq - 1 else right,
    )


def bias_of_block(bias: Any, queries: Piece, keys: Piece, Sq: int) -> Any:
    """A view of the part of a bias that is of these queries and keys. bias: of distances in the whole sequence, of which Sq
    are queries, [1,H,Sq+Sk-1]; or of this process's queries and all keys."""
    if bias is None:
        return None
    if bias.dim() == 3:  # key j of query i is number j - i + Sq - 1
        first = keys.start - queries.start + Sq - queries.length
        return bias.narrow(2, first, queries.length + keys.length - 1)
    rows = bias if bias.shape[2] == 1 else queries.of(bias)
    return rows if bias.shape[3] == 1 else rows.narrow(3, keys.start, keys.length)


@functools.lru_cache(maxsize=64)
def last_step(
    queries: tuple[tuple[Piece, ...], ...], keys: tuple[tuple[Piece, ...], ...], offset: int, left: int | None,
    right: int | None, top_left: bool,
) -> int:  # fmt: skip
    """The last t for which the queries of any process r see, in a band, keys of process r - t (modulo their number)."""
    band, n = NO_MASK._replace(left=left, right=right, top_left=top_left), len(keys)
    for t in reversed(range(1, n)):
        pairs = (pair for r in range(n) for pair in itertools.product(queries[r], keys[(r - t) % n]))
        if any(mask_of_block(band, *pair, offset) is not None for pair in pairs):
            return t
    return 0


def refuse_other_masks(args: MaskArgs, mask: Mask | Tensor | None) -> None:
    known = {"mask", "begin", "end", "query_ids", "key_ids", "left", "right", "top_left"}
    for name, value in args._asdict().items():
        if name not in known and value is not getattr(NO_MASK, name):
            raise ValueError(f"the mask is {mask!r}; accepted over several processes: masks without {name}.")
