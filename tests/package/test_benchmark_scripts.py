"""The scripts of benchmarks/ that measure against torch: on small shapes both sides give the same, which the scripts check."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import mha_ext


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


def test_serving(script, capsys):
    script("serving").main(["--tiny"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ") and "SDPA" not in line]
    assert len(rows) == 2 * 4 and all(row.count("x)") == 5 for row in rows)


def test_serving_notices_wrong_logits(script, monkeypatch):
    serving = script("serving")
    attend = mha_ext.nn.KVCache.attend
    monkeypatch.setattr(mha_ext.nn.KVCache, "attend", lambda *args, **options: attend(*args, **options) * 1.5)
    with pytest.raises(AssertionError, match="a token each, contiguous: logits are off"):
        serving.main(["--tiny", "--dtype", "float32"])


def test_transformers_serving(script, capsys):
    pytest.importorskip("transformers")
    script("transformers_serving").main(["--tiny", "--dtype", "float32"])
    out = capsys.readouterr().out
    assert (
        "| generate(), float32 | sdpa" in out
        and "| generate_batch(), float32 | sdpa" in out
        and out.count("8 bits, pages") == 2
    )


def test_flex(script, capsys, fresh_compiler):
    script("flex").main(["--tiny", "--only", "prefix", "--dtype", "float32"])
    assert "| prefix | float32 |" in capsys.readouterr().out


def test_flex_examples_say_the_same(script):
    """Uncompiled, as FlexAttention defines them."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    B, H, S = 2, 4, 160
    gen = torch.Generator().manual_seed(1)
    qkv = [torch.randn(B, H, S, 16, generator=gen, dtype=torch.float64) for _ in range(3)]
    for mask_mod, score_mod, given in script("flex").examples(B, H, S).values():
        block_mask = create_block_mask(mask_mod, B, H, S, S, device="cpu")
        expected = flex_attention(*qkv, score_mod=score_mod, block_mask=block_mask)
        torch.testing.assert_close(mha_ext.attention(*qkv, **given), expected, atol=1e-5, rtol=1e-5)
