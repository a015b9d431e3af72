"""The distributed example under torchrun, with two processes, against the same in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_distributed.py"
OPTIONS = ["--steps", "8", "--length", "48", "--batch", "2", "--d-model", "32", "--layers", "1", "--float64"]


def losses(launcher: list[str], *parallel: str) -> list[list[float]]:
    """The losses of the steps, for each way."""
    command = [sys.executable, *launcher, str(EXAMPLE), *OPTIONS, "--parallel", *parallel]
    paths = os.pathsep.join([str(EXAMPLE.parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300, env=environment).stdout
    return [[float(x) for x in line.split("processes: ")[1].split()] for line in out.splitlines() if "processes: " in line]


def test_two_processes_learn_as_one():
    pytest.importorskip("tqdm")
    (one,) = losses([], "data")
    several = losses(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], "data", "tensor", "sequence")
    assert len(several) == 3 and len(one) == 8 and one[-1] < 0.9 * one[0]
    for two in several:
        assert max(abs(a - b) for a, b in zip(two, one, strict=True)) < 1.5e-6  # six decimals are printed
