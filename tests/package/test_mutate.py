"""tests/mutate.py: which changes it makes, that what it runs sees them, and that the accepted ones are still there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import mutate
import pytest

SOURCE = """
def f(a: int = 0, b: str = "x") -> int:
    '''doc'''
    if a < 2 and not b:
        raise ValueError(f"a is {a + 1}")
    g.x = min(a, b)
    g(a)
    return a - 1
"""
CHANGES = {
    ("a < 2 and (not b)", "a < 2 or not b"), ("a < 2", "a <= 2"), ("a < 2", "2 + 1"), ("not b", "b"),
    ("raise ValueError(f'a is {a + 1}')", "pass"), ("g.x = min(a, b)", "pass"), ("min", "max"), ("g(a)", "pass"), ("a - 1", "a + 1"),
    ("a - 1", "1 + 1"), ("a: int=0, b: str='x'", "0 + 1"),
}  # fmt: skip


def test_changes():
    found = mutate.mutants(ast.parse(SOURCE))
    assert {(before, after) for _, _, before, after, _ in found} == CHANGES and len(found) == len(CHANGES)
    texts = {ast.unparse(tree) for *_, tree in found}
    assert len(texts) == len(found) and ast.unparse(ast.parse(SOURCE)) not in texts
    assert {function for function, *_ in found} == {"f"}


def test_accepted_mutants_are_there_and_have_reasons():
    lines = [line.split(" | ") for line in mutate.ACCEPTED.read_text().splitlines() if not line.startswith("#")]
    files = {line[0] for line in lines}
    trees = {file: ast.parse((mutate.ROOT / file).read_text()) for file in files}
    found = {(file, m[0], m[2], m[3]) for file in files for m in mutate.mutants(trees[file], names_only=True)}
    for *mutant, reason in lines:
        assert tuple(mutant) in found and len(reason) > 10, mutant


@pytest.mark.slow
def test_survivors_are_printed(tmp_path):
    """On a weak test: it notices what the sum does, not what is refused."""
    test = tmp_path / "test_weak.py"
    test.write_text("import mutate_example\n\ndef test():\n    assert mutate_example.total([1, 2]) == 3\n")
    example = Path(__file__).parents[1] / "mutate_example.py"
    command = [sys.executable, str(mutate.ROOT / "tests" / "mutate.py"), str(example), "--sample", "9", "--", str(test)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 1 and "1 of 4 survived" in result.stdout, result.stdout + result.stderr
    assert "mutate_example.py:8 | total | raise ValueError('no list') | pass" in result.stdout
