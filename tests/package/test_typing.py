"""What a type checker makes of a program that uses the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parents[1] / "typed_program.py"


def test_a_users_program(tmp_path):
    """Strict mypy finds fault with the lines marked "wrong", and with no other: what functions return follows return_lse
    and return_weights."""
    settings = tmp_path / "mypy.ini"
    settings.write_text(f"[mypy]\nstrict = true\nmypy_path = {ROOT}\ncache_dir = {tmp_path}\nfollow_imports = silent\n")
    out, problems, _ = api.run(["--config-file", str(settings), str(PROGRAM)])
    assert not problems
    found = {int(n): text for n, text in re.findall(r"typed_program\.py:(\d+): error: (.*)", out)}
    lines = PROGRAM.read_text().splitlines()
    assert sorted(found) == [n for n, line in enumerate(lines, 1) if line.endswith("# wrong")], out
