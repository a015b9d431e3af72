"""What the mask function registered with transformers says, against transformers' dense mask, eagerly and traced."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from mha_ext import masks

pytest.importorskip("transformers")

from transformers import masking_utils as hf

from mha_ext.integrations import transformers as integration

B, S = 2, 9
NO_SKIP = {"allow_is_causal_skip": False}


def pad(hidden: slice, length: int = S) -> torch.Tensor:
    mask = torch.ones(B, length, dtype=torch.bool)
    mask[1, hidden] = False
    return mask


def packed(window: int | None = None):
    """Sequences of 4 + 5 and of 2 + 2 + 5 tokens, as transformers makes them from position_ids."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 0, 1, 2, 3, 4]])
    inner = hf.causal_mask_function if window is None else hf.sliding_window_causal_mask_function(window)
    inner = hf.remap_positions_for_packed_sequence(inner, positions)
    return hf.and_masks(inner, hf.packed_sequence_mask_function(hf.find_packed_sequence_indices(positions)))


def blocks(*ids: int):
    return hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(torch.tensor([ids] * B)))


LEFT, RIGHT, HOLE = slice(0, 4), slice(6, None), slice(3, 5)
CAUSAL, BOTH_WAYS = hf.causal_mask_function, hf.bidirectional_mask_function
BIDIRECTIONAL = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
# name: (what is done: "none", "intervals" or "dense", mask function, arguments besides those of B queries and keys)
SITUATIONS = {
    "causal": ("none", lambda: CAUSAL, {}),
    "causal, nothing is padded": ("none", lambda: CAUSAL, {"attention_mask": pad(slice(0, 0))}),
    "causal, left": ("intervals", lambda: CAUSAL, {"attention_mask": pad(LEFT)}),
    "causal, right": ("intervals", lambda: CAUSAL, {"attention_mask": pad(RIGHT)}),
    "causal, hole": ("dense", lambda: CAUSAL, {"attention_mask": pad(HOLE)}),
    "causal, all padded": ("intervals", lambda: CAUSAL, {"attention_mask": pad(slice(None))}),
    "continued": ("intervals", lambda: CAUSAL, {"q_length": 3, "q_offset": 6}),
    "one query": ("none", lambda: CAUSAL, {"q_length": 1, "q_offset": 8}),
    "one query, left": ("intervals", lambda: CAUSAL, {"q_length": 1, "q_offset": 8, "attention_mask": pad(LEFT)}),
    "static prefill": ("none", lambda: CAUSAL, {"kv_length": 20, "attention_mask": pad(slice(0, 0))}),
    "static prefill, left": ("intervals", lambda: CAUSAL, {"kv_length": 20, "attention_mask": pad(LEFT)}),
    "static step": (
        "intervals",
        lambda: CAUSAL,
        {"kv_length": 20, "q_length": 1, "q_offset": torch.tensor(8), "attention_mask": pad(LEFT), **NO_SKIP},
    ),
    "window": ("intervals", lambda: hf.sliding_window_causal_mask_function(3), {}),
    "window that limits nothing": ("none", lambda: hf.sliding_window_causal_mask_function(9), {}),
    "window, left": ("intervals", lambda: hf.sliding_window_causal_mask_function(3), {"attention_mask": pad(LEFT)}),
    "window, its own cache": (
        "intervals",
        lambda: hf.sliding_window_causal_mask_function(5),
        {"q_length": 2, "q_offset": 9, "kv_offset": 5, "kv_length": 6, "attention_mask": pad(LEFT, 11)},
    ),
    "chunks": (
        "intervals",
        lambda: hf.chunked_causal_mask_function(4, torch.tensor([0, 4])),
        {"attention_mask": pad(LEFT)},
    ),
    "packed": ("intervals", packed, NO_SKIP),
    "packed, window": ("intervals", lambda: packed(2), NO_SKIP),
    "blocks": ("intervals", lambda: blocks(-1, 0, 0, 0, -1, 1, 1, -1, -1), NO_SKIP),
    "block in two parts": ("dense", lambda: blocks(-1, 0, 0, -1, -1, -1, 0, 0, -1), NO_SKIP),
    "everything": ("none", lambda: BOTH_WAYS, BIDIRECTIONAL),
    "everything, right": ("intervals", lambda: BOTH_WAYS, {"attention_mask": pad(RIGHT), **BIDIRECTIONAL}),
    "cross": ("intervals", lambda: BOTH_WAYS, {"q_length": 4, "attention_mask": pad(RIGHT), **BIDIRECTIONAL}),
    "window both ways": ("intervals", lambda: hf.sliding_window_bidirectional_mask_function(2), BIDIRECTIONAL),
    "custom": ("dense", lambda: lambda b, h, i, j: (i - j) % 2 == 0, {"use_vmap": True, **NO_SKIP}),
    "custom interval": ("intervals", lambda: lambda b, h, i, j: (i - j).abs() <= b, {"use_vmap": True, **NO_SKIP}),
    "the model computes with it": ("dense", lambda: CAUSAL, {"attention_mask": pad(LEFT), **NO_SKIP}),
    "the model computes with it, window": (
        "dense",
        lambda: hf.sliding_window_causal_mask_function(3),
        {"attention_mask": pad(LEFT), **NO_SKIP},
    ),
    "the model computes with it, both ways": ("dense", lambda: BOTH_WAYS, NO_SKIP),
    "three keys": ("dense", lambda: CAUSAL, {"kv_length": 3, "q_length": 2, "q_offset": 1}),
}


def arguments(name: str) -> tuple[dict, torch.Tensor, bool]:
    """The arguments but the mask function, the dense mask by transformers, and whether the mask is causal where None stands for it."""
    _, make, given = SITUATIONS[name]
    given = {"batch_size": B, "q_length": S, "kv_length": S, "q_offset": 0, "kv_offset": 0} | given
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    expected = hf.sdpa_mask(**{**given, **skips}, mask_function=make())
    return given, expected, given.get("allow_is_causal_skip", True)


def as_dense(found: torch.Tensor | None, given: dict, causal: bool) -> torch.Tensor:
    """What attention_forward makes of the mask."""
    Sq, Sk = given["q_length"], given["kv_length"]
    mask, bias = integration._mask_and_bias(found, torch.empty(B, 1, Sq, 1), Sk, causal)
    assert bias is None
    return torch.ones(B, 1, Sq, Sk, dtype=torch.bool) if mask is None else mask.to_dense(B, 1, Sq, Sk)


@pytest.mark.parametrize("elements", [2**22, 20], ids=["whole", "by rows"])
@pytest.mark.parametrize("name", SITUATIONS)
def test_mask(name, elements, monkeypatch):
    monkeypatch.setattr(integration, "ELEMENTS", elements)
    form, make, _ = SITUATIONS[name]
    given, expected, causal = arguments(name)
    found = integration.attention_mask(**given, mask_function=make())
    if form == "none":
        assert found is None
    elif form == "dense":
        assert found.dtype == torch.bool and found.shape == expected.shape
    else:
        assert found.dtype == torch.int64 and found.shape == (B, 1, given["q_length"], 2)
    assert torch.equal(as_dense(found, given, causal), expected)


@pytest.mark.parametrize("name", SITUATIONS)
def test_traced(name, fresh_compiler):
    """Without a look at values: what is padded with a hole stays exact, a mask that is no intervals is an error."""
    form, make, _ = SITUATIONS[name]
    given, expected, causal = arguments(name)
    made = torch.compile(
        lambda: integration.attention_mask(**given, mask_function=make()), backend="eager", fullgraph=True
    )
    if name == "block in two parts":
        with pytest.raises(RuntimeError, match="not one interval"):
            made()
        return
    found = made()
    if form == "intervals" and not given.get("use_vmap"):
        assert found.dtype == torch.int64
    assert torch.equal(as_dense(found, given, causal), expected)


@pytest.mark.parametrize("shape", [(2, 1, 9, 9), (2, 1, 9, 4), (2, 9), (2, 1, 3, 2)])
def test_integer_masks_are_refused(shape):
    q = torch.randn(2, 1, shape[-2] if len(shape) == 4 else 9, 4)
    k = torch.randn(2, 1, shape[-1], 4)
    with pytest.raises(TypeError, match="int64.*accepted.*bool"):
        integration.attention_forward(torch.nn.Module(), q, k, k, torch.ones(shape, dtype=torch.int64))


def test_float_masks_are_added():
    q = torch.randn(2, 1, 5, 4, dtype=torch.bfloat16)
    mask = torch.randn(2, 1, 5, 5, dtype=torch.float64)
    out, weights = integration.attention_forward(
        torch.nn.Module(), q, q, q, mask, position_bias=torch.randn(1, 1, 5, 5)
    )
    assert out.shape == (2, 5, 1, 4) and weights is None


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks"])
def test_what_cannot_be_done_is_refused(name):
    q = torch.randn(2, 1, 5, 4)
    with pytest.raises(ValueError, match=f"Module asks .*{name}=.*accepted"):
        integration.attention_forward(torch.nn.Module(), q, q, q, None, **{name: torch.zeros(2, 5, 3)})


def python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_absent_or_old_transformers(tmp_path):
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("""
__version__ = "5.3.0"
class AttentionInterface: pass
class AttentionMaskInterface: pass
""")
    (package / "masking_utils.py").write_text("def sdpa_mask(batch_size, cache_position, kv_length): pass")
    found = python(f"""
        import sys
        from mha_ext.integrations.transformers import register
        def attempt():
            try: register()
            except ImportError as error: print(error)
            sys.modules.pop("transformers", None)
        sys.modules["transformers"] = None
        attempt()
        sys.path.insert(0, {str(tmp_path)!r})
        attempt()
        open({str(package / "__init__.py")!r}, "w").write("__version__ = '4.40.0'")
        import importlib; importlib.invalidate_caches()
        attempt()
        """).splitlines()
    assert len(found) == 3
    assert "transformers is not installed; accepted: 5.6 or later: pip install" in found[0]
    assert "transformers is 5.3.0; accepted: 5.6 or later" in found[1]
    assert "transformers is 4.40.0; accepted: 5.6 or later" in found[2]


def test_importing_mha_ext_does_not_import_transformers():
    assert python("import sys, mha_ext.integrations.transformers; print('transformers' in sys.modules)") == "False\n"


def test_intervals_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"\[2,5\].*accepts \[B,Sq\] = \[2,9\]"):
        masks.Intervals(torch.zeros(2, 5, dtype=torch.int64), torch.ones(1, 9, dtype=torch.int64)).lower(
            B, 1, 9, 9, torch.device("cpu")
        )
    with pytest.raises(ValueError, match="Intervals.*float32"):
        masks.Intervals(torch.zeros(2, 5), torch.ones(2, 5))
