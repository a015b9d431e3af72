"""Every CPU instruction set that the machine has, forced in turn in a process of its own, runs the core of the suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cases
import oracle
import pytest
import torch

import mha_ext

HERE = Path(__file__).parents[1]
AVAILABLE = mha_ext._C.available_isas()  # plainest first
DEFAULT = AVAILABLE[-1]


def run(code: str, isa: str | None, *args: str, **more) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [HERE, *HERE.glob("*/"), HERE.parent, os.environ.get("PYTHONPATH", "")])),
    }
    environment.pop("MHA_EXT_CPU_ISA", None)
    if isa is not None:
        environment["MHA_EXT_CPU_ISA"] = isa
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        **more,
    )


def cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split(":")[1].split())
    return set()


NEEDS = {
    "scalar": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"},
    "amx": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vbmi", "amx_tile", "amx_bf16", "amx_int8"},
    "neon": {"asimd"},
    "neon_bf16": {"asimd", "bf16"},
}
NEEDS = {isa: NEEDS[isa] for isa in mha_ext._ops.built_isas()}


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="asks the Linux kernel what the processor has")
def test_what_is_available_is_what_the_machine_has():
    flags = cpu_flags()
    assert flags
    for isa, needs in NEEDS.items():
        refused = isa == "amx" and "refused by the operating system" in run(PROBE, isa).stderr
        assert (isa in AVAILABLE) == (needs <= flags and not refused), isa


PROBE = (
    "import torch, mha_ext; q = torch.ones(1, 1, 2, 8); mha_ext.attention(q, q, q); print(mha_ext._C.cpu_isa())"
)


@pytest.mark.parametrize("isa", [isa for isa in NEEDS if isa not in AVAILABLE])
def test_absent_isa_is_a_clear_error(isa):
    result = run(PROBE, isa)
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1 and isa in last and "MHA_EXT_CPU_ISA" in last, result.stderr


@pytest.mark.parametrize("name", ["avx1024", "AVX2 ", "none"])
def test_unknown_isa_is_a_clear_error(name):
    result = run(PROBE, name)
    assert result.returncode == 1, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert name.strip() in last and "MHA_EXT_CPU_ISA" in last and "scalar" in last, last


def test_the_best_isa_is_chosen():
    result = run(PROBE, None)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == DEFAULT


def test_empty_variable_is_no_choice():
    result = run(PROBE, "")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == DEFAULT


CORE_FILES = [f"functions/test_{name}.py" for name in ("hidden", "known_mask_traps", "known_traps", "semantics")]
CORE_NAMES = (
    "trap_04 or trap_06 or trap_10 or trap_12 or trap_13 or trap_15 or trap_18 or trap_20 or trap_22 or trap_23 or trap_27 or trap_34 "
    "or trap_35 or fully_masked or hidden_keys or hidden_queries or (nan and float32) or zero_sizes or dropout_is or accumulation "
    "or float64_is"
)


def core_results() -> dict[str, torch.Tensor]:
    """Every core case, forward and backward, checked by the rule; returns what came out, to compare among instruction sets."""
    results = {}
    for c in cases.CORE:
        x = cases.build(c)
        out, lse = mha_ext.attention(x.q, x.k, x.v, return_lse=True, **x.modifiers(), **c.options())
        keep = mha_ext.dropout_mask(x.rng_state, c.dropout_p, c.B, c.H, c.Sq, c.Sk) if c.dropout_p else None
        leaves = x.leaves()
        grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), x.dout)))
        truth = oracle.truths(x.q, x.k, x.v, **x.definition(), keep=keep, **c.options())
        oracle.check({"out": out, "lse": lse, **grads}, truth)
        results[c.id] = out.detach()
        if keep is not None:
            results[c.id + " kept"] = keep
    return results


@pytest.mark.parametrize("isa", AVAILABLE)
def test_core_cases_on_each_isa(isa, tmp_path):
    """The core cases on the instruction set that the variable names, and the same dropout bits on every one."""
    here, there = tmp_path / "here.pt", tmp_path / "there.pt"
    code = "import sys, torch, test_isa; torch.save(test_isa.core_results(), sys.argv[1]); print(test_isa.mha_ext._C.cpu_isa())"
    result = run(code, isa, str(there))
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == isa
    torch.save({name: t for name, t in core_results().items() if name.endswith("kept")}, here)
    other = torch.load(there)
    for name, keep in torch.load(here).items():
        assert torch.equal(keep, other[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("isa", [isa for isa in AVAILABLE if isa != DEFAULT])
def test_core_of_the_suite_on_each_isa(isa):
    """The default runs the whole suite anyway; the others run its core."""
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    files = [str(HERE / name) for name in CORE_FILES]
    result = run(code, isa, "-q", "-x", "-p", "no:cacheprovider", "-k", CORE_NAMES, *files, cwd=HERE.parent)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
