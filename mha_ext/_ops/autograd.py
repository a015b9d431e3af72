"""How an op gets its formulas: registered with the dispatcher for compiled code, and in an autograd.Function for eager code.

The backward ops are differentiable too: their formulas go through the reference.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import vmap
from .arguments import Arguments
from .library import library

Gradient = Tensor | None

below_autograd = getattr(torch._C, "_AutoDispatchBelowAutograd", contextlib.nullcontext)
transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def direct(op: Any) -> Callable[..., Any]:
    """What op() calls, a Python frame further down."""
    return getattr(op, "_op", op)


def apply_of(function: Any) -> Callable[..., Any]:
    """The C part of an autograd.Function's apply, without the checks that only torch.func needs."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise forward_mode_refusal()


def forward_mode_refusal() -> Exception:
    return NotImplementedError(
        "forward-mode differentiation (jvp, jacfwd, make_dual) was asked of a function of mha_ext; accepted: reverse mode "
        "(backward, vjp, jacrev): use the functions of mha_ext.reference for forward mode."
    )


def differentiable(
    arguments: Arguments, setup: Callable[..., None], backward: Callable[..., tuple[Any, ...]], rule: vmap.Rule
) -> Callable[..., Any]:
    """Gives an op its formulas, and returns the function that calls it.

    The formulas are registered with the dispatcher, for compiled code. Eager code goes through an autograd.Function of
    the same formulas: torch.func only differentiates those, and a call costs some 50 us less. Where torch lets it, it
    then skips the dispatcher's autograd kernel, for another 5 us, and outside of torch.func the part of
    autograd.Function.apply that only torch.func needs (it inspects the signature), for another 15 us.
    """
    op, tensors = arguments.op, arguments.tensors
    run = direct(op)
    torch.library.register_autograd(op.name(), backward, setup_context=setup, lib=library)

    def without_autograd(*args: Any) -> Any:
        with below_autograd():
            return run(*args)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(*args)
        if transforms_active() or forward_ad._current_level >= 0:
            if _functionalize_alone():
                return op(*args)
            return function.apply(*args)  # refuses forward-mode differentiation
        if torch.is_grad_enabled():
            for i in tensors:
                if args[i] is not None and args[i].requires_grad:
                    return apply(*args)
        return without_autograd(*args)

    mapped = functools.partial(rule, call, arguments)
    torch.library.register_vmap(op.name(), mapped, lib=library)
    methods: dict[str, Any] = {
        "forward": without_autograd, "setup_context": setup, "backward": backward, "vmap": mapped, "jvp": _refuse_forward_mode
    }  # fmt: skip
    function: Any = type(op._opname, (torch.autograd.Function,), {key: staticmethod(method) for key, method in methods.items()})
    apply = apply_of(function)
    return call


def _functionalize_alone() -> bool:
    """Whether torch.func.functionalize is the only transform, which has no rule for an autograd.Function and needs none."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    plain = all(each.key() == torch._C._functorch.TransformType.Functionalize for each in levels)
    return len(levels) > 0 and plain and forward_ad._current_level < 0


def where_needed(gradients: Sequence[Any], ctx: Any) -> tuple[Any, ...]:
    return tuple(g if need else None for g, need in zip(gradients, ctx.needs_input_grad))


# --- Formulas of backward ops ---------------------------------------------------------------------------------------


def vjp(function: Callable[..., Any], inputs: Sequence[Tensor | None]) -> tuple[Any, Callable[[Any], list[Gradient]]]:
    """torch.func.vjp for inputs of which some are None; the gradients of those are None."""
    there = [i for i, x in enumerate(inputs) if x is not None]

    def full(values: Sequence[Tensor]) -> list[Gradient]:
        filled: list[Gradient] = [None] * len(inputs)
        for i, value in zip(there, values):
            filled[i] = value
        return filled

    outputs, pull = torch.func.vjp(lambda *given: function(*full(given)), *(inputs[i] for i in there))[:2]
    return outputs, lambda cotangents: full(pull(cotangents))


def second_order(
    first_order: Callable[..., Any], inputs: Sequence[Tensor | None], cotangents: Sequence[Gradient]
) -> list[Gradient]:
    """The gradients of inputs, given those (or None) of what first_order computes from them."""
    wanted = [i for i, c in enumerate(cotangents) if c is not None]
    if not wanted:
        return [None] * len(inputs)

    def differentiable(*values: Any) -> tuple[Tensor, ...]:
        results = first_order(*values)
        return tuple(results[i] for i in wanted)

    return vjp(differentiable, inputs)[1](tuple(cotangents[i] for i in wanted))
