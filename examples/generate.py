"""Text from the GPT of train_gpt.py, decoded with key/value caches.

    python examples/train_gpt.py --attention mha_ext --save gpt.pt
    python examples/generate.py gpt.pt --prompt "The if statement" --tokens 200

Each step feeds the model one character per sequence instead of the whole text; --uncached feeds it the whole text, for
comparison: the characters are the same.
"""

import argparse
import time
from pathlib import Path

import torch
from real_text import Characters
from train_gpt import GPT


def load(path: Path) -> tuple[GPT, Characters]:
    saved = torch.load(path)
    config = dict(saved["config"])
    characters = Characters(config.pop("characters"))
    model = GPT("mha_ext", **config)
    model.load_state_dict(saved["model"])
    return model.eval(), characters


def choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """[B,vocabulary] -> [B,1]: the likeliest tokens, or with a temperature drawn ones."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


@torch.inference_mode()
def generate(model: GPT, ids: torch.Tensor, tokens: int, *, temperature=0.0, seed=0, cached=True, **cache_options):
    """ids [B,S] -> [B,S+tokens]. cache_options: of nn.SelfAttention.make_cache."""
    generator = torch.Generator().manual_seed(seed)
    caches = model.make_caches(ids.shape[0], ids.shape[1] + tokens, **cache_options) if cached else None
    new = ids
    for _ in range(tokens):
        logits = model(new, caches) if cached else model(ids)
        new = choose(logits[:, -1], temperature, generator)
        ids = torch.cat([ids, new], 1)
    return ids


def main(argv: list[str] | None = None) -> list[str]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("checkpoint", type=Path)
    options.add_argument("--prompt", default="The ")
    options.add_argument("--tokens", type=int, default=200)
    options.add_argument("--samples", type=int, default=1)
    options.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest character")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--uncached", action="store_true", help="feed the whole text at every step")
    args = options.parse_args(argv)
    model, characters = load(args.checkpoint)
    ids = torch.tensor([characters.encode(args.prompt)] * args.samples)
    start = time.perf_counter()
    more = {"temperature": args.temperature, "seed": args.seed, "cached": not args.uncached}
    texts = [characters.decode(row.tolist()) for row in generate(model, ids, args.tokens, **more)]
    seconds = time.perf_counter() - start
    print("\n---\n".join(texts))
    print(f"\n{args.samples * args.tokens / seconds:.0f} characters per second")
    return texts


if __name__ == "__main__":
    main()
