"""Loads the compiled module, which registers the ops, and gives them what torch asks for besides: fake kernels.

Arguments and shapes are those of the schemas in csrc/torch/schemas.cpp.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._checks import accumulate_dtype, dense, given

try:
    from .. import _C
except ImportError as error:
    raise ImportError(
        f"mha_ext's compiled part did not load ({error}); build it for the torch that is installed "
        f"({torch.__version__}) with: pip install --no-build-isolation ."
    ) from error

build_info: dict[str, Any] = _C.build_info()
cpu_isa, attention_plan = _C.cpu_isa, _C.attention_plan
built_isas, available_isas = _C.built_isas, _C.available_isas
# Why CUDA tensors are refused, or None.
without_cuda: str | None = None if build_info["cuda"] else build_info["cuda_reason"]
if build_info["cuda"] and torch.version.cuda is not None:
    from .. import _C_cuda  # registers the CUDA kernels

    if importlib.util.find_spec("mha_ext._C_cuda_sm90"):  # not built where other architectures were asked for
        from .. import _C_cuda_sm90

        _C_cuda.use_sm90(_C_cuda_sm90.kernels())

library = torch.library.Library("mha_ext", "FRAGMENT")
library.define(
    "draw_rng_state(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
)
# attention_fwd of q, k, v that are slices of one tensor [B,S,H+2*Hk,D]
_modifiers = str(torch.ops.mha_ext.attention_fwd.default._schema).split("Tensor v, ")[1].split(", bool return_weights")[0]
library.define(
    f"attention_packed_fwd(Tensor qkv, SymInt num_heads, {_modifiers}, bool deterministic) -> (Tensor out, Tensor lse, "
    "Tensor lse_rest)"
)

attention_cached = torch.ops.mha_ext.attention_cached.default  # has no gradient
dropout_mask = torch.ops.mha_ext.dropout_mask.default


def attention_kernels(deterministic: bool, *arguments: Any) -> list[tuple[str, str | None]]:
    """What attention_fwd(*arguments) on a GPU would run, without running it, and backward after it: for each the kernel's
    name and why it is none of those for compute capability 9.0, or None. Empty for fake tensors."""
    _C_cuda.note_kernels(deterministic)
    try:
        with torch.no_grad():
            torch.ops.mha_ext.attention_fwd(*arguments)
    finally:
        kernels = _C_cuda.noted_kernels()
    return [(name, why) for name, why in kernels if name is not None]


@torch.library.impl(library, "draw_rng_state", "CompositeExplicitAutograd")
def _draw_rng_state(like: Tensor) -> Tensor:
    """int64[6] (seed, offset, and where dropout_part says that the problem lies) on like's device, from torch's default
    CPU generator: what torch.manual_seed seeds, what checkpointing saves and restores, and what compiled code draws from
    too."""
    state = torch.tensor([0, 0, *_place.get()], dtype=torch.int64, device="cpu")
    state[:2].random_(-(2**63), 2**63 - 1)
    return state.to(like.device)


def draw_rng_state(like: Tensor) -> Tensor:
    """A new state on like's device. The op itself sees tensors on the CPU, whose generator it draws from: where compiled code
    computes an op again (checkpointing), it puts back the generator of the device of the op's tensors."""
    on_cpu = like if like.device.type == "cpu" else like.new_empty(0, device="cpu")
    state: Tensor = torch.ops.mha_ext.draw_rng_state.default(on_cpu)
    return state.to(like.device)


_place = contextvars.ContextVar("place of a part in its whole", default=(0, 0, 0, 0))


@contextlib.contextmanager
def dropout_part(*, batch: int = 0, head: int = 0, query: int = 0, key: int = 0) -> Iterator[None]:
    """Says that calls of attention inside are parts of a larger problem, whose first batch element, query head, query and
    key are these (key a multiple of 4): from the same torch.manual_seed, dropout then drops what the whole would drop there.

    So a model gives the same result, to rounding, in one process and in several that share out batch, heads or sequence.
    Modules that HeadParallel shards, DTensors and ring_attention say so themselves. A given rng_state says where it is
    used as its numbers 2 to 5: (seed, offset, batch, head, query, key).

    Raises:
        ValueError: numbers below 0, or a key that is no multiple of 4.
    """
    place = batch, head, query, key
    if any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in place) or key % 4:
        raise ValueError(
            f"batch, head, query, key are {', '.join(map(given, place))}; accepted: numbers from 0, key a multiple of 4."
        )
    before = _place.set(place)
    try:
        yield
    finally:
        _place.reset(before)


def part_of_state(rng_state: Tensor, batch: int = 0, head: int = 0, query: int = 0, key: int = 0) -> Tensor:
    """A state of dropout, [2] or [6], for the part of its problem that begins there: [6]."""
    state = torch.cat((rng_state, rng_state.new_zeros(6 - len(rng_state))))
    return state + state.new_tensor([0, 0, batch, head, query, key])


# --- Tensors that are not dense ---------------------------------------------------------------------------------------

OTHER_LAYOUTS = (
    "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "MkldnnCPU", "NestedTensorCPU", "NestedTensorCUDA",
)  # fmt: skip


def _refuse_other_layouts(name: str) -> None:
    """Kernels that say what was given. The dispatcher calls them, so that a call with dense tensors pays nothing."""
    arguments = [a.name for a in getattr(torch.ops.mha_ext, name).default._schema.arguments]

    def refuse(*args: Any, **kwargs: Any) -> None:
        for argument, x in (*zip(arguments, args), *kwargs.items()):
            if isinstance(x, Tensor):
                dense(x, argument)

    for key in OTHER_LAYOUTS:
        library.impl(name, refuse, key)


for _name in (
    "attention_fwd", "attention_bwd", "attention_cached", "attention_packed_bwd", "attention_mixed_fwd", "attention_mixed_bwd",
    "masked_softmax_fwd", "masked_softmax_bwd", "split_heads", "merge_heads", "dropout_mask",
):  # fmt: skip
    _refuse_other_layouts(_name)


# --- Fake kernels: shapes, strides and types without data -------------------------------------------------------------


def _in_order_of(x: Tensor, last: int) -> Tensor:
    """[n0,n1,n2,last], dense, the first three dimensions in the order that they have in x's memory."""
    sizes = [*x.shape[:3], last]
    order = sorted(range(3), key=x.stride, reverse=True)
    dense = x.new_empty([sizes[d] for d in order] + [last])
    return dense.permute([*(order.index(d) for d in range(3)), 3])


def _lse_of(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:3], dtype=accumulate_dtype(x.dtype))


def _dbias_of(bias: Tensor | None, need_dbias: bool, like: Tensor) -> Tensor:
    return bias.new_empty(bias.shape) if need_dbias and bias is not None else like.new_empty([0], dtype=accumulate_dtype(like.dtype))


@torch.library.register_fake("mha_ext::attention_fwd", lib=library)
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, ...]:
    weights = [*q.shape[:3], k.shape[2]] if args[-2] else [0]
    return _in_order_of(q, v.shape[3]), _lse_of(q), _lse_of(q), q.new_empty(weights)


@torch.library.register_fake("mha_ext::attention_cached", lib=library)
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return _in_order_of(q, v.shape[3]), _lse_of(q)


@torch.library.register_fake("mha_ext::attention_bwd", lib=library)
def _(
    dout: Tensor, dlse: Tensor | None, dweights: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    lse_rest: Tensor, bias: Tensor | None, *args: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    sinks, need_dbias = args[14], args[-2]
    gradients = _in_order_of(q, q.shape[3]), _in_order_of(k, k.shape[3]), _in_order_of(v, v.shape[3])
    dsinks = q.new_empty([q.shape[1] if sinks is not None else 0], dtype=accumulate_dtype(q.dtype))
    return *gradients, _dbias_of(bias, need_dbias, q), dsinks


def packed_slices(qkv: Tensor, num_heads: int) -> list[Tensor]:
    """q [B,H,S,D], k and v [B,Hk,S,D] of qkv [B,S,H+2*Hk,D], as views."""
    num_kv_heads = (qkv.shape[2] - num_heads) // 2
    return [x.transpose(1, 2) for x in qkv.split((num_heads, num_kv_heads, num_kv_heads), 2)]


@torch.library.impl(library, "attention_packed_fwd", "CompositeExplicitAutograd")
def _(qkv: Tensor, num_heads: int, *modifiers: Any) -> tuple[Tensor, ...]:
    op = torch.ops.mha_ext.attention_fwd.default
    return op(*packed_slices(qkv, num_heads), *modifiers[:-1], False, modifiers[-1])[:3]


@torch.library.register_fake("mha_ext::attention_packed_fwd", lib=library)
def _(qkv: Tensor, num_heads: int, *modifiers: Any) -> tuple[Tensor, ...]:
    q = packed_slices(qkv, num_heads)[0]
    return _in_order_of(q, q.shape[3]), _lse_of(q), _lse_of(q)


@torch.library.register_fake("mha_ext::attention_packed_bwd", lib=library)
def _(
    dout: Tensor, dlse: Tensor | None, dweights: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    lse_rest: Tensor, bias: Tensor | None, *args: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    dsinks = lse.new_empty([q.shape[1] if args[14] is not None else 0])
    dqkv = q.new_empty([q.shape[0], q.shape[2], q.shape[1] + 2 * k.shape[1], q.shape[3]])
    return dqkv, _dbias_of(bias, args[-2], q), dsinks


@torch.library.register_fake("mha_ext::attention_mixed_fwd", lib=library)
def _(
    q: Tensor, k: Tensor, v: Tensor, pre_mix: Tensor | None, post_mix: Tensor | None, *args: Any
) -> tuple[Tensor, ...]:
    weights = [*q.shape[:3], k.shape[2]] if args[-2] else [0]
    return _in_order_of(q, v.shape[3]), _lse_of(q), _lse_of(q), q.new_empty(weights)


@torch.library.register_fake("mha_ext::attention_mixed_bwd", lib=library)
def _(
    dout: Tensor, dlse: Tensor | None, dweights: Tensor | None, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, lse_rest: Tensor,
    pre_mix: Tensor | None, post_mix: Tensor | None, bias: Tensor | None, *args: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    sinks, need_dbias = args[14], args[-2]
    gradients = _in_order_of(q, q.shape[3]), _in_order_of(k, k.shape[3]), _in_order_of(v, v.shape[3])
    sums = ([q.shape[1]], sinks), ([q.shape[1]] * 2, pre_mix), ([q.shape[1]] * 2, post_mix)
    dsinks, dpre_mix, dpost_mix = (q.new_empty(n if x is not None else [0], dtype=lse.dtype) for n, x in sums)
    return *gradients, _dbias_of(bias, need_dbias, q), dsinks, dpre_mix, dpost_mix


@torch.library.register_fake("mha_ext::masked_softmax_fwd", lib=library)
def _(scores: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape), _lse_of(scores)


@torch.library.register_fake("mha_ext::masked_softmax_bwd", lib=library)
def _(dout: Tensor, scores: Tensor, lse: Tensor, bias: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape), _dbias_of(bias, args[-1], scores)


@torch.library.register_fake("mha_ext::split_heads", lib=library)
def _(x: Tensor, num_heads: int, bias: Tensor | None = None) -> Tensor:
    return x.new_empty([x.shape[0], num_heads, x.shape[1], x.shape[2] // num_heads])


@torch.library.register_fake("mha_ext::merge_heads", lib=library)
def _(x: Tensor, mix: Tensor | None = None) -> Tensor:
    return x.new_empty([x.shape[0], x.shape[2], x.shape[1] * x.shape[3]])


@torch.library.register_fake("mha_ext::dropout_mask", lib=library)
def _(rng_state: Tensor, p: float, B: int, H: int, Sq: int, Sk: int) -> Tensor:
    return rng_state.new_empty([B, H, Sq, Sk], dtype=torch.bool)


@torch.library.register_fake("mha_ext::draw_rng_state", lib=library)
def _(like: Tensor) -> Tensor:
    return like.new_empty([6], dtype=torch.int64)


@torch.library.register_vmap("mha_ext::draw_rng_state", lib=library)
def _(info: Any, in_dims: Any, like: Tensor) -> Any:
    if info.randomness == "error":
        raise ValueError(
            'dropout was asked for under vmap(randomness="error"); accepted there: randomness="different" or "same".'
        )
    return torch.ops.mha_ext.draw_rng_state(like), None  # the rules of the ops (vmap.py) tell the mapped problems apart
