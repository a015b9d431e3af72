"""The documents: every Python block runs and prints what it says, and the tutorial's experiments find what it says."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import mha_ext
import mha_ext.distributed

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# A block that can't run alone is announced by the reader's comment <!-- fragment --> in the line before.
# A block of text right after it is what it prints.
BLOCK = re.compile(r"(<!-- fragment -->\n)?```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(code, printed) for fragment, code, printed in BLOCK.findall(page.read_text()) if not fragment]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.stem)
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "page"}
    for needed in re.findall(r"^(?:import|from) (transformers|onnxscript)\b|needs (onnxscript)", page.read_text(), re.MULTILINE):
        pytest.importorskip("".join(needed))
    for code, printed in blocks(page):
        capsys.readouterr()
        exec(compile(code, str(page), "exec"), names)  # noqa: S102
        if printed:
            assert capsys.readouterr().out == printed


def test_pages_are_programs():
    """All of each; fragments, which need several processes, are in one page alone."""
    without = {"contribute", "cpp"}  # commands; a C++ program, which .ci/run builds and runs
    assert {p.stem for p in PAGES if p.parent.name == "howto" and not blocks(p)} == without
    assert {p.stem for p in PAGES if blocks(p)} >= {"README", "index", "tutorial"}
    assert {p.stem for p in PAGES if "<!-- fragment -->" in p.read_text()} == {"distributed"}


def test_the_cpp_page_shows_the_program_that_ci_runs():
    assert '--8<-- "examples/cpp/attention.cpp"' in (ROOT / "docs" / "howto" / "cpp.md").read_text()
    assert "build/example/attention" in (ROOT / ".ci" / "run").read_text()


def documented() -> list:
    """What api.md has mkdocstrings show: objects, and of modules the members that are theirs."""
    shown = []
    for path, options in re.findall(r"^::: ([\w.]+)\n((?:    .*\n)*)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE):
        found = pkgutil.resolve_name(path)
        if not inspect.ismodule(found):
            shown.append(found)
            continue
        own = {name: x for name, x in vars(found).items() if getattr(x, "__module__", "") == path or name in getattr(found, "__all__", ())}
        members = re.search(r"members: \[(.*)\]", options)
        shown += [own[name] for name in (members[1].split(", ") if members else own)]
    return shown


def test_every_public_function_and_class_is_in_the_reference():
    shown = documented()
    for module in (mha_ext, mha_ext.nn, mha_ext.distributed):
        for name in module.__all__:
            x = getattr(module, name)
            assert inspect.ismodule(x) or any(x is other for other in shown), f"{module.__name__}.{name}"


@pytest.fixture
def tutorial(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("tutorial")


def test_tutorial_draws_its_pictures(tutorial, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    tutorial.main(["--out", str(tmp_path)])
    told = (ROOT / "docs" / "tutorial.md").read_text()
    for name in ("weights", "scale", "memory"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"pictures/{name}.png" in told and (ROOT / "docs" / "pictures" / f"{name}.png").exists()
    assert "textbook" in capsys.readouterr().out


def test_tutorial_three_masks(tutorial):
    encoder, decoder, between = tutorial.three_masks().values()
    visible = [torch.ones(12, 12), torch.ones(10, 10).tril(), torch.ones(10, 12)]
    for weights, seen, length in zip((encoder, decoder, between), visible, (8, 6, 8)):
        seen[:, length:] = 0
        assert torch.equal(weights > 0, seen.bool())
        torch.testing.assert_close(weights.sum(-1), torch.ones(len(weights)))


def test_tutorial_scale(tutorial):
    rows = tutorial.why_one_over_sqrt_d()
    for row in rows:
        assert 0.8 < row["spread of q.k"] / math.sqrt(row["d"]) < 1.25
    last = rows[-1]
    assert last["largest weight, scale 1"] > 0.8 and last["largest weight, scale 1/sqrt(d)"] < 0.2
    assert last["gradient, scale 1"] < 0.02 * last["gradient, scale 1/sqrt(d)"]
    gradients = [row["gradient, scale 1/sqrt(d)"] for row in rows]
    assert max(gradients) < 1.2 * min(gradients)


def test_tutorial_ways_to_hide(tutorial):
    found = tutorial.infinity_against_a_big_number()
    first = found["value of the first key"]
    for way in ("-inf", "-1e4", "mask="):
        torch.testing.assert_close(found[way][0], first, atol=1e-3, rtol=1e-3)
    assert found["-inf"][1].isnan().all() and (found["mask="][1] == 0).all()
    torch.testing.assert_close(found["-1e4"][1], found["mean of the values"], atol=5e-3, rtol=0)
    assert found["-1e9 as float16"] == -math.inf


def test_tutorial_layouts_and_blocks(tutorial):
    *in_place, strided = tutorial.contiguity().values()
    assert in_place == [[], [], []] and len(strided) == 3
    scores, values = torch.randn(5, 70, dtype=torch.float64).mul(30), torch.randn(70, 3, dtype=torch.float64)
    for block in (1, 16, 100):
        out = tutorial.blocked_softmax(scores.float(), values.float(), block)
        torch.testing.assert_close(out.double(), scores.softmax(-1) @ values, atol=1e-4, rtol=1e-4)
    rows = tutorial.memory_growth((256, 1024))
    assert rows[1]["textbook"] == 16 * rows[0]["textbook"] and rows[1]["mha_ext"] < 5 * rows[0]["mha_ext"]
