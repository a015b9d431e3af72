"""Every refusal: the exception type that torch users expect, one sentence, what was given with its shapes, and what to do."""

from __future__ import annotations

import operator
import re

import pytest
import torch

import mha_ext
from mha_ext import masks

ANY = (ValueError, TypeError, RuntimeError)


def refusal(fn, *parts: str, kind=ANY) -> str:
    """fn() must raise `kind` with one sentence that holds each of `parts` (spaces and bracket kinds aside)."""
    with pytest.raises(kind) as error:
        fn()
    text = str(error.value)
    assert text and "\n" not in text, f"not one line: {text!r}"
    assert not re.search(r"[.!?]\s+[A-Z]", text), f"more than one sentence: {text!r}"
    assert len(text) < 500, f"too long: {text!r}"
    plain = text.replace(" ", "").replace("(", "[").replace(")", "]")
    for part in parts:
        assert part.replace(" ", "") in plain, f"{part!r} is not in {text!r}"
    return text


def qkv(B=2, H=4, Hk=2, Sq=5, Sk=7, D=8, Dv=8, dtype=torch.float32):
    return torch.randn(B, H, Sq, D).to(dtype), torch.randn(B, Hk, Sk, D).to(dtype), torch.randn(B, Hk, Sk, Dv).to(dtype)


q, k, v = qkv()

SHAPES = {
    "3-d query": ((torch.randn(4, 5, 8), k, v), "[4,5,8]"),
    "5-d key": ((q, k[None], v), "[1,2,2,7,8]"),
    "batch": ((q, k[:1], v[:1]), "[2,4,5,8]", "[1,2,7,8]", "Dv]: the batch sizes [dimension 0] must agree."),
    "batch as heads": ((q, k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)), "Dv]: the batch sizes [dimension 0] must agree."),
    "key batch": ((q, k[:1], v), "[1,2,7,8]", "Dv]: the batch sizes [dimension 0] must agree."),
    "key/value batch": ((q, k, v[:1]), "[1,2,7,8]", "Dv]: the batch sizes [dimension 0] must agree."),
    "key/value heads": ((q, k, v[:, :1]), "[2,1,7,8]", "Dv]: the key/value head counts [dimension 1] must agree."),
    "key/value length": ((q, k, v[:, :, :6]), "[2,2,6,8]", "Dv]: the key/value lengths [dimension 2] must agree."),
    "head size": ((q, k[..., :7], v), "[2,4,5,8]", "[2,2,7,7]", "Dv]: the query/key head sizes [dimension 3] must agree."),
    "head ratio": ((torch.randn(2, 3, 5, 8), k, v), "[2,3,5,8]", "[2,2,7,8]: 3 query heads do not divide evenly among 2 key/value heads"),
    "head ratio, other value size": ((torch.randn(2, 3, 5, 8), k, v[..., :6]), "3 query heads do not divide evenly among 2 key/value heads"),
    "head ratio, other value heads": ((torch.randn(2, 3, 5, 8), k, v[:, :1]), "Dv]: the key/value head counts [dimension 1] must agree."),
    "more key heads": ((q[:, :1], k, v), "[2,1,5,8]", "[2,2,7,8]: 1 query heads do not divide evenly among 2 key/value heads"),
    "no key heads": ((q, k[:, :0], v[:, :0]), "[2,0,7,8]", "Dv]: the head counts [dimension 1] must agree."),
    "one head, no key heads": ((q[:, :1], k[:, :0], v[:, :0]), "Dv]: the head counts [dimension 1] must agree."),
    "no heads, key/value length": ((q[:, :0], k[:, :0], v[:, :0, :6]), "Dv]: the key/value lengths [dimension 2] must agree."),
    "batch and head size": ((q, k[:1, ..., :7], v), "Dv]: the batch sizes [dimension 0] and the query/key head sizes [dimension 3] must agree."),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    tensors, *parts = SHAPES[name]
    refusal(lambda: mha_ext.attention(*tensors), *parts, kind=ValueError)
    refusal(lambda: mha_ext.explain(*tensors), *parts, kind=ValueError)


def test_dtypes():
    refusal(lambda: mha_ext.attention(q, k.bfloat16(), v), "float32", "bfloat16", kind=TypeError)
    refusal(lambda: mha_ext.attention(q.half(), k.half(), v.double()), "float16", "float64", kind=TypeError)
    refusal(lambda: mha_ext.attention(q.long(), k.long(), v.long()), "int64", kind=TypeError)
    refusal(lambda: mha_ext.attention(*(t.to(torch.complex64) for t in (q, k, v))), "complex64", kind=TypeError)
    refusal(lambda: mha_ext.attention(*(t.to(torch.float8_e4m3fn) for t in (q, k, v))), "float8_e4m3fn", kind=TypeError)


def test_not_tensors():
    refusal(lambda: mha_ext.attention([[1.0]], k, v), "list", kind=TypeError)
    refusal(lambda: mha_ext.attention(q, None, v), "NoneType", kind=TypeError)
    refusal(lambda: mha_ext.scaled_dot_product_attention(q, k, 3.0), "float", kind=TypeError)
    refusal(lambda: mha_ext.masked_softmax(3.0), "float", kind=TypeError)
    refusal(lambda: mha_ext.split_heads("x", 2), "str", kind=TypeError)


def test_devices():
    meta = torch.empty(2, 2, 7, 8, device="meta")
    refusal(lambda: mha_ext.attention(q, meta, meta), "cpu", "meta", kind=ValueError)
    refusal(
        lambda: mha_ext.attention(q, k, v, mask=torch.ones(5, 7, dtype=torch.bool, device="meta")),
        "cpu",
        "meta",
        kind=ValueError,
    )
    refusal(lambda: mha_ext.attention(q, k, v, bias=torch.ones(5, 7, device="meta")), "cpu", "meta", kind=ValueError)
    refusal(
        lambda: mha_ext.attention(q, k, v, mask=masks.Padding(torch.ones(2, dtype=torch.int64, device="meta"))),
        "meta",
        kind=ValueError,
    )


x, packed = torch.randn(2, 5, 8), torch.randn(5, 2, 8)
starts = torch.tensor([0, 5])
TAKES = {  # name of the argument: a dense tensor, and the call
    "q": (q, lambda t: mha_ext.attention(t, k, v)),
    "k": (k, lambda t: mha_ext.attention(q, t, v)),
    "v": (v, lambda t: mha_ext.attention(q.clone().requires_grad_(), k, t)),
    "q of all three": (q, lambda t: mha_ext.attention(t, t, t)),
    "q of sdpa": (q, lambda t: mha_ext.scaled_dot_product_attention(t, t, t)),
    "query of sdpa in 3-d": (torch.randn(2, 5, 8), lambda t: mha_ext.scaled_dot_product_attention(t, t, t)),
    "attn_mask": (torch.ones(5, 7, dtype=torch.bool), lambda t: mha_ext.scaled_dot_product_attention(q, k, v, t, enable_gqa=True)),
    "Documents": (torch.ones(2, 7, dtype=torch.int64), lambda t: mha_ext.masks.Documents(t)),
    "cu_seqlens_q": (starts, lambda t: mha_ext.attention_varlen(packed, packed, packed, t, starts)),
    "q of explain": (q, lambda t: mha_ext.explain(t, t, t)),
    "q of varlen": (packed, lambda t: mha_ext.attention_varlen(t, t, t, starts, starts)),
    "qkv": (torch.randn(2, 5, 12, 8), lambda t: mha_ext.attention_qkvpacked(t, 4)),
    "q of cached": (q, lambda t: mha_ext.attention_cached(t, k, v)),
    "v of cached": (v, lambda t: mha_ext.attention_cached(q, k, t)),
    "mask": (torch.ones(5, 7, dtype=torch.bool), lambda t: mha_ext.attention(q, k, v, mask=t)),
    "bias": (torch.randn(5, 7), lambda t: mha_ext.attention(q, k, v, bias=t)),
    "sinks": (torch.randn(4), lambda t: mha_ext.attention(q, k, v, sinks=t)),
    "pre_mix": (torch.eye(4), lambda t: mha_ext.attention(q, k, v, pre_mix=t)),
    "slopes": (torch.randn(4), lambda t: mha_ext.biases.ALiBi(t)),
    "scores": (torch.randn(2, 4, 5, 7), lambda t: mha_ext.masked_softmax(t)),
    "scores in 2-d": (torch.randn(5, 7), lambda t: mha_ext.masked_softmax(t)),
    "x of split_heads": (x, lambda t: mha_ext.split_heads(t, 2)),
    "bias of split_heads": (torch.randn(8), lambda t: mha_ext.split_heads(x, 2, t)),
    "x of merge_heads": (q, lambda t: mha_ext.merge_heads(t)),
    "a part's out": (q, lambda t: mha_ext.merge_partials([t], [torch.randn(2, 4, 5)])),
}
LAYOUTS = {
    "sparse_coo": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: t.to_sparse_csr() if t.dim() > 1 else None,
    "_mkldnn": lambda t: t.to_mkldnn() if t.dtype == torch.float32 and torch.backends.mkldnn.is_available() else None,
    "nested": lambda t: torch.nested.nested_tensor(list(t)) if t.dim() > 1 else None,
}


@pytest.mark.filterwarnings("ignore:.*(CSR|nested).*")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TAKES)
def test_layouts(name, layout):
    """Tensors that are not dense."""
    dense, call = TAKES[name]
    try:
        given = LAYOUTS[layout](dense)
    except RuntimeError as error:  # torch has no such tensor
        pytest.skip(str(error))
    if given is None:
        pytest.skip("no such tensor")
    if name == "q of varlen" and layout == "nested":
        refusal(lambda: call(given), "nested", "cu_seqlens", kind=ValueError)
    else:
        argument = "q" if layout == "nested" and name.startswith("query") else name.split(" of ")[0].split(" in ")[0]
        refusal(lambda: call(given), f"{argument} is a", layout, "accepted:", kind=TypeError)


MASK_SHAPES = {
    "1-d": ((7,), "[7]", "[5,7]"),
    "3-d per batch": ((2, 5, 7), "[2,5,7]", "[:,None]"),
    "3-d per head": ((4, 5, 7), "[4,5,7]", "[None]"),
    "3-d batch and heads": ((8, 5, 7), "[8,5,7]", "2,4"),
    "3-d that fits nothing": ((3, 5, 7), "[3,5,7]", "[2,4,5,7]"),
    "[B,Sk]": ((2, 7), "[2,7]", "[:,None,None,:]"),
    "wrong length": ((5, 6), "[5,6]", "[5,7]"),
    "transposed": ((7, 5), "[7,5]", "[5,7]"),
    "4-d wrong batch": ((3, 1, 5, 7), "[3,1,5,7]", "[2,4,5,7]"),
    "4-d wrong heads": ((2, 2, 5, 7), "[2,2,5,7]", "[2,4,5,7]"),
    "5-d": ((1, 2, 4, 5, 7), "[1,2,4,5,7]"),
    "0-d": ((), "[]", "[5,7]"),
}


PER_BATCH, PER_HEAD, PER_KEY_OF_EACH = "{}[:, None] for one per batch element", "{}[None] for one per head", "{}[:, None, None, :] for one per key of each batch element"
PER_KEY, PER_QUERY = "{}[None, :] for one per key", "{}[:, None] for one per query"
BOTH = "{}.view(2, 4, 5, 7) for one per batch element and head"
PADDING, LENGTHS = "masks.Padding(key_lengths)", "masks.Padding(key_lengths) if it holds lengths"
# B, H, Sq, Sk; the shape that was given; what to use instead, of a mask and of a bias
SHAPE_FIXES = [
    ((2, 4, 5, 7), (2, 5, 7), [PER_BATCH]), ((2, 4, 5, 7), (2, 1, 7), [PER_BATCH]), ((2, 4, 5, 7), (2, 5, 1), [PER_BATCH]),
    ((2, 4, 5, 7), (4, 5, 7), [PER_HEAD]), ((2, 4, 5, 7), (1, 5, 7), [PER_HEAD]), ((2, 2, 5, 7), (2, 5, 7), [PER_BATCH, PER_HEAD]),
    ((2, 4, 5, 7), (8, 5, 7), [BOTH]), ((2, 2, 5, 7), (4, 5, 7), [BOTH.replace("4", "2")]), ((1, 4, 5, 7), (4, 5, 7), [PER_HEAD]), ((2, 1, 5, 7), (2, 5, 7), [PER_BATCH]),
    ((2, 4, 5, 7), (3, 5, 7), []), ((2, 4, 5, 7), (2, 6, 7), []), ((2, 4, 5, 7), (2, 5, 6), []), ((2, 4, 5, 7), (2, 2, 7), []), ((2, 4, 5, 7), (2, 5, 2), []),
    ((2, 4, 5, 7), (2, 7), ([PADDING, PER_KEY_OF_EACH], [PER_KEY_OF_EACH])), ((2, 4, 5, 7), (2, 6), []), ((2, 4, 5, 7), (3, 7), []),
    ((2, 4, 5, 7), (7,), [PER_KEY]), ((2, 4, 5, 7), (5,), [PER_QUERY]), ((2, 4, 5, 7), (2,), ([LENGTHS], [])), ((2, 4, 5, 7), (3,), []),
    ((3, 4, 3, 3), (3,), ([PER_KEY, PER_QUERY, LENGTHS], [PER_KEY, PER_QUERY])), ((2, 4, 5, 7), (), []),
]  # fmt: skip


@pytest.mark.parametrize("argument", ["mask", "bias"])
@pytest.mark.parametrize("sizes,shape,fixes", SHAPE_FIXES, ids=str)
def test_what_to_do_with_a_shape(sizes, shape, fixes, argument):
    B, H, Sq, Sk = sizes
    x = torch.zeros(shape, dtype=torch.bool if argument == "mask" else torch.float32)
    with pytest.raises(ValueError, match=argument) as error:
        mha_ext.attention(*qkv(B, H, H, Sq, Sk), **{argument: x})
    fixes = fixes[argument == "bias"] if isinstance(fixes, tuple) else fixes
    use = ": use " + " or ".join(fixes).replace("{}", argument) if fixes else ""
    assert str(error.value).partition(f"[B,H,Sq,Sk] = [{B},{H},{Sq},{Sk}]")[2] == use + "."


@pytest.mark.parametrize("name", MASK_SHAPES)
@pytest.mark.parametrize("argument", ["mask", "Dense", "bias"])
def test_mask_and_bias_shapes(name, argument):
    shape, *parts = MASK_SHAPES[name]
    t = torch.ones(shape, dtype=torch.bool)
    options = {"mask": {"mask": t}, "Dense": {"mask": masks.Dense(t)}, "bias": {"bias": t.float()}}[argument]
    text = refusal(lambda: mha_ext.attention(q, k, v, **options), *parts, kind=ValueError)
    if name == "[B,Sk]" and argument != "bias":
        assert "Padding" in text
    refusal(lambda: mha_ext.masked_softmax(torch.randn(2, 4, 5, 7), **options), *parts, kind=ValueError)


def test_mask_types():
    refusal(lambda: mha_ext.attention(q, k, v, mask=torch.ones(5, 7)), "float32", "[5,7]", "bias=", kind=TypeError)
    refusal(lambda: masks.Dense(torch.ones(5, 7)), "float32", "bias=", kind=TypeError)
    refusal(lambda: mha_ext.attention(q, k, v, mask=torch.ones(5, 7).int()), "int32", "bool", kind=TypeError)
    refusal(lambda: mha_ext.attention(q, k, v, mask="causal"), "str", kind=TypeError)
    refusal(lambda: mha_ext.attention(q, k, v, mask=True), "bool", kind=TypeError)
    refusal(
        lambda: mha_ext.attention(q, k, v, mask=masks.Causal), "mask object", kind=TypeError
    )  # the class instead of an object
    refusal(
        lambda: mha_ext.attention(q, k, v, bias=torch.ones(5, 7, dtype=torch.bool)), "bool", "mask=", kind=TypeError
    )
    refusal(lambda: mha_ext.attention(q, k, v, bias=torch.ones(5, 7).double()), "float64", "float32", kind=TypeError)
    refusal(lambda: mha_ext.attention(q, k, v, bias=0.5), "float", kind=TypeError)
    for combine in (operator.and_, operator.or_):
        refusal(lambda c=combine: c(masks.Causal(), torch.ones(5, 7)), "float32", "bool", kind=TypeError)
        refusal(lambda c=combine: c(torch.ones(5, 7), masks.Causal()), "float32", "bool", kind=TypeError)
    refusal(lambda: masks.Causal() & None, "NoneType", kind=TypeError)


def masked_by(make, values):
    return lambda: mha_ext.attention(q, k, v, mask=make(torch.tensor(values)))


def test_mask_objects():
    for make in (masks.Padding, masks.LeftPadding, masks.Prefix):
        refusal(masked_by(make, [1, 2, 3]), make.__name__, "[3]", "[2]", kind=ValueError)
        refusal(masked_by(make, [[1, 2]]), make.__name__, "[1,2]", kind=ValueError)
        refusal(masked_by(make, [1.0, 2.0]), "float32", kind=(ValueError, TypeError))
        refusal(masked_by(make, [True, False]), "bool", kind=(ValueError, TypeError))
    refusal(
        lambda: mha_ext.attention(q, k, v, mask=masks.Documents(torch.zeros(7, dtype=torch.int64))),
        "[7]",
        kind=ValueError,
    )
    refusal(
        lambda: mha_ext.attention(q, k, v, mask=masks.Documents(torch.zeros(2, 6, dtype=torch.int64))),
        "[2,6]",
        "[2,7]",
        kind=ValueError,
    )
    refusal(
        lambda: mha_ext.attention(q, k, v, mask=masks.Documents(torch.zeros(3, 7, dtype=torch.int64))),
        "[3,7]",
        kind=ValueError,
    )
    refusal(lambda: masks.Causal("left"), "bottom_right", "top_left", kind=ValueError)
    refusal(lambda: masks.Causal(True), "bottom_right", kind=(ValueError, TypeError))
    refusal(lambda: masks.Window(1.5, 0), "1.5", kind=(ValueError, TypeError))
    unfinished = type("Own", (masks.Mask,), {})()
    refusal(lambda: mha_ext.attention(q, k, v, mask=unfinished), "Own has no lower", kind=NotImplementedError)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan"), float("inf")])
def test_probability(p):
    refusal(lambda: mha_ext.attention(q, k, v, dropout_p=p), "[0,1]", kind=ValueError)
    refusal(lambda: mha_ext.masked_softmax(torch.randn(1, 1, 2, 2), dropout_p=p), "[0,1]", kind=ValueError)
    refusal(lambda: mha_ext.dropout_mask(torch.tensor([1, 2]), p, 1, 1, 2, 2, "cpu"), "[0,1]", kind=ValueError)
    refusal(lambda: mha_ext.scaled_dot_product_attention(q, q, q, dropout_p=p), "[0,1]", kind=ValueError)


@pytest.mark.parametrize(
    "state",
    [
        torch.tensor([1.0, 2.0]),
        torch.tensor([1]),
        torch.tensor([[1, 2]]),
        torch.tensor([1, 2], dtype=torch.int32),
        7,
        (1, 2),
    ],
    ids=str,
)
def test_rng_state(state):
    refusal(
        lambda: mha_ext.attention(q, k, v, dropout_p=0.5, rng_state=state), "int64", "[2]", kind=(ValueError, TypeError)
    )


def test_numbers():
    for x in (torch.tensor(0.5), torch.tensor([0.5])):
        for name in ("scale", "softcap", "dropout_p"):
            refusal(lambda name=name, x=x: mha_ext.attention(q, k, v, **{name: x}), name, "tensor", "item", kind=TypeError)
    refusal(lambda: masks.Window(torch.tensor(3), 0), "left is", "int", kind=ValueError)
    refusal(lambda: masks.Window(True, 0), "True", kind=ValueError)
    refusal(lambda: masks.Strided(2.0), "2.0", kind=ValueError)
    refusal(lambda: masks.Causal().to_dense(5), "1 sizes", "Sq, Sk", kind=TypeError)
    refusal(lambda: mha_ext.attention(q, k, v, softcap=-1.0), "-1.0", kind=ValueError)
    refusal(lambda: mha_ext.attention(q, k, v, softcap=float("nan")), "nan", kind=ValueError)
    refusal(lambda: mha_ext.attention(q, k, v, scale="big"), "'big'", kind=TypeError)
    refusal(lambda: mha_ext.attention(q, k, v, deterministic="yes"), "yes", kind=TypeError)


def test_no_memory():
    """In words that libraries look for which then try a smaller batch."""
    endless, one = torch.zeros(1, 1, 1, 4).expand(1, 1, 2**46, 4), torch.zeros(1, 1, 1, 4)
    with pytest.raises(RuntimeError, match=r"^CPU out of memory\. A tensor \[1,1,70368744177664,4\] of Float could not be allocated"):
        mha_ext.attention(endless, one, one)


def test_heads():
    refusal(lambda: mha_ext.split_heads(torch.randn(2, 3, 10), 4), "[2,3,10]", "4", kind=ValueError)
    refusal(lambda: mha_ext.split_heads(torch.randn(2, 3, 8), 0), "0", kind=ValueError)
    refusal(lambda: mha_ext.split_heads(torch.randn(2, 3, 8), -2), "-2", kind=ValueError)
    refusal(lambda: mha_ext.split_heads(torch.randn(3, 8), 2), "[3,8]", kind=ValueError)
    refusal(lambda: mha_ext.split_heads(torch.randn(2, 3, 8), 2, torch.randn(7)), "[7]", "[8]", kind=ValueError)
    refusal(
        lambda: mha_ext.split_heads(torch.randn(2, 3, 8), 2, torch.randn(8).double()),
        "float64",
        "float32",
        kind=TypeError,
    )
    refusal(lambda: mha_ext.split_heads(torch.ones(2, 3, 8).long(), 2), "int64", kind=TypeError)
    refusal(lambda: mha_ext.merge_heads(torch.randn(2, 3, 8)), "[2,3,8]", kind=ValueError)
    refusal(lambda: mha_ext.merge_heads(torch.randn(2, 4, 3, 8), torch.eye(3)), "[3,3]", "[4,4]", kind=ValueError)
    refusal(lambda: mha_ext.merge_heads(torch.randn(2, 4, 3, 8), torch.eye(4).bfloat16()), "bfloat16", kind=TypeError)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_each_refusal_has_the_fix_of_its_argument():
    attention = lambda **given: mha_ext.attention(q, k, v, **given)
    for name, fix in (("scale", "multiply q by it if it is to be learned, or use .item[]"), ("softcap", "a number: use .item[]"), ("dropout_p", "a number: use .item[]")):
        refusal(lambda name=name: attention(**{name: torch.ones(2)}), name, fix, kind=TypeError)
    eight = torch.quantize_per_tensor(torch.ones(5, 7), 1.0, 0, torch.quint8)
    refusal(lambda: attention(mask=eight), "mask.dequantize[] > 0", kind=TypeError)
    refusal(lambda: attention(mask=torch.ones(5, 7).long()), "mask.bool[] or mask != 0", kind=TypeError)
    refusal(lambda: attention(mask=torch.ones(5, 7)), "pass it as bias=", "mask > 0", kind=TypeError)
    refusal(lambda: mha_ext.attention(q, k[:, :0], v[:, :0]), "the head counts [dimension 1] must agree", kind=ValueError)
    refusal(lambda: mha_ext.attention(q, k[:, :0], v), "key/value head counts [dimension 1] and the head counts [dimension 1]", kind=ValueError)


def test_masks_on_another_device_and_intervals_of_others():
    numbers, other = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64, device="meta")
    for mask, name in (
        (masks.Documents(torch.zeros(2, 7, dtype=torch.int64, device="meta")), "Documents"), (masks.Intervals(numbers, other), "Intervals"),
        (masks.Intervals(other, numbers), "Intervals"), (masks.Dense(torch.ones(5, 7, dtype=torch.bool, device="meta")), "mask"),
    ):  # fmt: skip
        refusal(lambda mask=mask: mha_ext.attention(q, k, v, mask=mask), f"{name} has a tensor on meta", "on cpu", kind=ValueError)
    for wrong in (numbers[:, :4], numbers.repeat(2, 1)):
        for mask in (masks.Intervals(numbers, wrong), masks.Intervals(wrong, numbers)):
            refusal(lambda mask=mask: mha_ext.attention(q, k, v, mask=mask), "it accepts [B,Sq] = [2,5]", kind=ValueError)


def test_softmax():
    refusal(lambda: mha_ext.masked_softmax(torch.randn(5)), "[5]", kind=ValueError)
    refusal(lambda: mha_ext.masked_softmax(torch.randn(2, 5, 7)), "[2,5,7]", kind=ValueError)
    refusal(lambda: mha_ext.masked_softmax(torch.ones(1, 1, 5, 7).long()), "int64", kind=TypeError)


def test_sdpa():
    sdpa = mha_ext.scaled_dot_product_attention
    refusal(lambda: sdpa(q, k, v), "[2,4,5,8]", "[2,2,7,8]", "enable_gqa")
    refusal(lambda: sdpa(torch.randn(2, 3, 5, 8), k, v, enable_gqa=True), "[2,3,5,8]", "[2,2,7,8]")
    refusal(lambda: sdpa(q, q, q, torch.ones(5, 6, dtype=torch.bool)), "[5,6]")
    refusal(lambda: sdpa(q, q, q, torch.ones(5, 5).long()), "int64")
    refusal(lambda: sdpa(torch.randn(8), torch.randn(8), torch.randn(8)), "[8]")


def test_modules():
    nn = mha_ext.nn
    refusal(lambda: nn.MultiheadAttention(10, 3), "10", "3", kind=(ValueError, AssertionError))
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    refusal(
        lambda: module(x, x, x, key_padding_mask=torch.zeros(2, 4, dtype=torch.bool)),
        "[2,4]",
        kind=(ValueError, RuntimeError),
    )
    refusal(
        lambda: module(x, x, x, attn_mask=torch.zeros(5, 4, dtype=torch.bool)), "[5,4]", kind=(ValueError, RuntimeError)
    )
    refusal(
        lambda: module(x, x, x, attn_mask=torch.zeros(3, 5, 5, dtype=torch.bool)),
        "[3,5,5]",
        kind=(ValueError, RuntimeError),
    )
    refusal(lambda: module(x[0, 0], x, x), "[8]", kind=(ValueError, RuntimeError, AssertionError))
    refusal(lambda: module(torch.randn(2, 5, 6), x, x), "[2,5,6]", kind=(ValueError, RuntimeError, AssertionError))
    refusal(lambda: nn.SelfAttention(16, 3, head_dim=None), "16", "3", kind=ValueError)
    refusal(lambda: nn.SelfAttention(16, 4, num_kv_heads=3), "4", "3", kind=ValueError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a device, CUDA tensors are served or refused elsewhere")
def test_cuda_without_cuda_says_why():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from mha_ext import _ops

    if _ops.without_cuda is None:
        pytest.skip("built with CUDA")
    with FakeTensorMode():
        x = torch.empty(1, 1, 2, 8, device="cuda")
        text = refusal(lambda: mha_ext.attention(x, x, x), "CUDA")
    assert _ops.without_cuda in text


def test_values_in_refusals_are_short():
    for x, shown in ((None, "None"), (2.5, "2.5"), ([1], "[1]"), ("x" * 38, repr("x" * 38)), ("x" * 39, "a str"), ("a\nb", repr("a\nb")), (object(), "a object")):
        assert mha_ext._checks.given(x) == shown
    assert mha_ext._checks.given(torch.ones(2, 3)) == "a float32 tensor of shape [2,3]"


@pytest.mark.parametrize("shape", [(7,), (2, 5, 7), (3, 1, 5, 7), (2, 3, 5, 7), (2, 4, 5, 6), (4, 7), (5, 6), (1, 2, 4, 5, 7)], ids=str)
def test_shapes_of_masks_in_exported_programs(shape):
    class Attend(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return mha_ext.attention(q, k, v, mask=mask)

    with pytest.raises(ValueError, match="mask has shape .*; accepted: "):
        torch.export.export(Attend(), (q, k, v, torch.ones(shape, dtype=torch.bool)), strict=False)
    torch.export.export(Attend(), (q, k, v, torch.ones(1, 4, 1, 7, dtype=torch.bool)), strict=False)
