"""The report as one HTML file that needs nothing else: numbers in tables, plots as SVG in the text."""

import io
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import COLUMNS, contender_cells, machine_line

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: 2px 12px 2px 0; text-align: right; }
td:first-child, th:first-child, td:last-child { text-align: left; } th { border-bottom: 1px solid #888; }
tr.row td { padding-top: 8px; font-weight: 600; } tr.ours { color: #06603a; } svg { max-width: 100%; height: auto; }
pre { white-space: pre-wrap; font-size: 12px; color: #555; }
"""


def speed_figure(report: dict[str, Any]) -> Figure:
    """One line per row: how many times as fast as the row's base each contender is."""
    rows = [row for row in report["rows"] if any(c["speed"] for c in row["contenders"])]
    figure = Figure(figsize=(10, 1.6 + 0.24 * len(rows)))
    axes = figure.subplots()
    points: dict[str, list[Any]] = {}
    for place, row in enumerate(rows):
        for c in row["contenders"]:
            if c["speed"] and c["contender"] != row["baseline"]:
                points.setdefault(c["contender"], []).append((c["speed"], place))
    scatter(axes, points)
    axes.set_yticks(range(len(rows)), [f"{row['name']} (against {row['baseline']})" for row in rows], size=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("speed against the row's base (right is faster)")
    axes.set_title(machine_line(report["machine"], report["peaks"]), size=7)
    figure.tight_layout()
    return figure


def memory_figure(report: dict[str, Any]) -> Figure:
    """One line per row: the memory that each contender allocates at most."""
    rows = [row for row in report["rows"] if any(c["peak_bytes"] for c in row["contenders"])]
    figure = Figure(figsize=(10, 1.2 + 0.24 * len(rows)))
    axes = figure.subplots()
    points: dict[str, list[Any]] = {}
    for place, row in enumerate(rows):
        for c in row["contenders"]:
            if c["seconds"] and c["peak_bytes"]:
                points.setdefault(c["contender"], []).append((c["peak_bytes"] / 2**20, place))
    scatter(axes, points)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], size=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("growth of the resident set during one call, outputs included, MiB (left is smaller)")
    figure.tight_layout()
    return figure


def scatter(axes: Axes, points: dict[str, list[Any]]) -> None:
    markers = iter("osv^<>PXd*pH" * 4)
    for contender, found in sorted(points.items(), key=lambda item: not item[0].startswith("mha_ext")):
        ours = contender.startswith("mha_ext")
        x, y = zip(*found, strict=True)
        axes.scatter(x, y, s=60 if ours else 24, marker=next(markers), label=contender, zorder=3)
    axes.set_xscale("log")
    axes.grid(which="both", alpha=0.25)
    if points:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def svg(figure: Figure) -> str:
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]  # without the XML declaration, which HTML does not know


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["<table><tr>", *(f"<th>{escape(column)}</th>" for column in COLUMNS), "</tr>"]
    for row in rows:
        lines.append(f'<tr class="row"><td colspan="{len(COLUMNS)}">{escape(row["name"])}</td></tr>')
        for c in row["contenders"]:
            ours = ' class="ours"' if c["contender"].startswith("mha_ext") else ""
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in contender_cells(c, row["baseline"]))
            lines.append(f"<tr{ours}>{cells}</tr>")
    return "\n".join([*lines, "</table>"])


def page(report: dict[str, Any]) -> str:
    machine = report["machine"]
    means = [
        f"<li>mha_ext over SDPA, {m['dtype']} {m['direction']}: <b>{m['speed']:.2f}x</b> "
        f"(geometric mean of {m['rows']} shapes)</li>"
        for m in report["geometric_means"]
    ]
    claims = [f"<li>{escape(c['claim'])}<br>here: {escape(c['here'])}</li>" for c in report["claims"]]
    groups = dict.fromkeys(row["group"] for row in report["rows"])
    tables = [
        f"<h2>{escape(group)}</h2>\n" + table([row for row in report["rows"] if row["group"] == group])
        for group in groups
    ]
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>mha_ext benchmark</title><style>{STYLE}</style>',
        f"<h1>mha_ext {escape(machine['mha_ext'])}: benchmark of {escape(machine['time'])}</h1>",
        f"<pre>{escape(machine_line(machine, report['peaks']))}\n{escape(machine['system'])}</pre>",
        *(["<ul>", *means, "</ul>"] if means else []),
        "<h2>Speed</h2>",
        svg(speed_figure(report)),
        "<h2>Memory</h2>",
        svg(memory_figure(report)),
        *tables,
        (
            "<p>time: median; spread: (slowest - fastest) / time; speed: against the row's base; memory: growth of the "
            "resident set during the call, outputs included; error: relative to torch in fp32.</p>"
        ),
        *(["<h2>Claims</h2><ul>", *claims, "</ul>"] if claims else []),
        "</html>",
    ]
    return "\n".join(parts) + "\n"
