"""Who may import whom in mha_ext: a module imports its own layer, without circles, and the layers below. And that Call is what
the schemas say."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path
from types import SimpleNamespace

import pytest

import mha_ext

PACKAGE = Path(mha_ext.__file__).parent
LAYERS = (  # from below; a name stands for a module or a whole package
    ("_C", "_C_cuda", "_C_cuda_sm90"),  # compiled
    ("_checks", "_foreign", "_pytrees"),
    ("masks", "biases"),
    ("reference", "_typing"),
    ("_ops",),
    ("_call",),  # what users pass becomes a Call
    ("_sequences",),
    ("nested",),
    ("functional", "varlen", "packed", "cached", "sdpa", "merge"),
    ("explain", "nn", "_aten", "use_for_sdpa"),
    ("swap", "distributed", "integrations"),
    ("__init__", "_explain_command"),
    ("__main__", "_bench"),
)
LAYER_OF = {name: i for i, names in enumerate(LAYERS) for name in names}


def sources() -> dict[str, str]:
    """The modules: "masks.base" and so on, and "__init__" of each package."""
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]
    return {".".join(f.relative_to(PACKAGE).with_suffix("").parts): f.read_text() for f in files}


def for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(name: str, source: str, names: set[str], in_functions: bool) -> set[str]:
    """The modules of the package that a module imports, but for types; those inside functions too if asked for."""
    found = set()

    def add(path: list[str]) -> None:
        while path and ".".join(path) not in names and ".".join([*path, "__init__"]) not in names:
            path = path[:-1]  # a name in a module
        found.add(".".join(path) if ".".join(path) in names else ".".join([*path, "__init__"]))

    def visit(node: ast.AST) -> None:
        if for_types(node) or (isinstance(node, (ast.FunctionDef, ast.Lambda)) and not in_functions):
            return
        if isinstance(node, ast.ImportFrom):
            own = name.split(".")
            base = own[: len(own) - node.level] if node.level else (node.module or "").split(".")
            if node.level or base[0] == "mha_ext":
                base = base[1:] if not node.level else [*base, *(node.module or "").split(".")]
                for alias in node.names:
                    add([part for part in (*base, alias.name) if part])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "mha_ext":
                    add(alias.name.split(".")[1:])
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found - {name}


def upward(modules: dict[str, str]) -> list[str]:
    found = []
    for name, source in modules.items():
        layer = LAYER_OF[name.split(".")[0]]
        for other in sorted(imports(name, source, set(modules), in_functions=True)):
            if LAYER_OF[other.split(".")[0]] > layer:
                found.append(f"{name} imports {other}")
    return found


def circle(modules: dict[str, str]) -> list[str]:
    """A circle of imports outside of functions, if there is one."""
    graph = {name: imports(name, source, set(modules), in_functions=False) for name, source in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_every_module_has_a_layer():
    assert {name.split(".")[0] for name in sources()} == set(LAYER_OF)


def test_modules_import_their_own_layer_and_those_below():
    assert upward(sources()) == []


def test_no_circle():
    assert circle(sources()) == []


@pytest.mark.parametrize(
    "name,line,found",
    [
        ("_call", "from . import functional", "_call imports functional"),
        ("_ops.rng", "from .._call import lower", "_ops.rng imports _call"),
        ("masks.base", "def f():\n    from .. import nn", "masks.base imports nn.__init__"),
        ("nested", "import mha_ext.varlen", "nested imports varlen"),
    ],
)
def test_finds_what_imports_upward(name, line, found):
    modules = sources()
    assert upward({**modules, name: modules[name] + "\n" + line}) == [found]


def test_finds_a_circle():
    modules = sources()
    assert not circle({**modules, "functional": modules["functional"] + "\ndef f():\n    from .packed import attention_qkvpacked"})
    found = circle({**modules, "functional": modules["functional"] + "\nfrom .packed import attention_qkvpacked"})
    assert {"functional", "packed"} <= set(found)


def test_only_these_use_torch_library():
    using = {name.split(".")[0] for name, source in sources().items() if "torch.library." in source or "register_sharding" in source}
    assert using == {"_ops", "_aten"}


def test_a_call_is_checked_against_the_schemas(monkeypatch):
    arguments = mha_ext._ops.arguments
    arguments._check()
    kinds = arguments.Call.__annotations__
    for others in ({**kinds, "left": kinds["mask"]}, dict(reversed(kinds.items()))):  # another type, another order
        monkeypatch.setattr(arguments, "Call", SimpleNamespace(__annotations__=others))
        with pytest.raises(ImportError, match="build it anew"):
            arguments._check()
