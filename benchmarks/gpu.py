"""Builds mha_ext with CUDA, tests it and times it, on a machine with an NVIDIA GPU (compute capability 8.0 or later).

    python benchmarks/gpu.py                      all of it, in under 8 minutes on 16 cores; no network is needed
    python benchmarks/gpu.py --no-build --no-tests    only the times

Needs torch >= 2.11 with CUDA, nvcc, setuptools and (for a build in minutes) ninja; pytest, hypothesis and numpy for the tests.
Prints one table and writes gpu.json, build.log and tests.log into --out. Ends with status 1 when the build or a test failed
or a result was wrong.
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
TIMING_SECONDS = 120  # kept free for the times when the build and the tests are slow
TEST_SECONDS = 100


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything together (default 8)")
    parser.add_argument("--no-build", action="store_true", help="time the mha_ext that is built in place already")
    parser.add_argument("--no-tests", action="store_true", help="leave the tests out")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for JSON and logs")
    args = parser.parse_args(argv)
    if not 1 <= args.minutes <= 600:
        parser.error(f"--minutes is {args.minutes:g}; accepted: 1 to 600.")
    return args


def problem() -> str | None:
    """Why nothing can be measured here, or None."""
    if torch.version.cuda is None:
        return f"This benchmark needs an NVIDIA GPU and a torch with CUDA; torch {torch.__version__} is one without."
    if not torch.cuda.is_available():
        return "This benchmark needs an NVIDIA GPU of compute capability 8.0 or later, and torch sees none here."
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        name = torch.cuda.get_device_name()
        return f"This benchmark needs a GPU of compute capability 8.0 or later; {name} has {major}.{minor}."
    return None


def run_logged(command: list[str], log: Path, seconds: float, **environment: str) -> tuple[int | None, str]:
    """(exit status, or None when the time ran out; the output, which also goes to log)"""
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it started
            process.wait()
            status = None
    return status, log.read_text(errors="replace")


def build(log: Path, seconds: float) -> dict:
    """For this GPU alone: its driver would take minutes to translate the PTX of a build for another."""
    major, minor = torch.cuda.get_device_capability()
    architectures = f"{major}.{minor}" + (";9.0a" if major == 9 else "")  # which has kernels of its own
    if importlib.util.find_spec("ninja") is None:
        print("ninja is missing: the build uses one core", file=sys.stderr)
    flags = ("-v", "--no-build-isolation", "--no-deps", "--no-index")
    command = [sys.executable, "-m", "pip", "install", *flags, "-e", "."]
    environment = {
        "MHA_EXT_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", architectures),
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count() or 2)),
    }
    start = time.perf_counter()
    status, text = run_logged(command, log, seconds, **environment)
    took = time.perf_counter() - start
    if status != 0:
        print("\n".join(text.splitlines()[-25:]), file=sys.stderr)
    result = {0: "built", None: "ran out of time"}.get(status, f"failed with status {status}") + f" in {took:.0f} s"
    return {"result": result, "ok": status == 0, "seconds": took, **environment}


def run_tests(log: Path, seconds: float) -> dict:
    missing = [name for name in ("pytest", "hypothesis", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        return {"result": f"not run: {' and '.join(missing)} missing", "ok": True, "seconds": 0.0}
    start = time.perf_counter()
    files = sorted(str(path) for path in (ROOT / "tests").glob("test_cuda*.py"))  # the others import more packages
    command = [sys.executable, "-m", "pytest", "-m", "cuda", *files, "-x", "-q", "-p", "no:cacheprovider"]
    status, text = run_logged(command, log, seconds)
    took = time.perf_counter() - start
    lines = text.strip().splitlines() or ["no output"]
    if status is None:
        failed = any(line.startswith(("FAILED", "ERROR")) for line in lines)
        return {"result": f"stopped after {took:.0f} s: {lines[-1][-60:]}", "ok": not failed, "seconds": took}
    if status not in (0, 5):
        print("\n".join(lines[-40:]), file=sys.stderr)
    result = "no test needs a GPU" if status == 5 else lines[-1].strip("= ")
    return {"result": result, "ok": status == 0, "seconds": took}


def machine_facts() -> dict:
    import mha_ext

    device = torch.cuda.get_device_properties(0)
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        driver = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        driver = "unknown"
    return {
        "gpu": device.name,
        "multiprocessors": device.multi_processor_count,
        "memory_bytes": device.total_memory,
        "driver, clock, power limit": driver,
        "cpu_cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "mha_ext": mha_ext.__version__,
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


HEAD = ("row", "contender", "time", "spread", "rate", "of copy", "against flash", "error", "")


def cells(row: dict, contender: dict) -> tuple[str, ...]:
    c, base, seconds = contender, row["base_seconds"], contender["seconds"]
    name = (row["name"], c["contender"])
    if seconds is None:
        return *name, "-", "-", "-", "-", "-", "-", c["note"]
    rate = row["amount"] / seconds
    memory = row["unit"] == "bytes"
    speed = f"{base / seconds:.2f}" if base else "-"
    return (
        *name,
        f"{seconds * 1e3:.3f} ms",
        f"{(c['slowest'] - c['fastest']) / seconds:.0%}",
        f"{rate / 1e9:.0f} GB/s" if memory else f"{rate / 1e12:.0f} TFLOP/s",
        speed if memory else "-",
        "-" if memory else speed,
        "-" if c["error"] is None else f"{c['error']:.0e}",
        c["note"],
    )


def print_table(rows: list[dict]) -> None:
    lines = [HEAD] + [cells(row, contender) for row in rows for contender in row["contenders"]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    previous = ""
    for line in lines:
        shown = ("" if line[0] == previous else line[0], *line[1:])
        previous = line[0]
        parts = [text.ljust(w) if i < 2 or i == 8 else text.rjust(w) for i, (text, w) in enumerate(zip(shown, widths))]
        print("  ".join(parts).rstrip())


def without_nan(value):
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: without_nan(x) for key, x in value.items()}
    if isinstance(value, list):
        return [without_nan(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def step(text: str, start: float) -> None:
    print(f"[{time.monotonic() - start:4.0f} s] {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if sentence := problem():
        print(sentence, file=sys.stderr)
        return 2
    start = time.monotonic()
    deadline = start + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict = {
        "build": {"result": "left out", "ok": True},
        "tests": {"result": "left out", "ok": True},
        "rows": [],
    }
    if not args.no_build:
        step("building", start)
        report["build"] = build(args.out / "build.log", deadline - time.monotonic() - TIMING_SECONDS / 2)
        step(f"build: {report['build']['result']}", start)
    sys.path.insert(0, str(ROOT))  # what a build for `pip install -e` leaves in place
    try:
        import gpu_rows

        import mha_ext
    except ImportError as error:
        print(f"mha_ext cannot be imported, so nothing is measured: {error}", file=sys.stderr)
        return 1
    if mha_ext._ops.without_cuda:
        print(f"mha_ext is built without CUDA ({mha_ext._ops.without_cuda}), so nothing is measured.", file=sys.stderr)
        return 1
    if not args.no_tests:
        step("testing", start)
        seconds = min(TEST_SECONDS, deadline - time.monotonic() - TIMING_SECONDS)
        too_late = {"result": "not run: the build took too long", "ok": True}
        report["tests"] = run_tests(args.out / "tests.log", seconds) if seconds > 5 else too_late
        step(f"tests: {report['tests']['result']}", start)
    report["machine"] = machine_facts()
    path = args.out / "gpu.json"
    path.write_text(json.dumps(without_nan(report), indent=1) + "\n")
    for row in gpu_rows.measured_rows(deadline):
        report["rows"].append(row)
        step(row["name"], start)
        path.write_text(json.dumps(without_nan(report), indent=1) + "\n")  # what is there stays if the machine goes
    report["seconds"] = time.monotonic() - start
    path.write_text(json.dumps(without_nan(report), indent=1) + "\n")
    machine = report["machine"]
    print(
        f"{machine['gpu']} ({machine['driver, clock, power limit']}), torch {machine['torch']}, cuDNN {machine['cudnn']}"
    )
    print(f"build: {report['build']['result']}; tests: {report['tests']['result']}")
    print_table(report["rows"])
    print(f"written: {path} ({report['seconds']:.0f} s in all)")
    ours = [(row["name"], c) for row in report["rows"] for c in row["contenders"] if "mha_ext" in c["contender"]]
    wrong = [name for name, contender in ours if contender["wrong"]]
    if wrong:
        print("mha_ext is WRONG or failed in: " + "; ".join(wrong))
    return 0 if report["build"]["ok"] and report["tests"]["ok"] and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
