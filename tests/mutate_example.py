"""What test_mutate.py tries mutate.py on."""

from __future__ import annotations


def total(numbers):
    if not isinstance(numbers, list):
        raise ValueError("no list")
    out = 0
    for n in numbers:
        out += n
    return out
