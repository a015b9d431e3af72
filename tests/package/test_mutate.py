"""tests/mutate.py and mutate_cpp.py: which changes they make, that what they run sees them, and that the accepted ones are still there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import mutate
import mutate_cpp
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


def accepted(in_cpp: bool) -> list[list[str]]:
    lines = [line.split(" | ") for line in mutate.ACCEPTED.read_text().splitlines() if not line.startswith("#")]
    return [line for line in lines if line[0].startswith("csrc/") == in_cpp]


def test_accepted_mutants_are_there_and_have_reasons():
    lines = accepted(in_cpp=False)
    trees = {file: ast.parse((mutate.ROOT / file).read_text()) for file in {line[0] for line in lines}}
    found = {(file, m[0], m[2], m[3]) for file in trees for m in mutate.mutants(trees[file], names_only=True)}
    for *mutant, reason in lines:
        assert tuple(mutant) in found and len(reason) > 10, mutant


@pytest.mark.slow
def test_accepted_mutants_of_cpp_are_there_and_have_reasons():
    pytest.importorskip("clang.cindex")
    found = {(f"csrc/torch/{m.file}", *m[2:5]) for m in mutate_cpp.mutants()}
    for *mutant, reason in accepted(in_cpp=True):
        assert tuple(mutant) in found and len(reason) > 10, mutant


def test_mutants_of_cpp_stand_within_each_other():
    def at(before, after, code, text="  if (a < b + 1) f(a);"):
        start = text.index(before)
        return mutate_cpp.Mutant("x.h", 1, "f", before, after, start, start + len(before), code)

    outer = at("a < b + 1", "a <= b + 1", "(@ ? (a <= b + 1) : ($))")
    found = [outer, at("b + 1", "b - 1", "(@ ? (b - 1) : ($))"), at("f(a)", "left out", "(@ ? void() : void($))")]
    mutated = mutate_cpp.with_mutants("  if (a < b + 1) f(a);", list(enumerate(found)), 0, 22)
    condition = "(mutant(0) ? (a <= b + 1) : (a < (mutant(1) ? (b - 1) : (b + 1))))"
    assert mutated == f"  if ({condition}) (mutant(2) ? void() : void(f(a)));"


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
