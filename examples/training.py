"""Trains the same model on several attention backends, step by step in turn, and compares losses and times."""

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

BACKENDS = {"mha_ext": ("mha_ext",), "torch": ("torch",), "both": ("torch", "mha_ext")}


def parser(description: str, steps: int) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--attention", choices=BACKENDS, default="both", help="which attention the model uses")
    options.add_argument("--steps", type=int, default=steps)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--noise", action="store_true", help="once more on torch, weights changed by a rounding")
    options.add_argument("--save", type=Path, help="write the trained model (mha_ext's if there is one) here")
    options.add_argument("--plot", type=Path, help="write the loss curves to this PNG file")
    return options


@dataclass
class Run:
    name: str
    model: nn.Module
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds)

    def loss_at_end(self) -> float:
        return statistics.mean(self.losses[-max(1, len(self.losses) // 10) :])


def make_runs(make_model: Callable[[str], nn.Module], args: argparse.Namespace) -> dict[str, Run]:
    """A model for each backend, all with the same weights."""
    runs = {}
    for name in BACKENDS[args.attention]:
        torch.manual_seed(args.seed)
        runs[name] = Run(name, make_model(name))
        runs[name].model.load_state_dict(next(iter(runs.values())).model.state_dict())
    if args.noise:
        runs["noise"] = Run("noise", copy.deepcopy(runs["torch"].model))
    return runs


@torch.no_grad()
def change_by_a_rounding(model: nn.Module) -> None:
    """What another order of additions might do: every weight goes up or down by one part in 2**23 (in fp32)."""
    for p in model.parameters():
        p.mul_(1 + torch.finfo(p.dtype).eps * torch.randn_like(p).sign())


def warmup_cosine(step: int, steps: int) -> float:
    return min((step + 1) / (0.1 * steps + 1), 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(runs: dict[str, Run], batches: Iterator, loss: Callable, steps: int, lr: float) -> None:
    """Every step shows each model the same batch, so that whatever disturbs the machine disturbs all alike."""
    optimizers, schedules = {}, {}
    for name, run in runs.items():
        optimizers[name] = torch.optim.AdamW(run.model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
        schedules[name] = torch.optim.lr_scheduler.LambdaLR(optimizers[name], lambda step: warmup_cosine(step, steps))
    with tqdm(range(steps), unit="step", dynamic_ncols=True) as bar:
        for _ in bar:
            batch = next(batches)
            for name, run in runs.items():
                if name == "noise":
                    change_by_a_rounding(run.model)
                start = time.perf_counter()
                optimizers[name].zero_grad(set_to_none=True)
                value = loss(run.model, batch)
                value.backward()
                nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
                optimizers[name].step()
                schedules[name].step()
                run.seconds.append(time.perf_counter() - start)
                run.losses.append(value.item())
            bar.set_postfix({name: f"{run.losses[-1]:.3f}" for name, run in runs.items()})


def gap(run: Run, other: Run) -> float:
    """The mean distance of two loss curves."""
    return statistics.mean(abs(a - b) for a, b in zip(run.losses, other.losses, strict=True))


def report(runs: dict[str, Run], args: argparse.Namespace) -> None:
    for run in runs.values():
        print(
            f"{run.name:8} loss {run.losses[0]:.4f} -> {run.loss_at_end():.4f}   "
            f"{run.step_seconds * 1e3:.1f} ms per step (median of {len(run.seconds)})"
        )
    if {"torch", "mha_ext"} <= runs.keys():
        ours, theirs = runs["mha_ext"], runs["torch"]
        print(f"mean distance of the loss curves: {gap(ours, theirs):.1e}")
        if "noise" in runs:
            print(f"noise (torch, weights changed by a rounding at every step): {gap(runs['noise'], theirs):.1e}")
        print(f"mha_ext trains {theirs.step_seconds / ours.step_seconds:.2f}x as fast as torch's attention")
    if args.plot:
        plot(runs, args.plot)


def plot(runs: dict[str, Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for run, style in zip(runs.values(), ("-", "--", ":"), strict=False):
        axes.plot(run.losses, style, label=f"{run.name}, {run.step_seconds * 1e3:.1f} ms per step")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def save(runs: dict[str, Run], path: Path, config: dict) -> None:
    run = runs.get("mha_ext") or runs["torch"]
    torch.save({"config": config, "model": run.model.state_dict(), "losses": run.losses}, path)
    print(f"saved: {path}")
