"""Tokens per second of generate() and generate_batch() in transformers: its caches on "sdpa", and ours on "mha_ext".

    python benchmarks/transformers_serving.py           # tables for docs/howto/serve.md
    python benchmarks/transformers_serving.py --tiny    # that everything runs

Ways are measured in turns, each by the median of its rounds, prompts included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    logging,
)

from mha_ext.integrations.transformers import register
from mha_ext.integrations.transformers_cache import DecodingCache


def llama(tiny: bool, dtype: torch.dtype) -> Any:
    hidden, layers, vocabulary = (64, 1, 50) if tiny else (512, 4, 4096)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa").to(dtype).eval()


def ways_of_generate(model: Any, prompt: int, tokens: int, **how: Any) -> dict[str, Callable[[], int]]:
    ids = torch.randint(1, model.config.vocab_size, (4, prompt), generator=torch.Generator().manual_seed(1))

    def call(implementation: str, cache: Callable[[], Any]) -> int:
        model.set_attn_implementation(implementation)
        found = model.generate(ids, cache=cache(), do_sample=False, max_new_tokens=tokens, **how)
        return found.shape[0] * tokens

    kinds: dict[str, dict[str, Any]] = {
        "contiguous": {}, "pages": {"page_size": 64}, "8 bits": {"dtype": torch.int8},
        "8 bits, pages": {"dtype": torch.int8, "page_size": 64},
    }  # fmt: skip
    ways = {"sdpa": lambda: call("sdpa", DynamicCache), "DynamicCache": lambda: call("mha_ext", DynamicCache)}
    for kind, options in kinds.items():
        ways[kind] = lambda options=options: call("mha_ext", lambda: DecodingCache(model.config, **options))
    return ways


def ways_of_batching(model: Any, prompt: int, tokens: int) -> dict[str, Callable[[], int]]:
    gen = torch.Generator().manual_seed(1)
    lengths = torch.linspace(prompt // 8, prompt, 12).long().tolist()
    prompts = [torch.randint(1, model.config.vocab_size, (n,), generator=gen).tolist() for n in lengths]
    how = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = 12 * (-(-(prompt + tokens) // 64) + 1)

    def call(implementation: str) -> int:
        model.set_attn_implementation(implementation)
        config = ContinuousBatchingConfig(
            page_size=64, num_blocks=blocks, max_batch_tokens=512, allow_block_sharing=False
        )
        found = model.generate_batch(
            prompts, generation_config=how, continuous_batching_config=config, progress_bar=False
        )
        return sum(len(request.generated_tokens) for request in found.values())

    return {"sdpa": lambda: call("sdpa"), "mha_ext": lambda: call("mha_ext")}


def compare(title: str, ways: dict[str, Callable[[], int]], rounds: int) -> None:
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):  # the first is not counted
        for name, way in ways.items():
            start = time.perf_counter()
            tokens = way()
            if i or rounds == 0:
                speeds[name].append(tokens / (time.perf_counter() - start))
    median = {name: statistics.median(found) for name, found in speeds.items()}
    cells = [f"{name} {speed:.0f} ({speed / median['sdpa']:.2f}x)" for name, speed in median.items()]
    print(f"| {title} | " + " | ".join(cells) + " |", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="*", default=("float32", "bfloat16"))
    parser.add_argument("--only", default="", help="tables whose names hold this")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    logging.set_verbosity_error()
    register()
    prompt, tokens, rounds = (16, 4, 0) if args.tiny else (512, 32, args.rounds)
    for dtype in args.dtype:
        model = llama(args.tiny, getattr(torch, dtype))
        tables = {
            "generate()": lambda model=model: ways_of_generate(model, prompt, tokens),
            "generate_batch()": lambda model=model: ways_of_batching(model, prompt, tokens),
            "beams of 4": lambda model=model: ways_of_generate(model, prompt // 4, tokens, num_beams=4),
        }
        for title, ways in tables.items():
            if args.only in title:
                compare(f"{title}, {dtype}", ways(), rounds)


if __name__ == "__main__":
    main()
