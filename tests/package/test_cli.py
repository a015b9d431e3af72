"""python -m mha_ext: what is built, what is used, and a self-check that can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mha_ext

ROOT = Path(__file__).parents[2]


def run(*args: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "mha_ext", *args],
        env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_says_what_is_built_and_checks_itself():
    result = run()
    assert result.returncode == 0, result.stderr
    text = result.stdout
    assert mha_ext.__version__ in text
    assert mha_ext._C.cpu_isa() in text
    assert all(isa in text for isa in mha_ext._ops.available_isas())
    assert "CUDA" in text
    if mha_ext._ops.without_cuda:
        assert mha_ext._ops.without_cuda in text
    assert torch.__version__.split("+")[0] in text


def test_names_the_forced_instruction_set():
    result = run(MHA_EXT_CPU_ISA="scalar")
    assert result.returncode == 0, result.stderr
    assert "CPU instruction set in use: scalar; available:" in result.stdout


def test_unknown_instruction_set_is_one_sentence():
    result = run(MHA_EXT_CPU_ISA="sse9")
    assert result.returncode != 0
    assert "sse9" in result.stdout + result.stderr and "scalar" in result.stdout + result.stderr


def test_explain_prints_the_plan_of_a_shape():
    result = run(
        "explain", "--shape", "2,4,2,30,50,16,8", "--dtype", "bfloat16", "--mask", "causal", "--mask", "padding:50,7"
    )
    assert result.returncode == 0, result.stderr
    q, k, v = (torch.empty(2, *size, dtype=torch.bfloat16) for size in ((4, 30, 16), (2, 50, 16), (2, 50, 8)))
    mask = mha_ext.masks.Causal() & mha_ext.masks.Padding(torch.tensor([50, 7]))
    plan = re.sub(r"\d+ threads?", "", str(mha_ext.explain(q, k, v, mask=mask)).split("memory")[0])
    assert re.sub(r"\d+ threads?", "", result.stdout.split("memory")[0]) == plan


@pytest.mark.parametrize(
    "arguments,given,accepted",
    [(["explain", "--shape", "1,3"], "'1,3'", "B,H,Hk,Sq,Sk,D,Dv"), (["explain", "--shape", "1,-2,3,4"], "'1,-2,3,4'", "B,H,S,D"),
     (["explain", "--shape", "1,2,3,4", "--mask", "wndow:5"], "'wndow:5'", "window:LEFT,RIGHT"),
     (["explain", "--shape", "1,2,3,4", "--threads", "-1"], "'-1'", "an int >= 1"),
     (["explain", "--shape", "1,3,2,4,4,8"], "[1,3,4,8]", "multiple"), (["explane"], "'explane'", "explain, bench")],
)  # fmt: skip
def test_commands_refuse_in_a_sentence(arguments, given, accepted):
    result = run(*arguments)
    assert result.returncode == 2 and result.stdout == "" and "Traceback" not in result.stderr
    assert given in result.stderr and accepted in result.stderr


def test_bench_lists_its_rows():
    for module in ("tqdm", "rich", "matplotlib"):
        pytest.importorskip(module)
    result = run("bench", "--list", "--only", "^decode")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 2
    assert all(line.startswith("decode") for line in result.stdout.splitlines())


def test_bench_says_what_to_install():
    """All of the extra by the names of its parts, which every registry has."""
    code = "import sys; sys.modules['rich'] = None; import mha_ext.__main__ as m; sys.exit(m.main(['bench', '--list']))"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120)
    parts = re.search(r"^bench = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1].replace('"', "").split(", ")
    assert result.returncode == 2 and result.stderr.strip() == f"The benchmark needs rich: pip install {' '.join(parts)}"


def test_self_check_fails_when_a_kernel_is_wrong():
    """The self-check compares with independent truth: with a falsified op it must not succeed."""
    code = """
import runpy, sys, torch, mha_ext
real = mha_ext._ops.attention_out
mha_ext._ops.attention_out = lambda *args: real(*args) * 1.01
sys.argv = ["mha_ext"]
try:
    runpy.run_module("mha_ext", run_name="__main__", alter_sys=True)
except SystemExit as stop:
    sys.exit(stop.code)
"""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode != 0, result.stdout
