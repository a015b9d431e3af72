"""Attention over several processes, on torch.distributed: DTensors, sharded heads, sharded sequences."""

from .._ops import sharding  # noqa: F401  (registers how the ops may be sharded)
from .head_parallel import HeadParallel
from .ring import ring_attention
from .sequence import sequence_positions

__all__ = ["HeadParallel", "ring_attention", "sequence_positions"]
