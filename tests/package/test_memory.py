"""Memory: O(S) forward and backward, and no copy of keys and values for grouped queries; measured as the peak of a process of its own."""

from __future__ import annotations

import os
import platform
import re

import pytest
import torch
from test_threads import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.system() != "Linux", reason="reads the peak from /proc"),
]

PRELUDE = """
import torch, mha_ext
from mha_ext import masks
torch.manual_seed(0)
torch.set_num_threads(2)

def status(name):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(name + ":"))

def warm_up(dtype=torch.float32, D=64):
    q = torch.randn(1, 2, 130, D).to(dtype).requires_grad_()
    mha_ext.attention(q, q, q, mask=masks.Causal()).float().sum().backward()

def peak_of(fn):
    # the peak since now, over what is resident now
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    before = status("VmRSS")
    result = fn()
    return status("VmHWM") - before
"""


def peak(body: str) -> int:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak cannot be reset here")
    return int(run_python(PRELUDE + body).split()[-1])


MB = 2**20
S = 8192


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", ["None", "masks.Causal()", "masks.Causal() & masks.Padding(torch.tensor([8000]))"])
def test_forward_and_backward_need_memory_of_the_order_of_the_length(dtype, mask):
    """One head, D = 16. S*S scores would be 256 MB in fp32, and 64 MB as bytes; inputs and gradients are 4 MB."""
    used = peak(f"""
warm_up(torch.{dtype}, 16)
q, k, v = (torch.randn(1, 1, {S}, 16).to(torch.{dtype}).requires_grad_() for _ in range(3))
print(peak_of(lambda: mha_ext.attention(q, k, v, mask={mask}).sum().backward()))
""")
    assert used < 24 * MB, f"{used / MB:.0f} MB"


def test_dropout_and_softcap_store_nothing_of_the_size_of_the_scores():
    used = peak(f"""
warm_up(torch.float32, 16)
q, k, v = (torch.randn(1, 1, {S}, 16).requires_grad_() for _ in range(3))
print(peak_of(lambda: mha_ext.attention(q, k, v, mask=masks.Window(500, 0), dropout_p=0.1, softcap=5.0).sum().backward()))
""")
    assert used < 24 * MB, f"{used / MB:.0f} MB"


def test_broadcast_bias_and_mask_are_read_in_place():
    """[1,1,1,S] and an expanded [1,1,S,S] bias: neither is materialised, nor is the gradient of the small one."""
    used = peak(f"""
warm_up(torch.float32, 16)
S = {S}
q, k, v = (torch.randn(1, 1, S, 16) for _ in range(3))
bias = torch.randn(1, 1, 1, S, requires_grad=True)
seen = (torch.rand(1, 1, 1, S) < 0.5).expand(1, 1, S, S)
print(peak_of(lambda: mha_ext.attention(q, k, v, mask=seen, bias=bias).sum().backward()))
""")
    assert used < 24 * MB, f"{used / MB:.0f} MB"


def test_documents_stay_structured():
    used = peak(f"""
warm_up(torch.float32, 16)
q, k, v = (torch.randn(1, 1, {S}, 16).requires_grad_() for _ in range(3))
ids = torch.arange({S}).div(300, rounding_mode="floor")[None]
print(peak_of(lambda: mha_ext.attention(q, k, v, mask=masks.Documents(ids) & masks.Causal()).sum().backward()))
""")
    assert used < 24 * MB, f"{used / MB:.0f} MB"


@pytest.mark.parametrize("mask", ["None", "dense"])
def test_trap_32_grouped_queries_copy_no_keys_or_values(mask):
    """K and V are 32 MB each with 8 heads; repeated for 32 query heads they would be 128 MB each. The output is 4 kB per query."""
    used = peak(f"""
warm_up(torch.float32, 64)
q = torch.randn(1, 32, 4, 64)
k, v = (torch.randn(1, 8, 16384, 64) for _ in range(2))
mask = None if {mask == "None"} else torch.rand(1, 1, 4, 16384) < 0.7
print(peak_of(lambda: mha_ext.attention(q, k, v, mask=mask)))
""")
    assert used < 16 * MB, f"{used / MB:.0f} MB"


def test_trap_32_grouped_queries_in_backward():
    """Gradients of K and V are 32 MB each and no more than the workspace of two threads comes on top."""
    used = peak("""
warm_up(torch.float32, 64)
q = torch.randn(1, 32, 64, 64, requires_grad=True)
k, v = (torch.randn(1, 8, 16384, 64, requires_grad=True) for _ in range(2))
mask = torch.rand(1, 1, 64, 16384) < 0.7
print(peak_of(lambda: mha_ext.attention(q, k, v, mask=mask).sum().backward()))
""")
    assert used < 64 * MB + 48 * MB, f"{used / MB:.0f} MB"


@pytest.mark.parametrize("layout", ["bshd", "packed"])
def test_strided_inputs_are_read_in_place(layout):
    """q, k, v as views of [B,S,H,D], 16 MB each: the output is 16 MB, and a copy of any would show."""
    make = {
        "bshd": "q, k, v = (torch.randn(1, 4096, 16, 64).transpose(1, 2) for _ in range(3))",
        "packed": "q, k, v = (t.transpose(1, 2) for t in torch.randn(1, 4096, 3, 16, 64).unbind(2))",
    }[layout]
    used = peak(f"""
warm_up(torch.float32, 64)
{make}
print(peak_of(lambda: mha_ext.attention(q, k, v, mask=masks.Window(64, 0))))
""")
    assert used < (16 + 14) * MB, f"{used / MB:.0f} MB"


def test_decoding_needs_next_to_nothing():
    used = peak("""
warm_up(torch.bfloat16, 64)
q = torch.randn(1, 32, 1, 64).bfloat16()
k, v = (torch.randn(1, 8, 32768, 64).bfloat16() for _ in range(2))
print(peak_of(lambda: mha_ext.attention(q, k, v)))
""")
    assert used < 12 * MB, f"{used / MB:.0f} MB"


def advised(x: torch.Tensor) -> tuple[int, int]:
    """For how many bytes of a tensor huge pages are asked, and how many lie in whole pages."""
    first, last, found = x.data_ptr(), x.data_ptr() + x.numel() * x.element_size(), 0
    with open("/proc/self/smaps") as f:
        for line in f:
            if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                start, end = (int(n, 16) for n in place.groups())
            elif line.startswith("VmFlags:") and "hg" in line.split():
                found += max(min(end, last) - max(start, first), 0)
    page = 2 * MB
    return found, max(last // page - -(-first // page), 0) * page


def test_big_outputs_ask_for_huge_pages():
    """From 32 MB on, for whole pages alone."""
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        pytest.skip("no huge pages here")
    x = torch.zeros(1, 33, 256, 1024)  # 33 MB
    for heads, dtype in (
        (31, torch.float32),
        (32, torch.float32),
        (33, torch.float32),
        (31, torch.float64),
        (32, torch.bfloat16),
    ):
        out = torch.ops.mha_ext.merge_heads(x[:, :heads].to(dtype))
        found, whole = advised(out)
        assert found == (whole if out.numel() * out.element_size() >= 32 * MB else 0)
    state = torch.tensor([1, 2])
    for rows in (31, 32):
        found, whole = advised(torch.ops.mha_ext.dropout_mask(state, 0.0, 1, rows, 1024, 1024))
        assert found == (whole if rows == 32 else 0)
