"""The commands of the package:

python -m mha_ext                          what is built, what is used, and a self-check against the reference
python -m mha_ext explain --shape ...      what a call of attention will do, and what it costs
python -m mha_ext bench                    the benchmark; both say more with --help
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

import mha_ext
from mha_ext import _ops, masks, reference


def _describe() -> list[str]:
    info = _ops.build_info
    cuda = "built in" if info["cuda"] else f"not built in: {info['cuda_reason']}"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch sees"
    return [
        f"mha_ext {info['version']}, built with {info['compiler']} for torch {info['torch']}",
        f"torch {torch.__version__}, {torch.get_num_threads()} threads",
        f"CPU instruction set in use: {_ops.cpu_isa()}; available: {', '.join(_ops.available_isas())}",
        f"CUDA: {cuda}; GPU: {gpu}",
    ]


def _cases(device: str) -> Iterator[tuple[str, torch.dtype, dict[str, Any]]]:
    """(name, dtype, the arguments besides q, k, v)"""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([70, 33], device=device)
    dense = (torch.rand(2, 1, 65, 70, generator=generator) < 0.7).to(device)
    bias = torch.randn(1, 4, 65, 70, generator=generator).to(device)
    seed = torch.tensor([42, 7], device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        yield "plain", dtype, {}
        yield "causal", dtype, {"mask": masks.Causal()}
        yield "window and padding", dtype, {"mask": masks.Window(20, 5) & masks.Padding(lengths)}
        yield "dense mask and bias", dtype, {"mask": dense, "bias": bias.to(dtype), "softcap": 5.0}
        yield "dropout", dtype, {"dropout_p": 0.3, "rng_state": seed}


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.detach().double() - want.detach()).abs().max() / want.detach().abs().max().clamp(min=1e-30))


def _check(device: str, dtype: torch.dtype, arguments: dict[str, Any]) -> str | None:
    """Compares output and gradients with the reference in fp64; returns what is wrong."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, heads, length, 40, generator=generator).to(device, dtype)
        for heads, length in ((4, 65), (2, 70), (2, 70), (4, 65))
    )

    def run(function: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = function(*inputs, **{n: x.to(dtype) if n == "bias" else x for n, x in arguments.items()})
        return out, *torch.autograd.grad(out, inputs, dout.to(dtype))

    want = run(reference.attention, torch.float64)
    # The same arithmetic in the same type, unfused, errs about as much as a right kernel may.
    plain = run(reference.attention, dtype)
    rounding = 8 * torch.finfo(dtype).eps
    for name, got, plain_one, truth in zip(("out", "dq", "dk", "dv"), run(mha_ext.attention, dtype), plain, want):
        error, allowed = _error(got, truth), 3 * _error(plain_one, truth) + rounding
        if not error <= allowed:
            return f"{name} differs by {error:.1e} of its largest value, allowed is {allowed:.1e}"
    return None


def self_check() -> int:
    try:
        print("\n".join(_describe()))
    except RuntimeError as error:  # MHA_EXT_CPU_ISA names an instruction set that is not there
        print(error, file=sys.stderr)
        return 2
    failed = checked = 0
    for device in ["cpu"] + (["cuda"] if _ops.without_cuda is None and torch.cuda.is_available() else []):
        for name, dtype, arguments in _cases(device):
            problem = _check(device, dtype, arguments)
            checked += 1
            if problem:
                failed += 1
                print(f"self-check, {device}, {str(dtype).removeprefix('torch.')}, {name}: {problem}", file=sys.stderr)
    print(f"self-check: {checked - failed} of {checked} cases agree with the reference")
    return 1 if failed else 0


def bench(arguments: list[str]) -> int:
    try:
        from mha_ext._bench.compare import main
    except ModuleNotFoundError as error:
        print(f"The benchmark needs {str(error.name).partition('.')[0]}: pip install matplotlib numpy rich tqdm", file=sys.stderr)
        return 2
    return main(arguments)


def main(arguments: list[str]) -> int:
    if not arguments:
        return self_check()
    command, *rest = arguments
    if command == "bench":
        return bench(rest)
    if command == "explain":
        from mha_ext._explain_command import main

        return main(rest)
    asked = command in ("-h", "--help")
    if not asked:
        print(f"{command!r} is no command of mha_ext; accepted: explain, bench, or none.", file=sys.stderr)
    print(__doc__.strip(), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
