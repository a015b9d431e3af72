"""How busy many threads are predicted to be with the CPU kernels' tasks: a table on stdout and docs/pictures/threads.png.

    python benchmarks/threads.py

What is predicted, and how, says csrc/cpu/isa/attention_schedule.h. Nothing is measured. "Whole heads" are the tasks that backward
had before its tasks took turns: one for each key/value head of these shapes.
"""

from pathlib import Path

import matplotlib

from mha_ext import _ops

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

SHAPES = {  # B, H, Hk, S, D, causal
    "B8 H12 S512 D64": (8, 12, 12, 512, 64, False),
    "B4 H12 S1024 D64 causal": (4, 12, 12, 1024, 64, True),
    "B1 H32/8 S2048 D128 causal": (1, 32, 8, 2048, 128, True),
    "B1 H8 S8192 D64 causal": (1, 8, 8, 8192, 64, True),
    "B1 H8 S4096 D128 causal": (1, 8, 8, 4096, 128, True),
}
THREADS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)


def efficiency(shape: tuple[int, int, int, int, int, bool], threads: int) -> tuple[float, float, float]:
    """Forward, backward, and backward with whole heads as tasks."""
    B, H, Hk, S, D, causal = shape
    band = (None, 0 if causal else None)
    plan = _ops.attention_plan("float32", (B, H, Hk, S, S, D, D), False, False, threads, band)
    heads = B * Hk
    return plan["forward_efficiency"], plan["backward_efficiency"], heads / (threads * -(-heads // threads))


def main() -> None:
    """Writes both."""
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True)
    for panel, title in zip(panels, ("forward", "backward", "backward, whole heads")):
        panel.set(title=title, xlabel="threads", ylim=(0, 1.05), xscale="log", xticks=THREADS[::2])
        panel.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("work / (threads x time)")
    print("| shape | forward, 64 / 128 / 256 | backward | whole heads |\n|---|---|---|---|")
    for name, shape in SHAPES.items():
        for panel, line in zip(panels, zip(*(efficiency(shape, n) for n in THREADS))):
            panel.plot(THREADS, line, marker=".", label=name)
        columns = zip(*(efficiency(shape, n) for n in (64, 128, 256)))
        print(f"| {name} |", " | ".join(" / ".join(f"{x:.2f}" for x in column) for column in columns), "|")
    panels[0].legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(Path(__file__).parents[1] / "docs" / "pictures" / "threads.png", dpi=90)


if __name__ == "__main__":
    main()
