"""The built library: no unstable torch symbols, one exported table per instruction set, one version; the repository's own rules."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import mha_ext

ROOT = Path(__file__).parents[2]
LIBRARY = Path(mha_ext._C.__file__)



def setup_py():
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")


def symbols(*options: str) -> list[str]:
    found = subprocess.run(["nm", "-DC", *options, str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    return [line.split(maxsplit=1)[1] if line.startswith(" ") else line for line in found.splitlines()]


def undefined() -> list[str]:
    found = subprocess.run(
        ["nm", "-D", "-C", "--undefined-only", str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    return [line.strip().removeprefix("U ").removeprefix("w ").strip() for line in found.splitlines()]


@pytest.mark.parametrize(
    "asked, visible, listed, hopper",
    [
        (None, [], "8.0;8.6;9.0;10.0;12.0+PTX", True),
        (None, [(8, 6)], "8.6", False),
        (None, [(9, 0), (8, 0), (9, 0)], "8.0;9.0", True),
        ("", [(12, 0)], "12.0", False),
        ("native", [(8, 9)], "8.9", False),
        ("8.6", [(9, 0)], "8.6", False),
        ("9.0", [], "9.0", True),  # brings the kernels for 9.0a
        ("9.0a", [], "9.0", True),  # which need the rest for 9.0
        ("9.0a+PTX", [], "9.0+PTX", True),
        ("8.0+PTX;9.0a", [], "8.0+PTX", True),
        ("8.0 9.0 9.0a+PTX", [], "8.0;9.0", True),
        ("7.5;8.0", [], "8.0", False),
        ("Turing;Ampere Hopper+PTX", [], "8.0;8.6;9.0+PTX", True),
        ("10.0a;12.0f", [], "10.0a;12.0f", False),
    ],
)
def test_architectures_to_build_for(asked, visible, listed, hopper):
    old = [name for name in ("7.5", "Turing") if name in (asked or "")]
    found, has_hopper, why = setup_py().architectures(asked, visible)
    assert (found, has_hopper) == (listed, hopper)
    assert why.count("\n") == 0 and ("left out" in why) == bool(old) and all(name in why for name in old)
    assert ("visible" in why) == (asked in (None, "", "native"))


KNOWN = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)]  # to a toolkit


@pytest.mark.parametrize(
    "visible, listed, hopper, unknown",
    [
        ([(8, 6)], "8.6", False, ""),
        ([(13, 0)], "12.0+PTX", False, "13.0"),  # newer than the toolkit
        ([(10, 0)], "9.0+PTX", False, "10.0"),  # between what it knows; code for 9.0a would not run there
        ([(9, 0), (10, 3)], "9.0;9.0+PTX", True, "10.3"),
        ([], "8.0;8.6;9.0;12.0+PTX", True, ""),
    ],
)
def test_gpus_that_the_toolkit_does_not_know_run_ptx(visible, listed, hopper, unknown):
    found, has_hopper, why = setup_py().architectures(None, visible, KNOWN)
    assert (found, has_hopper) == (listed, hopper)
    assert ("does not know" in why) == bool(unknown) and unknown in why
    with pytest.raises(SystemExit, match="knows no GPU"):
        setup_py().architectures(None, (), [(7, 5)])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_what_the_toolkit_knows():
    known = setup_py().known_architectures(setup_py().cuda_toolkit())
    assert (8, 0) in known and (9, 0) in known and all(major < 30 for major, _ in known)


@pytest.mark.parametrize("asked, said", [("7.5;Volta", "7.5, Volta is older than"), ("9", "names 9;"), ("Foo", "names Foo;")])
def test_architectures_that_nothing_can_be_built_for(asked, said):
    with pytest.raises(SystemExit, match=said):
        setup_py().architectures(asked)


@needs_nm
def test_no_unstable_torch_symbols():
    """Of torch, the library may need only its C shim (aoti_torch_*, torch_*): no symbol of at::, c10:: or torch:: classes."""
    names = undefined()
    assert any(name.startswith(("aoti_torch_", "torch_")) for name in names), "the scan sees torch's shim"
    unstable = [
        name for name in names if re.search(r"\b(at|c10|torch|caffe2|pybind11::detail::type_caster<at)::", name)
    ]
    assert unstable == []


@needs_nm
def test_undefined_symbols_are_of_known_origin():
    """Everything else comes from Python, the C and C++ libraries and the compiler; anything new should be looked at."""
    known = re.compile(
        r"^(aoti_torch_|torch_|_?Py|_Py|std::|__cxa|__cxxabiv1|_Unwind|__gxx|operator (new|delete)|vtable for |typeinfo for |"
        r"_ITM_|__gmon|__stack_chk|__tls|__assert|_GLOBAL|[a-z_0-9]+(@|$)|GOMP|__libc|__errno|non-virtual thunk|VTT for)"
    )
    strange = [name for name in undefined() if not known.match(name)]
    assert strange == []


@needs_nm
def test_no_second_thread_pool_and_no_fast_math():
    """OpenMP of its own would spin against torch's; -ffast-math leaves a mark that sets flush-to-zero for the process."""
    names = undefined()
    assert not [name for name in names if name.startswith(("GOMP_", "omp_", "__kmpc_"))]
    code = "import torch, mha_ext; t = torch.tensor([1e-40]); print((t * 1.0).item() != 0.0)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
        ).stdout.strip()
        == "True"
    )


@needs_nm
def test_only_the_module_entry_is_exported():
    """Symbols of kernels stay inside, so that they cannot collide with another library's."""
    found = subprocess.run(
        ["nm", "-DC", "--defined-only", str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split(maxsplit=2)[2] for line in found.splitlines()]
    assert "PyInit__C" in names
    kernels = [
        name for name in names if re.search(r"\bmha::", name) and not name.startswith(("typeinfo", "vtable", "guard"))
    ]
    assert kernels == []


@needs_nm
@pytest.mark.parametrize("isa", mha_ext._ops.built_isas())
def test_each_isa_object_exports_one_symbol(isa):
    """A function of a wider instruction set that leaks under a common name could be picked by the linker for every machine."""
    objects = sorted(ROOT.glob(f"build/**/isa/{isa}.o"), key=lambda p: p.stat().st_mtime)
    if not objects:
        pytest.skip("no objects here: installed, not built in place")
    found = subprocess.run(
        ["nm", "-C", "--defined-only", "--extern-only", str(objects[-1])], capture_output=True, text=True, check=True
    )
    names = [line.split(maxsplit=2) for line in found.stdout.splitlines()]
    strong = [name for _, kind, name in names if kind in "TDBR"]
    weak = [name for _, kind, name in names if kind in "WVu"]
    assert strong == [f"mha::cpu::kernels_{isa}()"]
    assert [name for name in weak if not name.startswith("DW.ref.")] == []


def test_one_version():
    """mha_ext/VERSION is the only place; everything else reads it."""
    version = (Path(mha_ext.__file__).parent / "VERSION").read_text().strip()
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", version)
    assert mha_ext.__version__ == version == mha_ext._ops.build_info["version"]
    for name in ("pyproject.toml", "setup.py", "CMakeLists.txt"):
        path = ROOT / name
        if path.exists():
            text = path.read_text()
            assert not re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.])", text), f"{name} repeats the version"


def test_build_info_names_what_is_built():
    info = mha_ext._ops.build_info
    assert info["torch_floor"] == "2.11" and info["compiler"]
    assert isinstance(info["cuda"], bool) and (info["cuda"] or info["cuda_reason"])


def test_public_names():
    promised = {
        "attention", "scaled_dot_product_attention", "split_heads", "merge_heads", "masked_softmax", "dropout_mask", "explain", "masks",
        "nn", "swap_attention",
    }  # fmt: skip
    assert promised <= set(mha_ext.__all__) and promised <= set(dir(mha_ext))
    for name in mha_ext.__all__:
        assert getattr(mha_ext, name).__doc__, f"{name} has no documentation"
    for name in ("Causal", "Window", "Padding", "LeftPadding", "Prefix", "Documents", "Dense"):
        assert getattr(mha_ext.masks, name).__doc__
    for name in ("MultiheadAttention", "SelfAttention", "CrossAttention"):
        assert getattr(mha_ext.nn, name).__doc__


def test_import_is_quick_and_quiet():
    """Importing prints nothing, starts no thread and leaves torch's settings alone."""
    code = (
        "import torch, os; before = (torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed());"
        "import mha_ext; assert before == (torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed())"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:mha_ext", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0 and result.stdout == "" and result.stderr == "", result.stderr


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="not in the repository")
def test_kernels_never_include_torch():
    """torch stays at the door: only csrc/torch and the bindings may know it."""
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".h", ".cpp", ".cuh", ".cu") and "torch" not in path.relative_to(ROOT / "csrc").parts:
            included = re.findall(r'#\s*include\s*[<"]([^>"]+)', path.read_text())
            assert not [name for name in included if name.startswith(("torch/", "ATen/", "c10/"))], path


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="not in the repository")
def test_unstable_headers_are_not_included():
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".h", ".cpp", ".cuh", ".cu"):
            for name in re.findall(r'#\s*include\s*[<"]([^>"]+)', path.read_text()):
                assert not name.startswith(("ATen/", "c10/", "torch/extension", "torch/torch.h", "torch/library.h")), (
                    f"{path}: {name}"
                )


def test_loads_beside_torch_of_this_version():
    major, minor = map(int, torch.__version__.split(".")[:2])
    assert (major, minor) >= (2, 11)


def test_sdist_has_every_file(tmp_path):
    """What git tracks, but for the settings of git, CI and pre-commit; and nothing that was built."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in (m.name for m in tar.getmembers() if m.isfile())}
    tracked = set(subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split())
    settings = re.compile(r"(?!\.clang-format)\.")
    missing = {name for name in tracked - packed if not settings.match(name) and (ROOT / name).exists()}
    assert missing == set()
    built = {name for name in packed if name.endswith((".so", ".o", ".pyc", ".html")) or name.startswith("build/")}
    assert built == set() and "csrc/attention.h" in packed
