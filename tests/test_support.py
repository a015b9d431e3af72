"""docs/support.md: the tests that it names exist, and what it lists as refused is the code's list and is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_refusals import refusal

import mha_ext
from mha_ext.explain import REFUSED

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "support.md").read_text()


def test_named_tests_exist():
    named = re.findall(r"(tests/\w+\.py)::(\w+)", TEXT)
    assert len(named) > 10
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), (path, name)


def test_the_list_of_refusals_is_that_of_the_code():
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in TEXT.splitlines() if line.startswith("|")]
    assert tuple(rows[rows.index(("what", "with", "why")) + 2 :]) == REFUSED


def _dual():
    import torch.autograd.forward_ad as fwad

    x = torch.randn(1, 1, 3, 4)
    with fwad.dual_level():
        return mha_ext.attention(fwad.make_dual(x, x), x, x)


NESTED = torch.nested.nested_tensor([torch.randn(3, 2, 4), torch.randn(2, 2, 4)], layout=torch.jagged).transpose(1, 2)
FEATURES = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=torch.jagged)
CALLS = {
    "return_weights": lambda: mha_ext.attention(NESTED, NESTED, NESTED, return_weights=True),
    "attn_mask": lambda: mha_ext.scaled_dot_product_attention(NESTED, NESTED, NESTED, torch.ones(3, 3, dtype=torch.bool)),
    "rope": lambda: mha_ext.nn.SelfAttention(8, 2, rope=True)(FEATURES),
    "MultiheadAttention masks": lambda: mha_ext.nn.MultiheadAttention(8, 2, batch_first=True)(
        FEATURES, FEATURES, FEATURES, torch.zeros(2, 3, dtype=torch.bool), need_weights=False
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused(name):
    assert name in {what for what, _, _ in REFUSED}
    refusal(CALLS[name], kind=ValueError)


def test_forward_mode_is_refused():
    with pytest.raises((RuntimeError, NotImplementedError)):
        _dual()


def test_explain_prints_what_a_call_may_not_be_combined_with():
    q = torch.randn(1, 2, 3, 4)
    mix = torch.eye(2)
    assert "pre_mix, post_mix with attention_varlen on a GPU" in str(mha_ext.explain(q, q, q, pre_mix=mix))
    assert "pre_mix, post_mix with" not in str(mha_ext.explain(q, q, q))
