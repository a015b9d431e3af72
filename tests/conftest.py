"""Seeds, threads, devices and markers for the whole suite."""

from __future__ import annotations

import os

import pytest
import torch
from budget import seeds  # noqa: F401  (a fixture)
from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60, database=None)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("MHA_EXT_TEST_PROFILE", "suite"))


def pytest_collection_modifyitems(items):
    there = torch.cuda.is_available()
    simulated = there and torch.cuda.get_device_name().startswith("ptxsim")
    for item in items:
        if item.get_closest_marker("cuda") is None:  # keywords have the names of folders, too
            continue
        if not there:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))
        elif simulated and "device" in item.fixturenames:
            item.add_marker(pytest.mark.skip(reason="torch's own kernels do not run in simulation"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def same_start():
    """Each test starts from the same seed and leaves threads, default dtype and compiled code as it found them."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def processes():
    """Groups of processes of torch.distributed, by their number."""
    from processes import Processes

    pools = {n: Processes(n) for n in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.stop()
