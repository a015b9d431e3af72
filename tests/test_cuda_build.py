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


def counted(call, path, monkeypatch) -> list[dict]:
    """What the simulator counts for each kernel that call launches."""
    if "libptxsim" not in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("only the simulated device counts")
    monkeypatch.setenv("PTXSIM_STATS", str(path))
    call()
    torch.cuda.synchronize()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("head_dim", [64, 256])
def test_forward_skips_tiles_that_blocks_hide(head_dim, tmp_path, monkeypatch):
    """Each row of blocks sees one block of 128 keys of eight."""
    q, k, v = (torch.randn(1, 1, 1024, head_dim).bfloat16().cuda() for _ in range(3))
    mask = mha_ext.masks.BlockSparse(torch.eye(8, dtype=torch.bool).roll(3, 0)[None, None].cuda(), 128)
    call = lambda: mha_ext.attention(q, k, v, mask=mask)
    flops = sum(launch["mma_flops"] for launch in counted(call, tmp_path / "launches.json", monkeypatch))
    assert 0 < flops <= 1.01 * 4 * 128 * 1024 * head_dim


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "repeatable"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_stores_are_whole_and_nothing_conflicts_in_shared_memory(head_dim, deterministic, tmp_path, monkeypatch):
    """The compiler may take a 16-byte store apart, and then each piece touches as many sectors as the whole."""
    q, k, v, dout = (torch.randn(1, 2, 256, head_dim).bfloat16().cuda().requires_grad_(i < 3) for i in range(4))
    call = lambda: torch.autograd.grad(mha_ext.attention(q, k, v, deterministic=deterministic), (q, k, v), dout)
    launches = counted(call, tmp_path / "launches.json", monkeypatch)
    assert sum(launch["mma_flops"] > 0 for launch in launches) >= 2
    for launch in launches:
        assert launch["shared_wavefronts"] <= 1.01 * launch["shared_wavefronts_ideal"], launch["kernel"]
        assert launch["global_store_bytes"] > 0.8 * 32 * launch["global_store_sectors"], launch["kernel"]
