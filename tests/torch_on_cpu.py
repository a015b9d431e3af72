"""torch's own operations on CUDA tensors, computed by its CPU kernels on copies, for the simulated device of tests/ptxsim, which cannot run
torch's CUDA kernels (they carry no PTX). What is around this project's kernels then runs there as on a GPU: autograd, torch.compile,
torch.func, nested tensors, modules and optimisers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import warnings

import torch
from torch.utils import _pytree as pytree


def simulated() -> bool:
    return torch.cuda.get_device_name().startswith("ptxsim")


# What runs in simulation as it is: memory, and reading a number.
NATIVE = (
    "empty",
    "set_",
    "resize_",
    "record_stream",
    "_local_scalar_dense",
    "_pin_memory",
    "is_pinned",
    "_cudnn_init_dropout_state",
)
TO_HOST, TO_DEVICE = 2, 1  # cudaMemcpyKind


def _copy(to: int, source: int, size: int, kind: int) -> None:
    if size:
        function = ctypes.CDLL(None).cudaMemcpy
        function.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        assert function(to, source, size, kind) == 0


def _over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(like.is_inference()):
        return torch.empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.size(), like.stride())


class _Copies:
    """Copies on the CPU of the tensors of one call, one for each storage."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}

    def of(self, x):
        if isinstance(x, torch.device):
            return torch.device("cpu") if x.type == "cuda" else x
        if isinstance(x, torch.Generator):
            return None
        if not isinstance(x, torch.Tensor) or not x.is_cuda:
            return x
        there = x.untyped_storage()
        if there.data_ptr() not in self.storages or there.nbytes() == 0:
            here = torch.UntypedStorage(there.nbytes())
            _copy(here.data_ptr(), there.data_ptr(), there.nbytes(), TO_HOST)
            self.storages[there.data_ptr()] = here
        return _over(self.storages[there.data_ptr()], x)

    @staticmethod
    def write_back(x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        if copy.size() != x.size():
            x.resize_(copy.size())
        there, here = x.untyped_storage(), copy.untyped_storage()
        _copy(there.data_ptr(), here.data_ptr(), min(there.nbytes(), here.nbytes()), TO_DEVICE)
        return x


def _to_device(x):
    if not isinstance(x, torch.Tensor) or x.is_cuda:
        return x
    extent = 1 + sum((n - 1) * s for n, s in zip(x.size(), x.stride())) if x.numel() else 0
    made = torch.empty(extent, dtype=x.dtype, device="cuda")
    _copy(made.data_ptr(), x.data_ptr(), extent * x.element_size(), TO_DEVICE)
    return made.as_strided(x.size(), x.stride())


def _on_the_cpu(op: torch._ops.OpOverload):
    """op, or where it is CUDA's alone what torch says that it consists of."""
    if torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU"):
        return op
    return torch._decomp.decomposition_table.get(op, op)


def _by_the_cpu(op: torch._ops.OpOverload, *args, **kwargs):
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    named = dict(zip((a.name for a in op._schema.arguments), args)) | kwargs
    for a in op._schema.arguments:  # a number that torch wrapped as a tensor comes as a number
        if isinstance(named.get(a.name), (int, float)) and str(a.type) == "Tensor":
            named[a.name] = torch.tensor(named[a.name], device="cpu")
    copies = _Copies()
    here = pytree.tree_map(copies.of, named)
    positional = [here.pop(a.name) for a in op._schema.arguments[: len(args)]]
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python)):
        result = _on_the_cpu(op)(*positional, **here)
    here |= dict(zip((a.name for a in op._schema.arguments), positional))
    for name in written:
        for there, copy in zip(pytree.tree_leaves(named[name]), pytree.tree_leaves(here[name])):
            if isinstance(there, torch.Tensor) and there.is_cuda:
                copies.write_back(there, copy)
    if written and op._schema.returns:
        aliased = [r.alias_info is not None for r in op._schema.returns]
        if all(aliased):
            out = tuple(named[name] for name in written)
            return out[0] if len(aliased) == 1 else out
    return None if not op._schema.returns else pytree.tree_map(_to_device, result)


def _overloads():
    """Operations of torch with a CUDA kernel that computes something."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace != "aten" or base.startswith(NATIVE):
            continue
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        if any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns):
            continue  # views
        yield rest, op
    yield "copy_", torch.ops.aten.copy_.default  # one kernel for all devices, which launches CUDA's


@contextlib.contextmanager
def torch_on_cpu():
    """While it is on, every operation of torch's on CUDA tensors is computed by the CPU."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, op in _overloads():
            library.impl(name, functools.partial(_by_the_cpu, op), "CUDA", allow_override=True)
        library.impl(
            "_fused_sdp_choice", lambda *args, **options: 0, "CUDA", allow_override=True
        )  # the one of plain operations
    try:
        yield
    finally:
        library._destroy()
