"""What attention gets right and wrong, in five short experiments; docs/tutorial.md tells them.

python examples/tutorial.py [--out FOLDER]     seconds on a CPU; writes pictures with --out
"""

import argparse
import math
from pathlib import Path

import torch

import mha_ext
from mha_ext import masks


def three_masks() -> dict[str, torch.Tensor]:
    """Weights [Sq,Sk] of one head of an encoder (padding), a decoder (causal and padding) and between the two (padding)."""
    torch.manual_seed(0)
    source, target = torch.tensor([12, 8]), torch.tensor([10, 6])  # lengths in a batch of two
    x, y = torch.randn(2, 1, 12, 16), torch.randn(2, 1, 10, 16)
    calls = {
        "encoder: Padding": (x, x, masks.Padding(source)),
        "decoder: Causal & Padding": (y, y, masks.Causal() & masks.Padding(target)),
        "decoder on encoder: Padding": (y, x, masks.Padding(source)),
    }
    weights = {}
    for name, (q, kv, mask) in calls.items():
        weights[name] = mha_ext.attention(q, kv, kv, mask=mask, return_weights=True)[1][1, 0]  # the shorter sequence
    return weights


def why_one_over_sqrt_d(sizes: tuple[int, ...] = (4, 16, 64, 256, 1024)) -> list[dict[str, float]]:
    """The spread of q.k, the largest weight, and the gradient that reaches a query's scores, without the factor and with it."""
    torch.manual_seed(0)
    found = []
    for d in sizes:
        q, k = torch.randn(2, 1, 1, 256, d).unbind()
        products, dweights = q @ k.transpose(-2, -1), torch.randn(1, 1, 256, 256)
        row: dict[str, float] = {"d": d, "spread of q.k": products.std().item()}
        for name, scale in (("1", 1.0), ("1/sqrt(d)", d**-0.5)):
            scores = (products * scale).requires_grad_()
            weights = mha_ext.masked_softmax(scores)
            weights.backward(dweights)
            row[f"largest weight, scale {name}"] = weights.amax(-1).mean().item()
            row[f"gradient, scale {name}"] = scores.grad.norm(dim=-1).median().item()
        found.append(row)
    return found


def infinity_against_a_big_number() -> dict[str, torch.Tensor]:
    """Four ways to hide keys, in half precision; the second query may see nothing."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 2, 8, dtype=torch.float16) for _ in range(3))
    visible = torch.tensor([[True, False], [False, False]])
    scores = q @ k.transpose(-2, -1) * 8**-0.5
    return {
        "value of the first key": v[0, 0, 0],
        "mean of the values": v[0, 0].mean(0),
        "-inf": (scores.masked_fill(~visible, -math.inf).softmax(-1) @ v)[0, 0],
        "-1e4": (scores.masked_fill(~visible, -1e4).softmax(-1) @ v)[0, 0],
        "-1e9 as float16": torch.tensor(-1e9).half(),
        "mask=": mha_ext.attention(q, k, v, mask=visible)[0, 0],
    }


def contiguity() -> dict[str, list[str]]:
    """What has to be copied for four layouts of the same numbers."""
    B, S, H, D = 2, 128, 4, 32
    x = torch.randn(B, S, H * D)
    packed = torch.randn(B, S, 3, H, D)
    layouts = {
        "[B,H,S,D], contiguous": torch.randn(B, H, S, D),
        "[B,S,H*D], split into heads by view and transpose": x.view(B, S, H, D).transpose(1, 2),
        "a third of a packed [B,S,3,H,D]": packed[:, :, 0].transpose(1, 2),
        "[B,H,D,S], transposed": torch.randn(B, H, D, S).transpose(2, 3),
    }
    return {name: mha_ext.explain(q, q, q).copies for name, q in layouts.items()}


def blocked_softmax(scores: torch.Tensor, values: torch.Tensor, block: int) -> torch.Tensor:
    """softmax(scores) @ values, a block of keys at a time: nothing of the size of a row is kept."""
    m = torch.full(scores.shape[:-1], -math.inf)  # the largest score so far
    total = torch.zeros(scores.shape[:-1])  # the sum of exp(score - m)
    out = torch.zeros(*scores.shape[:-1], values.shape[-1])  # the sum of exp(score - m) * value
    for s, v in zip(scores.split(block, -1), values.split(block, -2)):
        m_new = torch.maximum(m, s.amax(-1))
        correction, weights = torch.exp(m - m_new), torch.exp(s - m_new[..., None])
        total = total * correction + weights.sum(-1)
        out = out * correction[..., None] + weights @ v
        m = m_new
    return out / total[..., None]


def memory_growth(lengths: tuple[int, ...] = (256, 512, 1024, 2048)) -> list[dict[str, float]]:
    """MiB that a call allocates: the textbook's scores and weights, and what mha_ext takes."""
    found = []
    for S in lengths:
        q = torch.randn(1, 8, S, 64)
        plan = mha_ext.explain(q, q, q)
        found.append({"S": S, "textbook": 2 * plan.memory_unfused / 2**20, "mha_ext": plan.memory / 2**20})
    return found


def draw(out: Path, weights: dict, scaling: list[dict], memory: list[dict]) -> list[Path]:
    from matplotlib.figure import Figure

    out.mkdir(parents=True, exist_ok=True)
    figures = {}

    figure = figures["weights"] = Figure(figsize=(9, 3))
    for axes, (name, w) in zip(figure.subplots(1, 3), weights.items()):
        axes.imshow(w.numpy(), cmap="Greens", vmin=0, vmax=1)
        axes.set_title(name, size=9)
        axes.set_xlabel("key")
        axes.set_ylabel("query")

    figure = figures["scale"] = Figure(figsize=(9, 3))
    for axes, what in zip(figure.subplots(1, 2), ("largest weight", "gradient")):
        for scale in ("1", "1/sqrt(d)"):
            axes.plot(
                [r["d"] for r in scaling], [r[f"{what}, scale {scale}"] for r in scaling], "o-", label=f"scale {scale}"
            )
        axes.set_xscale("log", base=2)
        axes.set_xlabel("d")
        axes.set_yscale("log" if what == "gradient" else "linear")
        axes.set_title(
            {
                "gradient": "gradient of the median query's scores",
                "largest weight": "largest weight, mean over queries",
            }[what],
            size=9,
        )
        axes.legend(fontsize=8)

    figure = figures["memory"] = Figure(figsize=(6, 3))
    axes = figure.subplots()
    for who in ("textbook", "mha_ext"):
        axes.plot([r["S"] for r in memory], [r[who] for r in memory], "o-", label=who)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("sequence length (8 heads of 64, float32)")
    axes.set_ylabel("MiB")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)

    paths = []
    for name, figure in figures.items():
        figure.tight_layout()
        paths.append(out / f"{name}.png")
        figure.savefig(paths[-1], dpi=100)
    return paths


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the pictures")
    args = parser.parse_args(argv)

    weights = three_masks()
    for name, w in weights.items():
        print(f"{name}: every query shares 1 among {(w > 0).sum(-1).tolist()} keys")
    scaling = why_one_over_sqrt_d()
    for row in scaling:
        print(", ".join(f"{name} {value:.3g}" for name, value in row.items()))
    for name, value in infinity_against_a_big_number().items():
        print(f"{name}: {[round(x, 2) for x in value.flatten().tolist()]}")
    for name, copies in contiguity().items():
        print(f"{name}: {'; '.join(copies) or 'read in place'}")
    scores, values = torch.randn(3, 100), torch.randn(100, 8)
    difference = (blocked_softmax(scores, values, 16) - scores.softmax(-1) @ values).abs().max()
    print(f"blocked softmax differs from softmax by {difference:.1e}")
    memory = memory_growth()
    for row in memory:
        print(f"S {row['S']}: textbook {row['textbook']:.0f} MiB, mha_ext {row['mha_ext']:.1f} MiB")
    if args.out:
        for path in draw(args.out, weights, scaling, memory):
            print(f"written: {path}")


if __name__ == "__main__":
    main()
