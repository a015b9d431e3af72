"""FlexAttention's examples, compiled, beside the same attention of mha_ext: forward, in one process, in turns.

    python benchmarks/flex.py            # a table for docs/performance.md
    python benchmarks/flex.py --tiny     # that both give the same

Times are medians of the rounds. FlexAttention has no backward on CPUs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import mha_ext
from mha_ext import biases, masks


def examples(B: int, H: int, S: int) -> dict[str, tuple[Callable | None, Callable | None, dict[str, Any]]]:
    """{name: (mask_mod, score_mod, what mha_ext.attention is given)}"""
    gen = torch.Generator().manual_seed(0)
    prefix = torch.linspace(S // 8, S // 2, B).long()
    ids = torch.sort(torch.randint(0, 8, (B, S), generator=gen), dim=1).values
    slopes = biases.alibi_slopes(H)
    table = torch.randn(32, H, generator=gen)
    t5 = biases.T5Relative(table, bidirectional=False)
    by_distance = t5.to_dense(S, S)[:, -1].flip(-1).contiguous()  # [H,S] of i - j
    cap, window = 20.0, S // 8

    def causal(b, h, i, j):
        return i >= j

    causal_mask = masks.Causal("top_left")
    return {
        "causal": (causal, None, {"mask": causal_mask}),
        f"sliding window of {window}": (
            lambda b, h, i, j: (i >= j) & (i - j <= window), None, {"mask": masks.Window(window, 0)}
        ),
        "prefix": (lambda b, h, i, j: (j < prefix[b]) | (i >= j), None, {"mask": masks.Prefix(prefix)}),
        "8 documents, causal": (
            lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j), None, {"mask": masks.Documents(ids) & causal_mask}
        ),
        "ALiBi, causal": (
            causal, lambda score, b, h, i, j: score + slopes[h] * (j - i),
            {"mask": causal_mask, "bias": biases.ALiBi(slopes)},
        ),
        "soft cap, causal": (
            causal, lambda score, b, h, i, j: cap * torch.tanh(score / cap), {"mask": causal_mask, "softcap": cap}
        ),
        "T5, causal": (
            causal, lambda score, b, h, i, j: score + by_distance[h, (i - j).clamp(min=0)],
            {"mask": causal_mask, "bias": t5},
        ),
    }  # fmt: skip


def compare(
    name: str, mask_mod: Any, score_mod: Any, given: dict[str, Any], qkv: list[Tensor], rounds: int
) -> tuple[float, float]:
    """Seconds of FlexAttention and of ours, after a look at whether they agree."""
    B, H, S, _ = qkv[0].shape
    # A mask that does not depend on b and h is made once for all, as FlexAttention's guides say
    per_sample = name.startswith(("prefix", "8 documents"))
    block_mask = create_block_mask(mask_mod, B if per_sample else None, None, S, S, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    calls = {
        "flex": lambda: compiled(*qkv, score_mod=score_mod, block_mask=block_mask),
        "ours": lambda: mha_ext.attention(*qkv, **given),
    }
    outs = {who: call() for who, call in calls.items()}
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if qkv[0].dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(outs["ours"], outs["flex"], **tolerance)
    seconds: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(rounds + 1):
        for who, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[who].append(time.perf_counter() - start)
    flex, ours = (statistics.median(times[1:]) for times in seconds.values())
    return flex, ours


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="*", default=("float32", "bfloat16"))
    parser.add_argument("--only", default="", help="examples whose names hold this")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(argv)
    B, H, S, D = (1, 2, 256, 16) if args.tiny else (2, 8, 2048, 64)
    torch._dynamo.config.recompile_limit = 64
    print(
        f"B={B}, H={H}, S={S}, D={D}\n| example | type | compiled FlexAttention | mha_ext | ratio |\n|---|---|---|---|---|"
    )
    for name, example in examples(B, H, S).items():
        if args.only not in name:
            continue
        for dtype in args.dtype:
            gen = torch.Generator().manual_seed(1)
            qkv = [torch.randn(B, H, S, D, generator=gen).to(getattr(torch, dtype)) for _ in range(3)]
            with torch.no_grad():
                flex, ours = compare(name, *example, qkv, 1 if args.tiny else args.rounds)
            print(f"| {name} | {dtype} | {flex * 1e3:.1f} ms | {ours * 1e3:.1f} ms | {flex / ours:.1f}x |", flush=True)


if __name__ == "__main__":
    main()
