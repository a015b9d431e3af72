"""docs/support.md: the tests that it names are about what it says, and what it lists as refused is refused."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from test_refusals import refusal

import mha_ext

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "support.md").read_text()


ROWS = [[cell.strip() for cell in re.split(r"(?<!\\)\|(?!`)", line)[1:-1]] for line in TEXT.splitlines() if "|" in line]
LINES = [row for row in ROWS if len(row) == 5 and "tests/" in row[4]]


def source_of(path: str, name: str) -> tuple[str, list[str]]:
    """The source of a test and of all in its file that it calls, and the test's marks and arguments."""
    functions = {f.name: f for f in ast.parse((ROOT / path).read_text()).body if isinstance(f, ast.FunctionDef)}
    assert name.startswith("test_") and name in functions, (path, name)
    found, new = [], [name]
    for each in new:
        found.append(ast.unparse(functions[each].body))
        new += [other for other in functions if other not in new and re.search(rf"\b{other}\b", found[-1])]
    test = functions[name]
    return "\n".join(found), [ast.unparse(x) for x in (*test.decorator_list, *test.args.args)]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_named_tests_are_about_the_line(line):
    """They exist, are not always skipped, and check something; one is on a GPU where the line says so, and one takes a
    gradient where it claims one; their files use the feature's names."""
    feature, _, cuda, gradient, tested = line
    named = re.findall(r"(tests/\w+/\w+\.py)::(\w+)", tested)
    sources = [source_of(path, name) for path, name in named]
    for (source, about), name in zip(sources, named):
        assert not any(re.match(r"pytest\.mark\.(skip|xfail)\b", mark) for mark in about), name
        assert re.search(r"\bassert|check\(|compare\(|\btest_\w+\.test_", source), name
    on_cuda = [path.startswith("tests/cuda/") or "device" in about for (path, _), (_, about) in zip(named, sources)]
    assert named and (not cuda.startswith("yes") or any(on_cuda)), "no test on a GPU is named"
    assert gradient == "-" or any(re.search("grad|backward|opcheck|leaves", source) for source, _ in sources), (
        "no gradient"
    )
    texts = [(ROOT / path).read_text() for path, _ in named]
    for used in re.findall(r"`(\w+)`", feature):
        assert any(re.search(rf"\b{used}\b", text) for text in texts), used


def test_every_line_names_its_test():
    start = ROWS.index(["feature", "CPU", "CUDA", "gradient to", "tested by"]) + 2
    assert len(LINES) > 10 and ROWS[start : start + len(LINES)] == LINES


START = ROWS.index(["what", "with", "why"]) + 2
REFUSED = {row[0]: row[1] for row in ROWS[START:]}


def _dual():
    import torch.autograd.forward_ad as fwad

    x = torch.randn(1, 1, 3, 4)
    with fwad.dual_level():
        return mha_ext.attention(fwad.make_dual(x, x), x, x)


@torch.no_grad()
def _weights_with_a_cache():
    layer = mha_ext.nn.SelfAttention(8, 2, causal=True).eval()
    layer(torch.randn(1, 3, 8), cache=layer.make_cache(1, 4), return_weights=True)


NESTED = torch.nested.nested_tensor([torch.randn(3, 2, 4), torch.randn(2, 2, 4)], layout=torch.jagged).transpose(1, 2)
FEATURES = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=torch.jagged)
CALLS = {
    "return_weights": lambda: mha_ext.attention(NESTED, NESTED, NESTED, return_weights=True),
    "return_weights of `SelfAttention`": _weights_with_a_cache,
    "attn_mask": lambda: mha_ext.scaled_dot_product_attention(
        NESTED, NESTED, NESTED, torch.ones(3, 3, dtype=torch.bool)
    ),
    "forward-mode differentiation": _dual,
    "rope": lambda: mha_ext.nn.SelfAttention(8, 2, rope=True)(FEATURES),
    "MultiheadAttention masks": lambda: mha_ext.nn.MultiheadAttention(8, 2, batch_first=True)(
        FEATURES, FEATURES, FEATURES, torch.zeros(2, 3, dtype=torch.bool), need_weights=False
    ),
}


@pytest.mark.parametrize("name", [name for name, other in REFUSED.items() if not other.endswith("on a GPU")])
def test_refused(name):
    """Each line of the page, but for what takes a GPU."""
    refusal(CALLS[name], kind=NotImplementedError if name == "forward-mode differentiation" else ValueError)


def test_explain_says_nothing_of_what_other_calls_may_not():
    q = torch.randn(1, 2, 3, 4)
    for legal in ({}, {"pre_mix": torch.eye(2)}, {"return_weights": True}, {"dropout_p": 0.5}):
        plan = str(mha_ext.explain(q, q, q, **legal))
        assert "refused" not in plan and not any(f"{what} with" in plan for what in REFUSED)
