"""Compares mha_ext with the other ways to compute attention in torch, on this machine's CPU.

    python -m mha_ext bench                  under 3 minutes on 2 cores
    python -m mha_ext bench --only "decode"  rows whose name matches a regular expression
    python -m mha_ext bench --full           every contender on every shape, both dtypes, full rounds

Prints tables and writes compare.json, compare.html (one file with tables and plots) and compare.png into --out.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm

from .measure import machine_facts, machine_peaks, measure
from .page import page, speed_figure
from .parts import feature_rows, part_rows
from .report import claims, geometric_means, print_report, row_record
from .rows import Row, decode_rows, flushed_rows, layout_rows, main_rows, small_rows


def arguments(argv: list[str] | None, out: Path) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m mha_ext bench", description=__doc__, formatter_class=raw)
    parser.add_argument("--only", metavar="PATTERN", default="", help="run the rows whose name matches this expression")
    parser.add_argument("--full", action="store_true", help="more contenders, shapes and rounds; takes longer")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads before measuring")
    parser.add_argument("--out", type=Path, default=out, help=f"folder for the results (default {out})")
    return parser.parse_args(argv)


def run(rows: list[Row], full: bool, peaks: dict[str, float]) -> list[dict[str, Any]]:
    """The records of the rows; of those done so far if the user interrupts. A terminal sees a bar, a log one line per row."""
    records = []
    terminal = sys.stderr.isatty()
    with tqdm(rows, unit="row", dynamic_ncols=True, file=sys.stderr, disable=not terminal) as bar:
        for n, row in enumerate(bar, 1):
            bar.set_description(row.name)
            start = time.perf_counter()
            try:
                case = row.build()
                timings = measure(case, full, bar.set_postfix_str)
            except KeyboardInterrupt:
                break
            elapsed = time.perf_counter() - start
            records.append(row_record(row, case, timings, peaks, elapsed))
            if not terminal:
                print(f"{n} of {len(rows)}: {row.name}, {elapsed:.1f} s", file=sys.stderr, flush=True)
            del case
    return records


def write(report: dict[str, Any], out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"compare.{ending}" for ending in ("json", "html", "png")]
    paths[0].write_text(json.dumps(report, indent=1) + "\n")
    paths[1].write_text(page(report), encoding="utf-8")
    speed_figure(report).savefig(paths[2], dpi=120)
    return paths


def main(argv: list[str] | None = None, out: Path = Path("mha_ext_bench")) -> int:
    args = arguments(argv, out)
    if args.threads:
        torch.set_num_threads(args.threads)
    makers = (main_rows, layout_rows, part_rows, small_rows, decode_rows, feature_rows, flushed_rows)
    rows = [row for make in makers for row in make(args.full) if re.search(args.only, row.name)]
    if args.list or not rows:
        print("\n".join(row.name for row in rows) or f"No row's name matches {args.only!r}; --list shows the names.")
        return 0 if rows else 2
    start = time.perf_counter()
    peaks = machine_peaks()
    records = run(rows, args.full, peaks)
    report = {
        "machine": machine_facts(),
        "peaks": peaks,
        "full": args.full,
        "only": args.only,
        "minutes": (time.perf_counter() - start) / 60,
        "geometric_means": geometric_means(records),
        "claims": claims(records),
        "rows": records,
    }
    console = Console(width=None if sys.stdout.isatty() else 150)
    print_report(report, console)
    for path in write(report, args.out):
        console.print(f"written: {path}", highlight=False)
    wrong = [
        row["name"]
        for row in records
        for c in row["contenders"]
        if c["contender"].startswith("mha_ext") and c["seconds"] is None
    ]
    if wrong:
        console.print("mha_ext is WRONG in: " + "; ".join(wrong), style="red", markup=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
