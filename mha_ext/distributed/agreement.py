"""What the processes of a group must agree on before they attend together: found out with one small all_gather."""

from __future__ import annotations

import datetime
import zlib
from typing import Any

import torch
import torch.distributed as dist

# In this order; numbers are compared and shown, other values are compared by checksum.
FIELDS = (
    "batch size", "number of query heads", "number of key/value heads", "query/key head size", "value head size", "dtype",
    "need of gradients", "number of sinks", "scale", "softcap", "layout", "mask", "bias", "dropout_p",
)  # fmt: skip


def lengths_if_agreed(
    form: dict[str, Any] | None, lengths: tuple[int, int], rng_state: list[int], group: dist.ProcessGroup | None,
    timeout: datetime.timedelta | None,
) -> tuple[list[tuple[int, int]], list[int]]:  # fmt: skip
    """The (Sq, Sk) of each process, and the state of dropout of the first one. form: this process's FIELDS by name; None
    says that it refused its inputs.

    Raises: ValueError where forms differ, RuntimeError where another process refused its inputs or did not answer.
    """
    values = [form[name] for name in FIELDS] if form is not None else [0] * len(FIELDS)
    codes = [x if isinstance(x, int) else zlib.crc32(str(x).encode()) for x in values]
    # A group for both devices has a CPU backend; one of NCCL alone takes GPU tensors only.
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    mine = torch.tensor([form is not None, *codes, *rng_state, *lengths], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    wait([dist.all_gather(everyone, mine, group=group, async_op=True)], timeout, "the other processes")
    rows = torch.stack(everyone).tolist()
    refused = [rank for rank, row in enumerate(rows) if not row[0]]
    if form is not None and refused:
        raise RuntimeError(f"process {refused[0]} of the group refused its inputs; its error says why.")
    for i, (name, value) in enumerate(zip(FIELDS, values) if form is not None else ()):
        found = [row[1 + i] for row in rows]
        if len(set(found)) > 1:
            shown = f"{found}" if isinstance(value, int) else f"{value} here, something else elsewhere"
            raise ValueError(f"the processes of the group differ in {name} ({shown}); accepted: the same on all of them.")
    return [(row[-2], row[-1]) for row in rows], rows[0][-2 - len(rng_state) : -2]


def wait(works: list[Any], timeout: datetime.timedelta | None, whom: str) -> None:
    """Waits for communication; what torch raises becomes an error that says what was going on."""
    try:
        for work in works:
            work.wait() if timeout is None else work.wait(timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"communication with {whom} failed: they ended, are slower than the timeout, or called something else ({error})."
        ) from error
