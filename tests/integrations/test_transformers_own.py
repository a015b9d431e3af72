"""Models of transformers that do not go through its AttentionInterface keep their own attention, and one warning says so."""

from __future__ import annotations

import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, LlamaConfig, MptConfig

from mha_ext.integrations.transformers import register

sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
OWN = {
    "BloomForCausalLM": BloomConfig(**sizes, n_head=4),
    "FalconForCausalLM": FalconConfig(**sizes, num_attention_heads=4, alibi=False),
    "MptForCausalLM": MptConfig(vocab_size=50, d_model=32, n_heads=4, n_layers=2),
}
LLAMA = LlamaConfig(**sizes, num_attention_heads=4, intermediate_size=48)


def logits(model) -> list[torch.Tensor]:
    ids = torch.arange(18).view(2, 9) % 50
    padding = torch.ones(2, 9, dtype=torch.int64)
    padding[1, 6:] = 0
    with torch.no_grad():
        return [model(ids).logits, model(ids, attention_mask=padding).logits[padding.bool()]]


def model(config, implementation):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize("name", OWN)
def test_own_attention(name, tmp_path):
    assert register() == register() == "mha_ext"
    config = OWN[name]
    expected = logits(model(config, "eager"))
    with pytest.warns(UserWarning, match=rf"{name} does not go through .*'mha_ext' has no effect on it") as caught:
        ours = model(config, "mha_ext")
    assert len([w for w in caught if "mha_ext" in str(w.message)]) == 1
    ours.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=rf"{name} does not go through"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="mha_ext").eval()
    changed = model(config, "eager")
    changed.set_attn_implementation("mha_ext")  # transformers warns in words of its own
    for each in (ours, loaded, changed):
        for a, b in zip(logits(each), expected):
            torch.testing.assert_close(a, b)


def test_no_warning_for_the_others():
    register()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*mha_ext.*")
        ours = model(LLAMA, "mha_ext")
        ours.set_attn_implementation("eager")
        ours.set_attn_implementation("mha_ext")
    assert ours.config._attn_implementation == "mha_ext"
    for a, b in zip(logits(ours), logits(model(LLAMA, "eager"))):
        torch.testing.assert_close(a, b)


def test_name_of_another_kind():
    with pytest.raises(TypeError, match=r"name is 3; accepted: a str"):
        register(3)
