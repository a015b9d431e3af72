"""What torch and libraries ask of attention modules, answered by ours."""

from __future__ import annotations

from typing import Any

import torch


def be_a_leaf(module: torch.nn.Module) -> None:
    """torch.fx's tracers do not look into modules whose __module__ begins with torch.nn. They ask the object; of its class,
    which pickle and others ask, the answer stays true."""
    module.__module__ = "torch.nn"  # without a dot at its end, which torch.compile looks for


def call_forward_always(module: torch.nn.Module) -> Any:
    """torch's transformer layers, in evaluation, compute attention themselves from a module's parameters, with other results
    for fully masked rows, unless a hook waits for its call. Returns what removes the hook."""
    return module.register_forward_pre_hook(_wait_for_the_call)


def _wait_for_the_call(module: torch.nn.Module, inputs: Any) -> None:
    pass
