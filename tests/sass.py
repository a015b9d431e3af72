"""Machine code of the built CUDA modules, as cuobjdump shows it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest


def cuobjdump(*options: str) -> str:
    """Of a CUDA toolkit, or of the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm."""
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders = [os.environ["PATH"], *(str(path) for path in packages.glob("*/bin")), "/usr/local/cuda/bin"]
    tool = shutil.which("cuobjdump", path=os.pathsep.join(folders))
    if tool is None:
        pytest.skip("no cuobjdump is at hand: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    path = os.pathsep.join([os.path.dirname(tool), os.environ["PATH"]])  # it runs nvdisasm
    return subprocess.run([tool, *options], env={"PATH": path}, capture_output=True, text=True, check=True).stdout


class Instruction(NamedTuple):
    address: int
    text: str  # with its predicate

    @property
    def name(self) -> str:
        return self.text.removeprefix(self.text.split()[0]).split()[0] if self.text[0] == "@" else self.text.split()[0]


def kernels(file: str) -> dict[str, list[Instruction]]:
    found = {}
    for text in re.split(r"^\s*Function : ", cuobjdump("-sass", file), flags=re.M)[1:]:
        code = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+([^;]+?)\s*;", text)
        found[text.split(maxsplit=1)[0]] = [Instruction(int(address, 16), one) for address, one in code]
    return found


def in_loops(code: list[Instruction]) -> list[Instruction]:
    """What lies between the target of a branch backwards and the branch. Code that the compiler has put behind the kernel's end, such
    as the repetition of a wait, is no loop's: its branches back are not looked at."""
    end = max(i.address for i in code if i.name == "EXIT")
    loops = []
    for i in code:
        target = re.search(r"\bBRA(?:\.\w+)* .*?(0x[0-9a-f]+)", i.text)
        if target and int(target[1], 16) < i.address <= end:
            loops.append((int(target[1], 16), i.address))
    return [i for i in code if any(first <= i.address <= last for first, last in loops)]


def resources(file: str) -> dict[str, dict[str, int]]:
    """Of each kernel: REG, STACK, SHARED (static), LOCAL."""
    lines = cuobjdump("-res-usage", file).splitlines()
    found = {}
    for line, after in zip(lines, lines[1:]):
        if name := re.match(r"\s*Function (\S+):", line):
            found[name[1]] = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", after)}
    return found
