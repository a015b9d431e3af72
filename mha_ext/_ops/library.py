"""Loads the compiled module, which registers the ops that csrc/torch/schemas.cpp names, and says what was built."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from .._checks import dense

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
    from .. import _C_cuda as _C_cuda  # registers the CUDA kernels

    if importlib.util.find_spec("mha_ext._C_cuda_sm90"):  # not built where other architectures were asked for
        from .. import _C_cuda_sm90

        _C_cuda.use_sm90(_C_cuda_sm90.kernels())

library = torch.library.Library("mha_ext", "FRAGMENT")  # where what Python adds to the ops is registered

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
    "attention_fwd", "attention_bwd", "attention_cached", "attention_packed_fwd", "attention_packed_bwd", "attention_mixed_fwd",
    "attention_mixed_bwd", "masked_softmax_fwd", "masked_softmax_bwd", "split_heads", "merge_heads", "dropout_mask",
):  # fmt: skip
    _refuse_other_layouts(_name)
