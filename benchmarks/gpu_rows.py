"""What benchmarks/gpu.py times: the rows and their contenders, timed in turn with CUDA events."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import mha_ext

ROUNDS = 7
SAMPLE_SECONDS = 4e-3  # a shorter call is repeated within a sample until the sample lasts about this long
TOKENS, MODEL = 16384, 2048  # of every attention row: B * S and H * D
LENGTHS = (16384, 8192, 4096, 2048, 1024, 512)  # the longest first: the goals are about it
HEADS_SHAPE = (128, 32, 2048, 128)  # B, H, S, D: a tensor of 2 GiB, of which caches keep nothing
SOFTMAX_SHAPES = ((8, 16, 2048), (1, 4, 16384))  # B, H, S
DECODE_SHAPES = ((16, 16384), (1, 131072))  # B, Sk, with 32 query heads of 128 on 8; the second needs its keys split
MATH_LENGTH = 4096  # beyond, torch's unfused way takes tens of GB
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}


@dataclass
class Row:
    name: str
    unit: str  # bytes or flop
    amount: float  # of them that any implementation has to move or compute
    base: str  # the contender that the others' speed is given against; memory rows: a copy of as many bytes
    calls: dict[str, Callable[[], object]]
    notes: dict[str, str] = field(default_factory=dict)  # contender -> why it is not run
    unchecked: tuple[str, ...] = ()  # contenders whose result is not comparable: the copy


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def tensors_of(result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def relative_error(result, expected) -> float:
    """The largest distance over the tensors of a result, relative to the expected tensor's norm."""
    worst = 0.0
    for got, want in zip(tensors_of(result), tensors_of(expected), strict=True):
        if got.shape != want.shape or not torch.isfinite(got).all():
            return math.inf
        distance = torch.linalg.vector_norm(got - want, dtype=torch.float32).item()
        worst = max(worst, distance / (torch.linalg.vector_norm(want, dtype=torch.float32).item() or 1.0))
    return worst


def one_sample(call: Callable[[], object], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:70]}"


def measure(row: Row) -> dict:
    """Checks every contender against the first that runs, then times all in turn."""
    expected, found, repeats = None, {}, {}
    for name, call in row.calls.items():
        found[name] = {"contender": name, "seconds": None, "error": None, "note": "", "wrong": True, "samples": []}
        try:
            result = call()
            torch.cuda.synchronize()
            if name not in row.unchecked:
                expected = result if expected is None else expected
                found[name]["error"] = relative_error(result, expected)
            del result
            one_sample(call, 1)
            repeats[name] = max(1, min(200, round(SAMPLE_SECONDS / max(one_sample(call, 1), 1e-6))))
        except Exception as error:  # noqa: BLE001  one contender that cannot run here must not end the comparison
            found[name]["note"] = f"not available: {short(error)}"
            continue
        # Half of bfloat16's digits: every rounding error passes, no wrong result does. The tests are the strict ones.
        if found[name]["error"] is None or found[name]["error"] <= 0.09:
            found[name]["wrong"] = False
        else:
            found[name]["note"] = "wrong result"
            del repeats[name]
    del expected
    for _ in range(ROUNDS):
        for name, count in repeats.items():
            found[name]["samples"].append(one_sample(row.calls[name], count))
    for name in repeats:
        samples = found[name]["samples"]
        found[name] |= {"seconds": statistics.median(samples), "fastest": min(samples), "slowest": max(samples)}
    for name, why in row.notes.items():
        found[name] = {"contender": name, "seconds": None, "error": None, "note": f"not run: {why}", "wrong": False}
    base = found.get(row.base, {}).get("seconds")
    contenders = list(found.values())
    return {"name": row.name, "unit": row.unit, "amount": row.amount, "base_seconds": base, "contenders": contenders}


def copy_of(bytes_moved: float) -> Callable[[], object]:
    source = torch.empty(int(bytes_moved) // 2, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def memory_row(name: str, amount: float, **calls: Callable[[], object]) -> Row:
    named = {key.replace("ours", "mha_ext").replace("theirs", "torch"): call for key, call in calls.items()}
    return Row(name, "bytes", amount, "copy", {"copy": copy_of(amount), **named}, unchecked=("copy",))


def split_and_merge_rows() -> Iterator[Callable[[], Row]]:
    B, H, S, D = HEADS_SHAPE

    def split(with_bias: bool) -> Row:
        x, bias = random(B, S, H * D), random(H * D) if with_bias else None
        return memory_row(
            f"split_heads B{B} S{S} H{H} D{D}" + (" bias" if with_bias else ""),
            2 * x.nbytes,
            theirs=lambda: (x if bias is None else x + bias).unflatten(-1, (H, D)).transpose(1, 2).contiguous(),
            ours=lambda: mha_ext.split_heads(x, H, bias),
        )

    def merge(with_mix: bool) -> Row:
        x, mix = random(B, H, S, D), random(H, H) / H**0.5 if with_mix else None
        return memory_row(
            f"merge_heads B{B} S{S} H{H} D{D}" + (" mix" if with_mix else ""),
            2 * x.nbytes,
            theirs=lambda: (x.transpose(1, 2) if mix is None else torch.einsum("bhsd,hg->bsgd", x, mix)).flatten(2),
            ours=lambda: mha_ext.merge_heads(x, mix),
        )

    yield lambda: split(False)
    yield lambda: merge(False)
    yield lambda: split(True)
    yield lambda: merge(True)


def softmax_rows() -> Iterator[Callable[[], Row]]:
    def full(B: int, H: int, S: int) -> Row:
        x = random(B, H, S, S)
        return memory_row(
            f"softmax B{B} H{H} S{S}",
            2 * x.nbytes,
            theirs=lambda: x.softmax(-1),
            ours=lambda: mha_ext.masked_softmax(x),
        )

    def causal(B: int, H: int, S: int) -> Row:
        x, hidden = random(B, H, S, S), torch.ones(S, S, dtype=torch.bool, device="cuda").triu_(1)
        mask = mha_ext.masks.Causal()
        return memory_row(
            f"softmax causal B{B} H{H} S{S}",
            1.5 * x.nbytes,  # half of the scores are read, all weights written
            theirs=lambda: x.masked_fill(hidden, float("-inf")).softmax(-1),
            ours=lambda: mha_ext.masked_softmax(x, mask),
        )

    def backward(B: int, H: int, S: int) -> Row:
        x, dout = random(B, H, S, S).requires_grad_(), random(B, H, S, S)
        ours, theirs = mha_ext.masked_softmax(x), x.softmax(-1)
        return memory_row(
            f"softmax backward B{B} H{H} S{S}",
            3 * x.nbytes,
            theirs=lambda: torch.autograd.grad(theirs, x, dout, retain_graph=True),
            ours=lambda: torch.autograd.grad(ours, x, dout, retain_graph=True),
        )

    for kind in (full, causal, backward):
        for shape in SOFTMAX_SHAPES:
            yield lambda kind=kind, shape=shape: kind(*shape)


def decode_rows() -> Iterator[Callable[[], Row]]:
    def decode(B: int, Sk: int) -> Row:
        q, k, v = random(B, 32, 1, 128), random(B, 8, Sk, 128), random(B, 8, Sk, 128)
        return memory_row(
            f"decode B{B} H32/8 Sk{Sk} D128",
            k.nbytes + v.nbytes,
            theirs=lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            ours=lambda: mha_ext.attention(q, k, v),
        )

    for shape in DECODE_SHAPES:
        yield lambda shape=shape: decode(*shape)


def attention_pair(length: int, head_dim: int, causal: bool) -> list[Row]:
    """Forward, then backward alone, of one shape. Visible pairs count, 4 FLOP per pair and head dimension forward."""
    B, H = TOKENS // length, MODEL // head_dim
    q, k, v, dout = (random(B, H, length, head_dim) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mask = mha_ext.masks.Causal() if causal else None

    def sdpa(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    backends = {name: b for name, b in BACKENDS.items() if name != "sdpa math" or length <= MATH_LENGTH}
    left_out = {} if length <= MATH_LENGTH else {"sdpa math": f"only up to S={MATH_LENGTH}"}
    training: dict[str, Callable[[], torch.Tensor]] = {name: lambda b=b: sdpa(b) for name, b in backends.items()}
    training["mha_ext"] = lambda: mha_ext.attention(q, k, v, mask=mask, deterministic=False)

    def no_grad(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def forward() -> torch.Tensor:
            with torch.no_grad():
                return call()

        return forward

    def gradients(call: Callable[[], torch.Tensor]) -> Callable[[], tuple[torch.Tensor, ...]]:
        kept: list[torch.Tensor] = []  # the output of forward, made at the first call

        def backward() -> tuple[torch.Tensor, ...]:
            if not kept:
                kept.append(call())
            return torch.autograd.grad(kept[0], inputs, dout, retain_graph=True)

        return backward

    pairs = length * (length + 1) / 2 if causal else length**2
    flop = 4.0 * B * H * pairs * head_dim
    name = f"D{head_dim} {'causal' if causal else 'full'} S{length} B{B} H{H}"
    forward_calls = {contender: no_grad(call) for contender, call in training.items()}
    backward_calls = {contender: gradients(call) for contender, call in training.items()}
    backward_calls["mha_ext repeatable"] = gradients(lambda: mha_ext.attention(q, k, v, mask=mask, deterministic=True))
    return [
        Row(f"fwd {name}", "flop", flop, "sdpa flash", forward_calls, left_out),
        Row(f"bwd {name}", "flop", 2.5 * flop, "sdpa flash", backward_calls, left_out),
    ]


def together(forward: dict, backward: dict) -> dict:
    """Forward and backward of one shape, from the medians of both."""
    forwards = {c["contender"]: c for c in forward["contenders"]}
    contenders = []
    for second in backward["contenders"]:
        first = forwards[second["contender"].removesuffix(" repeatable")]
        both = {"contender": second["contender"], "seconds": None, "error": None, "note": "", "wrong": False}
        if first["seconds"] is None or second["seconds"] is None:
            both["note"] = first["note"] or second["note"]
        else:
            both |= {key: first[key] + second[key] for key in ("seconds", "fastest", "slowest")}
            both["error"] = max(first["error"], second["error"])
        contenders.append(both)
    base = next((c["seconds"] for c in contenders if c["contender"] == "sdpa flash"), None)
    name = forward["name"].replace("fwd", "fwd+bwd", 1)
    amount = forward["amount"] + backward["amount"]
    return {"name": name, "unit": "flop", "amount": amount, "base_seconds": base, "contenders": contenders}


def not_measured(name: str, why: str) -> dict:
    contender = {"contender": "mha_ext", "seconds": None, "error": None, "note": f"not run: {why}", "wrong": False}
    return {"name": name, "unit": "flop", "amount": 0, "base_seconds": None, "contenders": [contender]}


def attempt(name: str, rows: Callable[[], list[Row]], deadline: float) -> list[dict]:
    """The results of rows; of none if time or memory is short, which is then said instead."""
    torch.cuda.empty_cache()
    if time.monotonic() > deadline - 10:
        return [not_measured(name, "out of time")]
    try:
        return [measure(row) for row in rows()]
    except Exception as error:  # noqa: BLE001  such as too little memory for the inputs
        return [not_measured(name, short(error))]


def measured_rows(deadline: float) -> Iterator[dict]:
    """Every row as it is done; once the deadline (of time.monotonic) is near, what is left is only named."""
    for number, make in enumerate((*split_and_merge_rows(), *softmax_rows(), *decode_rows())):
        yield from attempt(f"memory row {number}", lambda make=make: [make()], deadline)
    for length in LENGTHS:
        for head_dim in (128, 64, 256) if length == LENGTHS[0] else (128, 64):
            for causal in (False, True):
                name = f"D{head_dim} {'causal' if causal else 'full'} S{length}"
                pair = partial(attention_pair, length, head_dim, causal)
                results = attempt(name, pair, deadline)
                yield from results
                if len(results) == 2:
                    yield together(*results)
