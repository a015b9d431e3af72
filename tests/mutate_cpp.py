"""Mutation testing, by hand, of what lies between torch and the CPU kernels: as mutate.py, for the C++ of csrc/torch.

    pip install libclang
    python tests/mutate_cpp.py problems.h ops.h -- tests/functions/test_op_refusals.py tests/functions/test_packed.py

One build serves all: a copy of the sources has every mutant, and a number says which one is on. Each changes one place: a comparison, an operator, a
number, a flag, `!`, a condition, std::min or max, or a statement or check that is left out. The tests after -- run once, to see which mutants each
reaches; then on each mutant, in a forked process, those that reach it, the shortest first, until one fails. Survivors, and what no test reaches, are
printed, and end in exit code 1. ccache shortens the build if CCACHE_BASEDIR is above this folder and --copy, and the two are equally deep.

tests/accepted_mutants.txt lists those that change nothing that matters, with the reason.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from mutate import QUICKLY, ROOT, accepted, exit_code

LAYER = ROOT / "csrc" / "torch"
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&"}
SWAPS |= {"+": "-", "-": "+", "*": "/", "/": "*", "%": "+", "+=": "-=", "*=": "/="}
EXPRESSIONS = ("CALL_EXPR", "BINARY_OPERATOR", "COMPOUND_ASSIGNMENT_OPERATOR", "UNEXPOSED_EXPR")
NAMED = ("STRUCT_DECL", "CLASS_TEMPLATE", "FUNCTION_DECL", "FUNCTION_TEMPLATE", "CXX_METHOD", "CONSTRUCTOR")
# MHA_CHECK is read as a function, as long as the macro, so that its arguments have places of their own.
CHECK, CHECK_FUNCTION = r"(?s)#define MHA_CHECK.*?while \(false\)", "template <class... T> void MHA_CHECK(T&&...);"
SWITCH = """#pragma once
#include <cstdlib>
#include <type_traits>
extern "C" {
[[gnu::visibility("default")]] inline int mutant_on = std::getenv("MHA_MUTANT") ? std::atoi(std::getenv("MHA_MUTANT")) : -1;
[[gnu::visibility("default")]] inline unsigned char mutants_reached[10000] = {};
}
constexpr bool mutant(int id) {
  if (std::is_constant_evaluated()) return false;
  mutants_reached[id] = 1;
  return id == mutant_on;
}
"""  # fmt: skip


class Mutant(NamedTuple):
    file: str
    line: int
    function: str
    before: str
    after: str
    start: int
    end: int
    code: str  # for what stands there, with @ for whether this mutant is on, and $ for what stands there otherwise


def declarations(unit: str) -> list:
    from clang import cindex
    from torch.utils.cpp_extension import include_paths

    verbose = ["c++", "-E", "-x", "c++", "-v", "-"]
    told = subprocess.run(verbose, input="", capture_output=True, text=True, check=True).stderr
    system = [line.strip() for line in told.split("search starts here:")[-1].splitlines() if line.startswith(" /")]
    flags = ["-std=c++20", "-DTORCH_TARGET_VERSION=0x020b000000000000ULL", "-nostdinc", "-nostdinc++"]
    flags += [flag for path in (*include_paths(), *system) for flag in ("-isystem", path)]
    header = LAYER / "tensors.h"
    text = re.sub(CHECK, lambda found: CHECK_FUNCTION.ljust(len(found[0])), header.read_text())
    tree = cindex.Index.create().parse(str(LAYER / unit), flags, [(str(header), text)])
    wrong = [str(x) for x in tree.diagnostics if x.severity >= 3 and str(LAYER) in str(x.location.file)]
    assert not wrong, wrong
    return list(tree.cursor.get_children())


def mutants() -> list[Mutant]:
    """All, the outer ones first."""
    found: dict[tuple[str, int, int, str], Mutant] = {}
    texts = {str(path): path.read_text() for path in LAYER.iterdir()}

    def visit(node, function: str, above, role: str) -> None:
        if str(node.location.file) not in texts:
            return
        text, kind, inner = texts[str(node.location.file)], node.kind.name, list(node.get_children())
        start, end = node.extent.start.offset, node.extent.end.offset
        here, around = text[start:end], text[above.extent.start.offset : above.extent.end.offset]
        if kind == "UNEXPOSED_EXPR" and len(inner) == 1 and inner[0].extent == node.extent:  # a conversion
            return visit(inner[0], function, above, role)
        for_compiler = text[start - 1] == "<" or (text[start - 1] == "[" and above.kind.name == "VAR_DECL")
        if for_compiler or re.match(r"(static )?constexpr|MHA_REGISTER", here):
            return
        function = f"{function}.{node.spelling}".lstrip(".") if kind in NAMED else function

        def add(after: str, code: str, before: str = here, end: int = end) -> None:
            path, one_line = Path(str(node.location.file)), (" ".join(x.split()) for x in (before, after))
            mutant = Mutant(path.name, node.location.line, function, *one_line, start, end, code)
            found.setdefault((path.name, start, end, after), mutant)

        operator, between = "", (0, 0)
        if kind in ("BINARY_OPERATOR", "COMPOUND_ASSIGNMENT_OPERATOR"):
            between = inner[0].extent.end.offset, inner[1].extent.start.offset
            operator = text[slice(*between)].strip()
        is_check = kind == "CALL_EXPR" and here.startswith("MHA_CHECK")
        if role == "check":
            add("true", "@ || ($)")
        elif role == "condition" and not operator and here[0] != "!":
            add(f"!({here})", f"(@ ? !({here}) : bool($))")
        elif role == "statement" and here == "return":
            add("left out", "{ if (!@) $ }", end=text.index(";", end) + 1)
        elif role == "statement" and kind in EXPRESSIONS and operator != "," and not is_check:
            add("left out", "(@ ? void() : void($))")
        if operator in SWAPS:
            after = f"{text[start : between[0]]} {SWAPS[operator]} {text[between[1] : end]}"
            add(after, f"(@ ? ({after}) : ($))")
        elif kind == "UNARY_OPERATOR" and re.match("!|-(?!-)", here):
            add(here[1:], f"(@ ? {'bool' if here[0] == '!' else ''}({here[1:]}) : ($))")
        elif kind == "INTEGER_LITERAL" and here.isdigit():
            add(f"{here} + 1", f"(@ ? {here} + 1 : $)", around)
        elif kind == "CXX_BOOL_LITERAL_EXPR":
            add("flipped", f"(@ ? !{here} : $)", around)
        elif kind == "CALL_EXPR" and here.startswith(("std::min", "std::max")):
            after = ("std::max" if here.startswith("std::min") else "std::min") + here[8:]
            add(after, f"(@ ? ({after}) : ($))")
        if is_check:  # what follows the condition is the message
            return visit(next(node.get_arguments()), function, node, "check")
        for i, child in enumerate(inner):
            in_list = kind in ("COMPOUND_STMT", "CXX_TRY_STMT") or (role == "statement" and operator == ",")
            is_body = kind in ("FOR_STMT", "CXX_FOR_RANGE_STMT", "DEFAULT_STMT") and child == inner[-1]
            decides = kind in ("IF_STMT", "CONDITIONAL_OPERATOR") and i == 0
            statement = in_list or is_body or kind == "IF_STMT"
            visit(child, function, node, "condition" if decides else "statement" if statement else "")

    for node in (*declarations("cpu_ops.cpp"), *declarations("schemas.cpp")):
        visit(node, "", node, "")
    return sorted(found.values(), key=lambda m: (m.file, m.start, -m.end, m.after not in ("left out", "true")))


def with_mutants(text: str, numbered: list[tuple[int, Mutant]], start: int, end: int) -> str:
    out = ""
    while numbered:
        (number, first), *rest = numbered
        within = [one for one in rest if one[1].start < first.end]
        now = with_mutants(text, within, first.start, first.end)
        out += text[start : first.start] + first.code.replace("@", f"mutant({number})").replace("$", now)
        start, numbered = first.end, rest[len(within) :]
    return out + text[start:end]


def build(copy: Path, found: list[Mutant]) -> None:
    for name in ("csrc", "mha_ext", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "*.pyc"), dirs_exist_ok=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, copy)
    (copy / "csrc" / "torch" / "mutant.h").write_text(SWITCH)
    for path in LAYER.iterdir():
        text, its = path.read_text(), [(number, m) for number, m in enumerate(found) if m.file == path.name]
        mutated = '#include "mutant.h"\n' + with_mutants(text, its, 0, len(text))
        (copy / "csrc" / "torch" / path.name).write_text(mutated)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=copy, check=True, stdout=subprocess.DEVNULL)


class Mutating:
    """A plugin of pytest that runs the tests on each of these mutants."""

    def __init__(self, numbered: list[tuple[int, Mutant]], arguments: list[str]):
        self.numbered, self.arguments, self.survivors = numbered, arguments, 0

    def pytest_runtestloop(self, session):
        import mha_ext._C

        library = ctypes.CDLL(mha_ext._C.__file__)
        self.on = ctypes.c_int.in_dll(library, "mutant_on")
        self.reached = (ctypes.c_ubyte * 10000).in_dll(library, "mutants_reached")
        at_import = self.take_reached()
        with tempfile.NamedTemporaryFile() as to:
            if self.forked([(0, item) for item in session.items], -1, to.name) != 0:
                pytest.exit("the tests fail, or there are none, without any mutant", 2)
            tests = json.load(to)  # (seconds, place among the items, what it reaches)
        for number, m in self.numbered:
            chosen = sorted(test[:2] for test in tests if number in test[2])
            if number in at_import:
                command = [sys.executable, "-m", "pytest", "-x", "-q", *QUICKLY, *self.arguments]
                with_it = os.environ | {"MHA_MUTANT": str(number)}
                code = subprocess.run(command, env=with_it, capture_output=True, check=False).returncode
            else:
                code = self.forked([(took, session.items[i]) for took, i in chosen], number) if chosen else 0
            if code == 0:
                self.survivors += 1
                unreached = "" if chosen or number in at_import else " (reached by no test)"
                print(f"csrc/torch/{m.file}:{m.line} | {m.function} | {m.before} | {m.after}{unreached}", flush=True)
        return True

    def take_reached(self) -> list[int]:
        found = [number for number, there in enumerate(bytes(self.reached)) if there]
        ctypes.memset(self.reached, 0, len(self.reached))
        return found

    def forked(self, timed: list, number: int, to: str | None = None) -> int | None:
        """The exit code of these tests on a mutant; or, for a file, of them all without one, and what each takes and reaches."""
        child = os.fork()
        if child:
            return exit_code(child, 3600)
        os.setpgid(0, 0)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        code, tests, self.on.value = 1, [], number
        try:
            for i, (took, item) in enumerate(timed):
                signal.alarm(0 if to else 10 + int(5 * took))  # ends the process
                start, following = time.monotonic(), timed[i + 1][1] if i + 1 < len(timed) else None
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if item.session.testsfailed:
                    break
                tests.append((time.monotonic() - start, i, self.take_reached() if to else []))
            if to:
                Path(to).write_text(json.dumps(tests))
            code = int(not timed or len(tests) < len(timed))
        finally:
            os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="names of files of csrc/torch; all, if there are none")
    parser.add_argument("--copy", type=Path, default=ROOT / "build" / "mutants", help="where they are built")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, arguments = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]  # after -- what pytest is given
    copy, found, known = given.copy.resolve(), mutants(), accepted()
    chosen = [(number, m) for number, m in enumerate(found) if not given.files or m.file in given.files]
    new = [(number, m) for number, m in chosen if (f"csrc/torch/{m.file}", *m[2:5]) not in known]
    build(copy, found)
    print(f"{len(chosen)} mutants, {len(chosen) - len(new)} accepted, {len(new)} to try", flush=True)
    sys.path.insert(0, str(copy))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(copy)
    import torch

    torch.set_num_threads(1)
    mutating = Mutating(new, arguments)
    code = pytest.main(["-s", *QUICKLY, "-p", "no:terminal", "-p", "no:faulthandler", *arguments], [mutating])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(code)
    print(f"{mutating.survivors} of {len(new)} survived ({100 * mutating.survivors / max(len(new), 1):.1f} %)")
    return 1 if mutating.survivors else 0


if __name__ == "__main__":
    sys.exit(main())
