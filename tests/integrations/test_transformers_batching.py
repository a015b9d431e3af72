"""Continuous batching of transformers (generate_batch) with our attention: the tokens of each request alone."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from test_transformers import VOCAB, model_of
from transformers import ContinuousBatchingConfig, GenerationConfig

from mha_ext.integrations import _in_place
from mha_ext.integrations import transformers as integration

LENGTHS = 5, 33, 1, 12, 20


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


def prompts() -> list[list[int]]:
    gen = torch.Generator().manual_seed(1)
    found = [torch.randint(2, VOCAB, (n,), generator=gen).tolist() for n in LENGTHS]
    return [*found, found[1], found[1][:17] + [3, 4, 5]]  # whose pages are known


def alone(model, ids: list[int], n: int) -> list[int]:
    return model.generate(torch.tensor([ids]), max_new_tokens=n, do_sample=False)[0, len(ids) :].tolist()


def batched(model, n: int, **options) -> list[list[int]]:
    config = ContinuousBatchingConfig(**({"page_size": 16, "num_blocks": 40, "max_batch_tokens": 64} | options))
    how = GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=-1, pad_token_id=0)
    given = prompts()
    found = model.generate_batch(given, generation_config=how, continuous_batching_config=config, progress_bar=False)
    by_prompt = {tuple(x.prompt_ids): x.generated_tokens for x in found.values()}
    assert len(found) == len(given)
    return [by_prompt[tuple(x)] for x in given]


@pytest.fixture
def calls(monkeypatch):
    """What is called with which keys: of a pool of pages, or of packed requests."""
    seen: dict[str, list] = {"attention_cached": [], "attention_varlen": []}
    for name, found in seen.items():
        function = getattr(_in_place, name)

        def spy(q, k, *args, function=function, found=found, **kwargs):
            found.append((q.shape, k.data_ptr(), kwargs.get("block_table")))
            return function(q, k, *args, **kwargs)

        monkeypatch.setattr(_in_place, name, spy)
    return seen


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_the_tokens_of_each_request_alone(name, calls):
    model = model_of(name, torch.float32)
    model.set_attn_implementation("eager")
    n = 24
    expected = [alone(model, ids, n) for ids in prompts()]
    model.set_attn_implementation("mha_ext")
    assert batched(model, n) == expected
    assert model.config._attn_implementation == "mha_ext"
    assert calls["attention_varlen"]
    if name == "llama":  # the others have layers whose windows transformers keeps without pages
        steps = calls["attention_cached"]
        assert len(steps) > 2 * 10 and all(table is not None for _, _, table in steps)
        assert len({place for _, place, _ in steps}) == 2  # the pool's place of each layer: nothing was gathered


def test_prefill_in_parts_and_few_pages(calls):
    """Prompts longer than what a step takes, more requests than the pool holds at once."""
    model = model_of("llama", torch.float32)
    model.set_attn_implementation("eager")
    expected = [alone(model, ids, 10) for ids in prompts()]
    model.set_attn_implementation("mha_ext")
    assert batched(model, 10, max_batch_tokens=8, num_blocks=8, page_size=16) == expected
    assert calls["attention_varlen"] and calls["attention_cached"]


def test_pages_for_ours_alone(calls):
    """Another implementation is served as it was; and one that transformers does not take is refused by it."""
    model = model_of("llama", torch.float32)
    model.set_attn_implementation("sdpa")
    expected = [alone(model, ids, 6) for ids in prompts()]
    assert batched(model, 6) == expected and not calls["attention_cached"]
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="flex_attention is not supported for continuous batching"):
        batched(model, 6)


def test_by_the_name_of_earlier_versions():
    model = model_of("llama", torch.float32)
    with pytest.warns(FutureWarning, match="prefix is no longer needed"):
        model.set_attn_implementation("paged|mha_ext")
    assert model.config._attn_implementation == "mha_ext"
    assert batched(model, 4) == [alone(model, ids, 4) for ids in prompts()]


def test_registered_twice_and_by_another_name():
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    before = ContinuousBatchingManager.switch_to_cb_friendly_attn
    integration.register("mha_ext_too")
    assert ContinuousBatchingManager.switch_to_cb_friendly_attn is before
    model = model_of("llama", torch.float32)
    model.set_attn_implementation("mha_ext_too")
    assert batched(model, 4) == [alone(model, ids, 4) for ids in prompts()]
