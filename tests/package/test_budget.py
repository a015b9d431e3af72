"""What random tests draw from, budget.py: seeds until the time is over, the seed of a failure, one alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

from budget import Seeds


def test_seeds_until_the_seconds_are_over():
    start = time.monotonic()
    drawn = []
    for seed in Seeds(0.05):
        drawn.append(seed)
        time.sleep(0.01)
    assert 2 <= len(drawn) <= 6 and drawn == list(range(len(drawn)))
    assert time.monotonic() - start < 5
    assert list(Seeds(0, first=7)) == [7]
    assert list(Seeds(10, only=3)) == [3]


def test_a_failure_names_its_seed(tmp_path):
    (tmp_path / "conftest.py").write_text("from budget import seeds\n")
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
            import pytest

            @pytest.mark.random(seconds=60)
            def test_it(seeds):
                for seed in seeds:
                    assert seed < 3
        """)
    )
    given = {k: v for k, v in os.environ.items() if not k.startswith(("MHA_EXT_TEST", "PYTEST"))}
    given["PYTHONPATH"] = os.path.dirname(os.path.dirname(__file__))

    def run(**more):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
        return subprocess.run(command, env={**given, **more}, cwd=tmp_path, capture_output=True, text=True)

    found = run()
    assert found.returncode == 1 and "MHA_EXT_TEST_SEED=3 " in found.stdout
    assert run(MHA_EXT_TEST_SEED="2").returncode == 0
