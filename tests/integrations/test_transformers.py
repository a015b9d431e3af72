"""mha_ext as attention implementation of transformers: tiny random models against their own eager attention."""

from __future__ import annotations

import functools

import oracle
import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils

from mha_ext.integrations import transformers as integration

B, S, VOCAB = 2, 11, 61
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


def exact_attention(
    module, query, key, value, attention_mask, scaling=None, softcap=0.0, position_bias=None, s_aux=None, **kwargs
):
    """The textbook in fp64. (transformers' own eager attention has its softmax in fp32, and NaN in padded rows.)"""
    options = {"seen": attention_mask, "bias": position_bias, "scale": scaling, "softcap": softcap}
    out, lse, _ = oracle.attention(query, key, value, **options)
    if s_aux is not None:  # one more term in the denominators
        out = out * torch.sigmoid(lse - s_aux[:, None]).unsqueeze(-1)
    return out.transpose(1, 2), None


def exact_mask(*args, allow_is_causal_skip=None, allow_is_bidirectional_skip=None, **kwargs):
    return masking_utils.sdpa_mask(*args, allow_is_causal_skip=False, **kwargs)


@pytest.fixture(scope="module", autouse=True)
def registered():
    assert integration.register() == "mha_ext"
    transformers.AttentionInterface.register("exact", exact_attention)
    transformers.AttentionMaskInterface.register("exact", exact_mask)


def config_of(name: str):
    t = transformers
    match name:
        case "llama":
            return t.LlamaConfig(**TEXT, num_key_value_heads=2)
        case "gpt2":
            return t.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=None)
        case "bert":
            return t.BertConfig(**TEXT)
        case "gemma2":
            return t.Gemma2Config(
                **TEXT, num_key_value_heads=2, head_dim=8, sliding_window=4, attn_logit_softcapping=2.0
            )
        case "gpt_oss":
            return t.GptOssConfig(
                **TEXT, num_key_value_heads=2, head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=2
            )
        case "t5":
            return t.T5Config(
                vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
                eos_token_id=None, dropout_rate=0.0,
            )  # fmt: skip
        case "vit":
            return t.ViTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                image_size=8,
                patch_size=2,
            )
        case "whisper":
            return t.WhisperConfig(
                vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=12,
                max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1,
                suppress_tokens=None, begin_suppress_tokens=None,
            )  # fmt: skip
    raise AssertionError(name)


CLASSES = {
    "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM", "gemma2": "Gemma2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "t5": "T5ForConditionalGeneration", "vit": "ViTModel",
    "whisper": "WhisperForConditionalGeneration",
}  # fmt: skip


@functools.cache
def model_of(name: str, dtype: torch.dtype):
    """Weights large enough that attention is far from uniform; the same in every dtype, up to bfloat16's rounding."""
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES[name])._from_config(config_of(name), attn_implementation="eager").float()
    if name == "gpt_oss":
        model.set_experts_implementation("eager")  # the fast one has no fp64
    with torch.no_grad():
        for p in model.parameters():
            std = 1.5 * p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3
            p.copy_((torch.randn(p.shape) * std + (p if p.dim() == 1 else 0)).bfloat16())
    return model.to(dtype).eval()


def padding(side: str) -> torch.Tensor:
    mask = torch.ones(B, S, dtype=torch.int64)
    if side == "left":
        mask[1, :4] = 0
    elif side == "right":
        mask[1, -4:] = 0
    elif side == "hole":
        mask[0, 3:5] = 0
    return mask


def inputs_of(name: str, side: str, dtype: torch.dtype) -> dict:
    gen = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCAB, (B, S), generator=gen)
    mask = None if side == "none" else padding(side)
    if name == "vit":
        return {"pixel_values": torch.randn(B, 3, 8, 8, generator=gen).to(dtype)}
    if name == "whisper":
        features = torch.randn(B, 8, 24, generator=gen).to(dtype)
        return {"input_features": features, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    if name == "t5":
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids.flip(1)[:, :7]}
    return {"input_ids": ids, "attention_mask": mask}


def run(name: str, implementation: str, side: str, dtype: torch.dtype, grad: bool = False, wrap=lambda model: model):
    """What the model gives at the tokens that are there, [tokens, features]; with grad also the parameters' gradients."""
    model = model_of(name, dtype)
    model.set_attn_implementation(implementation)
    inputs = inputs_of(name, side, dtype)
    with torch.set_grad_enabled(grad):
        result = wrap(model)(**inputs, **({"use_cache": False} if grad and name not in ("vit", "bert") else {}))
        out = result.last_hidden_state if name == "vit" else result.logits
        mask = inputs.get("decoder_attention_mask") if name == "whisper" else inputs.get("attention_mask")
        out = out[mask.bool()] if mask is not None and name != "t5" else out.flatten(0, 1)
        if not grad:
            return out
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        names, leaves = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad))
        grads = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
        return out.detach(), {n: g for n, g in zip(names, grads) if g is not None}


@functools.cache
def truth(name: str, side: str, dtype: torch.dtype, grad: bool = False):
    return run(name, "exact", side, torch.float64, grad), run(name, "eager", side, dtype, grad)


def compare(what: str, actual, exact, rival, factor: float = oracle.FORWARD, terms=None) -> None:
    """The rule on a whole tensor: after some layers every error depends on every other. terms: a tensor as large as what
    the result sums up, where that cancels."""
    actual, exact, rival = (x.reshape(1, -1) for x in (actual, exact, rival))
    largest = exact.abs().amax() if terms is None else torch.maximum(exact.abs().amax(), terms.abs().amax())
    oracle.compare(what, actual, exact, rival, factor, largest.expand_as(exact))


def compare_gradients(grads: dict, exact: dict, rival: dict) -> None:
    assert list(grads) == list(exact) and len(grads) > 10
    for name, g in grads.items():
        # The gradient of a key projection's bias is 0: it sums terms, as the weight's does, that cancel.
        terms = exact.get(name.removesuffix("bias") + "weight")
        compare(name, g, exact[name], rival[name], oracle.GRADIENT, terms)


PADDED = {"vit": ["none"], "whisper": ["none", "right"]}  # Whisper pads its decoder on the right
SIDES = [(name, side) for name in CLASSES for side in PADDED.get(name, ["none", "left", "right"])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name, side", SIDES)
def test_outputs(name, side, dtype):
    exact, rival = truth(name, side, dtype)
    compare("out", run(name, "mha_ext", side, dtype), exact, rival)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_gradients(name, dtype):
    side = PADDED.get(name, ["left"])[-1]
    (exact, exact_grads), (rival, rival_grads) = truth(name, side, dtype, True)
    out, grads = run(name, "mha_ext", side, dtype, True)
    compare("out", out, exact, rival)
    compare_gradients(grads, exact_grads, rival_grads)


@pytest.mark.parametrize(
    "name, side", [ns for ns in SIDES if ns[1] == "right"] + [("bert", "hole"), ("gemma2", "hole")]
)
def test_padding_becomes_intervals(name, side):
    """No mask of size S x S goes through the layers, unless the padding has holes."""
    forms = set()

    def attention_forward(module, query, key, value, attention_mask, **kwargs):
        forms.add(None if attention_mask is None else str(attention_mask.dtype).removeprefix("torch."))
        return integration.attention_forward(module, query, key, value, attention_mask, **kwargs)

    transformers.AttentionInterface.register("watched", attention_forward)
    transformers.AttentionMaskInterface.register("watched", integration.attention_mask)
    compare("out", run(name, "watched", side, torch.float32), *truth(name, side, torch.float32))
    assert forms - {None} == {"bool" if side == "hole" else "int64"}
    assert (None in forms) == (name in ("t5", "whisper"))  # T5's decoder, Whisper's encoder: nothing is padded


def generate(name: str, implementation: str, **options) -> list:
    model = model_of(name, torch.float32)
    model.set_attn_implementation(implementation)
    inputs = inputs_of(name, "left", torch.float32)
    if name == "t5":
        del inputs["decoder_input_ids"]
    if name == "whisper":
        inputs = {"input_features": inputs["input_features"]}
    return model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0, **options).tolist()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "t5", "whisper"])
def test_generate(name, cache):
    """Longer than the window of 4, from prompts padded on the left."""
    tokens = generate(name, "mha_ext", cache_implementation=cache)
    assert tokens == generate(name, "eager", cache_implementation=cache)
    assert len(set(tokens[0])) > 2  # not one token over and over


def test_generate_with_beams():
    assert generate("llama", "mha_ext", num_beams=3) == generate("llama", "eager", num_beams=3)


def test_generate_compiled(fresh_compiler):
    """One graph for all steps with a static cache."""
    compile_config = transformers.CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager", mode=None)
    compile_config._compile_all_devices = True
    torch._dynamo.utils.counters.clear()
    tokens = generate("llama", "mha_ext", cache_implementation="static", compile_config=compile_config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert tokens == generate("llama", "eager", cache_implementation="static")


@pytest.mark.parametrize("name, side", [("llama", "none"), ("bert", "left"), ("gemma2", "left"), ("gemma2", "hole")])
def test_compiled(name, side, fresh_compiler):
    """Masks are made in the graph, without a look at values."""
    wrap = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    (exact, exact_grads), (rival, rival_grads) = truth(name, side, torch.float32, True)
    out, grads = run(name, "mha_ext", side, torch.float32, True, wrap)
    compare("out", out, exact, rival)
    compare_gradients(grads, exact_grads, rival_grads)


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "whisper", "gpt_oss"])
def test_compiled_outputs(name, fresh_compiler):
    """Of the other models; gpt-oss breaks the graph itself, at the loop over its experts."""
    side = PADDED.get(name, ["right"])[-1]
    wrap = functools.partial(torch.compile, backend="aot_eager", fullgraph=name != "gpt_oss")
    compare("out", run(name, "mha_ext", side, torch.float32, wrap=wrap), *truth(name, side, torch.float32))


@pytest.mark.parametrize("side", ["none", "left", "hole"])
def test_inductor(side, fresh_compiler):
    """A layer with its mask, window and all, becomes machine code."""
    layer = torch.nn.Module()
    q, k, v = (torch.randn(B, h, S, 8) for h in (4, 2, 2))
    given = None if side == "none" else padding(side).bool()

    def attend(mask_function, attention_function):
        mask = mask_function(
            batch_size=B, q_length=S, kv_length=S, attention_mask=given,
            mask_function=masking_utils.sliding_window_causal_mask_function(4),
        )  # fmt: skip
        return attention_function(layer, q, k, v, mask, is_causal=True)[0]

    out = torch.compile(attend, fullgraph=True)(integration.attention_mask, integration.attention_forward)
    exact = attend(exact_mask, exact_attention)
    there = slice(None) if given is None else given
    compare("out", out[there], exact[there], attend(integration.attention_mask, integration.attention_forward)[there])


def test_packed_sequences():
    """Sequences one after the other, told apart by position_ids only, give what each gives alone."""
    model = model_of("gemma2", torch.float32)
    model.set_attn_implementation("mha_ext")
    gen = torch.Generator().manual_seed(3)
    parts = [torch.randint(2, VOCAB, (1, n), generator=gen) for n in (7, 3, 9)]
    positions = torch.cat([torch.arange(p.shape[1]) for p in parts])[None]
    with torch.no_grad():
        together = model(torch.cat(parts, 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(p).logits for p in parts], 1)
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize(
    "name, side", [ns for ns in SIDES if (ns[1] != "none" or ns[0] == "vit") and ns[0] not in ("gemma2", "gpt_oss")]
)
def test_sdpa_agrees(name, side):
    """transformers' own fast path is held to the same truth. It has no soft-capped scores and no sinks."""
    exact, rival = truth(name, side, torch.float32)
    compare("out", run(name, "sdpa", side, torch.float32), exact, rival)


def test_weights():
    model = model_of("llama", torch.float32)
    inputs = inputs_of("llama", "left", torch.float32)
    found = []
    for implementation in ("eager", "mha_ext"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(model(**inputs, output_attentions=True).attentions)
    assert len(found[1]) == 2
    there = inputs["attention_mask"].bool()[:, None, :, None]
    for a, b in zip(*found):
        torch.testing.assert_close(b * there, a * there)


def test_dropout_in_training():
    config = config_of("gpt2")
    config.attn_pdrop = 0.5
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="mha_ext").train()
    inputs = inputs_of("gpt2", "left", torch.float32)
    for module in model.modules():  # only that of attention is left
        if isinstance(module, torch.nn.Dropout) and module.p != 0.5:
            module.p = 0.0
    a, b = model(**inputs).logits, model(**inputs).logits
    assert not torch.equal(a, b)
    torch.testing.assert_close(model.eval()(**inputs).logits, model(**inputs).logits, rtol=0, atol=0)


def test_gradient_checkpointing():
    """Masks go through the recomputation as they are."""
    _, grads = run("gemma2", "mha_ext", "left", torch.float32, True)
    model = model_of("gemma2", torch.float32)
    model.activation_checkpointing_enable({"use_reentrant": False})
    try:
        _, again = run("gemma2", "mha_ext", "left", torch.float32, True, lambda model: model.train())
    finally:
        model.activation_checkpointing_disable()
        model.eval()
    for name, g in grads.items():
        assert torch.equal(again[name], g), name
