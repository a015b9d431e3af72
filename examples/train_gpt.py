"""A small GPT on real text (Python's language reference), on torch's attention and on mha_ext's.

    python examples/train_gpt.py                                   both, in turn, with the same weights and batches
    python examples/train_gpt.py --attention mha_ext --save gpt.pt

Rotary positions, grouped key/value heads, causal. The loss curves must match, and the time of a step is shown for both.
"""

import torch
import torch.nn.functional as F
from attention import SELF
from real_text import Characters, language_reference
from torch import nn
from training import Run, make_runs, parser, report, save, train


class Block(nn.Module):
    def __init__(self, backend: str, d_model: int, num_heads: int, num_kv_heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = SELF[backend](d_model, num_heads, num_kv_heads=num_kv_heads, rope=True, causal=True)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x, cache=None):
        x = x + (self.attention(self.norm1(x)) if cache is None else self.attention(self.norm1(x), cache=cache))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, backend: str, vocabulary: int, d_model: int, layers: int, num_heads: int, num_kv_heads: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)  # it is the output layer too
        self.blocks = nn.Sequential(*(Block(backend, d_model, num_heads, num_kv_heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, ids, caches=None):
        """Logits; with caches, one for each block, ids are what comes after the positions in them."""
        x = self.embedding(ids)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache)
        return F.linear(self.norm(x), self.embedding.weight)

    def make_caches(self, batch: int, capacity: int, **options) -> list:
        return [block.attention.make_cache(batch, capacity, **options) for block in self.blocks]


def batches(ids: torch.Tensor, batch: int, length: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(ids) - length, (batch,), generator=generator)
        rows = torch.stack([ids[s : s + length + 1] for s in starts])
        yield rows[:, :-1], rows[:, 1:]


def loss(model, batch):
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def main(argv: list[str] | None = None) -> dict[str, Run]:
    options = parser(__doc__, steps=150)
    options.add_argument("--length", type=int, default=256)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--d-model", type=int, default=128)
    args = options.parse_args(argv)
    text = language_reference()
    characters = Characters("".join(sorted(set(text))))
    config = {
        "vocabulary": len(characters),
        "d_model": args.d_model,
        "layers": args.layers,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    runs = make_runs(lambda backend: GPT(backend, **config), args)
    ids = torch.tensor(characters.encode(text))
    train(runs, batches(ids, args.batch, args.length, args.seed), loss, args.steps, lr=3e-3)
    report(runs, args)
    if args.save:
        save(runs, args.save, config | {"characters": characters.characters})
    return runs


if __name__ == "__main__":
    main()
