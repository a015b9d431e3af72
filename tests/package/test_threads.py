"""Threads and processes: many callers at once, thread counts that change between calls, forked workers, no growth over many calls."""

from __future__ import annotations

import concurrent.futures
import ctypes
import multiprocessing
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import cases
import pytest
import torch

import mha_ext
from mha_ext import masks


def results_of(c: cases.Case) -> list[torch.Tensor]:
    x = cases.build(c)
    out, lse = mha_ext.attention(x.q, x.k, x.v, return_lse=True, **x.modifiers(), **c.options())
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, list(x.leaves().values()), x.dout)]


def softmax_and_heads() -> list[torch.Tensor]:
    gen = cases.generator(1)
    scores = cases.randn(gen, 2, 3, 65, 1000).requires_grad_()
    bias = cases.randn(gen, 1, 3, 1, 1000).requires_grad_()
    out = mha_ext.masked_softmax(scores, masks.Causal(), bias=bias, dropout_p=0.3, rng_state=torch.tensor([1, 2]))
    x, mix = cases.randn(gen, 2, 129, 48), cases.randn(gen, 4, 4)
    merged = mha_ext.merge_heads(mha_ext.split_heads(x, 4, x[0, 0]), mix)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [scores, bias]), merged]


def other_calls() -> list[torch.Tensor]:
    """What neither cases nor softmax_and_heads call: packed sequences, one tensor for q, k and v, talking heads, caches, modules, explain."""
    gen = cases.generator(2)
    qkv, starts = cases.randn(gen, 1, 60, 12, 8).requires_grad_(), torch.tensor([0, 11, 60])
    q, k, v = qkv[0].split(4, 1)
    mix = cases.randn(gen, 4, 4).requires_grad_()
    outs = [
        mha_ext.attention_varlen(q, k, v, starts, starts, mask=masks.Causal()),
        mha_ext.attention_qkvpacked(qkv, 4, bias=mha_ext.biases.ALiBi(torch.ones(4) / 8)),
        mha_ext.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), pre_mix=mix, post_mix=mix),
    ]
    grads = torch.autograd.grad(sum(out.square().sum() for out in outs), [qkv, mix])
    with torch.no_grad():
        cache = mha_ext.nn.KVCache(1, 64, 4, 8, dtype=torch.int8)
        steps = ([x[i : i + 5].transpose(0, 1)[None] for x in (q, k, v)] for i in range(0, 20, 5))
        cached = [cache.attend(*step) for step in steps]
    plan = str(mha_ext.explain(*(x.transpose(0, 1)[None] for x in (q, k, v))))
    assert "attention" in plan
    return [*(out.detach() for out in outs), *grads, *cached]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("c", cases.CORE + cases.SPECIAL[:2] + cases.SPECIAL[4:7], ids=lambda c: c.id)
def test_thread_count_changes_no_bit(c):
    """torch.set_num_threads is obeyed between calls, and results do not depend on it."""
    torch.set_num_threads(1)
    expected = results_of(c)
    for threads in (2, 3, 8, 64, 1):
        torch.set_num_threads(threads)
        assert same(results_of(c), expected), threads


def test_thread_count_changes_no_bit_of_softmax_and_heads():
    torch.set_num_threads(1)
    expected = softmax_and_heads()
    for threads in (2, 3, 7, 1):
        torch.set_num_threads(threads)
        assert same(softmax_and_heads(), expected), threads


def test_forward_with_one_thread_count_and_backward_with_another():
    c = cases.Case(1, 4, 2, 200, 200, 64, 64, torch.float32, "causal & padding", "1,H,Sq,Sk", dropout_p=0.1)
    expected = results_of(c)
    x = cases.build(c)
    torch.set_num_threads(1)
    out = mha_ext.attention(x.q, x.k, x.v, mask=x.mask, bias=x.bias, rng_state=x.rng_state, dropout_p=0.1)
    torch.set_num_threads(3)
    grads = torch.autograd.grad(out, list(x.leaves().values()), x.dout)
    assert same([out.detach(), *grads], [expected[0], *expected[2:]])


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="counts threads through /proc")
def test_one_thread_means_one_thread():
    """With torch.set_num_threads(1) a process starts no thread of its own, and the work is done by the caller."""
    code = """
import os, torch
torch.set_num_threads(1)
import mha_ext
q = torch.randn(2, 4, 300, 64, requires_grad=True)
before = len(os.listdir("/proc/self/task"))
out = mha_ext.attention(q, q, q)
forward = len(os.listdir("/proc/self/task"))
for x in (mha_ext.masked_softmax(q.detach()), mha_ext.merge_heads(q.detach())): pass
print(before, forward, len(os.listdir("/proc/self/task")))
"""
    result = run_python(code)
    before, forward, after = map(int, result.split())
    assert before == forward == after


@pytest.mark.skipif(sys.platform != "linux", reason="reads times of threads from /proc")
def test_all_threads_work():
    torch.set_num_threads(2)
    q = torch.randn(1, 8, 2048, 64)

    def times() -> dict[str, int]:
        return {
            path.name: int((path / "schedstat").read_text().split()[0]) for path in Path("/proc/self/task").iterdir()
        }

    mha_ext.attention(q, q, q)  # makes the threads
    for _ in range(10):  # another process may take a processor for a while
        before = times()
        mha_ext.attention(q, q, q)
        first, second, *_ = sorted((t - before.get(name, 0) for name, t in times().items()), reverse=True)
        if second > first / 5:
            return
    pytest.fail(f"one thread ran for {first / 1e6:.1f} ms, the next for {second / 1e6:.1f} ms")


def run_python(code: str, timeout: int = 240) -> str:
    here = Path(__file__).parents[1]
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert result.returncode == 0, f"exit code {result.returncode}: {result.stderr[-2000:]}"
    return result.stdout


def test_many_python_threads_at_once():
    """Eight threads run forward and backward of different cases at the same time: each gets its own right result, bit for bit."""
    todo = [c for c in cases.CORE for _ in range(6)]
    expected = {c.id: results_of(c) for c in cases.CORE}
    others = softmax_and_heads, other_calls
    expected_others = [call() for call in others]
    start = threading.Barrier(8)

    def work(n):
        start.wait()
        wrong = [c.id for c in todo[n::8] if not same(results_of(c), expected[c.id])]
        return wrong + [call.__name__ for call, results in zip(others, expected_others) if not same(call(), results)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert [wrong for found in pool.map(work, range(8)) for wrong in found] == []


def test_backward_in_another_thread_than_forward():
    c = cases.CORE[0]
    expected = results_of(c)
    x = cases.build(c)
    out, lse = mha_ext.attention(x.q, x.k, x.v, mask=x.mask, bias=x.bias, return_lse=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        grads = pool.submit(torch.autograd.grad, out, list(x.leaves().values()), x.dout).result()
    assert same([out.detach(), lse.detach(), *grads], expected)


def test_first_call_of_a_process_from_many_threads():
    """The choice of the instruction set happens once, also when the first calls race."""
    run_python("""
import threading, torch, mha_ext
q = torch.randn(1, 2, 33, 16)
start, results = threading.Barrier(8), []
def work():
    start.wait()
    results.append(mha_ext.attention(q, q, q))
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len(results) == 8 and all(torch.equal(r, results[0]) for r in results)
""")


class Attends(torch.utils.data.Dataset):
    """Each item is the result of a case, computed in the worker."""

    def __len__(self):
        return 6

    def __getitem__(self, n):
        return results_of(cases.CORE[n])[0].float()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
@pytest.mark.skipif(platform.system() == "Darwin", reason="fork with threads is not supported there")
@pytest.mark.parametrize("parent_threads", [1, 2])
def test_in_forked_data_loader_workers(parent_threads):
    """After the parent used the ops, with its thread pool started, workers made by fork use them too."""
    torch.set_num_threads(parent_threads)
    expected = [results_of(c)[0].float() for c in cases.CORE[:6]]
    loader = torch.utils.data.DataLoader(
        Attends(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    for got, right in zip(loader, expected, strict=True):
        assert torch.equal(got, right)
    assert same([results_of(cases.CORE[0])[0].float()], expected[:1])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_plain_fork_with_threads_set_in_the_child():
    """A child may set its own thread count after the fork."""
    run_python("""
import os, torch, mha_ext
q = torch.randn(2, 4, 129, 32)
expected = mha_ext.attention(q, q, q)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(mha_ext.attention(q, q, q), expected) else 3)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(mha_ext.attention(q, q, q), expected)
""")


def ticks_during(call):
    """How often another Python thread, which wants to run each millisecond, does so while this one is inside one call."""
    ticks, stop = [0], threading.Event()

    def tick():
        while not stop.wait(0.001):
            ticks[0] += 1

    other = threading.Thread(target=tick)
    other.start()
    try:
        before = ticks[0]
        call()
        return ticks[0] - before
    finally:
        stop.set()
        other.join()


HAS_LOCK = getattr(sys, "_is_gil_enabled", lambda: True)()


@pytest.mark.skipif(HAS_LOCK, reason="this Python has a lock, or was told to use it")
def test_a_python_without_the_lock_does_without():
    """Each compiled module declares that it needs none; one that does not would switch it on when it is imported."""
    run_python("import sys, mha_ext; assert not sys._is_gil_enabled()")


@pytest.mark.skipif(not HAS_LOCK, reason="this Python has no lock")
def test_the_global_interpreter_lock_is_released():
    """While one thread is inside a long call, another Python thread goes on. One that keeps the lock shows that this can fail."""
    torch.set_num_threads(1)
    q = torch.randn(1, 2, 8192, 64)
    assert ticks_during(lambda: ctypes.PyDLL(None).usleep(300_000)) < 10
    assert ticks_during(lambda: mha_ext.attention(q, q, q)) >= 10


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads memory from /proc")
def test_no_memory_grows_over_a_thousand_calls():
    growth = run_python("""
import cases, gc, os, torch, mha_ext
from mha_ext import masks
torch.manual_seed(0)

def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

q, k, v = (torch.randn(2, 4, 65, 32, requires_grad=True) for _ in range(3))
bias = torch.randn(1, 4, 65, 65, requires_grad=True)
module = mha_ext.nn.MultiheadAttention(32, 4, batch_first=True)
x = torch.randn(2, 33, 32)

def once(n):
    mask = masks.Causal() & masks.Padding(torch.tensor([65, n % 65]))
    out, lse, w = mha_ext.attention(q, k, v, mask=mask, bias=bias, dropout_p=0.1, return_lse=True, return_weights=True)
    torch.autograd.grad(out.sum() + w.sum(), [q, k, v, bias])
    mha_ext.masked_softmax(mha_ext.merge_heads(mha_ext.split_heads(x, 4)).unsqueeze(0))
    module(x, x, x)[0].sum().backward()
    try:
        mha_ext.attention(q, k[:1], v)
    except ValueError:
        pass

for n in range(200):
    once(n)
gc.collect()
start = resident()
for n in range(1000):
    once(n)
gc.collect()
print(resident() - start)
""")
    assert int(growth) < 8 * 2**20, f"{int(growth) / 2**20:.1f} MB"  # one leaked output per call would be 66 MB
