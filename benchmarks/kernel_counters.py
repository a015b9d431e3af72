"""Counts what the CUDA kernels execute, in simulation: no GPU is needed.

    make -C tests/ptxsim
    PTXSIM_DEVICE=sm_80 tests/ptxsim/run python benchmarks/kernel_counters.py     less than a minute; sm_90 likewise

The package must be built with CUDA and hold PTX (MHA_EXT_CUDA=1, as by default). Prints two Markdown tables: attention per
score, beside the same counts of flash-attention 2's kernels (sm_90: flash-attention 3's), and the kernels bound by memory
per element. The last columns are estimates from published peaks, not measurements: simulation knows no time.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

import mha_ext

# Flash-attention 2's kernels, compiled unchanged and counted in the same simulator (S=1024, B1 H2, bf16; of backward its
# main kernel): instructions and mma FLOP and exp per score, shared wavefronts per 1024 scores, loads and stores.
FLASH_ATTENTION_2 = {
    "forward D64 full": ("10.1", "256", "1.04", "91", "17", "1.03"),
    "forward D64 causal": ("12.5", "288", "1.17", "105", "10", "1.03"),
    "forward D128 full": ("15.5", "512", "1.07", "198", "17", "1.02"),
    "forward D128 causal": ("18.4", "575", "1.20", "228", "10", "1.02"),
    "backward D64 full": ("20.9", "640", "1.00", "342", "22", "2 + atomics"),
    "backward D64 causal": ("25.4", "719", "1.12", "390", "13", "2 + atomics"),
    "backward D128 full": ("33.6", "1280", "1.00", "652", "22", "2 + atomics"),
}

# Likewise flash-attention 3's, of which fewer counts are known.
FLASH_ATTENTION_3 = {
    "forward D64 full": ("12.8",),
    "forward D64 causal": ("17.6",),
    "forward D128 full": ("11.1", "-", "1.06", "-", "9"),
    "forward D128 causal": ("14.4",),
    "backward D128 full": ("20.9",),
    "backward D128 causal": ("28.0",),
}

# An H200 (SXM), per SM and clock. Published: 989.4 dense bf16 TFLOP/s and 4.8 TB/s for 132 SMs at 1.83 GHz, four
# instructions of 32 threads, 16 exp, 128 bytes of shared memory (one wavefront). mma.sync was seen by published
# microbenchmarks at about 63 % of what wgmma reaches.
SMS, CLOCK = 132, 1.83e9
PER_CLOCK = {
    "mma.sync": 0.63 * 989.4e12 / SMS / CLOCK,
    "wgmma": 989.4e12 / SMS / CLOCK,
    "exp": 16.0,
    "issue": 128.0,
    "shared": 1.0,
    "bandwidth": 4.8e12 / SMS / CLOCK,
}


@dataclass
class Counters:
    """Sums over the kernels that one call launched."""

    kernels: list[dict] = field(default_factory=list)

    def total(self, key: str) -> int:
        return sum(kernel[key] for kernel in self.kernels)

    def main(self) -> "Counters":
        """The kernels that use tensor cores."""
        return Counters([kernel for kernel in self.kernels if kernel["mma_flops"]])

    def shared_bytes(self) -> int:
        """What wgmma reads of its operands, and what bulk copies write and read."""
        return sum(self.total(key) for key in ("wgmma_shared_bytes", "bulk_to_shared_bytes", "bulk_from_shared_bytes"))

    def shared_clocks(self) -> float:
        """128 bytes each: accesses by threads, and those others."""
        return self.total("shared_wavefronts") + self.shared_bytes() / 128

    def sector_efficiency(self) -> str:
        """Bytes asked of global memory per byte of the 32-byte sectors touched: above 1 where lanes share bytes."""
        asked, sectors = (
            sum(self.total(f"global_{access}_{what}") for access in ("load", "store")) for what in ("bytes", "sectors")
        )
        return f"{asked / (32 * sectors):.2f}"


def count(call: Callable[[], object]) -> Counters:
    """Runs a call; the simulator appends a line of JSON to a file for each kernel that it launches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "launches.json"
        os.environ["PTXSIM_STATS"] = str(path)
        try:
            call()
            torch.cuda.synchronize()
        finally:
            del os.environ["PTXSIM_STATS"]
        kernels = [json.loads(line) for line in path.read_text().splitlines()]
    for kernel in kernels:
        if "error" in kernel or kernel["races"]:
            raise RuntimeError(f"{kernel['kernel']}: {kernel.get('error') or str(kernel['races']) + ' races'}")
    return Counters([kernel for kernel in kernels if "mha::" in kernel["kernel"]])


def on_device(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16().cuda()  # the simulated device has none of torch's own kernels


@dataclass
class Attention:
    """One row of the table of attention."""

    direction: str  # forward, backward, backward (repeatable)
    head_dim: int
    causal: bool
    length: int
    value_dim: int = 0  # 0: head_dim

    def __post_init__(self) -> None:
        self.value_dim = self.value_dim or self.head_dim

    @property
    def name(self) -> str:
        sizes = f"{self.head_dim}" if self.value_dim == self.head_dim else f"{self.head_dim}/{self.value_dim}"
        return f"{self.direction} D{sizes} {'causal' if self.causal else 'full'}"

    @property
    def heads(self) -> int:
        """Forward splits the keys when its blocks fill half of the GPU or less, so it gets enough heads to fill more."""
        return SMS // 2 // -(-self.length // 128) + 1 if self.direction == "forward" else 2

    @property
    def scores(self) -> int:
        return self.heads * (self.length * (self.length + 1) // 2 if self.causal else self.length**2)

    @property
    def tensor_bytes(self) -> int:
        return self.heads * self.length * (self.head_dim + self.value_dim)

    def count(self) -> Counters:
        sizes = (self.head_dim, self.head_dim, self.value_dim, self.value_dim)
        q, k, v, dout = (on_device(1, self.heads, self.length, size) for size in sizes)
        mask = mha_ext.masks.Causal() if self.causal else None
        if self.direction == "forward":
            return count(lambda: mha_ext.attention(q, k, v, mask=mask))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = mha_ext.attention(*inputs, mask=mask, deterministic="repeatable" in self.direction)
        return count(lambda: torch.autograd.grad(out, inputs, dout))

    def clocks(self, counters: Counters) -> dict[str, float]:
        """Of one SM per score, for each limit; memory traffic is each tensor once."""
        tensors = 4 if self.direction == "forward" else 8
        spent = {
            "wgmma" if counters.total("wgmma_shared_bytes") else "mma.sync": counters.total("mma_flops"),
            "exp": 32 * counters.total("sfu_instructions"),
            "issue": 32 * counters.total("warp_instructions"),
            "shared": counters.shared_clocks(),
            "bandwidth": tensors * self.tensor_bytes,
        }
        return {limit: amount / PER_CLOCK[limit] / self.scores for limit, amount in spent.items()}

    def useful_flop(self) -> int:
        return (2 if self.direction == "forward" else 5) * (self.head_dim + self.value_dim)

    def cells(self, all_kernels: Counters) -> list[str]:
        counters = all_kernels.main()
        wavefronts, ideal = counters.total("shared_wavefronts"), counters.total("shared_wavefronts_ideal")
        stores = f"{counters.total('global_store_bytes') / self.tensor_bytes:.2f}"
        values = (
            f"{32 * counters.total('warp_instructions') / self.scores:.1f}",
            f"{counters.total('mma_flops') / self.scores:.0f}",
            f"{32 * counters.total('sfu_instructions') / self.scores:.2f}",
            f"{1024 * wavefronts / self.scores:.0f}",
            f"{counters.total('global_load_bytes') / self.tensor_bytes:.1f}",
            stores + (" + atomics" if counters.total("atomics") else ""),
        )
        wgmma = counters.total("wgmma_shared_bytes") > 0
        theirs = (FLASH_ATTENTION_3 if wgmma else FLASH_ATTENTION_2).get(self.name, ())
        theirs += ("-",) * (len(values) - len(theirs))
        both = [f"{ours} / {other}" for ours, other in zip(values, theirs, strict=True)]
        clocks = self.clocks(counters)
        limit = max(clocks, key=clocks.get)
        products = clocks["wgmma" if wgmma else "mma.sync"]
        close = [name for name in clocks if name != limit and clocks[name] > 0.8 * clocks[limit]]
        bound = limit + (f" ({', '.join(close)} close)" if close else "")
        flops = self.useful_flop() / clocks[limit] * SMS * CLOCK / 1e12
        return [
            self.name,
            *both,
            f"{counters.total('mma_instructions') / counters.total('warp_instructions'):.1%}",
            f"{wavefronts / ideal:.2f}",
            f"{counters.shared_bytes() / self.scores:.1f}",
            counters.sector_efficiency(),
            f"{32 * all_kernels.total('warp_instructions') / self.scores:.1f}",
            bound,
            f"{products / clocks[limit]:.0%}",
            f"{flops:.0f}",
        ]


def attention_rows(length: int) -> list[Attention]:
    sizes = ((64, 64), (128, 128), (192, 128), (256, 256))
    rows = [Attention("forward", head, causal, length, value) for head, value in sizes for causal in (False, True)]
    for direction in ("backward", "backward (repeatable)"):
        rows += [Attention(direction, head, causal, length) for head in (64, 128, 256) for causal in (False, True)]
    return rows


def memory_calls(length: int) -> dict[str, tuple[Callable[[], object], int, int]]:
    """Name -> (call, elements of one tensor, how many tensors it has to read or write)."""
    heads, head_dim, model = 2, 64, 768
    scores, dout, dense = (on_device(1, heads, length, length) for _ in range(3))
    scores.requires_grad_()
    weights = mha_ext.masked_softmax(scores)
    joined, split = on_device(1, length, model), on_device(1, model // head_dim, length, head_dim)
    mix, bias = on_device(model // head_dim, model // head_dim), on_device(model)
    query, cache = on_device(1, 32, 1, 128), on_device(2, 1, 8, length, 128)
    return {
        "softmax": (lambda: mha_ext.masked_softmax(dense), dense.numel(), 2),
        "softmax, causal": (lambda: mha_ext.masked_softmax(dense, mha_ext.masks.Causal()), dense.numel(), 2),
        "softmax backward": (lambda: torch.autograd.grad(weights, scores, dout), dense.numel(), 3),
        "split_heads": (lambda: mha_ext.split_heads(joined, model // head_dim), joined.numel(), 2),
        "split_heads with bias": (lambda: mha_ext.split_heads(joined, model // head_dim, bias), joined.numel(), 2),
        "merge_heads": (lambda: mha_ext.merge_heads(split), split.numel(), 2),
        "decoding, 32 heads on 8": (lambda: mha_ext.attention(query, *cache), cache.numel(), 1),
        "merge_heads with mix": (lambda: mha_ext.merge_heads(split, mix), split.numel(), 2),
    }


def memory_cells(name: str, elements: int, tensors: int, counters: Counters) -> list[str]:
    sectors = 32 * (counters.total("global_load_sectors") + counters.total("global_store_sectors"))
    spent = {
        "exp": 32 * counters.total("sfu_instructions"),
        "issue": 32 * counters.total("warp_instructions"),
        "shared": counters.total("shared_wavefronts"),
        "bandwidth": min(tensors * elements * 2, sectors),
    }
    clocks = {limit: amount / PER_CLOCK[limit] for limit, amount in spent.items()}
    limit = max(clocks, key=clocks.get)
    busiest = max(clocks[other] for other in clocks if other != "bandwidth") / clocks["bandwidth"]
    return [
        name,
        f"{spent['issue'] / elements:.2f}",
        f"{spent['exp'] / elements:.2f}",
        f"{counters.total('global_load_bytes') / (2 * elements):.2f}",
        f"{counters.total('global_store_bytes') / (2 * elements):.2f}",
        counters.sector_efficiency(),
        limit,
        f"{busiest:.0%}",
    ]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def problem() -> str | None:
    if "libptxsim" not in os.environ.get("LD_PRELOAD", ""):
        return "The counts come from the simulated device: run this as tests/ptxsim/run python benchmarks/kernel_counters.py."
    if mha_ext._ops.without_cuda:
        return f"mha_ext was built without CUDA ({mha_ext._ops.without_cuda}): rebuild it with MHA_EXT_CUDA=1."
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="queries and keys of a head (default 1024)")
    args = parser.parse_args(argv)
    if sentence := problem():
        print(sentence, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    rows = [row.cells(row.count()) for row in tqdm(attention_rows(args.length), unit="row", file=sys.stderr)]
    print(
        f"bf16, S={args.length}. Each cell: mha_ext / flash-attention (2, or 3 beside wgmma), per visible score; "
        "wavefronts per 1024 scores; loads and stores in units of one tensor; shares by kernels with tensor cores.\n"
    )
    head = ["kernel", "instr", "mma FLOP", "exp", "shared wavefronts", "loads", "stores", "mma share of instr"]
    head += ["wavefronts / ideal", "wgmma and TMA in shared memory, bytes", "bytes asked / sectors touched"]
    head += [
        "instr of all kernels",
        "bound by (estimate)",
        "tensor cores busy (estimate)",
        "at most TFLOP/s (estimate)",
    ]
    print(markdown(head, rows))
    print(f"\nbf16, S={args.length}, per element; loads and stores in units of one tensor.\n")
    head = ["kernel", "instr", "exp", "loads", "stores", "bytes asked / sectors touched", "bound by (estimate)"]
    head.append("busiest other limit / memory (estimate)")
    calls = memory_calls(args.length)
    print(markdown(head, [memory_cells(name, *sizes, count(call)) for name, (call, *sizes) in calls.items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
