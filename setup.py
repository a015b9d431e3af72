"""Builds mha_ext._C: the ops and the CPU kernels, on LibTorch's stable ABI, so that one build serves torch 2.11 and later."""

import glob
import os
import re
import shutil
import sys

from setuptools import setup

FLOOR = (2, 11)
TORCH_TARGET_VERSION = f"0x{FLOOR[0]:02x}{FLOOR[1]:02x}000000000000ULL"
ROOT = os.path.dirname(os.path.abspath(__file__))


def stop(sentence):
    raise SystemExit(f"mha_ext: {sentence}")


def require_torch():
    try:
        import torch
    except ImportError as error:
        stop(f"torch could not be imported ({error}); install torch >= 2.11 first (pip install torch), then mha_ext.")
    version = tuple(int(x) for x in re.match(r"(\d+)\.(\d+)", torch.__version__).groups())
    if version < FLOOR:
        stop(
            f"torch {torch.__version__} is older than 2.11, whose stable C++ interface mha_ext is built on; "
            'upgrade it (pip install "torch>=2.11").'
        )
    return torch


def require_compiler():
    compiler = os.environ.get("CXX", "cl" if sys.platform == "win32" else "c++").split()[0]
    if shutil.which(compiler) is None and (os.environ.get("CXX") or shutil.which("g++") is None):
        stop(
            f"no C++ compiler was found (looked for {compiler}); install one that knows C++20, such as g++ >= 11 "
            "(Debian: apt install g++) or clang >= 14, or name it in CXX."
        )


def extension():
    require_compiler()
    torch = require_torch()
    from torch.utils.cpp_extension import CppExtension, include_paths

    system_headers = [flag for path in include_paths() for flag in ("-isystem", path)]  # no warnings about torch's own
    with open(os.path.join(ROOT, "mha_ext", "VERSION")) as f:
        version = f.read().strip()
    sources = [path for folder in ("cpu", "torch") for path in glob.glob(f"csrc/{folder}/*.cpp", root_dir=ROOT)]
    texts = {
        "MHA_EXT_VERSION": version,
        "MHA_EXT_TORCH": torch.__version__,
        "MHA_EXT_CUDA_REASON": "this version has CPU kernels only",
    }
    texts = {name: f'"{text}"' for name, text in texts.items()}
    return CppExtension(
        "mha_ext._C",
        sorted(sources) + ["csrc/bindings.cpp"],
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION), *texts.items()],
        extra_compile_args=["-O3", "-std=c++20", "-Wall", "-Wextra", "-fvisibility=hidden", "-g0", *system_headers],
    )


def build_commands():
    if not {"build_ext", "bdist_wheel", "editable_wheel", "install", "develop", "build"} & set(sys.argv):
        return {}  # sdist and metadata need neither torch nor a compiler
    from torch.utils.cpp_extension import BuildExtension

    return {"build_ext": BuildExtension}


if __name__ == "__main__":
    building = {"build_ext", "bdist_wheel", "editable_wheel", "install", "develop", "build"} & set(sys.argv)
    setup(ext_modules=[extension()] if building else [], cmdclass=build_commands())
