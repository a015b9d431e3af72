"""What the compiler made of the kernels for compute capability 9.0, read with a disassembler where there is one."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

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
