"""Export to an AOTInductor package, which runs in a process that has torch and the built library, not the Python package."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mha_ext

HERE = Path(__file__).parents[1]
LOADED = """
import sys, torch
library, package, data, result = sys.argv[1:]
torch.ops.load_library(library)
run = torch._inductor.aoti_load_package(package)
torch.save([run(*inputs) for inputs in torch.load(data)], result)
assert "mha_ext" not in sys.modules
"""


@pytest.mark.slow
def test_package_runs_with_torch_and_the_library_alone(tmp_path):
    script = runpy.run_path(str(HERE / "cpp" / "package.py"))
    package, data, result = (str(tmp_path / name) for name in ("attention.pt2", "inputs.pt", "outputs.pt"))
    script["write"](package)
    calls = [[torch.randn(B, 3, S, 16) for _ in "qkv"] for B, S in ((3, 20), (1, 7), (5, 33))]
    torch.save(calls, data)
    command = [sys.executable, "-c", LOADED, mha_ext._C.__file__, package, data, result]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    for inputs, out in zip(calls, torch.load(result), strict=True):
        assert torch.equal(out, script["CausalAttention"]()(*inputs))
