"""python -m mha_ext explain: the plan of a call of attention, from its shape."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any

import torch

from . import masks
from .explain import explain

DESCRIPTION = """Says what mha_ext.attention would do for a shape, and what it costs.

    python -m mha_ext explain --shape 8,12,512,64
    python -m mha_ext explain --shape 1,32,8,2048,2048,128 --dtype bfloat16 --mask causal
    python -m mha_ext explain --shape 4,8,8,1,4096,128,64 --mask window:255,0 --mask padding:1000,4096,17,300
"""
MASKS = """causal | causal:top_left | window:LEFT,RIGHT (none: no limit) | padding:N,... | left_padding:N,... |
prefix:N,... (one number for all sequences or one for each); given several times, all of them apply"""
DTYPES = ("float32", "bfloat16", "float16", "float64")


def shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(n) for n in text.split(","))
    if len(sizes) not in (4, 6, 7) or min(sizes) < 0:
        raise ValueError
    if len(sizes) == 4:  # B,H,S,D
        B, H, S, D = sizes
        return B, H, H, S, S, D, D
    return sizes if len(sizes) == 7 else (*sizes, sizes[-1])


def mask(text: str) -> masks.Mask:
    name, _, values = text.partition(":")
    if name == "causal":
        return masks.Causal(values or "bottom_right")
    numbers = [None if n == "none" else int(n) for n in values.split(",")]
    if name == "window":
        left, right = numbers
        return masks.Window(left, right)
    kinds = {"padding": masks.Padding, "left_padding": masks.LeftPadding, "prefix": masks.Prefix}
    return kinds[name](torch.tensor(numbers))


def threads(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def checked(parse: Any, accepted: str) -> Callable[[str], Any]:
    """parse, for argparse: what it cannot read is refused with what is accepted."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise argparse.ArgumentTypeError(f"{text!r} was given; accepted: {accepted}") from error

    return read


def main(argv: list[str]) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m mha_ext explain", description=DESCRIPTION, formatter_class=raw)
    shapes = "B,H,S,D or B,H,Hk,Sq,Sk,D or B,H,Hk,Sq,Sk,D,Dv"
    parser.add_argument("--shape", type=checked(shape, shapes), required=True, metavar="SIZES", help=shapes)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default float32")
    parser.add_argument("--mask", type=checked(mask, MASKS), action="append", metavar="MASK", help=MASKS)
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P")
    parser.add_argument("--weights", action="store_true", help="as with return_weights=True")
    parser.add_argument("--threads", type=checked(threads, "an int >= 1"), help="torch.set_num_threads first")
    args = parser.parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    B, H, Hk, Sq, Sk, D, Dv = args.shape
    try:
        # Never touched, so that large shapes take addresses only.
        q, k, v = (
            torch.empty(size, dtype=getattr(torch, args.dtype))
            for size in ((B, H, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv))
        )
        visible = reduce(and_, args.mask) if args.mask else None
        plan = explain(q, k, v, mask=visible, dropout_p=args.dropout, return_weights=args.weights)
    except (ValueError, TypeError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    print(plan)
    return 0
