"""What torch and libraries ask of attention modules, answered by ours."""

from __future__ import annotations

from collections.abc import Callable
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


class NotScriptable:
    """torch.jit.script asks objects to prepare themselves, modules within modules too."""

    def __prepare_scriptable__(self) -> Any:
        raise _script_refusal(type(self).__name__)


def not_scriptable(*functions: Callable[..., Any]) -> None:
    """The same for functions."""
    for function in functions:

        def refuse(name: str = function.__name__) -> Any:
            raise _script_refusal(name)

        function.__prepare_scriptable__ = refuse  # type: ignore[attr-defined]


def _script_refusal(name: str) -> Exception:
    return TypeError(
        f"{name} was given to torch.jit.script; accepted: torch.compile or torch.export: TorchScript cannot read the "
        "functions of mha_ext."
    )
