"""Tokens per second of a small decoder with the caches of mha_ext, and on torch's scaled_dot_product_attention with a cache
that is allocated before.

    python benchmarks/serving.py                    # both types; a table for docs/howto/serve.md
    python benchmarks/serving.py --tiny             # that everything runs and gives the same logits

Both have the same weights, projections and rotary embedding; they differ in the cache and in attention. Rows are measured in
turns, each by the median of its rounds; a round is STEPS steps from the same context on.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_ext

STEPS = 4


class Decoder(nn.Module):
    def __init__(self, layers: int, d_model: int, num_heads: int, num_kv_heads: int, vocabulary: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d_model)
        self.attentions = nn.ModuleList(
            mha_ext.nn.SelfAttention(d_model, num_heads, num_kv_heads=num_kv_heads, causal=True, rope=True, bias=False)
            for _ in range(layers)
        )
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(d_model) for _ in range(2 * layers))
        self.head = nn.Linear(d_model, vocabulary, bias=False)

    def forward(self, ids: Tensor, attend: Callable[[int, Tensor], Tensor]) -> Tensor:
        """ids [B,S] -> logits [B,S,vocabulary]; attend(i, x) is the attention of layer i."""
        x = self.embed(ids)
        for i, mlp in enumerate(self.mlps):
            x = x + attend(i, self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(x)


class Ours:
    def __init__(self, model: Decoder, lengths: Tensor, capacity: int, **options):
        self.model = model
        self.caches = [layer.make_cache(len(lengths), capacity, **options) for layer in model.attentions]

    def step(self, ids: Tensor, counts: Tensor | None = None) -> Tensor:
        return self.model(ids, lambda i, x: self.model.attentions[i](x, cache=self.caches[i], counts=counts))

    def append(self, i: int, k: Tensor, v: Tensor, counts: Tensor) -> None:
        self.caches[i].append(k, v, counts)

    def truncate(self, lengths: Tensor) -> None:
        for cache in self.caches:
            cache.truncate(lengths)

    def reorder(self, indices: Tensor) -> None:
        for cache in self.caches:
            cache.reorder(indices)


class Torchs:
    """The same with scaled_dot_product_attention: where sequences are equally long, on a slice of the cache without a mask,
    else on all of it with one."""

    def __init__(self, model: Decoder, lengths: Tensor, capacity: int):
        self.model, self.lengths = model, torch.zeros_like(lengths)
        first = model.attentions[0]
        shape = len(lengths), first.num_kv_heads, capacity, first.head_dim
        dtype = first.out_proj.weight.dtype
        self.stored = [[torch.zeros(shape, dtype=dtype) for _ in "kv"] for _ in model.attentions]

    def step(self, ids: Tensor, counts: Tensor | None = None) -> Tensor:
        S = ids.shape[1]
        equal = counts is None and bool((self.lengths == self.lengths[0]).all())
        start = int(self.lengths[0]) if equal else self.lengths
        positions = self.lengths[:, None] + torch.arange(S)
        mask = None
        if not equal:
            mask = (torch.arange(self.stored[0][0].shape[2]) <= positions[..., None])[:, None]
        elif S > 1:
            mask = torch.ones(S, start + S, dtype=torch.bool).tril(start)
        out = self.model(ids, lambda i, x: self.attend(i, x, start, positions, mask))
        self.lengths = self.lengths + (S if counts is None else counts)
        return out

    def attend(self, i: int, x: Tensor, start, positions: Tensor, mask: Tensor | None) -> Tensor:
        layer, (k, v) = self.model.attentions[i], self.stored[i]
        H, n = layer.num_heads, layer.num_kv_heads
        heads = layer.qkv_proj(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        q, new_k, new_v = heads.split((H, n, n), dim=1)
        q, new_k = layer.rope(q, start), layer.rope(new_k, start)
        if isinstance(start, int):
            end = start + x.shape[1]
            k[:, :, start:end], v[:, :, start:end] = new_k, new_v
            k, v = k[:, :, :end], v[:, :, :end]
        else:
            rows = torch.arange(len(x))[:, None]
            k.transpose(1, 2)[rows, positions] = new_k.transpose(1, 2)
            v.transpose(1, 2)[rows, positions] = new_v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return layer.out_proj(out.transpose(1, 2).flatten(2))

    def append(self, i: int, k: Tensor, v: Tensor, counts: Tensor) -> None:
        for stored, x in zip(self.stored[i], (k, v)):
            stored[:, :, : k.shape[2]] = x
        self.lengths = counts.clone()

    def truncate(self, lengths: Tensor) -> None:
        self.lengths = torch.minimum(self.lengths, lengths)

    def reorder(self, indices: Tensor) -> None:
        end = int(self.lengths.max())
        for pair in self.stored:
            for x in pair:
                x[:, :, :end] = x[:, :, :end].index_select(0, indices)
        self.lengths = self.lengths[indices]


def fill(decoder, lengths: Tensor) -> None:
    """A context of so many positions for each sequence: the same random keys and values for every contender."""
    gen = torch.Generator().manual_seed(1)
    for i, layer in enumerate(decoder.model.attentions):
        shape = len(lengths), layer.num_kv_heads, int(lengths.max()), layer.head_dim
        k, v = (torch.randn(shape, generator=gen).to(layer.out_proj.weight.dtype) for _ in "kv")
        decoder.append(i, k, v, lengths)


def rows_of(model: Decoder, batch: int, context: int, page_size: int) -> dict[str, dict[str, tuple]]:
    """{row: {contender: (decoder, lengths, new ids [batch,n], tokens that a step gives, reorder or None)}}"""
    vocabulary = model.head.out_features
    gen = torch.Generator().manual_seed(2)
    equal = torch.full((batch,), context)
    ragged = torch.linspace(context // 8, context, batch).long()
    one, five = (torch.randint(0, vocabulary, (batch, n), generator=gen) for n in (1, 5))
    order = torch.arange(batch) // 4 * 4 + torch.tensor([0, 0, 1, 2]).repeat(batch // 4)
    capacity = context + 32
    kinds = {
        "contiguous": {}, "pages": {"page_size": page_size}, "8 bits": {"dtype": torch.int8},
        "8 bits, pages": {"dtype": torch.int8, "page_size": page_size},
    }  # fmt: skip
    found: dict[str, dict[str, tuple]] = {}
    for row, lengths, ids, tokens, reorder in (
        ("a token each", equal, one, batch, None),
        ("the same, ragged", ragged, one, batch, None),
        ("beams of 4", equal, one, batch, order),
        ("5 guesses each", equal, five, 5 * batch, None),
    ):
        makers = {"SDPA": lambda lengths=lengths: Torchs(model, lengths, capacity)}
        for kind, options in kinds.items():
            makers[kind] = lambda lengths=lengths, options=options: Ours(model, lengths, capacity, **options)
        found[row] = {}
        for name, make in makers.items():
            decoder = make()
            fill(decoder, lengths)
            found[row][name] = decoder, lengths, ids, tokens, reorder
    return found


def one_round(decoder, lengths: Tensor, ids: Tensor, reorder: Tensor | None, steps: int) -> tuple[float, Tensor]:
    start = time.perf_counter()
    for _ in range(steps):
        if reorder is not None:
            decoder.reorder(reorder)
        out = decoder.step(ids)
    seconds = time.perf_counter() - start
    decoder.truncate(lengths)
    return seconds / steps, out


def compare(rows: dict, rounds: int, steps: int) -> None:
    for row, contenders in rows.items():
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        outs = {}
        for i in range(rounds + 1):  # the first is not counted
            for name, (decoder, lengths, ids, _, reorder) in contenders.items():
                # Beams of a random text grow alike: from the second round on all contenders hold copies of the first
                taken, outs[name] = one_round(decoder, lengths, ids, reorder, steps)
                if i:
                    seconds[name].append(taken)
        median = {name: statistics.median(times) for name, times in seconds.items()}
        tokens = next(iter(contenders.values()))[3]
        cells = [f"{tokens / median[name]:.0f} ({median['SDPA'] / median[name]:.2f}x)" for name in contenders]
        print(f"| {row} | " + " | ".join(cells) + " |", flush=True)
        exact = outs["SDPA"].float()
        for name, out in outs.items():
            error = ((out.float() - exact).abs().max() / exact.abs().max()).item()
            limit = 0.05 if "8 bits" in name or out.dtype == torch.bfloat16 else 1e-3
            if not error < limit:
                raise AssertionError(f"{row}, {name}: logits are off by {error:.1e} of their largest")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model of no size, one round")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="*", default=("float32", "bfloat16"))
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    sizes = (2, 32, 4, 2, 50) if args.tiny else (4, 512, 8, 2, 4096)
    batch, context, rounds, steps = (4, 24, 1, 2) if args.tiny else (8, args.context, args.rounds, STEPS)
    torch.manual_seed(0)
    model = Decoder(*sizes).eval()
    with torch.inference_mode():
        for dtype in args.dtype:
            print(
                f"{dtype}, batch {batch}, context {context}, {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters"
            )
            print("| | SDPA | contiguous | pages | 8 bits | 8 bits, pages |\n|---|---|---|---|---|---|")
            compare(rows_of(model.to(getattr(torch, dtype)), batch, context, 8 if args.tiny else 64), rounds, steps)


if __name__ == "__main__":
    main()
