"""The report as one HTML file that needs nothing else: numbers in tables, plots as SVG in the text."""

import io
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .report import COLUMNS, LEGEND, contender_cells, machine_line

OURS, MARKS, BEHIND = "#0b7a4b", "osv^<>PXd*pH", {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: 2px 12px 2px 0; text-align: right; }
td:first-child, th:first-child, td:last-child { text-align: left; } th { border-bottom: 1px solid #888; }
tr.row td { padding-top: 8px; font-weight: 600; } tr.ours { color: #06603a; } svg { max-width: 100%; height: auto; }
pre { white-space: pre-wrap; font-size: 12px; color: #555; }
"""


def speed_figure(report: dict[str, Any]) -> Figure:
    """How many times as fast as its base each contender is: a panel for the rows of a group that share a base, the main
    shapes on top; our bar has its number, the others are marks."""
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in sorted(report["rows"], key=lambda row: row["group"] != "main"):
        if any(c["speed"] and c["contender"] != row["baseline"] for c in row["contenders"]):
            panels.setdefault((row["group"], row["baseline"]), []).append(row)
    heights = [len(rows) + 1.5 for rows in panels.values()]
    figure = Figure(figsize=(10, 1.2 + 0.25 * sum(heights)), layout="constrained")
    grid = figure.subplots(max(len(panels), 1), 1, sharex=True, squeeze=False, height_ratios=heights or None)
    marks: dict[str, str] = {}
    for axes, ((group, base), rows) in zip(grid[:, 0], panels.items()):
        _speed_panel(axes, rows, marks)
        axes.set_title(f"{'the main shapes' if group == 'main' else group}, against {base}", loc="left", size=10, weight="bold")
    grid[-1, 0].set_xlabel("times as fast as the base (right is faster)")
    handles = [Line2D([], [], marker=mark, color="0.45", linestyle="", label=name) for name, mark in marks.items()]
    handles.append(Line2D([], [], color=OURS, linewidth=6, label="mha_ext"))
    figure.legend(handles=handles[::-1], loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    figure.supxlabel(machine_line(report["machine"], report["peaks"]), size=7, color="0.35")
    return figure


def _speed_panel(axes: Axes, rows: list[dict[str, Any]], marks: dict[str, str]) -> None:
    """marks: of the contenders that are not ours, by name, for all panels; it grows."""
    for place, row in enumerate(rows):
        for c in row["contenders"]:
            if not c["speed"] or c["contender"] == row["baseline"]:
                continue
            if c["contender"].startswith("mha_ext"):
                first = c["contender"] in ("mha_ext", "mha_ext.nn")
                axes.barh(place, c["speed"] - 1, left=1, height=0.7, color=OURS, alpha=1 if first else 0.5)
                text = f"{c['speed']:.2f}x" if first else f"{c['contender'].removeprefix('mha_ext ')} {c['speed']:.2f}x"
                where: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "size": 8}
                axes.annotate(text, (max(c["speed"], 1), place), **where, bbox=BEHIND, zorder=4)
            else:
                mark = marks.setdefault(c["contender"], MARKS[len(marks) % len(MARKS)])
                axes.scatter(c["speed"], place, s=22, marker=mark, color="0.45", zorder=3)
    shapes = [row["name"].rsplit(" ", 2) if row["group"] == "main" else [row["name"]] for row in rows]
    again = [n > 0 and len(parts) > 1 and parts[0] == shapes[n - 1][0] for n, parts in enumerate(shapes)]
    labels = [" ".join(parts[1:] if same else parts) for parts, same in zip(shapes, again)]  # a shape is named once
    axes.set_yticks(range(len(rows)), labels, size=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("log", base=2)
    axes.axvline(1, color="black", linewidth=1)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.1)
    axes.grid(axis="x", alpha=0.25)


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
        f"<p>{LEGEND}</p>",
        *(["<h2>Claims</h2><ul>", *claims, "</ul>"] if claims else []),
        "</html>",
    ]
    return "\n".join(parts) + "\n"
