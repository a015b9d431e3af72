"""What the functions accept. Each refusal is one sentence: what was given, what is accepted, what to do.

The tests on the way in are cheap; messages are only built once something is wrong.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def text(shape: Sequence[int]) -> str:
    return "[" + ",".join(str(n) for n in shape) + "]"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def given(x: Any) -> str:
    """A value in a few words, for a refusal."""
    if isinstance(x, Tensor):
        if x.is_nested:
            return f"a nested tensor of layout {x.layout}"
        return f"a {name_of(x.dtype)} tensor of shape {text(x.shape)}"
    if x is None or isinstance(x, (bool, int, float, complex, str, tuple, list)):
        shown = repr(x)
        if len(shown) <= 40 and "\n" not in shown:
            return shown
    return f"a {type(x).__name__}"


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of softmax statistics and of gradient sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_dtensor(x: Tensor) -> bool:
    """Whether x is a torch.distributed.tensor.DTensor; does not import that module."""
    return type(x) is not Tensor and type(x).__name__ == "DTensor"


def autocasts(x: Tensor) -> bool:
    """Whether torch.autocast is on for tensors like x; meta tensors have none, and torch refuses to say so."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def values_known(x: Tensor) -> bool:
    """Whether x's values can be looked at for free: not on a GPU, not while compiling or under vmap."""
    plain = type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def require(condition: Tensor, message: str) -> None:
    """Refuses with this message unless the condition holds: at once where its value is known, else on the device."""
    if not values_known(condition):
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)


def integer_tensor(x: Tensor, owner: str, shape: str, dim: int) -> Tensor:
    if not isinstance(x, Tensor):
        try:
            x = torch.as_tensor(x)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{owner} was given {given(x)}; it accepts an integer tensor {shape}.") from None
    dense(x, owner)
    integer = not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool or x.is_quantized)
    if not integer or x.dim() != dim:
        raise ValueError(f"{owner} was given {given(x)}; it accepts an integer tensor {shape}.")
    return x if x.dtype == torch.int64 else x.to(torch.int64)


def same_device(x: Tensor, name: str, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(
            f"{name} has a tensor on {x.device} but the queries are on {device}; accepted: one device: move it with "
            f".to('{device}')."
        )


def dense(x: Tensor, name: str) -> None:
    """Refuses sparse, nested and oneDNN's own tensors."""
    if x.layout is torch.strided and not x.is_nested:
        return
    if x.is_nested:
        found, fix = f"nested tensor of layout {x.layout}", "pad it with torch.nested.to_padded_tensor and mask what that adds"
    else:
        found, fix = f"tensor of layout {x.layout} and shape {text(x.shape)}", "convert it with .to_dense()"
    raise TypeError(f"{name} is a {found}; accepted: a dense tensor (of layout torch.strided): {fix}.")


def bool_mask(mask: Tensor, name: str) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} is a {type(mask).__name__}; accepted: a bool tensor, True = attend.")
    if mask.layout is not torch.strided or mask.is_nested:
        dense(mask, name)
    if mask.dtype == torch.bool:
        return
    refused = f"{name} is {given(mask)}; accepted: a bool tensor, True = attend"
    if mask.dtype.is_floating_point:
        raise TypeError(
            f"{refused}: pass it as bias= if it is to be added to the scores, or {name} > 0 if it holds 0 and 1."
        )
    fix = f"{name}.dequantize() > 0" if mask.is_quantized else f"{name}.bool() or {name} != 0"
    raise TypeError(f"{refused}: convert it with {fix}.")


def known(condition: Any) -> bool:
    """Whether a condition on sizes holds; in compiled code, whether it holds for all that the program is for. To ask for more
    there would make it one for these sizes alone."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # brings sympy

        return statically_known_true(condition)
    return bool(condition)


def same(n: int, size: int) -> bool:
    """Whether two sizes are equal, or may be in compiled code: the op compares them when it runs."""
    return not known(n != size)


def one_or(n: int, size: int) -> bool:
    """Whether a dimension of n numbers broadcasts to this size."""
    return same(n, size) or n == 1


def as_4d(x: Tensor, name: str, B: int, H: int, Sq: int, Sk: int) -> Tensor:
    """x as a 4-d tensor whose dimensions are full or 1; x is [Sq,Sk] or has four such dimensions already."""
    shape = x.shape
    if torch.compiler.is_compiling():
        if len(shape) in (2, 4) and all(map(one_or, shape, (B, H, Sq, Sk)[-len(shape) :])):
            return x if len(shape) == 4 else x[None, None]
    elif len(shape) == 4:
        b, h, i, j = shape
        if (b == B or b == 1) and (h == H or h == 1) and (i == Sq or i == 1) and (j == Sk or j == 1):
            return x
    elif len(shape) == 2:
        i, j = shape
        if (i == Sq or i == 1) and (j == Sk or j == 1):
            return x[None, None]
    raise ValueError(_shape_refusal(shape, name, B, H, Sq, Sk))


def _shape_refusal(shape: Sequence[int], name: str, B: int, H: int, Sq: int, Sk: int) -> str:
    fixes = []
    if len(shape) == 3 and shape[1] in (1, Sq) and shape[2] in (1, Sk):
        if shape[0] == B:
            fixes.append(f"{name}[:, None] for one per batch element")
        if shape[0] == H or shape[0] == 1:
            fixes.append(f"{name}[None] for one per head")
        if shape[0] == B * H and B > 1 and H > 1:
            fixes.append(f"{name}.view({B}, {H}, {shape[1]}, {shape[2]}) for one per batch element and head")
    elif len(shape) == 2 and shape[0] == B and shape[1] == Sk:
        if name == "mask":
            fixes.append("masks.Padding(key_lengths)")
        fixes.append(f"{name}[:, None, None, :] for one per key of each batch element")
    elif len(shape) == 1:
        if shape[0] == Sk:
            fixes.append(f"{name}[None, :] for one per key")
        if shape[0] == Sq:
            fixes.append(f"{name}[:, None] for one per query")
        if shape[0] == B and name == "mask":
            fixes.append("masks.Padding(key_lengths) if it holds lengths")
    accepted = f"[Sq,Sk] = [{Sq},{Sk}], or four dimensions that broadcast to [B,H,Sq,Sk] = [{B},{H},{Sq},{Sk}]"
    use = f": use {' or '.join(fixes)}" if fixes else ""
    return f"{name} has shape {text(shape)}; accepted: {accepted}{use}."


def bias_tensor(bias: Tensor, dtype: torch.dtype, device: torch.device, B: int, H: int, Sq: int, Sk: int) -> Tensor:
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias is a {type(bias).__name__}; accepted: a floating-point tensor.")
    if bias.layout is not torch.strided or bias.is_nested:
        dense(bias, "bias")
    kind = bias.dtype
    if not kind.is_floating_point:
        fix = "pass it as mask=" if kind == torch.bool else "convert it to a floating-point type"
        raise TypeError(
            f"bias is {given(bias)}; accepted: a floating-point tensor that is "
            f"added to the scores: {fix}."
        )
    same_device(bias, "bias", device)
    accumulate = accumulate_dtype(dtype)
    if kind != dtype and kind != accumulate:
        if kind not in DTYPES or kind == torch.float64:
            raise TypeError(
                f"bias is {name_of(kind)} but q is {name_of(dtype)}; accepted: "
                f"{' or '.join(dict.fromkeys((name_of(dtype), name_of(accumulate))))}: convert it."
            )
        bias = bias.to(accumulate)  # exact
    return as_4d(bias, "bias", B, H, Sq, Sk)


def elsewhere(function: Callable[..., Any], names: Sequence[str], arguments: dict[str, Any]) -> Any:
    """What function(**arguments) gives where not all of the named arguments are tensors: an object that stands in for a
    tensor, such as torch.fx's proxies, takes the call, or it is refused."""
    tensors = [arguments[name] for name in names]
    arguments.pop("foreign", None)  # which is empty
    if torch.overrides.has_torch_function(tensors) and not any(isinstance(x, type) for x in tensors):
        return torch.overrides.handle_torch_function(function, tensors, **arguments)
    raise not_tensors(names, *tensors)


def not_tensors(names: Sequence[str], *found: Any) -> Exception:
    if len(names) == 1:
        return TypeError(f"{names[0]} is a {type(found[0]).__name__}; accepted: a tensor.")
    return TypeError(f"{', '.join(names)} are a {', a '.join(type(x).__name__ for x in found)}; accepted: three tensors.")


def attention_inputs(q: Tensor, k: Tensor, v: Tensor, without_cuda: str | None) -> tuple[int, int, int, int]:
    """(B, H, Sq, Sk). Refuses q, k, v that do not fit together. without_cuda: why the build has no CUDA, or None if it has."""
    if q.dim() == 4 and k.dim() == 4 and v.dim() == 4:
        try:
            B, H, Sq, D = q.shape
            Bk, Hk, Sk, Dk = k.shape
            Bv, Hv, Sv, _ = v.shape
        except RuntimeError:  # nested tensors have none; the op refuses other layouts
            for x, name in zip((q, k, v), "qkv"):
                dense(x, name)
            raise
        dtype = q.dtype
        if (
            Bk == B and Bv == B and Hv == Hk and Sv == Sk and Dk == D and (H % Hk == 0 if Hk > 0 else H == 0)
            and k.dtype == dtype and v.dtype == dtype and dtype in DTYPES
            and (q.is_cpu and k.is_cpu and v.is_cpu or q.device == k.device == v.device)
            and (without_cuda is None or not q.is_cuda)
        ):  # fmt: skip
            return B, H, Sq, Sk
    raise _attention_refusal(q, k, v, without_cuda)


def _attention_refusal(q: Tensor, k: Tensor, v: Tensor, without_cuda: str | None) -> Exception:
    for x, name in zip((q, k, v), "qkv"):
        dense(x, name)
    shapes = f"q, k, v have shapes {text(q.shape)}, {text(k.shape)}, {text(v.shape)}"
    accepted = "q [B,H,Sq,D], k [B,Hk,Sk,D], v [B,Hk,Sk,Dv]"
    if not (q.dim() == k.dim() == v.dim() == 4):
        return ValueError(f"{shapes}; accepted: {accepted}: add the missing dimensions with unsqueeze or split_heads.")
    if not (q.dtype == k.dtype == v.dtype):
        names = ", ".join(name_of(x.dtype) for x in (q, k, v))
        return TypeError(
            f"q, k, v have dtypes {names}; accepted: one dtype for all three: convert them or use torch.autocast."
        )
    if q.dtype not in DTYPES:
        return unsupported_dtype("q", q.dtype)
    if not (q.device == k.device == v.device):
        return ValueError(
            f"q, k, v are on {q.device}, {k.device}, {v.device}; accepted: one device: move them with .to()."
        )
    if q.shape[1] % max(k.shape[1], 1) and k.shape[1:3] == v.shape[1:3]:
        return ValueError(
            f"{shapes}: {q.shape[1]} query heads do not divide evenly among {k.shape[1]} key/value heads; accepted: "
            "H a multiple of Hk."
        )
    if q.device.type == "cuda" and without_cuda is not None:
        return no_cuda(without_cuda)
    wrong = [
        what
        for what, differs in (
            ("batch sizes (dimension 0)", not q.shape[0] == k.shape[0] == v.shape[0]),
            ("key/value head counts (dimension 1)", k.shape[1] != v.shape[1]),
            ("key/value lengths (dimension 2)", k.shape[2] != v.shape[2]),
            ("query/key head sizes (dimension 3)", q.shape[3] != k.shape[3]),
            ("head counts (dimension 1)", k.shape[1] == 0 and q.shape[1] > 0),
        )
        if differs
    ]
    return ValueError(f"{shapes}; accepted: {accepted}: the {' and the '.join(wrong)} must agree.")


def unsupported_dtype(name: str, dtype: torch.dtype) -> Exception:
    return TypeError(f"{name} is {name_of(dtype)}; accepted: {', '.join(map(name_of, DTYPES))}: convert it first.")


def no_cuda(reason: str) -> Exception:
    return ValueError(
        f"mha_ext was built without CUDA: {reason}; move the tensors with .cpu(), or rebuild where nvcc and a "
        "CUDA build of torch are installed with MHA_EXT_CUDA=1 pip install --force-reinstall --no-deps "
        "--no-build-isolation ."
    )


def one_tensor(x: Tensor, name: str, shape: str, dim: int, without_cuda: str | None) -> None:
    """Refuses anything but a floating-point tensor of dim dimensions on a device that this build serves."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; accepted: a tensor {shape}.")
    if x.is_nested:  # the ops refuse other layouts
        dense(x, name)
    if x.dim() != dim:
        raise ValueError(f"{name} has shape {text(x.shape)}; accepted: {shape}.")
    if x.dtype not in DTYPES:
        raise unsupported_dtype(name, x.dtype)
    if without_cuda is not None and x.is_cuda:
        raise no_cuda(without_cuda)


def number(name: str, x: Any) -> float:
    """x as the ops take it; numpy's scalars are numbers, too."""
    if isinstance(x, (float, torch.SymInt, torch.SymFloat)):
        return x  # type: ignore[return-value]  # a symbolic number does what a number does
    if isinstance(x, numbers.Real):
        try:
            return float(x)
        except OverflowError:
            raise ValueError(f"{name} is an {type(x).__name__} beyond the largest float; accepted: a number.") from None
    fix = ": multiply q by it if it is to be learned, or use .item()" if name == "scale" else ""
    fix = fix or (": use .item()" if isinstance(x, Tensor) else "")
    raise TypeError(f"{name} is {given(x)}; accepted: a number{fix}.")


def whole(x: Any) -> int | None:
    """x if it is a whole number, as an int (a symbolic one stays); else None."""
    if isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool):
        return x  # type: ignore[return-value]  # a SymInt does what an int does
    return int(x) if isinstance(x, numbers.Integral) and not isinstance(x, bool) else None


def at_least(least: int, x: Any) -> int | None:
    """x if it is a whole number from least on that the ops and tensors hold; else None."""
    n = whole(x)
    bounded = isinstance(x, torch.SymInt) or torch.compiler.is_compiling()  # what is symbolic
    return n if n is not None and n >= least and (bounded or n < 2**63) else None


def scale(x: Any) -> float:
    x = number("scale", x)
    if type(x) is float and x - x != 0.0:
        raise ValueError(f"scale is {x}; accepted: a finite number.")
    return x


def probability(name: str, p: Any) -> float:
    p = number(name, p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} is {p}; accepted: a probability in [0, 1].")
    return p


def softcap(c: Any) -> float:
    c = number("softcap", c)
    if not 0.0 <= c < float("inf"):
        raise ValueError(f"softcap is {c}; accepted: a positive limit of the scores, or 0 for none.")
    return c


def size(name: str, x: Any, least: int = 1) -> int:
    n = at_least(least, x)
    if n is None:
        raise (TypeError if whole(x) is None else ValueError)(f"{name} is {given(x)}; accepted: an int >= {least}.")
    return n


def flag(name: str, x: bool | None) -> None:
    if x is not None and not isinstance(x, bool):
        raise TypeError(f"{name} is {given(x)}; accepted: True, False or None.")


def flags(**given_flags: bool) -> None:
    for name, x in given_flags.items():
        if x is not True and x is not False:
            raise TypeError(f"{name} is {given(x)}; accepted: True or False.")


def device(x: Any) -> torch.device:
    try:
        return torch.device(x)
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"device is {given(x)}; accepted: a device of this torch, as 'cpu'.") from None


def sinks(x: Tensor, q: Tensor, H: int) -> Tensor:
    if isinstance(x, Tensor):
        dense(x, "sinks")
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point or x.shape != (H,):
        raise ValueError(f"sinks is {given(x)}; accepted: a floating-point tensor [H] = [{H}], one logit per query head.")
    same_device(x, "sinks", q.device)
    return x.to(accumulate_dtype(q.dtype))


def mix(x: Tensor, name: str, q: Tensor, H: int) -> Tensor:
    """pre_mix or post_mix in the type that the ops take."""
    accumulate = accumulate_dtype(q.dtype)
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; accepted: a floating-point tensor [H,H] = [{H},{H}].")
    dense(x, name)
    if x.shape != (H, H):
        raise ValueError(f"{name} has shape {text(x.shape)}; accepted: [H,H] = [{H},{H}], H being q's heads.")
    same_device(x, name, q.device)
    if x.dtype != q.dtype and x.dtype != accumulate and not (x.dtype.is_floating_point and autocasts(q)):
        accepted = " or ".join(dict.fromkeys((name_of(q.dtype), name_of(accumulate))))
        raise TypeError(f"{name} is {name_of(x.dtype)} but q is {name_of(q.dtype)}; accepted: {accepted}: convert it.")
    return x.to(accumulate)


def rng_state(state: Tensor, device: torch.device) -> Tensor:
    if not isinstance(state, Tensor) or state.dtype != torch.int64 or state.is_nested or state.shape not in ((2,), (6,)):
        raise ValueError(
            f"rng_state is {given(state)}; accepted: an int64 tensor [2] of (seed, offset), or [6] of (seed, offset, and the "
            "first batch element, head, query and key of this part of a larger problem)."
        )
    return state if state.device == device else state.to(device)
