"""csrc/cpu and csrc/cuda are rooms: folders that include what is below them alone, as the main header of each says."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {".h", ".cuh", ".cpp", ".cu"}
pytestmark = pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="not in the repository")


def rooms(of: Path) -> list[Path]:
    return sorted({path.parent for path in of.rglob("*") if path.suffix in SOURCES})


def texts(room: Path) -> list[str]:
    return [path.read_text() for path in room.iterdir() if path.suffix in SOURCES]


def included(room: Path, of: Path) -> set[str]:
    """The other rooms that its files include, as said() names them."""
    found = set()
    for text in texts(room):
        for name in re.findall(r'#include "([^"]+)"', text):
            path = (room / name).resolve()
            if path.exists() and path.parent != room and path.is_relative_to(of):
                found.add(name_of(path.parent, of))
    return found


def name_of(room: Path, of: Path) -> str:
    return str(room.relative_to(of if room != of else ROOT))


def said(room: Path) -> set[str]:
    lines = [
        line for text in texts(room) for line in re.findall(r"^// This room includes ([^.]*)\.$", text, re.MULTILINE)
    ]
    assert len(lines) == 1, f"{room.relative_to(ROOT)}: one file says what the room includes, not {len(lines)}"
    names = re.sub(r"\s*\n// *", " ", lines[0])
    return set() if names == "none of the other rooms" else set(names.split(", "))


@pytest.mark.parametrize("of", [ROOT / "csrc/cpu", ROOT / "csrc/cuda"], ids=lambda path: path.name)
def test_a_room_includes_what_it_says_and_none_above_it(of):
    below = {}
    for room in rooms(of):
        below[name_of(room, of)] = included(room, of)
        assert included(room, of) == said(room), room
    assert len(below) > 6
    TopologicalSorter(below).prepare()  # raises where rooms include each other
