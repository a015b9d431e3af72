"""What the benchmark found: records, tables, and the classical claims beside the numbers measured here."""

import math
import statistics
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from .measure import Case, Timing
from .rows import Row

LEGEND = (
    "time: median; spread: (slowest - fastest) / time; of matmul: the rate as a share of torch's matrix product in that type "
    "(GB/s: of its copy); speed: against the row's base; memory: growth of the resident set during the call, outputs "
    "included; error: relative to torch in fp32."
)
COLUMNS = ("contender", "time", "spread", "rate", "of matmul", "speed", "memory", "error", "")


def number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def row_record(row: Row, case: Case, timings: list[Timing], peaks: dict[str, Any], elapsed: float) -> dict[str, Any]:
    base = next((t.seconds for t in timings if t.contender == case.baseline), math.nan)
    contenders = []
    for t in timings:
        flops_rate, bytes_rate = case.flops / t.seconds, case.bytes / t.seconds
        share = bytes_rate / peaks["copy"] if case.bytes else flops_rate / peaks[case.peak]
        contenders.append(
            {
                "contender": t.contender,
                "seconds": number(t.seconds),
                "fastest": number(t.fastest),
                "slowest": number(t.slowest),
                "rounds": t.rounds,
                "flops_per_second": number(flops_rate) if case.flops else None,
                "bytes_per_second": number(bytes_rate) if case.bytes else None,
                "share_of_matmul": number(share) if case.flops or case.bytes else None,
                "speed": number(base / t.seconds),
                "peak_bytes": number(t.peak_bytes),
                "error": number(t.error),
                "note": t.note,
            }
        )
    return {
        "group": row.group,
        "name": row.name,
        "baseline": case.baseline,
        "elapsed": elapsed,
        "contenders": contenders,
    }


def show_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def show_memory(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f} MiB"


def contender_cells(c: dict[str, Any], baseline: str) -> list[str]:
    seconds = c["seconds"]
    if seconds is None:
        return [
            c["contender"],
            "-",
            "-",
            "-",
            "-",
            "-",
            "-",
            "-" if c["error"] is None else f"{c['error']:.0e}",
            c["note"],
        ]
    rate = c["bytes_per_second"] or c["flops_per_second"]
    unit = "GB/s" if c["bytes_per_second"] else "GFLOP/s"
    speed = "1 (base)" if c["contender"] == baseline else f"{c['speed']:.2f}x" if c["speed"] else "-"
    return [
        c["contender"],
        show_time(seconds),
        f"{(c['slowest'] - c['fastest']) / seconds:.0%}",
        f"{rate / 1e9:.1f} {unit}" if rate else "-",
        f"{c['share_of_matmul']:.0%}" if c["share_of_matmul"] else "-",
        speed,
        show_memory(c["peak_bytes"]),
        f"{c['error']:.0e}",
        c["note"],
    ]


def machine_line(machine: dict[str, Any], peaks: dict[str, Any]) -> str:
    rates = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in peaks.items() if name != "copy")
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} threads; torch {machine['torch']} "
        f"({machine['torch_cpu_isa']}), mha_ext {machine['mha_ext']} ({machine['mha_ext_cpu_isa']}), "
        f"Python {machine['python']}\ntorch's matrix product and copy reach: {rates}, "
        f"copy {peaks['copy'] / 1e9:.1f} GB/s"
    )


def find(rows: list[dict[str, Any]], name: str, contender: str) -> dict[str, Any]:
    for row in rows:
        if row["name"] == name:
            for c in row["contenders"]:
                if c["contender"] == contender and c["seconds"]:
                    return c
    return {}


def geometric_means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Speed of mha_ext over torch's SDPA on the main shapes, for each dtype and direction."""
    means = []
    for dtype in ("fp32", "bf16"):
        for way in ("fwd", "fwd+bwd"):
            chosen = [row for row in rows if row["group"] == "main" and row["name"].endswith(f" {dtype} {way}")]
            speeds = [
                c["speed"] for row in chosen for c in row["contenders"] if c["contender"] == "mha_ext" and c["speed"]
            ]
            if speeds:
                mean = statistics.geometric_mean(speeds)
                means.append({"dtype": dtype, "direction": way, "rows": len(speeds), "speed": mean})
    return means


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The textbook's claims about multi-head attention, and what this machine says of each."""
    found = []

    def add(claim: str, *parts: dict[str, Any], text: Callable[..., str]) -> None:
        if all(parts):
            found.append({"claim": claim, "here": text(*parts)})

    for way in ("fwd", "fwd+bwd"):
        name = f"B8 H12 S512 D64 fp32 {way}"
        add(
            f"all heads in parallel are 7.3x as fast as a loop over heads (V100, S=512), {way}",
            find(rows, name, "loop over heads"),
            find(rows, name, "eager"),
            find(rows, name, "mha_ext"),
            text=lambda a, b, c: (
                f"textbook in parallel {a['seconds'] / b['seconds']:.2f}x, mha_ext {a['seconds'] / c['seconds']:.2f}x"
            ),
        )
        name = f"layouts B1 H12 S1024 D64 fp32 {way}"
        for who in ("eager", "sdpa", "mha_ext"):
            add(
                f"contiguous inputs 23 ms, transposed 37 ms, so 1.6x (S=1024, d_model 768, 12 heads), {way}",
                find(rows, name, f"{who} contiguous"),
                find(rows, name, f"{who} transposed"),
                text=lambda a, b, who=who: (
                    f"{who}: {show_time(a['seconds'])}, {show_time(b['seconds'])}, {b['seconds'] / a['seconds']:.2f}x"
                ),
            )
    for size, mib in (("B4 H12 S1024 D64 causal", 4 * 4 * 12 * 1024**2 / 2**20), ("B8 H12 S512 D64", 96.0)):
        for way in ("fwd", "fwd+bwd"):
            name = f"{size} fp32 {way}"
            add(
                f"the unfused way takes 4*B*H*S^2 bytes = {mib:.0f} MiB per score matrix ({size}), {way}",
                find(rows, name, "eager"),
                find(rows, name, "mha_ext"),
                text=lambda a, b: f"textbook {show_memory(a['peak_bytes'])}, mha_ext {show_memory(b['peak_bytes'])}",
            )
    for row in rows:
        if row["name"].startswith("fp16 large logits"):
            results = (
                f"{c['contender']}: {c['note'] or 'finite and right, error ' + format(c['error'], '.0e')}"
                for c in row["contenders"]
            )
            found.append({"claim": "fp16 with logits beyond 65504", "here": "; ".join(results)})
    return found


def print_report(report: dict[str, Any], console: Console) -> None:
    console.print(machine_line(report["machine"], report["peaks"]), highlight=False, markup=False)
    for group in dict.fromkeys(row["group"] for row in report["rows"]):
        table = Table(*COLUMNS, title=group, title_justify="left", pad_edge=False)
        for column in table.columns[1:-1]:
            column.justify = "right"
        for row in report["rows"]:
            if row["group"] == group:
                table.add_row(f"[bold]{row['name'].replace('[', chr(92) + '[')}[/bold]")
                for c in row["contenders"]:
                    style = "green" if c["contender"].startswith("mha_ext") else None
                    table.add_row(*contender_cells(c, row["baseline"]), style=style)
                table.add_section()
        console.print(table)
    for mean in report["geometric_means"]:
        console.print(
            f"mha_ext over SDPA, {mean['dtype']} {mean['direction']}: {mean['speed']:.2f}x "
            f"(geometric mean of {mean['rows']} shapes)",
            highlight=False,
        )
    for claim in report["claims"]:
        console.print(f"claim: {claim['claim']}\n  here: {claim['here']}", highlight=False, markup=False)
    console.print(LEGEND, style="dim", highlight=False)
