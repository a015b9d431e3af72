"""The one table of cases: shapes, masks, biases, layouts and dtypes, and builders for their inputs.

Every list below is walked at its own pace (case n takes element n modulo the length), and the lengths of the lists have no common factor,
so that over the table each value meets most values of every other list without the full cross product.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from mha_ext import biases, masks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

# (batch, query heads, key/value heads)
HEADS = [(1, 2, 2), (2, 4, 2), (3, 3, 1)]

# (query length, key length): on, below and above the tile sizes of any kernel
LENGTHS = [
    (1, 1), (31, 33), (64, 64), (1, 257), (33, 31), (127, 129), (65, 65), (129, 63), (257, 127), (63, 257), (4, 1000), (128, 31), (258, 258),
]  # fmt: skip

# (query/key head size, value head size)
HEAD_SIZES = [
    (64, 64), (1, 1), (3, 3), (8, 10), (17, 17), (32, 32), (59, 59), (80, 80), (96, 96), (111, 111), (128, 128), (160, 160), (192, 128),
    (256, 256), (257, 257), (40, 24), (10, 8),
]  # fmt: skip

# "*_sparse": the last dimension is not contiguous; "expanded": keys and values are one sample expanded over the batch
LAYOUTS = ["padded", "bshd", "packed", "plain", "expanded", "bshd", "last_sparse"]

# of a dense bias the shape; alibi, t5, t5_causal: mha_ext.biases
BIASES = [
    "none", "none", "Sq,Sk", "1,H,Sq,Sk", "none", "alibi", "B,1,1,Sk", "B,H,Sq,Sk", "none", "1,1,Sq,Sk", "1,H,1,Sk", "t5", "none", "B,1,Sq,1",
    "none", "none", "alibi", "none", "t5_causal",
]  # fmt: skip

MASKS = [
    "none", "causal", "causal_top_left", "window", "window_left", "window_right", "padding", "left_padding", "prefix", "documents",
    "dense_2d", "dense_b1", "dense_bh", "dense_1h", "dense_key", "dense_query",
    "causal & padding", "window & left_padding", "documents & causal", "prefix & padding", "dense_b1 & causal", "documents & documents",
    "causal & window & padding & dense_bh",
    "blocks_64", "strided & causal", "blocks_24", "dilated", "blocks_64 & blocks_24 & causal", "blocks_24 & documents",
]  # fmt: skip

OPTIONS = [{}, {"softcap": 5.0}, {"sinks": True}, {"scale": -0.3}, {"dropout_p": 0.2}]


@dataclasses.dataclass(frozen=True)
class Case:
    B: int
    H: int
    Hk: int
    Sq: int
    Sk: int
    D: int
    Dv: int
    dtype: torch.dtype = torch.float32
    mask: str = "none"
    bias: str = "none"
    layout: str = "padded"
    softcap: float = 0.0
    scale: float | None = None
    dropout_p: float = 0.0
    sinks: bool = False

    @property
    def id(self) -> str:
        name = f"{str(self.dtype)[6:]}-b{self.B}h{self.H}:{self.Hk}-q{self.Sq}k{self.Sk}-d{self.D}:{self.Dv}-{self.mask}-{self.layout}"
        extra = [f"bias[{self.bias}]"] if self.bias != "none" else []
        extra += [f"{k}={getattr(self, k)}" for k in ("softcap", "scale", "dropout_p", "sinks") if getattr(self, k)]
        return "-".join([name.replace(" ", "")] + extra)

    def options(self) -> dict:
        return {"softcap": self.softcap, "scale": self.scale, "dropout_p": self.dropout_p}


PATTERN_BLOCK = 32  # the block size of Strided and Dilated


def _case(n: int) -> Case:
    B, H, Hk = HEADS[n % len(HEADS)]
    Sq, Sk = LENGTHS[n % len(LENGTHS)]
    D, Dv = HEAD_SIZES[n % len(HEAD_SIZES)]
    mask, layout = MASKS[n % len(MASKS)], LAYOUTS[n % len(LAYOUTS)]
    if "documents" in mask or layout == "packed":
        Sk = Sq
    if "strided" in mask or "dilated" in mask:  # the lengths differ by whole blocks
        Sk = Sq + (Sk - Sq) // PATTERN_BLOCK * PATTERN_BLOCK
        Sk += PATTERN_BLOCK if Sk <= 0 else 0
    if layout == "packed":
        Dv = D
    return Case(
        B, H, Hk, Sq, Sk, D, Dv, DTYPES[n % len(DTYPES)], mask, BIASES[n % len(BIASES)], layout, **OPTIONS[n % len(OPTIONS)]
    )  # fmt: skip


SWEEP = [_case(n) for n in range(5 * len(MASKS))]

SPECIAL = [
    Case(1, 2, 2, 1000, 1000, 64, 64, torch.float32, "causal", layout="bshd"),
    Case(1, 2, 1, 1000, 1000, 64, 64, torch.bfloat16, "causal & padding", layout="bshd"),
    Case(1, 1, 1, 1000, 257, 128, 128, torch.float16, "window", "1,H,Sq,Sk"),
    Case(1, 32, 8, 65, 65, 64, 64, torch.float32, "dense_b1", layout="bshd"),  # grouped queries
    Case(2, 32, 1, 33, 129, 32, 32, torch.bfloat16, "padding"),  # one key/value head
    Case(1, 32, 8, 1, 1000, 128, 128, torch.float32, "padding", layout="bshd"),  # decoding
    Case(2, 32, 8, 3, 257, 64, 64, torch.bfloat16, "causal", layout="bshd"),  # decoding a few tokens
    Case(8200, 8, 8, 2, 3, 2, 2, torch.float32, "causal", layout="plain"),  # B*H > 65,535
    Case(3, 22000, 22000, 1, 2, 1, 3, torch.float32, "padding", layout="plain"),
    Case(1, 2, 2, 129, 129, 64, 64, torch.float64, "causal & padding", "1,H,Sq,Sk", dropout_p=0.3),
    Case(1, 2, 2, 2, 5, 8, 8, torch.float32, "causal"),
    Case(1, 2, 2, 5, 2, 8, 8, torch.float32, "causal"),  # three rows that see nothing
    Case(2, 2, 2, 65, 64, 32, 32, torch.float32, "causal_top_left", scale=0.0),
    Case(2, 2, 2, 65, 64, 32, 32, torch.bfloat16, "prefix & padding", "1,H,Sq,Sk", softcap=30.0, dropout_p=0.1),
    Case(2, 4, 2, 65, 129, 32, 32, torch.bfloat16, "blocks_24 & prefix", "alibi", softcap=8.0, dropout_p=0.2, sinks=True),
    Case(1, 8, 2, 3, 257, 64, 64, torch.float32, "causal", "t5", "bshd", sinks=True),  # decoding, with sinks
    Case(1, 2, 2, 5, 2, 8, 8, torch.float32, "causal", sinks=True),  # three rows that see only the sink
]

ALL = SWEEP + SPECIAL

# A few cases that touch every kernel path: for suites that repeat per instruction set, per thread count and the like
CORE = [
    Case(2, 4, 2, 65, 129, 64, 64, torch.float32, "causal & padding", "1,H,Sq,Sk", "bshd"),
    Case(2, 4, 2, 65, 129, 64, 64, torch.bfloat16, "causal", "none", "bshd"),
    Case(1, 2, 2, 127, 127, 59, 59, torch.bfloat16, "dense_b1", "B,1,1,Sk", softcap=5.0),
    Case(1, 2, 2, 63, 257, 128, 128, torch.float16, "window & left_padding", layout="bshd"),
    Case(1, 2, 1, 33, 33, 17, 17, torch.float64, "documents & causal", "B,H,Sq,Sk", dropout_p=0.2),
    Case(3, 3, 1, 1, 257, 192, 128, torch.float32, "padding"),
    Case(2, 8, 2, 2, 1000, 64, 64, torch.bfloat16, "causal", layout="bshd"),
    Case(1, 2, 2, 31, 33, 3, 5, torch.float32, "prefix & padding", dropout_p=0.3, softcap=2.0),
    Case(1, 1, 1, 33, 31, 257, 257, torch.float16, "dense_bh", "1,1,Sq,Sk"),
    Case(1, 3, 3, 129, 65, 8, 10, torch.bfloat16, "causal", layout="last_sparse", dropout_p=0.5),
    Case(2, 4, 2, 129, 161, 32, 32, torch.float32, "strided & causal", "alibi", "bshd", sinks=True),
    Case(2, 2, 1, 70, 100, 24, 24, torch.bfloat16, "blocks_24 & padding", "t5", dropout_p=0.2, sinks=True),
]


def generator(seed: int | str) -> torch.Generator:
    number = seed if isinstance(seed, int) else sum(ord(c) * 31**i for i, c in enumerate(seed)) % (2**31)
    return torch.Generator().manual_seed(number)


def randn(gen: torch.Generator, *shape: int, dtype=torch.float32) -> torch.Tensor:
    """From gen, which is of the CPU, on the default device."""
    return torch.randn(shape, generator=gen, dtype=torch.float64, device="cpu").to(torch.get_default_device(), dtype)


def surrounded(t: torch.Tensor, order: tuple[int, ...] | None = None, last_step: int = 1, aligned: bool = False) -> torch.Tensor:
    """The same values as a view into a bigger tensor full of NaN (True for bool tensors; a far index for integers), whose dimensions lie
    in memory in the given order. aligned: rows of 2-byte elements start at multiples of 16 bytes; otherwise they don't."""
    order = order or tuple(range(t.dim()))
    poison = float("nan") if t.is_floating_point() else True if t.dtype == torch.bool else 2**40
    sizes = [t.shape[d] + 2 for d in order]
    columns, first = t.shape[order[-1]] * last_step, 8 if aligned else 2
    sizes[-1] = columns + 16 - columns % 8 if aligned else columns + 3
    big = torch.full(sizes, poison, dtype=t.dtype, device=t.device)
    inner = big[
        tuple(slice(1, 1 + t.shape[d]) for d in order[:-1]) + (slice(first, first + columns, last_step),)
    ]
    view = inner.permute([order.index(d) for d in range(t.dim())])
    return view.copy_(t)


def lay_out(q, k, v, layout: str):
    """q, k, v as views of the named layout; every layout but "plain" and "expanded" has NaN between and around the values."""
    if layout == "plain":
        return q.contiguous(), k.contiguous(), v.contiguous()
    if layout == "padded":
        return surrounded(q), surrounded(k), surrounded(v)
    if layout == "bshd":
        return tuple(surrounded(t, (0, 2, 1, 3)) for t in (q, k, v))
    if layout == "aligned":
        return tuple(surrounded(t, (0, 2, 1, 3), aligned=True) for t in (q, k, v))
    if layout == "last_sparse":
        return surrounded(q, last_step=2), surrounded(k, last_step=3), surrounded(v, (0, 1, 3, 2))
    if layout == "expanded":
        return q.contiguous(), *(t[:1].contiguous().expand_as(t) for t in (k, v))
    assert layout == "packed"
    packed = surrounded(torch.cat([t.transpose(1, 2) for t in (q, k, v)], dim=2))  # [B,S,H+2Hk,D]
    H, Hk = q.shape[1], k.shape[1]
    return tuple(t.transpose(1, 2) for t in packed.split([H, Hk, Hk], dim=2))


def _dense_shape(kind: str, c: Case) -> tuple[int, ...]:
    return {
        "dense_2d": (c.Sq, c.Sk), "dense_b1": (c.B, 1, c.Sq, c.Sk), "dense_bh": (c.B, c.H, c.Sq, c.Sk), "dense_1h": (1, c.H, c.Sq, c.Sk),
        "dense_key": (1, 1, 1, c.Sk), "dense_query": (c.B, 1, c.Sq, 1),
    }[kind]  # fmt: skip


def _one_mask(kind: str, c: Case, gen: torch.Generator, device):
    """(mask object, what it shows as a bool tensor [B,H,Sq,Sk] straight from the definition)."""
    i, j = torch.arange(c.Sq).view(1, 1, -1, 1), torch.arange(c.Sk).view(1, 1, 1, -1)
    o = c.Sk - c.Sq

    def lengths(low, high):
        return torch.randint(low, high + 1, (c.B,), generator=gen)

    if kind == "causal":
        mask, seen = masks.Causal(), j <= i + o
    elif kind == "causal_top_left":
        mask, seen = masks.Causal("top_left"), j <= i
    elif kind == "window":
        left, right = c.Sk // 4, 3
        mask, seen = masks.Window(left, right), (i + o - left <= j) & (j <= i + o + right)
    elif kind == "window_left":
        mask, seen = masks.Window(5, None), i + o - 5 <= j
    elif kind == "window_right":
        mask, seen = masks.Window(None, 2), j <= i + o + 2
    elif kind == "padding":
        n = lengths(0, c.Sk)
        mask, seen = masks.Padding(surrounded(n.to(device))), j < n.view(-1, 1, 1, 1)
    elif kind == "left_padding":
        n = lengths(0, c.Sk // 2)
        mask, seen = masks.LeftPadding(surrounded(n.to(device))), j >= n.view(-1, 1, 1, 1)
    elif kind == "prefix":
        n = lengths(0, c.Sk)
        mask, seen = masks.Prefix(surrounded(n.to(device))), (j < n.view(-1, 1, 1, 1)) | (j <= i + o)
    elif kind == "documents":
        ids = torch.randint(0, 4, (c.B, c.Sk), generator=gen).sort(dim=1).values
        if c.Sk > 40:  # ids need not be sorted: the same document may come again
            ids[:, -7:] = ids[:, :7]
        mask, seen = masks.Documents(surrounded(ids.to(device))), ids[:, None, :, None] == ids[:, None, None, :]
    elif kind.startswith("blocks"):
        size = int(kind.split("_")[1])
        blocks = torch.rand((c.B, 1, -(-c.Sq // size), -(-c.Sk // size)) if c.B > 1 else (-(-c.Sq // size), -(-c.Sk // size)), generator=gen) < 0.6
        blocks[..., 0] |= blocks.shape[-1] < 3  # some rows see nothing, but not all
        mask, seen = masks.BlockSparse(surrounded(blocks.to(device)), size), blocks[..., i // size, j // size].view(-1, 1, c.Sq, c.Sk)
    elif kind == "strided":
        distance = (i + o) // PATTERN_BLOCK - j // PATTERN_BLOCK
        mask = masks.Strided(3, 2, PATTERN_BLOCK)
        seen = (distance == 0) | (distance == 1) | (j // PATTERN_BLOCK % 3 == 2)
    elif kind == "dilated":
        distance = ((i + o) // PATTERN_BLOCK - j // PATTERN_BLOCK).abs()
        mask, seen = masks.Dilated(1, 2, PATTERN_BLOCK), (distance == 0) | (distance == 2)
    else:
        shape = _dense_shape(kind, c)
        seen = torch.rand(shape, generator=gen) < 0.6
        if len(shape) == 4 and c.Sk > 70:
            seen[..., 3:70] = False  # whole tiles that nothing sees ...
            seen[..., 70:] |= seen.new_tensor(c.Sk > 200)  # ... and that everything sees
        mask = masks.Dense(surrounded(seen.to(device)))
    return mask, seen.expand(c.B, c.H, c.Sq, c.Sk)


def build_mask(kind: str, c: Case, gen: torch.Generator, device="cpu"):
    """(mask object or None, bool [B,H,Sq,Sk] or None) for "none" or names joined by &."""
    if kind == "none":
        return None, None
    parts = [_one_mask(name, c, gen, device) for name in kind.split(" & ")]
    mask, seen = parts[0]
    for other, other_seen in parts[1:]:
        mask, seen = mask & other, seen & other_seen
    return mask, seen.to(device)


def build_bias(kind: str, c: Case, gen: torch.Generator, device="cpu"):
    if kind == "none":
        return None
    if kind in RELATIVE:
        return build_relative_bias(kind, c, gen, device)
    sizes = {"B": c.B, "H": c.H, "Sq": c.Sq, "Sk": c.Sk, "1": 1}
    values = randn(gen, *(sizes[name] for name in kind.split(",")), dtype=c.dtype).to(device)
    return surrounded(values).requires_grad_()


class Gaussian(biases.Bias):
    """A user's own."""

    tensors = ("width",)

    def __init__(self, width):
        self.width = width

    def of_distance(self, distance):
        return -((distance / self.width[:, None]) ** 2)


RELATIVE = ("alibi", "t5", "t5_causal")


def build_relative_bias(kind: str, c: Case, gen: torch.Generator, device="cpu"):
    """The bias object; its parameter is kept in more digits than half types have."""
    dtype = torch.float64 if c.dtype == torch.float64 else torch.float32
    if kind == "alibi":
        return biases.ALiBi(surrounded((randn(gen, c.H).abs() * 0.1).to(dtype).to(device)).requires_grad_())
    table = surrounded(randn(gen, 12, c.H, dtype=dtype).to(device)).requires_grad_()
    return biases.T5Relative(table, 12, 40, kind == "t5")


def relative_bias(bias, parameter: torch.Tensor, Sq: int, Sk: int) -> torch.Tensor:
    """[1,H,Sq,Sk], from the definitions: each bias is linear in its parameter."""
    distance = torch.arange(Sk) - torch.arange(Sq)[:, None] - (Sk - Sq)
    if isinstance(bias, biases.ALiBi):
        return -parameter[None, :, None, None] * distance.abs().to(parameter)
    buckets, first = bias.num_buckets, torch.zeros_like(distance)
    if bias.bidirectional:
        buckets //= 2
        first = (distance > 0) * buckets
    back = distance.abs() if bias.bidirectional else (-distance).clamp(min=0)
    exact = buckets // 2
    growth = ((back.clamp(min=1) / exact).log() / math.log(bias.max_distance / exact) * (buckets - exact)).long()
    bucket = first + torch.where(back < exact, back, (exact + growth).clamp(max=buckets - 1))
    return parameter[bucket.to(parameter.device)].permute(2, 0, 1)[None]


@dataclasses.dataclass
class Inputs:
    """Leaves of one case, all but the mask requiring gradients, and the gradient of the output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: object
    seen: torch.Tensor | None
    bias: torch.Tensor | biases.Bias | None
    dout: torch.Tensor
    rng_state: torch.Tensor | None
    sinks: torch.Tensor | None

    def bias_leaf(self) -> torch.Tensor | None:
        """The bias, or the parameter of a bias object."""
        if isinstance(self.bias, biases.Bias):
            return self.bias.slopes if isinstance(self.bias, biases.ALiBi) else self.bias.table
        return self.bias

    def leaves(self) -> dict[str, torch.Tensor]:
        found = {"q": self.q, "k": self.k, "v": self.v, "bias": self.bias_leaf(), "sinks": self.sinks}
        return {name: t for name, t in found.items() if t is not None}

    def modifiers(self) -> dict:
        """What attention takes besides q, k, v and the options."""
        return {"mask": self.mask, "bias": self.bias, "rng_state": self.rng_state, "sinks": self.sinks}

    def definition(self) -> dict:
        """The same for oracle.truths."""
        given = {"dout": self.dout, "seen": self.seen, "bias": self.bias_leaf(), "sinks": self.sinks}
        if isinstance(self.bias, biases.Bias):
            given["dense_bias"] = functools.partial(relative_bias, self.bias, Sq=self.q.shape[2], Sk=self.k.shape[2])
        return given


def build(c: Case, device="cpu") -> Inputs:
    gen = generator(c.id)
    q, k, v, dout = (
        randn(gen, *shape, dtype=c.dtype).to(device)
        for shape in ((c.B, c.H, c.Sq, c.D), (c.B, c.Hk, c.Sk, c.D), (c.B, c.Hk, c.Sk, c.Dv), (c.B, c.H, c.Sq, c.Dv))
    )
    q, k, v = (t.detach().requires_grad_() for t in lay_out(q, k, v, c.layout))
    mask, seen = build_mask(c.mask, c, gen, device)
    rng_state = torch.tensor([0x123456789ABCD, 7 + (3 << 33)], device=device) if c.dropout_p else None
    bias = build_bias(c.bias, c, gen, device)
    sinks = None
    if c.sinks:
        sinks = randn(gen, c.H, dtype=torch.float64 if c.dtype == torch.float64 else torch.float32).to(device)
        sinks = surrounded(sinks).requires_grad_()
    dout = surrounded(dout, (2, 0, 1, 3), aligned=c.layout in ("plain", "aligned"))  # where q, k and v are, too
    return Inputs(q, k, v, mask, seen, bias, dout, rng_state, sinks)


def op_arguments(op, **given) -> tuple:
    """The arguments of an op in the order of its schema: those given by name, and for the others None, False, or 0."""
    names = [a.name for a in op._schema.arguments]
    assert set(given) <= set(names), f"{op} has no {set(given) - set(names)}"
    neutral = {"Tensor?": None, "int?": None, "int": 0, "SymInt": 0, "bool": False, "float": 0.0}
    return tuple(
        given[a.name]
        if a.name in given
        else neutral[str(a.type).replace("Optional[Tensor]", "Tensor?").replace("Optional[int]", "int?")]
        for a in op._schema.arguments
    )
