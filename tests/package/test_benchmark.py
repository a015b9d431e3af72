"""The benchmark: a short run writes its table, JSON, page and picture; a wrong contender is called wrong, not timed."""

import importlib
import json
import math
import re

import pytest
import torch


@pytest.fixture
def benchmark_module():
    for module in ("tqdm", "rich", "matplotlib"):
        pytest.importorskip(module)
    return lambda name: importlib.import_module(f"mha_ext._bench.{name}")


def test_short_run_writes_table_json_page_and_picture(benchmark_module, tmp_path, capsys):
    pattern = "small B8 H12 S16 D64 fp32 fwd$|split_heads .* fp32"
    assert benchmark_module("compare").main(["--only", pattern, "--out", str(tmp_path)]) == 0
    printed, told = capsys.readouterr()
    assert re.fullmatch(r"1 of 2: split_heads .*, [\d.]+ s\n2 of 2: small .*, [\d.]+ s\n", told), "a log gets one line per row"
    for text in ("small B8 H12 S16 D64 fp32 fwd", "sdpa", "mha_ext", "GFLOP/s", "GB/s", torch.__version__):
        assert text in printed
    report = json.loads((tmp_path / "compare.json").read_text())
    assert len(report["rows"]) == 2
    assert report["machine"]["torch_threads"] == torch.get_num_threads()
    assert all(rate > 0 for rate in report["peaks"].values())
    for row in report["rows"]:
        contenders = {c["contender"]: c for c in row["contenders"]}
        base = contenders[row["baseline"]]
        for c in contenders.values():
            assert c["seconds"] > 0 and c["fastest"] <= c["seconds"] <= c["slowest"]
            assert c["rounds"] >= 7 or c["note"] == f"{c['rounds']} rounds"  # fewer where the machine is busy
            assert math.isclose(c["speed"], base["seconds"] / c["seconds"])
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    panels = benchmark_module("page").speed_figure(report).axes
    assert [axes.get_title("left") for axes in panels] == ["parts, against clone", "small, against sdpa"]
    page = (tmp_path / "compare.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 2
    for row in report["rows"]:
        assert row["name"] in page
        for c in row["contenders"]:
            assert f"<td>{c['contender']}</td>" in page
    addresses = re.findall(r"""(?:src|href)=["']([^"']*)""", page)
    assert all(address.startswith("#") for address in addresses), "the page needs nothing beside it"


def test_wrong_contender_is_not_timed(benchmark_module):
    measure = benchmark_module("measure")
    x = torch.randn(64)
    calls = {"right": lambda: x * 2, "wrong": lambda: x * 2.1, "nan": lambda: x / 0 * 0, "shape": lambda: x[:1]}
    case = measure.Case(calls, "right", lambda: x + x)
    timings = {t.contender: t for t in measure.measure(case)}
    assert timings["right"].seconds > 0 and not timings["right"].note
    assert math.isnan(timings["wrong"].seconds) and timings["wrong"].note == "wrong result"
    for name in ("nan", "shape"):
        assert math.isnan(timings[name].seconds) and timings[name].note


def test_peak_memory_sees_every_allocation(benchmark_module):
    measure = benchmark_module("measure")
    if math.isnan(measure.peak_growth(lambda: None)[1]):
        pytest.skip("this system does not let a process reset its peak resident set")
    size = 64 * 2**20
    by_torch = measure.peak_growth(lambda: torch.ones(size, dtype=torch.uint8))[1]
    by_python = measure.peak_growth(lambda: bytearray(b"x" * 1024) * (size // 1024))[1]
    for growth in (by_torch, by_python):
        assert 0.98 * size <= growth <= 1.25 * size  # the system counts pages in batches


def test_unknown_row_is_a_sentence(benchmark_module, capsys):
    assert benchmark_module("compare").main(["--only", "no such row"]) == 2
    assert "--list" in capsys.readouterr().out
