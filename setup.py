"""Builds mha_ext._C (the ops and the CPU kernels) and, where CUDA is to be had, mha_ext._C_cuda (the CUDA kernels), on
LibTorch's stable ABI, so that one build serves torch 2.11 and later.

MHA_EXT_CUDA=1 (or FORCE_CUDA=1) asks for CUDA, MHA_EXT_CUDA=0 for none; without either it is built where a GPU is visible.
TORCH_CUDA_ARCH_LIST names the compute capabilities to build for; without it, those of the visible GPUs or, where none is
visible, all (ARCHITECTURES).
"""

import glob
import os
import re
import shutil
import subprocess
import sys

from setuptools import setup

FLOOR = (2, 11)
TORCH_TARGET_VERSION = f"0x{FLOOR[0]:02x}{FLOOR[1]:02x}000000000000ULL"
ROOT = os.path.dirname(os.path.abspath(__file__))


# Machine code for all GPUs that the kernels are for (8.6's also runs on 8.9), and PTX of the last for those to come.
ARCHITECTURES = "8.0;8.6;9.0;10.0;12.0"
GENERATIONS = {"Ampere": "8.0;8.6", "Ada": "8.9", "Hopper": "9.0", "Blackwell": "10.0;12.0"}  # as torch names them


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
            "(Debian: apt install g++), or name it in CXX."
        )


def cuda_toolkit():
    """The folder of the toolkit whose nvcc would run, as nvcc itself tells (it may be a wrapper), or None."""
    nvcc = shutil.which("nvcc") or os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    try:
        told = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, check=False).stderr
    except OSError:
        return None
    top = re.search(r"^#\$ TOP=(.*)$", told, re.MULTILINE)
    return os.path.realpath(os.path.join(os.path.dirname(nvcc), top[1].strip())) if top else None


def decide_cuda(torch):
    """(whether to build the CUDA kernels, the reason)"""
    asked = os.environ.get("MHA_EXT_CUDA") or ("1" if os.environ.get("FORCE_CUDA") == "1" else "")
    if asked == "0":
        return False, "MHA_EXT_CUDA=0 asked for none"
    toolkit = cuda_toolkit()
    if torch.version.cuda is None:
        missing = f"torch {torch.__version__} is a build without CUDA"
    elif toolkit is None:
        missing = "no nvcc was found on PATH or in CUDA_HOME"
    else:
        missing = None
    if missing and asked:
        stop(f"MHA_EXT_CUDA={asked} asks for CUDA, but {missing}; install what is missing or set MHA_EXT_CUDA=0.")
    if missing:
        return False, missing
    if not asked and not torch.cuda.is_available():
        return False, "no GPU was visible to the build (MHA_EXT_CUDA=1 builds for one that is elsewhere)"
    os.environ["CUDA_HOME"] = toolkit
    return True, f"nvcc of {toolkit}"


def known_architectures(toolkit):
    """The compute capabilities that a toolkit's nvcc compiles for, as (major, minor); none if it does not tell."""
    nvcc = os.path.join(toolkit, "bin", "nvcc")
    told = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout
    return [(int(name[:-1]), int(name[-1])) for name in re.findall(r"compute_(\d+)\b", told)]


def within(known, capability):
    """A GPU's compute capability as a name for TORCH_CUDA_ARCH_LIST; where the toolkit does not know it, PTX of the newest before
    it, which the GPU's driver translates."""
    older = [one for one in known if one <= capability]
    found = max(older) if older else capability
    return f"{found[0]}.{found[1]}" + ("+PTX" if found != capability else "")


def architectures(asked, visible=(), known=()):
    """What to compile for: (a list as TORCH_CUDA_ARCH_LIST for all kernels but those for 9.0a, whether to build the latter, how that
    came about).

    asked: TORCH_CUDA_ARCH_LIST or None; visible: the compute capabilities of the GPUs that are there, known: of those that the
    toolkit compiles for, as (major, minor).
    """
    names, newer = (asked or "").replace(";", " ").replace(",", " ").split(), []
    if names and names != ["native"]:
        why = "as TORCH_CUDA_ARCH_LIST asks"
    elif visible:
        names = list(dict.fromkeys(within(known, one) for one in sorted(set(visible))))
        why = "those of the visible GPUs alone"
        newer = [f"{major}.{minor}" for major, minor in sorted(set(visible)) if known and (major, minor) not in known]
        if newer:
            why += f"; the toolkit does not know {', '.join(newer)}, which run PTX: a newer one would make machine code"
    else:
        every = [tuple(map(int, re.findall(r"\d+", name))) for name in ARCHITECTURES.split(";")]
        names = [f"{major}.{minor}" for major, minor in every if not known or (major, minor) in known]
        if not names:
            stop("the CUDA toolkit knows no GPU of compute capability 8.0 or later; install a newer one or set MHA_EXT_CUDA=0.")
        names[-1] += "+PTX"
        why = "as neither TORCH_CUDA_ARCH_LIST is set nor a GPU visible"
    chosen, old = [], []
    for name in names:
        name, plus, ptx = name.partition("+")
        expanded = GENERATIONS.get(name, name).split(";")
        for one in expanded:
            number = re.fullmatch(r"(\d+)\.(\d)[af]?", one)
            if number and int(number[1]) >= 8:
                chosen.append(one + (plus + ptx if one == expanded[-1] else ""))
            elif number or one in ("Kepler", "Maxwell", "Pascal", "Volta", "Turing"):
                old.append(one)
            else:
                stop(f"TORCH_CUDA_ARCH_LIST names {name}; it takes compute capabilities such as 8.6 or 9.0+PTX.")
    if not chosen:
        stop(f"{', '.join(old)} is older than compute capability 8.0, which the CUDA kernels need; set MHA_EXT_CUDA=0.")
    if old:
        why += f"; left out {', '.join(old)}: the kernels need 8.0 or later"
    hopper = [name for name in chosen if name.startswith("9.0")] if (9, 0) in visible or not newer else []
    rest = [name for name in chosen if not name.startswith("9.0a")]
    rest = rest or [name.replace("9.0a", "9.0") for name in hopper]
    return ";".join(dict.fromkeys(rest)), bool(hopper), why


def sources(*patterns):
    return sorted(path for pattern in patterns for path in glob.glob(pattern, root_dir=ROOT))


def extensions():
    require_compiler()
    torch = require_torch()
    cuda, reason = decide_cuda(torch)
    if cuda:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        visible = [torch.cuda.get_device_capability(i) for i in range(count)]
        known = known_architectures(os.environ["CUDA_HOME"])
        listed, hopper, why = architectures(os.environ.get("TORCH_CUDA_ARCH_LIST"), visible, known)
        os.environ["TORCH_CUDA_ARCH_LIST"] = listed
        reason += f", compute capabilities {listed}{' and 9.0a' if hopper else ''}, {why}"
    print(f"mha_ext: building {'with' if cuda else 'without'} CUDA: {reason}", file=sys.stderr)
    from torch.utils.cpp_extension import CppExtension, CUDAExtension, include_paths

    system_headers = [flag for path in include_paths() for flag in ("-isystem", path)]  # no warnings about torch's own
    with open(os.path.join(ROOT, "mha_ext", "VERSION")) as f:
        version = f.read().strip()
    texts = {"MHA_EXT_VERSION": version, "MHA_EXT_TORCH": torch.__version__, "MHA_EXT_CUDA_REASON": reason}
    target = ("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)
    macros = [target, *((name, f'"{text}"') for name, text in texts.items())]
    cxx = ["-O3", "-std=c++20", "-Wall", "-Wextra", "-fvisibility=hidden", "-g0", *system_headers]
    built = [
        CppExtension(
            "mha_ext._C",
            sources("csrc/cpu/*/*.cpp", "csrc/torch/cpu_ops.cpp", "csrc/torch/schemas.cpp", "csrc/bindings.cpp"),
            define_macros=[*macros, ("MHA_EXT_CUDA", str(int(cuda)))],
            extra_compile_args=cxx,
        )
    ]
    if cuda:
        nvcc = ["-O3", "-std=c++20", "-lineinfo", "-Xcompiler=-fvisibility=hidden"]
        # torch hides what the half types convert to and compute with; the kernels use it.
        hidden = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
        nvcc += [f"-U__CUDA_NO_{name}__" for name in hidden]
        no_spills = "-Xptxas=-warn-spills,-Werror"
        sm80 = [no_spills] if listed in ("8.0", "8.0+PTX") else []  # which the kernels' tiles are sized for
        # An image for 9.0a would be preferred to the PTX of 8.0, so kernels for the one are not compiled for the other.
        sm90 = [f"-gencode=arch=compute_90a,code={code}_90a" for code in ("sm", "compute")] + [no_spills]
        instances = os.path.join("build", "cuda_instances")
        generate = os.path.join(ROOT, "csrc", "cuda", "generate_instances.py")
        subprocess.run([sys.executable, generate, os.path.join(ROOT, instances)], check=True)
        files = sources("csrc/torch/cuda_ops.cpp", "csrc/cuda/*/*.cu", f"{instances}/*.cu")
        modules = {"_C_cuda": ([file for file in files if "_sm90_" not in file], sm80)}
        if hopper:
            modules["_C_cuda_sm90"] = (sources("csrc/torch/cuda_sm90.cu", f"{instances}/*_sm90_*.cu"), sm90)
        for name, (files, flags) in modules.items():
            built.append(
                CUDAExtension(
                    f"mha_ext.{name}",
                    files,
                    include_dirs=[os.path.join(ROOT, "csrc", "cuda"), os.path.join(ROOT, instances)],
                    define_macros=[target, ("USE_CUDA", None)],
                    extra_compile_args={"cxx": cxx, "nvcc": nvcc + flags},
                )
            )
    return built


# sdist and metadata need neither torch nor a compiler.
BUILDING = {"build_ext", "bdist_wheel", "editable_wheel", "install", "develop", "build"} & set(sys.argv)


def build_commands():
    from torch.utils.cpp_extension import BuildExtension

    return {"build_ext": BuildExtension}


if __name__ == "__main__":
    setup(ext_modules=extensions() if BUILDING else [], cmdclass=build_commands() if BUILDING else {})
