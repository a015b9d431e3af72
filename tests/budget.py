"""Random tests by time: a test marked `random(seconds)` takes the fixture `seeds` and draws one problem from each.

    @pytest.mark.random(seconds=3)
    def test_what_holds_always(seeds):
        for seed in seeds:
            gen = cases.generator(seed)
            ...

It gets 0, 1, 2, ... until its seconds are spent, and one at least. A failure prints the seed and the command that runs it alone
(MHA_EXT_TEST_SEED). MHA_EXT_TEST_SECONDS shares so many seconds among the random tests that were collected, from new seeds on.
Tests of hypothesis take part where they are marked `again`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator

import hypothesis
import pytest


class Seeds:
    """Numbers to draw problems from, until the seconds are over; `last` is the one in use."""

    def __init__(self, seconds: float, first: int = 0, only: int | None = None):
        self.seconds, self.first, self.only = seconds, first, only
        self.last: int | None = None

    def __iter__(self) -> Iterator[int]:
        if self.only is not None:
            self.last = self.only
            yield self.only
            return
        end, self.last = time.monotonic() + self.seconds, self.first
        while self.last == self.first or time.monotonic() < end:
            yield self.last
            self.last += 1


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Iterator[Seeds]:
    """What the mark `random` asks for, or the share of MHA_EXT_TEST_SECONDS."""
    seconds, first = request.node.get_closest_marker("random").kwargs["seconds"], 0
    if total := os.environ.get("MHA_EXT_TEST_SECONDS"):
        tests = sum(item.get_closest_marker("random") is not None for item in request.session.items)
        seconds = float(total) * int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) / tests
        first = random.SystemRandom().randrange(2**40)
    only = os.environ.get("MHA_EXT_TEST_SEED")
    found = Seeds(seconds, first, None if only is None else int(only))
    yield found
    print(f"last seed {found.last}: MHA_EXT_TEST_SEED={found.last} python -m pytest '{request.node.nodeid}'")


def again(test: Callable[[], None]) -> Callable[[Seeds], None]:
    """A test of hypothesis, run once as ever, and from new seeds as long as MHA_EXT_TEST_SECONDS lasts."""

    def run(seeds: Seeds) -> None:
        for seed in seeds:
            hypothesis.seed(seed)(test)()

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return pytest.mark.random(seconds=0)(run)
