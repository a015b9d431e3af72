"""What the compiler made of the kernels: read with a disassembler where there is one, and counted in simulation."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

import mha_ext

pytestmark = pytest.mark.cuda


def disassembler() -> str | None:
    """cuobjdump: of a CUDA toolkit, or of the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm."""
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders = [os.environ["PATH"], *(str(path) for path in packages.glob("*/bin")), "/usr/local/cuda/bin"]
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


def test_the_kernels_use_wgmma_and_no_local_memory():
    module = importlib.util.find_spec("mha_ext._C_cuda_sm90")
    if module is None:
        pytest.skip("the build has no kernels for 9.0a")
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump is at hand: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    path = os.pathsep.join([os.path.dirname(tool), os.environ["PATH"]])  # it runs nvdisasm
    text = subprocess.run([tool, "-sass", module.origin], env={"PATH": path}, capture_output=True, text=True, check=True)
    kernels = re.split(r"^\s*Function : ", text.stdout, flags=re.M)[1:]
    assert len(kernels) > 10
    for kernel in kernels:
        name = kernel.split(maxsplit=1)[0]
        assert "_sm90" in name and ("HGMMA" in kernel or "round" in name), name
        assert not re.search(r"\b(LDL|STL)\b", kernel), f"{name} keeps something in local memory"


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "repeatable"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_stores_are_whole_and_nothing_conflicts_in_shared_memory(head_dim, deterministic, tmp_path, monkeypatch):
    """The compiler may take a 16-byte store apart, and then each piece touches as many sectors as the whole."""
    if "libptxsim" not in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("only the simulated device counts")
    q, k, v, dout = (torch.randn(1, 2, 256, head_dim).bfloat16().cuda().requires_grad_(i < 3) for i in range(4))
    path = tmp_path / "launches.json"
    monkeypatch.setenv("PTXSIM_STATS", str(path))
    torch.autograd.grad(mha_ext.attention(q, k, v, deterministic=deterministic), (q, k, v), dout)
    torch.cuda.synchronize()
    launches = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum(launch["mma_flops"] > 0 for launch in launches) >= 2
    for launch in launches:
        assert launch["shared_wavefronts"] <= 1.01 * launch["shared_wavefronts_ideal"], launch["kernel"]
        assert launch["global_store_bytes"] > 0.8 * 32 * launch["global_store_sectors"], launch["kernel"]
