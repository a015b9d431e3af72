"""A cache of ours in transformers' generate(): the tokens that its own caches give, from pages and from 8 bits."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from test_transformers import VOCAB, inputs_of, model_of
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from mha_ext.cached import quantise, scales_of
from mha_ext.integrations import transformers as integration
from mha_ext.integrations import transformers_cache
from mha_ext.integrations.transformers_cache import DecodingCache

HOW = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "several answers": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 2.0},
    "samples": {"do_sample": True, "temperature": 0.7, "num_return_sequences": 2},
    "guesses": {"prompt_lookup_num_tokens": 3},
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


@pytest.fixture(autouse=True)
def small_at_first(monkeypatch):
    """So that caches grow."""
    monkeypatch.setattr(transformers_cache, "FIRST", 2)


def model(name: str, implementation: str = "mha_ext", dtype: torch.dtype = torch.float64):
    found = model_of(name, dtype)
    found.set_attn_implementation(implementation)
    return found


def prompt(batch: int):
    ids = torch.randint(2, VOCAB, (batch, 9), generator=torch.Generator().manual_seed(batch))
    ids[:, 4:7] = ids[:, 1:4]  # something to guess from
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, cache, n: int = 14, **how):
    torch.manual_seed(3)
    batch = 1 if "prompt_lookup_num_tokens" in how else 2
    given = {
        "max_new_tokens": n,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    return model.generate(**prompt(batch), cache=cache, **(given | how))


class Rounded(DynamicLayer):
    """transformers' own layer, whose keys and values are rounded as 8 bits hold them."""

    dtype = torch.int8

    def update(self, key_states, value_states, *args, **kwargs):
        def rounded(x):
            scale = scales_of(x, self.dtype)
            return quantise(x, scale, self.dtype).to(x.dtype) * scale[..., None].to(x.dtype)

        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


class Rounded8(Rounded):
    dtype = torch.float8_e4m3fn


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("page_size", [None, 4], ids=["contiguous", "paged"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_the_tokens_of_a_dynamic_cache(name, page_size, how):
    ours = model(name)
    expected = generate(ours, DynamicCache(), **HOW[how])
    cache = DecodingCache(ours.config, page_size=page_size)
    found = generate(ours, cache, **HOW[how])
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits):
        torch.testing.assert_close(a, b)
    assert cache.get_seq_length() == 9 + 14 - 1
    held = cache.layers[0].held
    assert held.capacity < 100 and not cache.is_compileable
    if page_size is not None:
        assert ((held.block_table == held.pages).sum(1) == held.block_table.shape[1] - 6).all()


@pytest.mark.parametrize("how", ["greedy", "beams"])
@pytest.mark.parametrize("page_size", [None, 4], ids=["contiguous", "paged"])
@pytest.mark.parametrize("layer", [Rounded, Rounded8], ids=["int8", "e4m3"])
def test_eight_bits(layer, page_size, how):
    """Tokens and logits are those of keys and values that are rounded so; and near those of others."""
    ours = model("llama", dtype=torch.float32)
    expected = generate(ours, transformers.Cache(layer_class_to_replicate=layer), **HOW[how])
    cache = DecodingCache(ours.config, dtype=layer.dtype, page_size=page_size)
    found = generate(ours, cache, **HOW[how])
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert cache.layers[0].held.k.dtype == layer.dtype
    with torch.no_grad():
        ids = prompt(1)["input_ids"]
        exact = ours(ids).logits
        off = ours(ids, cache=DecodingCache(ours.config, dtype=layer.dtype, page_size=page_size)).logits - exact
    assert 1e-4 < off.std() / exact.std() < (0.03 if layer is Rounded else 0.15)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_with_another_attention_they_are_copied_to_its_type(implementation):
    """To the numbers that ours reads in place."""
    for options in ({"dtype": torch.int8}, {"page_size": 4}, {"dtype": torch.int8, "page_size": 4}):
        ours = model("llama", dtype=torch.float32)
        expected = generate(ours, DecodingCache(ours.config, **options))
        theirs = model("llama", implementation, torch.float32)
        found = generate(theirs, DecodingCache(theirs.config, **options))
        assert torch.equal(found.sequences, expected.sequences)
        for a, b in zip(found.logits, expected.logits):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_beams_have_pages_in_common():
    ours = model("llama")
    used = []
    for beams in (1, 6):
        cache = DecodingCache(ours.config, page_size=2)
        generate(ours, cache, n=20, num_beams=beams)
        held = cache.layers[0].held
        used.append((held.pages - held.free_pages) / held.batch)
    assert used[0] == 14 and used[1] < 14


@torch.no_grad()
def test_masks_of_every_form():
    """Padding with holes and tensors of four dimensions, step by step."""
    ours = model("llama")
    ids = torch.randint(2, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
    holes = torch.ones(2, 11, dtype=torch.int64)
    holes[0, 3:5] = 0
    dense = (torch.rand(2, 1, 11, 11) < 0.7).tril() | torch.eye(11, dtype=torch.bool)
    added = torch.randn(2, 4, 11, 11, dtype=torch.float64).masked_fill(~dense, -torch.inf)
    for page_size in (None, 4):
        for mask in (None, holes, dense, added):
            expected = ours(ids, attention_mask=mask).logits
            cache = DecodingCache(ours.config, page_size=page_size)
            outs = []
            for a, b in ((0, 6), (6, 7), (7, 11)):
                part = mask if mask is None else mask[:, :b] if mask.dim() == 2 else mask[:, :, a:b, :b]
                outs.append(ours(ids[:, a:b], attention_mask=part, cache=cache).logits)
            torch.testing.assert_close(torch.cat(outs, 1), expected)


@torch.no_grad()
def test_weights_and_what_transformers_does_to_caches():
    ours = model("llama")
    ids = torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    for options in ({"page_size": 4}, {"page_size": 4, "capacity": 60}, {}):
        cache, other = DecodingCache(ours.config, **options), DynamicCache()
        outs = []
        for each in (cache, other):
            found = [ours(ids, cache=each, output_attentions=True).attentions[1]]
            each.batch_repeat_interleave(2)
            found.append(ours(torch.tensor([[5], [6], [7], [8]]), cache=each, output_attentions=True).attentions[1])
            each.crop(-3)
            each.batch_select_indices(torch.tensor([3, 0, 1]))
            each.reorder_cache(torch.tensor([1, 1, 0]))
            found.append(ours(torch.tensor([[5, 9], [6, 9], [7, 9]]), cache=each).logits)
            assert each.get_seq_length() == 9 and each.get_mask_sizes(3, 0) == (12, 0)
            outs.append(found)
        for a, b in zip(*outs):
            torch.testing.assert_close(a, b)
        assert copy.deepcopy(cache).nbytes == cache.nbytes > 0
        cache.reset()
        torch.testing.assert_close(ours(ids[:1], cache=cache).logits, ours(ids[:1]).logits)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_encoder_decoders(name):
    ours = model(name)
    given = {
        x: y
        for x, y in inputs_of(name, "right", torch.float64).items()
        if x in ("input_ids", "attention_mask", "input_features")
    }
    how = {"max_new_tokens": 8, "num_beams": 3}
    expected = ours.generate(**given, **how)
    for page_size in (None, 4):
        cache = transformers.EncoderDecoderCache(DecodingCache(ours.config, page_size=page_size), DynamicCache())
        assert torch.equal(ours.generate(**given, **how, cache=cache), expected)
        assert cache.self_attention_cache.get_seq_length() == 8
    with pytest.raises(
        ValueError, match="an encoder-decoder was given a DecodingCache.*; accepted: EncoderDecoderCache"
    ):
        ours.generate(**given, **how, cache=DecodingCache(ours.config))


def test_refusals():
    ours = model("llama")
    ids = torch.tensor([[3, 4]])
    with pytest.raises(ValueError, match="a DecodingCache was given while gradients are recorded; accepted"):
        ours(ids, cache=DecodingCache(ours.config))
    for given, message in (
        ({"page_size": 0}, "page_size is 0; DecodingCache accepts an int >= 1"),
        ({"capacity": 1.5}, "capacity is 1.5; DecodingCache accepts"),
        ({"dtype": torch.int4}, "dtype is torch.int4; DecodingCache accepts torch.int8"),
        ({"dtype": torch.float32}, "dtype is torch.float32; DecodingCache accepts torch.int8"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            DecodingCache(ours.config, **given)
    with pytest.raises(TypeError, match=r"config is a LlamaForCausalLM; accepted: a model's config"):
        DecodingCache(ours)
    mixed = transformers.Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(ValueError, match="the model has layers of linear_attention; DecodingCache accepts"):
        DecodingCache(mixed)
    cache = DecodingCache(ours.config, page_size=4)
    with pytest.raises(ValueError, match="asked to move to the CPU"):
        cache.offload(0)


@torch.no_grad()
def test_a_model_that_computes_with_what_it_does_not_have_fails():
    ours = model("llama")
    cache = DecodingCache(ours.config, page_size=4)
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    k, v = cache.update(x, x, 0)
    assert k.shape == v.shape == x.shape
    layer = ours.model.layers[0].self_attn
    q = torch.randn(1, 4, 3, 8, dtype=torch.float64)
    out, _ = integration.attention_forward(layer, q, k, v, None)
    torch.testing.assert_close(out, integration.attention_forward(layer, q, x, x, None)[0])
    with pytest.raises((ValueError, RuntimeError), match="meta"):
        integration.attention_forward(layer, q, k + 1, v, None)
