"""The rows of the benchmark: a name and a function that makes the inputs and the calls when the row's turn comes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..cached import QUANTISED, attention_cached, quantise
from .contenders import Shape, eager, flex, loop, ours, sdpa, training
from .measure import Case

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}

MAIN_SHAPES = (
    Shape(8, 12, 512, 64),
    Shape(4, 12, 1024, 64, causal=True),
    Shape(1, 32, 2048, 128, causal=True, kv_heads=8),
    Shape(1, 8, 8192, 64, causal=True),
)
UNFUSED_BYTES = 1 << 27  # scores larger than this keep the unfused contenders out of the default run


@dataclass
class Row:
    group: str
    name: str
    build: Callable[[], Case]


def direction(backward: bool) -> str:
    return "fwd+bwd" if backward else "fwd"


def dtype_key(dtype: torch.dtype) -> str:
    """The measured peak to compare with; torch's fp16 matrix product is too slow on many CPUs to be one."""
    return "bfloat16" if dtype == BF16 else "float32"


def compare(
    calls: dict[str, Callable[..., Any]], inputs: list[torch.Tensor], *, backward: bool, baseline: str = "sdpa",
    expected: Callable[..., Any] | None = None, **kwargs: Any,
) -> Case:  # fmt: skip
    """A case of forward calls, or of the same with a backward pass after each.

    What is expected is the baseline's result on fp32 copies of the inputs, unless another forward function is given.
    """
    wanted = expected or sdpa

    def right() -> Any:
        wide = [x.detach().float().requires_grad_(backward) for x in inputs]
        return training(lambda: wanted(*wide), wide, dout.float())() if backward else wanted(*wide)

    if backward:
        dout = torch.randn_like(inputs[0][..., : inputs[2].shape[-1]])
        calls = {name: training(call, inputs, dout) for name, call in calls.items()}
    same = inputs[0].dtype == FP32 and next(iter(calls)) == "sdpa"
    truth = None if same else right
    return Case(calls, baseline, truth, peak=dtype_key(inputs[0].dtype), **kwargs)


def main_case(shape: Shape, dtype: torch.dtype, backward: bool, full: bool) -> Case:
    inputs = shape.inputs(dtype, requires_grad=backward)
    causal = shape.causal
    skipped: dict[str, str] = {}
    calls = {
        "sdpa": lambda: sdpa(*inputs, causal=causal),
        "mha_ext": lambda: ours(*inputs, causal=causal),
    }
    if full or (dtype == FP32 and shape.scores_bytes < UNFUSED_BYTES):
        calls["eager"] = lambda: eager(*inputs, causal=causal)
        calls["loop over heads"] = lambda: loop(*inputs, causal=causal)
    else:
        skipped |= dict.fromkeys(
            ("eager", "loop over heads"), f"scores of {shape.scores_bytes / 2**20:.0f} MiB, see --full"
        )
    if backward:
        skipped["flex"] = "has no backward on CPU"
    elif not full and (shape.queries != 1024 or dtype != FP32):
        skipped["flex"] = "compiles for seconds, see --full"
    else:
        q, k, v = inputs
        calls["flex"] = flex(q, k, v, visible=(lambda b, h, i, j: i >= j) if causal else None)
    return compare(
        calls,
        inputs,
        backward=backward,
        expected=lambda *wide: sdpa(*wide, causal=causal),
        flops=shape.flops(backward),
        skipped=skipped,
    )


def main_rows(full: bool) -> list[Row]:
    return [
        Row(
            "main",
            f"{shape} {NAMES[dtype]} {direction(backward)}",
            partial(main_case, shape, dtype, backward, full),
        )
        for shape in MAIN_SHAPES
        for dtype in (FP32, BF16, FP16)
        for backward in (False, True)
        if full or not (dtype == FP16 and backward)  # SDPA's takes seconds
    ]


def layout_case(shape: Shape, dtype: torch.dtype, backward: bool, with_eager: bool) -> Case:
    """The same numbers in three layouts: [B,H,S,D] contiguous, [B,S,H,D] transposed, slices of a packed [B,S,3,H,D]."""
    contiguous = shape.inputs(dtype, requires_grad=backward)
    transposed = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in contiguous]
    packed = torch.stack([x.detach().transpose(1, 2) for x in contiguous], 2)
    layouts = {
        "contiguous": contiguous,
        "transposed": [x.requires_grad_(backward) for x in transposed],
        "packed": [packed[:, :, i].transpose(1, 2).requires_grad_(backward) for i in range(3)],
    }
    dout = torch.randn_like(contiguous[0])
    dout_of = {name: dout.transpose(1, 2).contiguous().transpose(1, 2) for name in layouts} | {"contiguous": dout}
    ways = {"mha_ext": ours, "sdpa": sdpa} | ({"eager": eager} if with_eager else {})
    calls = {}
    for way, function in ways.items():
        for layout, inputs in layouts.items():
            call = lambda function=function, inputs=inputs: function(*inputs, causal=shape.causal)
            calls[f"{way} {layout}"] = training(call, inputs, dout_of[layout]) if backward else call
    wide = [x.detach().float().requires_grad_(backward) for x in contiguous]
    forward = lambda: sdpa(*wide, causal=shape.causal)
    return Case(
        calls,
        "mha_ext contiguous",
        training(forward, wide, dout.float()) if backward else forward,
        flops=shape.flops(backward),
        peak=dtype_key(dtype),
    )


def layout_rows(full: bool) -> list[Row]:
    rows = []
    for dtype in (FP32, BF16) if full else (FP32,):
        for backward in (False, True) if full else (False,):
            shape = Shape(1, 12, 1024, 64)
            name = f"layouts {shape} {NAMES[dtype]} {direction(backward)}"
            rows.append(Row("layouts", name, partial(layout_case, shape, dtype, backward, with_eager=True)))
    shape = Shape(4, 12, 512, 64, causal=True)
    rows.append(Row("layouts", f"layouts {shape} bf16 fwd", lambda: layout_case(shape, BF16, False, False)))
    return rows


def small_case(shape: Shape, dtype: torch.dtype, backward: bool, flops: float) -> Case:
    inputs = shape.inputs(dtype, requires_grad=backward)
    calls = {"sdpa": lambda: sdpa(*inputs), "mha_ext": lambda: ours(*inputs), "eager": lambda: eager(*inputs)}
    return compare(calls, inputs, backward=backward, flops=flops)


def small_rows(full: bool) -> list[Row]:
    rows = []
    for length in (16, 64):
        for dtype in (FP32, BF16):
            for backward in (False, True):
                shape = Shape(8, 12, length, 64)
                name = f"small {shape} {NAMES[dtype]} {direction(backward)}"
                rows.append(Row("small", name, partial(small_case, shape, dtype, backward, shape.flops(backward))))
    shape = Shape(1, 1, 1, 8)
    for backward in (False, True):
        name = f"call overhead {shape} fp32 {direction(backward)}"
        rows.append(Row("small", name, partial(small_case, shape, FP32, backward, flops=0)))
    return rows


def decode_case(shape: Shape, dtype: torch.dtype) -> Case:
    inputs = shape.inputs(dtype)
    calls = {"sdpa": lambda: sdpa(*inputs), "mha_ext": lambda: ours(*inputs), "eager": lambda: eager(*inputs)}
    size = sum(x.nbytes for x in inputs) + inputs[0].nbytes
    return compare(calls, inputs, backward=False, flops=shape.flops(False), bytes=size)


def cached_case(shape: Shape, dtype: torch.dtype, stored: torch.dtype | None, page_size: int = 0) -> Case:
    """From a cache: in pages that lie in any order, or of 8 bits; against SDPA on plain keys and values."""
    q, k, v = inputs = shape.inputs(dtype)
    options: dict[str, Any] = {}
    if page_size:
        pages = torch.randperm(k.shape[0] * k.shape[2] // page_size).view(k.shape[0], -1)
        place = pages.flatten().argsort()
        k, v = (x.unflatten(2, (-1, page_size)).transpose(1, 2).flatten(0, 1)[place] for x in (k, v))
        options["block_table"] = pages
    if stored is not None:
        scales = [x.float().abs().amax((2, 3)) / QUANTISED[stored] for x in (k, v)]
        k, v = (quantise(x, scale, stored) for x, scale in zip((k, v), scales))
        options |= {"k_scale": scales[0], "v_scale": scales[1]}
    calls = {"sdpa": lambda: sdpa(*inputs), "mha_ext": lambda: attention_cached(q, k, v, **options)}
    size = 2 * q.nbytes + k.nbytes + v.nbytes
    return compare(calls, inputs, backward=False, flops=shape.flops(False), bytes=size)


def decode_rows(full: bool) -> list[Row]:
    shape = Shape(8, 32, 1, 128, kv_heads=8, keys=4096)
    one = Shape(1, 32, 1, 128, kv_heads=8, keys=4096)
    rows = [
        Row("decode", f"decode {s} {NAMES[dtype]} fwd", partial(decode_case, s, dtype))
        for s in (shape, one)
        for dtype in (FP32, BF16, FP16)
    ]
    name = f"decode {shape} bf16 fwd"
    rows.append(Row("decode", f"{name}: pages of 128", partial(cached_case, shape, BF16, None, 128)))
    for stored, kind in ((torch.float8_e4m3fn, "e4m3"), (torch.int8, "int8")):
        rows.append(Row("decode", f"{name}: {kind} cache", partial(cached_case, shape, BF16, stored)))
    return rows


def flushed(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same on a thread that flushes denormal numbers by itself."""

    def run() -> Any:
        torch.set_flush_denormal(True)
        try:
            return call()
        finally:
            torch.set_flush_denormal(False)

    return run


def flushed_case(shape: Shape, dtype: torch.dtype, peaked: bool) -> Case:
    """Weights that are far from 1, or hidden: as fast as flushed, where a processor is slow with denormal numbers, too."""
    q, k, v = shape.inputs(dtype)
    inputs = [q * 30 if peaked else q, k, v]
    visible = None if peaked else torch.rand(shape.queries, shape.Sk) < 0.5
    call = lambda: ours(*inputs, mask=visible)
    return compare(
        {"mha_ext flushed": flushed(call), "mha_ext": call, "sdpa": lambda: sdpa(*inputs, attn_mask=visible)},
        inputs,
        backward=False,
        baseline="mha_ext flushed",
        expected=lambda *wide: sdpa(*wide, attn_mask=visible),
        flops=shape.flops(False),
    )


def flushed_rows(full: bool) -> list[Row]:
    shape = Shape(1, 12, 512, 64)
    return [
        Row("flushed", f"{name} {shape} {NAMES[dtype]} fwd", partial(flushed_case, shape, dtype, name == "peaked"))
        for name in ("peaked", "random mask")
        for dtype in (FP32, BF16)
    ]
