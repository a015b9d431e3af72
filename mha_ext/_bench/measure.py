"""Times, peak memory and the machine's own limits, measured so that contenders can be compared.

All contenders of a row are timed in turn within one process: each round calls every contender once, and the median
over the rounds is reported. Whatever disturbs the machine for a while thus disturbs all of them alike.
"""

import ctypes
import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import mha_ext

ROUNDS = 7  # the least for a median; rows of seconds get fewer, and the table says so
SLOW_ROUNDS = 3
ROW_SECONDS = 1.5  # once the contenders of many rounds took this long, SLOW_ROUNDS are enough
SLOW_SECONDS = 0.1  # contenders beside the baseline and mha_ext that are slower get SLOW_ROUNDS
SHORT_SECONDS = 2e-3  # a shorter call is repeated within a sample until the sample lasts about this long


@dataclass
class Case:
    """What one row of the benchmark compares: calls that should give equal results."""

    calls: dict[
        str, Callable[..., Any]
    ]  # contender -> call without arguments that returns a tensor or a tuple of tensors
    baseline: str  # the contender that the others' speed is given against
    expected: (
        Callable[..., Any] | None
    )  # gives what every result is checked against; None: the first contender's result
    flops: float = 0.0
    bytes: float = 0.0  # bytes that any implementation has to move, for rows bound by memory
    peak: str = "float32"  # which measured peak the share is taken of
    skipped: dict[str, str] = field(default_factory=dict)  # contender -> why it is not run
    check: Callable[..., Any] | None = (
        None  # replaces the comparison of tensors: (result) -> error, where above 1 is wrong
    )


@dataclass
class Timing:
    contender: str
    seconds: float = math.nan
    fastest: float = math.nan
    slowest: float = math.nan
    rounds: int = 0
    peak_bytes: float = math.nan
    error: float = math.nan
    note: str = ""


def as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def relative_error(result: Any, expected: Any) -> float:
    """The largest distance over the tensors of a result, relative to the expected tensor's norm."""
    worst = 0.0
    for got, want in zip(as_tuple(result), as_tuple(expected), strict=True):
        if got.shape != want.shape or not torch.isfinite(got).all():
            return math.inf
        norm = want.norm(dtype=torch.float32).item()
        worst = max(worst, (got.float() - want.float()).norm().item() / (norm or 1.0))
    return worst


def tolerance(dtype: torch.dtype) -> float:
    """Half of the dtype's digits: every rounding error passes, no wrong result does. The tests are the strict ones."""
    return math.sqrt(torch.finfo(dtype).eps)


def return_freed_memory() -> None:
    """Gives freed heap pages back to the system, so that the next call's growth is seen in full."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass


def status_bytes(key: str) -> int:
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def peak_growth(call: Callable[..., Any]) -> tuple[object, float]:
    """A call's result, and the bytes by which the process's resident memory grew at most, the result included.

    It sees every allocation that is touched, whoever makes it: torch's allocator, a math library or a kernel's own
    buffers. NaN where the system (not Linux) has no such measure.
    """
    return_freed_memory()
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the high-water mark
        before = status_bytes("VmRSS")
        result = call()
        return result, max(0, status_bytes("VmHWM") - before)
    except OSError:
        return call(), math.nan


def one_sample(call: Callable[..., Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def measure(case: Case, full: bool = False, on_step: Callable[[str], object] = lambda text: None) -> list[Timing]:
    """Checks every contender, then times them in turn."""
    expected = case.expected() if case.expected and not case.check else None
    timings: list[Timing] = []
    samples: dict[str, list[float]] = {}
    plan: dict[str, tuple[int, int]] = {}
    for name, call in case.calls.items():
        on_step(f"check {name}")
        timing = Timing(name)
        timings.append(timing)
        start = time.perf_counter()
        try:
            result, timing.peak_bytes = peak_growth(call)
        except Exception as failure:  # noqa: BLE001  one contender that cannot run here must not end the comparison
            timing.note = f"failed: {type(failure).__name__}: {str(failure).strip().splitlines()[0][:80]}"
            continue
        seconds = time.perf_counter() - start
        expected = result if expected is None else expected
        timing.error = case.check(result) if case.check else relative_error(result, expected)
        right = timing.error <= (1 if case.check else tolerance(as_tuple(result)[0].dtype))
        del result
        if not right:
            timing.note = "wrong result" if math.isfinite(timing.error) else "result not finite"
            continue
        if seconds < 1 or name == "flex":  # the first call may have compiled, or made buffers that stay
            timing.peak_bytes = peak_growth(call)[1]
            seconds = one_sample(call, 1)
        main = name == case.baseline or name.startswith("mha_ext")
        few = seconds > SLOW_SECONDS and not main and not full
        rounds = SLOW_ROUNDS if few else ROUNDS if seconds > 0.02 else 3 * ROUNDS
        plan[name], samples[name] = (rounds, max(1, round(SHORT_SECONDS / seconds))), []
    del expected
    return_freed_memory()
    gc.disable()
    try:
        for round_ in range(max((rounds for rounds, _ in plan.values()), default=0)):
            spent = sum(sum(samples[name]) * repeats for name, (rounds, repeats) in plan.items() if rounds >= ROUNDS)
            if round_ >= SLOW_ROUNDS and spent > ROW_SECONDS and not full:
                break
            for name, (rounds, repeats) in plan.items():
                if round_ < rounds:
                    on_step(f"round {round_ + 1} {name}")
                    samples[name].append(one_sample(case.calls[name], repeats))
    finally:
        gc.enable()
    for timing in timings:
        if times := samples.get(timing.contender):
            timing.seconds, timing.rounds = statistics.median(times), len(times)
            timing.fastest, timing.slowest = min(times), max(times)
            if len(times) < ROUNDS:
                timing.note = f"{len(times)} rounds"
    timings += [Timing(name, note=f"not run: {why}") for name, why in case.skipped.items()]
    return timings


def best_seconds(call: Callable[..., Any], rounds: int = 5) -> float:
    call()
    return min(one_sample(call, 1) for _ in range(rounds))


def machine_peaks() -> dict[str, float]:
    """The rates that torch's matrix product and copy reach here: FLOP/s per dtype, and bytes/s moved (read + write)."""
    peaks = {}
    n = 2048
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
        peaks[str(dtype).removeprefix("torch.")] = 2 * n**3 / best_seconds(partial(torch.matmul, left, right))
    source = torch.randn(64 * 2**20)
    target = torch.empty_like(source)
    peaks["copy"] = 2 * source.nbytes / best_seconds(lambda: target.copy_(source))
    return peaks


def cpu_model() -> str:
    """The name, and family and model as the name alone may stand for several generations; from /proc/cpuinfo where it is."""
    try:
        with open("/proc/cpuinfo") as lines:
            facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']})"
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


def machine_facts() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch_cpu_isa": torch.backends.cpu.get_cpu_capability(),
        "mha_ext_cpu_isa": mha_ext._C.cpu_isa(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mha_ext": mha_ext.__version__,
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
