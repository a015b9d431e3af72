"""Mutation testing, by hand: does a test notice when a line of a file is wrong?

    python tests/mutate.py mha_ext/nn/rope.py -- tests/modules/test_rope.py
    python tests/mutate.py mha_ext/explain.py --sample 50 --seconds 600 -- tests/functions/test_explain.py

Each mutant changes one place of the file: a comparison, an operator, a number, `and`/`or`, `not`, min/max, a flag, or a statement that is left
out. Of the tests after --, those that run its line run on each, until one fails; survivors are printed, and end in exit code 1. No file is touched:
each mutant is compiled in place of the module in a process of its own, forked from one that has what the tests import. Tests that start a Python of
their own there see the file as it is.

tests/accepted_mutants.txt lists those that change nothing that matters, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.machinery
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ACCEPTED = Path(__file__).parent / "accepted_mutants.txt"
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "all": "any",
    "any": "all",
    "cos": "sin",
    "sin": "cos",
}
# Not what a program does: annotations (all of them strings here), messages, what describes an object.
SKIPPED = (ast.JoinedStr, ast.AnnAssign, ast.arg)
DESCRIBING = ("__repr__", "extra_repr")
ANY_LINE = 0
QUICKLY = ("-p", "no:cacheprovider", "-p", "no:unraisableexception")


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in place of a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in SWAPS:
        new = copy.copy(node)
        new.op = SWAPS[type(node.op)]()
        yield new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, (ast.Name, ast.Attribute)):
        name = node.id if isinstance(node, ast.Name) else node.attr
        if name in NAMES:
            new = copy.copy(node)
            setattr(new, "id" if isinstance(node, ast.Name) else "attr", NAMES[name])
            yield new
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Raise) and ast.unparse(node) != "raise NotImplementedError":  # what subclasses define
        yield ast.Pass()
    elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
        yield ast.Pass()
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
        yield ast.Pass()


def mutants(tree: ast.Module, names_only: bool = False) -> list[tuple[str, int, str, str, ast.Module]]:
    """(function, line, before, after, the mutated tree, or where only names are asked for the tree itself)"""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, SKIPPED) or (isinstance(node, ast.FunctionDef) and node.name in DESCRIBING):
            return
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for i, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.AST):
                    continue
                for new in changes(child):
                    if isinstance(value, list):
                        value[i] = new
                    else:
                        setattr(node, field, new)
                    whole = tree if names_only else ast.fix_missing_locations(copy.deepcopy(tree))
                    if isinstance(value, list):
                        value[i] = child
                    else:
                        setattr(node, field, child)
                    about = node if isinstance(child, ast.Constant) else child
                    before = ast.unparse(about).splitlines()[0]
                    after = (
                        ast.unparse(new)
                        if about is child
                        else f"{ast.unparse(child)} + 1"
                        if not isinstance(child.value, bool)
                        else "flipped"
                    )
                    found.append((function, child.lineno, before, after.splitlines()[0], whole))
                if not isinstance(child, ast.Raise):  # its message
                    visit(child, function)

    visit(tree, "")
    return found


def statement(tree: ast.Module, line: int) -> range:
    """The lines of the innermost statement of a function there, without those of its body; none where there is no such statement."""
    found = None
    for function in ast.walk(tree):
        for x in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            if isinstance(x, ast.stmt) and x is not function and x.lineno <= line <= x.end_lineno:
                found = x if found is None or x.lineno >= found.lineno else found
    if found is None or isinstance(found, (ast.FunctionDef, ast.ClassDef)):
        return range(0)
    return range(found.lineno, found.body[0].lineno if hasattr(found, "body") else found.end_lineno + 1)


class Lines:
    """A plugin of pytest that writes down which tests run which lines of the file, and what was imported."""

    def __init__(self, path: Path, to: Path):
        self.path, self.to = str(path), to
        self.tests: dict[int, list[tuple[float, str]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        lines = set()

        def trace(frame, event, argument):
            lines.add(frame.f_lineno)
            return trace

        def calls(frame, event, argument):
            return trace(frame, event, argument) if frame.f_code.co_filename == self.path else None

        start = time.monotonic()
        threading.settrace(calls)
        sys.settrace(calls)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            if "fresh_compiler" in item.fixturenames:  # what torch.compile runs is not traced
                lines.add(ANY_LINE)
            for line in lines:
                self.tests.setdefault(line, []).append((time.monotonic() - start, item.nodeid))

    def pytest_sessionfinish(self):
        self.to.write_text(json.dumps([self.tests, list(sys.modules)]))


class Chosen:
    """A plugin of pytest that runs only these tests, the shortest first; all, if there are none."""

    def __init__(self, tests: list[tuple[float, str]]):
        self.took = {name: took for took, name in tests}

    def pytest_collection_modifyitems(self, items):
        if self.took:
            items[:] = [item for item in items if item.nodeid in self.took]
            items.sort(key=lambda item: self.took[item.nodeid])


def exit_code(child: int, limit: float) -> int | None:
    """Of a forked process that leads a group; None: it took too long."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run_tests(path: Path, tree: ast.Module, arguments: list[str], limit: float, plugin: object) -> int | None:
    """pytest's exit code in a forked process; None: it took too long."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        original = importlib.machinery.SourceFileLoader.get_code

        def get_code(loader, name):
            if Path(loader.path).resolve() == path:
                return compile(tree, str(path), "exec", dont_inherit=True)
            return original(loader, name)

        importlib.machinery.SourceFileLoader.get_code = get_code
        code = 3
        try:
            code = int(pytest.main(["-q", "-x", *QUICKLY, *arguments], [plugin]))
        finally:
            os._exit(code)
    return exit_code(child, limit)


def without_mutant(path: Path, tree: ast.Module, arguments: list[str]) -> dict[int, list[tuple[float, str]]] | None:
    """The tests that run each line, and how long they take, or None if one fails; imports here, once, what they need of others."""
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "lines"
        if run_tests(path, tree, arguments, 3600, Lines(path, to)) != 0:
            return None
        tests, modules = json.loads(to.read_text())
    for name in modules:
        if name.split(".")[0] in ("torch", "numpy", "sympy", "transformers"):
            with contextlib.suppress(Exception):  # some come into being with others
                importlib.import_module(name)
    return {int(line): of_line for line, of_line in tests.items()}


def accepted() -> set[tuple[str, ...]]:
    lines = ACCEPTED.read_text().splitlines() if ACCEPTED.exists() else []
    return {
        tuple(part.strip() for part in line.split(" | ")[:4]) for line in lines if line and not line.startswith("#")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--sample", type=int, help="try so many mutants, drawn at random, instead of all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--seed", type=int, default=0)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, arguments = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]  # after -- what pytest is given
    path = given.file.resolve()
    name = path.relative_to(ROOT).as_posix()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import hypothesis  # noqa: F401  # what all tests import, once
    import torch

    torch.set_num_threads(1)
    start = time.monotonic()
    tree = ast.parse(path.read_text())
    tests = without_mutant(path, tree, arguments)
    if tests is None:
        print("the tests fail, or there are none, without any mutant")
        return 2
    alone = time.monotonic() - start
    known, found = accepted(), mutants(tree)
    new = [m for m in found if (name, m[0], m[2], m[3]) not in known]
    total = len(new)
    if given.sample is not None and given.sample < total:
        new = random.Random(given.seed).sample(new, given.sample)
    print(
        f"{name}: {len(found)} mutants, {len(found) - total} accepted, {len(new)} to try; the tests take {alone:.1f} s",
        flush=True,
    )
    tried = survivors = 0
    for function, line, before, after, mutant in new:
        if time.monotonic() - start > given.seconds:
            break
        tried += 1
        reached = [test for x in statement(tree, line) for test in tests.get(x, ())]
        chosen = Chosen(reached and reached + tests.get(ANY_LINE, []))
        code = run_tests(path, mutant, arguments, 3 * alone + 20, chosen)
        if code == 0:
            survivors += 1
            print(f"{name}:{line} | {function} | {before} | {after}", flush=True)
    print(f"{survivors} of {tried} survived ({100 * survivors / max(tried, 1):.1f} %)")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
