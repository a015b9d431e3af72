"""What the compiler made of the kernels: read with a disassembler where there is one, and counted in simulation."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import sass
import torch
from torch.utils import cpp_extension

import mha_ext

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parents[2]


def module(name: str) -> str:
    found = importlib.util.find_spec(f"mha_ext.{name}")
    if found is None:
        pytest.skip(f"the build has no {name}")
    return found.origin


@functools.cache
def kernels_sm90() -> dict[str, list[sass.Instruction]]:
    found = sass.kernels(module("_C_cuda_sm90"))
    assert len(found) > 10
    return found


def places(code: list[sass.Instruction], *names: str) -> list[int]:
    return [n for n, i in enumerate(code) if i.name.startswith(names)]


def test_the_kernels_use_wgmma_and_no_local_memory():
    for name, code in kernels_sm90().items():
        assert "_sm90" in name and (places(code, "HGMMA") or "round" in name), name
        assert not places(code, "LDL", "STL"), f"{name} keeps something in local memory"


def test_products_are_not_made_one_after_the_other():
    """ptxas, where it cannot see that registers of a product are left alone, waits after each instruction."""
    for name, code in kernels_sm90().items():
        assert 2 * len(places(code, "WARPGROUP.DEPBAR")) <= len(places(code, "HGMMA")), name


def test_the_softmax_overlaps_with_the_products_before_it():
    """In forward's loop, between the wait for a tile's scores and that for the product with the tile before."""
    for name, code in kernels_sm90().items():
        if "attention_fwd" not in name:
            continue
        values, general = map(int, re.search(r"ForwardSm90ILi\d+ELi(\d+)ELb(\d)E", name).groups())
        keys = (128 if values <= 128 else 64) // (1 + general)
        first, scores, product, last = places(code, "WARPGROUP.DEPBAR")
        after = places(code[product:last], "HGMMA")[0] + product
        assert len(places(code[scores:product], "MUFU.EX2")) >= keys // 2, name  # of a thread
        assert not places(code[product:after], "MUFU.EX2"), name


def test_backward_leaves_dk_to_the_next_tile():
    """Where registers have room the product that makes dk goes on beside the additions to dq and the next tile's first two products.
    The wait for all, after it, is jumped over unless something is not finite."""
    found = 0
    for name, code in kernels_sm90().items():
        kind = re.search(r"attention_bwd_sm90.*BackwardSm90ILi(64ELb[01]|128ELb0)", name)
        if not kind:
            continue
        loop, found = sass.in_loops(code), found + 1
        waits, products, branches = (places(loop, *names) for names in (["WARPGROUP.DEPBAR"], ["HGMMA"], ["BRA"]))
        plain = kind[1].endswith("0")
        assert [int(loop[n].text.split()[-1], 16) for n in waits] == ([2, 1, 1, 1, 0] if plain else [2, 0, 1, 0]), name
        assert sum(n < waits[0] for n in products) == 2 * int(kind[1].split("E")[0]) // 16, name
        additions, softmax = places(loop, "REDG.E.ADD.F32", "RED.E.ADD.F32"), places(loop, "MUFU.EX2")
        assert waits[1] < softmax[0] and softmax[-1] < waits[2] and waits[-2] < additions[0], name
        over = [n for n in branches if additions[-1] < n < waits[-1] and loop[n].text[0] == "@"]
        assert any(int(loop[n].text.split()[-1], 16) > loop[waits[-1]].address for n in over), name
    assert found == 6


def test_no_loop_waits_for_the_memory_of_the_whole_gpu():
    """Backward may: where blocks take turns, one thread releases what all have added."""
    for name, code in kernels_sm90().items():
        fences = places(sass.in_loops(code), "MEMBAR.SC", "MEMBAR.ALL.GPU", "MEMBAR.ALL.SYS", "MEMBAR.GPU")
        assert len(fences) <= ("attention_bwd_sm90" in name), name


def test_warpgroups_take_no_more_registers_than_the_block_has():
    """setmaxnreg waits until others have given enough back: for ever, if nobody does. One warpgroup gives, two take."""
    used, found = sass.resources(module("_C_cuda_sm90")), 0
    for name, code in kernels_sm90().items():
        moves = [re.search(r"USETMAXREG\.(\w+)\..* (0x\w+)", code[n].text) for n in places(code, "USETMAXREG")]
        after = {move[1]: int(move[2], 16) for move in moves}
        if "_round_" in name:
            assert not moves, name
            continue
        assert len(moves) == len(after) == 2, name
        assert after["DEALLOC"] + 2 * after["TRY_ALLOC"] <= 3 * used[name]["REG"], name
        found += 1
    assert found >= 20


def test_what_is_built_for_8_0_keeps_nothing_in_local_memory():
    found = sass.resources(module("_C_cuda"))
    assert sum("sm80" in name for name in found) > 60
    spilled = [name for name, used in found.items() if "sm80" in name and (used["LOCAL"] or used["STACK"])]
    if any(
        "sm_80" not in line for line in sass.cuobjdump("--list-elf", module("_C_cuda")).split("\n") if ".cubin" in line
    ):
        pytest.skip("other architectures may spill a few bytes")
    assert not spilled


def test_a_build_for_all_gpus_has_machine_code_for_each(tmp_path):
    """One small file, as setup.py and torch have it compiled where no TORCH_CUDA_ARCH_LIST is set and no GPU visible."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc is at hand")
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    listed, hopper, _ = setup.architectures(None)
    assert hopper
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_CUDA_ARCH_LIST", listed)
        flags = cpp_extension._get_cuda_arch_flags()
    built = tmp_path / "dropout_mask.o"
    source = ROOT / "csrc" / "cuda" / "rows" / "dropout_mask.cu"
    subprocess.run([nvcc, "-std=c++20", *flags, "-c", "-o", built, source], check=True)
    images = set(re.findall(r"sm_\d+", sass.cuobjdump("--list-elf", str(built))))
    assert images == {"sm_80", "sm_86", "sm_90", "sm_100", "sm_120"}
    assert set(re.findall(r"sm_\d+", sass.cuobjdump("--list-ptx", str(built)))) == {"sm_120"}
    assert "sm_90a" in sass.cuobjdump("--list-elf", module("_C_cuda_sm90"))


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
