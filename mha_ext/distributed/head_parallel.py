"""Tensor parallelism of the attention modules: each process has some of the heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .._ops import draw_rng_state, part_of_state
from ..nn import CrossAttention, SelfAttention

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "q_proj": ColwiseParallel,
    "k_proj": ColwiseParallel,
    "v_proj": ColwiseParallel,
    # Their weights are one for all heads: this style sums the gradients over the processes.
    "q_norm": lambda: SequenceParallel(sequence_dim=1, use_local_output=True),
    "k_norm": lambda: SequenceParallel(sequence_dim=1, use_local_output=True),
}


class _OneOfFewHeads(ParallelStyle):
    """A projection to fewer heads than there are processes: each process makes them all, and uses the one that its query
    heads share; the gradients of the parameters are summed over the processes."""

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        head = device_mesh.get_local_rank() * self.heads // device_mesh.size()

        def own_head(_: nn.Module, __: Any, out: Any) -> Any:
            return out.to_local(grad_placements=[Partial()]).unflatten(-1, (self.heads, -1))[..., head, :]

        module = distribute_module(module, device_mesh)
        module.register_forward_hook(own_head)
        return module


class HeadParallel(ParallelStyle):
    """Shards a SelfAttention or a CrossAttention by heads over a mesh (Shoeybi et al., "Megatron-LM", 2019); for parallelize_module.

    Query, key and value projections are sharded by rows, the output projection by columns. A packed projection is
    unpacked first, because a contiguous share of its rows is not a share of each part: parameters become q_proj, k_proj
    and v_proj, whose state dict loads into packed modules as well. Apply it before building the optimizer. Masks and
    biases that differ between heads must hold the heads of this process. Dropout drops what the whole module would: its
    state is that of the mesh's first process. Of fewer key/value heads than processes, each process computes them all and
    keeps the one that it needs.

    Args:
        input_layouts: how the input x [B,S,d_model], and the context, (local tensors) are laid out: Replicate(), or Shard(1)
            for sequence parallelism around the module. They are gathered.
        output_layouts: how the output is to be laid out, likewise.

    Raises:
        ValueError, TypeError: a module that is neither, has parameters of other kinds, or heads that do not divide evenly
            among the processes.
    """

    def __init__(self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None):
        super().__init__()
        self.input_layouts = Replicate() if input_layouts is None else input_layouts
        self.output_layouts = Replicate() if output_layouts is None else output_layouts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, (SelfAttention, CrossAttention)):
            raise TypeError(
                f"HeadParallel was given a {type(module).__name__}; accepted: mha_ext.nn.SelfAttention and CrossAttention."
            )
        processes, heads = device_mesh.size(), module.num_heads
        if heads % processes or (module.num_kv_heads % processes and processes % module.num_kv_heads):
            raise ValueError(
                f"{heads} query and {module.num_kv_heads} key/value heads do not divide evenly among {processes} processes; "
                "accepted: a number of processes that divides num_heads, and divides num_kv_heads or is a multiple of it."
            )
        module.unpack()
        module.head_shards = processes

        def draw(like: Tensor) -> Tensor:
            state = distribute_tensor(draw_rng_state(torch.empty(0, device=like.device)), device_mesh, [Replicate()]).to_local()
            return part_of_state(state, head=device_mesh.get_local_rank() * (heads // processes))

        module.draw_rng_state = draw
        known = {"sinks", *(f"{name}.{kind}" for name in (*_STYLES, "out_proj") for kind in ("weight", "bias"))}
        other = [name for name, _ in module.named_parameters() if name not in known]
        if other:
            raise ValueError(
                f"the module has the parameter {other[0]}, which HeadParallel cannot shard; accepted: those of projections, norms "
                "and sinks: leave it out."
            )
        plan = {name: style() for name, style in _STYLES.items() if getattr(module, name) is not None}
        if module.num_kv_heads < processes:
            plan.update({name: _OneOfFewHeads(module.num_kv_heads) for name in ("k_proj", "v_proj")})
        if module.sinks is not None:
            module.sinks = nn.Parameter(
                distribute_tensor(module.sinks.detach(), device_mesh, [Shard(0)]), module.sinks.requires_grad
            )
        parallelize_module(
            module, device_mesh, {**plan, "out_proj": RowwiseParallel(output_layouts=self.output_layouts)}
        )

        inputs = ("x", "context") if isinstance(module, CrossAttention) else ("x",)

        def gather_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Once for all projections, so that backward sums their gradients before it communicates.
            given = [*args, *(kwargs.pop(name) for name in inputs[len(args) :])]
            for i, x in enumerate(given[: len(inputs)]):
                if not isinstance(x, DTensor):
                    x = DTensor.from_local(x, device_mesh, [self.input_layouts], run_check=False)
                given[i] = x.redistribute(placements=[Replicate()])
            return tuple(given), kwargs

        module.register_forward_pre_hook(gather_input, with_kwargs=True)
        return module
