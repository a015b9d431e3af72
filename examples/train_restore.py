"""An encoder-decoder Transformer on real text, on torch's attention and on mha_ext's.

    python examples/train_restore.py

It learns to restore sentences from Python's documentation whose spaces, capitals and punctuation were removed:
"shufflelistxinplaceandreturnnone" -> "Shuffle list x in place, and return None."
Batches are padded: the encoder and the cross-attention hide the padding, the decoder is causal. The loss curves must
match, and the time of a step is shown for both.
"""

import random
import re

import torch
import torch.nn.functional as F
from attention import CROSS, SELF, padding
from real_text import Characters, sentences
from torch import nn
from training import Run, make_runs, parser, report, save, train


def stripped(sentence: str) -> str:
    return re.sub("[^a-z0-9]", "", sentence.lower())


class EncoderBlock(nn.Module):
    def __init__(self, backend: str, d_model: int, num_heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = SELF[backend](d_model, num_heads)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class DecoderBlock(nn.Module):
    def __init__(self, backend: str, d_model: int, num_heads: int):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))
        self.attention = SELF[backend](d_model, num_heads, causal=True)
        self.cross = CROSS[backend](d_model, num_heads)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x, context, mask):
        x = x + self.attention(self.norm1(x))
        x = x + self.cross(self.norm2(x), context, mask)
        return x + self.mlp(self.norm3(x))


class Restorer(nn.Module):
    def __init__(self, backend: str, vocabulary: int, d_model: int, layers: int, num_heads: int, longest: int = 128):
        super().__init__()
        self.backend = backend
        self.embedding = nn.Embedding(vocabulary, d_model)
        self.source_position, self.target_position = nn.Embedding(longest, d_model), nn.Embedding(longest, d_model)
        for embedding in (self.embedding, self.source_position, self.target_position):
            nn.init.normal_(embedding.weight, std=0.02)
        self.encoder = nn.ModuleList(EncoderBlock(backend, d_model, num_heads) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderBlock(backend, d_model, num_heads) for _ in range(layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def encode(self, source, mask):
        x = self.embedding(source) + self.source_position.weight[: source.shape[1]]
        for block in self.encoder:
            x = block(x, mask)
        return self.encoder_norm(x)

    def decode(self, target, context, mask):
        x = self.embedding(target) + self.target_position.weight[: target.shape[1]]
        for block in self.decoder:
            x = block(x, context, mask)
        return F.linear(self.decoder_norm(x), self.embedding.weight)

    def forward(self, source, lengths, target):
        mask = padding(self.backend, lengths, source.shape[1])
        return self.decode(target, self.encode(source, mask), mask)

    @torch.no_grad()
    def restore(self, text: str, characters: Characters) -> str:
        """Greedy decoding."""
        source = torch.tensor([characters.encode(stripped(text))])
        context = self.encode(source, None)
        ids = [characters.start]
        while len(ids) < 2 * source.shape[1] and ids[-1] != characters.end:
            ids.append(int(self.decode(torch.tensor([ids]), context, None)[0, -1].argmax()))
        return characters.decode(ids)


def batches(pairs: list[tuple[list[int], list[int]]], batch: int, characters: Characters, seed: int):
    generator = random.Random(seed)
    while True:
        chosen = generator.sample(pairs, batch)
        source, lengths = characters.padded([s for s, _ in chosen])
        target, _ = characters.padded([[characters.start, *t, characters.end] for _, t in chosen])
        yield source, lengths, target


def loss(model, batch):
    source, lengths, target = batch
    logits = model(source, lengths, target[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=Characters.pad)


def main(argv: list[str] | None = None) -> dict[str, Run]:
    options = parser(__doc__, steps=600)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--d-model", type=int, default=128)
    args = options.parse_args(argv)
    texts = sentences(64)
    random.Random(0).shuffle(texts)
    characters = Characters("".join(sorted(set("".join(texts)) | set("abcdefghijklmnopqrstuvwxyz0123456789"))))
    pairs = [(characters.encode(stripped(t)), characters.encode(t)) for t in texts]
    held_out, unseen_pairs, pairs = texts[:100], pairs[:100], pairs[100:]
    config = {"vocabulary": len(characters), "d_model": args.d_model, "layers": args.layers, "num_heads": 4}
    runs = make_runs(lambda backend: Restorer(backend, **config), args)
    train(runs, batches(pairs, args.batch, characters, args.seed), loss, args.steps, lr=2e-3)
    report(runs, args)
    unseen = next(batches(unseen_pairs, len(held_out), characters, 0))
    for run in runs.values():
        with torch.no_grad():
            print(f"{run.name:8} loss on 100 sentences not trained on: {loss(run.model, unseen).item():.4f}")
    model = list(runs.values())[-1].model
    for text in held_out[:5]:
        print(f"{stripped(text)}\n    -> {model.restore(text, characters)}\n    is {text}")
    if args.save:
        save(runs, args.save, config | {"characters": characters.characters})
    return runs


if __name__ == "__main__":
    main()
