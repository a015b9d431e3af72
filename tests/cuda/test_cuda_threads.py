"""Calls from threads in which the CUDA runtime has done nothing yet."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cuda

# All memory comes out of what torch's allocator keeps, so that nothing but the call itself can bind a context to the thread. Backward
# runs in autograd's own thread, which has not seen this device before either.
PROGRAM = """
import os, sys, threading, torch, mha_ext
q, k, v, dout = (torch.randn(1, 2, 128, 128, generator=torch.Generator().manual_seed(i)).bfloat16().cuda() for i in range(4))
spare = [torch.empty(1 << 19, dtype=torch.uint8, device="cuda") for _ in range(3)]
del spare
found = []
def work():
    try:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = mha_ext.attention(*leaves)
        found.extend([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    except Exception as error:
        found.append(error)
thread = threading.Thread(target=work)
thread.start()
thread.join()
if isinstance(found[-1], Exception):
    sys.exit(f"{type(found[-1]).__name__}: {found[-1]}")
leaves = [t.cpu().requires_grad_() for t in (q, k, v)]
out = mha_ext.attention(*leaves)
wanted = [out, *torch.autograd.grad(out, leaves, dout.cpu())]
assert len(found) == len(wanted)
for x, y in zip(found, wanted):
    assert (x.cpu().float() - y.float()).abs().max() <= 2 ** -6 * y.float().abs().max()
os._exit(0)  # how threads of torch and of the simulator end is not what is asked
"""


def test_a_fresh_thread_and_autograds():
    environment = {name: value for name, value in os.environ.items() if name != "PYTORCH_NO_CUDA_MEMORY_CACHING"}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
