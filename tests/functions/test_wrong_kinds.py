"""Every public function and module, called with the wrong kind of each argument: one sentence of ours, or it works."""

from __future__ import annotations

import inspect
import re
import traceback

import numpy
import pytest
import torch

import mha_ext
from mha_ext import biases, masks, nn

B, H, S, D = 2, 4, 5, 8
E = H * D
gen = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, generator=gen)


def ones(*shape, dtype=torch.int64):
    return torch.ones(*shape, dtype=dtype)


def kinds() -> dict:
    """What no argument, or few, can be."""
    with_values = torch.quantize_per_tensor(torch.rand(S, S), 0.1, 0, torch.quint8)
    return {
        "None": None, "str": "x", "list": [1.5], "tuple": (1, 2, 3), "dict": {}, "object": object(), "float": 2.5, "nan": float("nan"),
        "inf": float("inf"), "int": 3, "negative": -1, "bool": True, "huge": 2**63,
        "beyond floats": 10**400, "empty list": [], "complex": 1j, "numpy": numpy.ones((S, S)),
        "0-d": torch.tensor(1.5), "5-d": randn(2, 1, 1, 3, 7), "int tensor": ones(S, S), "bool tensor": ones(S, S, dtype=torch.bool),
        "complex tensor": torch.ones(B, H, S, D, dtype=torch.complex64), "float8 tensor": randn(B, H, S, D).to(torch.float8_e4m3fn),
        "sparse": torch.eye(S).to_sparse(), "sparse 3-d": torch.ones(B, S, E).to_sparse(),
        "nested": torch.nested.nested_tensor([randn(2, 3), randn(3, 3)]), "quantised": with_values,
        "quantised 3-d": torch.quantize_per_tensor(torch.rand(B, S, E), 0.1, 0, torch.quint8),
        "quantised 4-d": torch.quantize_per_tensor(torch.rand(B, H, S, D), 0.1, 0, torch.quint8),
        "meta": torch.empty(B, H, S, D, device="meta"), "meta 3-d": torch.empty(B, S, E, device="meta"), "type": torch.Tensor,
    }  # fmt: skip


FLAGS = {"bool"}
SIZES = {"int"}
NUMBERS = {"int", "float", "negative", "bool", "huge"}
OPTIONAL = {"None"}


class Case:
    """call(**good) works. `works`: for each argument, the kinds that are right, too; `names`: what messages call it."""

    def __init__(self, call, good, works=None, names=None):
        self.call, self.good, self.works, self.names = call, good, works or {}, names or {}


def tensors(n=3, heads=H):
    return dict(zip("qkv", (randn(B, heads, S, D) for _ in range(n))))


SCORES = {
    "mask": masks.Causal(), "bias": randn(S, S), "scale": 0.5, "softcap": 2.0, "sinks": randn(H),
}  # fmt: skip
SCORES_WORK = {
    "mask": OPTIONAL | {"bool tensor"}, "bias": OPTIONAL, "scale": OPTIONAL | NUMBERS, "softcap": {"int", "float", "bool", "huge"},
    "sinks": OPTIONAL,
}  # fmt: skip
DROPOUT = {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2])}
DROPOUT_WORKS = {"dropout_p": {"bool"}, "rng_state": OPTIONAL}
MIXES = {"pre_mix": torch.eye(H), "post_mix": torch.eye(H), "deterministic": True}
MIXES_WORK = {"pre_mix": OPTIONAL, "post_mix": OPTIONAL, "deterministic": FLAGS | OPTIONAL}
RETURNS = {"return_lse": True, "return_weights": True}
RETURNS_WORK = {"return_lse": FLAGS, "return_weights": FLAGS}
ATTENTION = {**SCORES, **DROPOUT, **MIXES, **RETURNS}
ATTENTION_WORKS = {**SCORES_WORK, **DROPOUT_WORKS, **MIXES_WORK, **RETURNS_WORK}
packed = dict(zip("qkv", (randn(S, H, D) for _ in range(3))))
starts = torch.tensor([0, 2, S])
PACKED = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 3, "max_seqlen_k": 3}
PACKED_WORK = {"cu_seqlens_q": {"list of starts"}, "max_seqlen_q": OPTIONAL | {"int"}, "max_seqlen_k": OPTIONAL | {"int"}}
without_weights = {name: value for name, value in ATTENTION.items() if name != "return_weights"}
parts = [randn(B, H, S, D), randn(B, H, S, D)], [randn(B, H, S), randn(B, H, S)]
SDPA = {
    "query": randn(B, H, S, D), "key": randn(B, H, S, D), "value": randn(B, H, S, D), "attn_mask": ones(S, S, dtype=torch.bool),
    "dropout_p": 0.5, "is_causal": True, "scale": 0.5, "enable_gqa": True,
}  # fmt: skip
pages = {"k": torch.ones(3, H, 4, D, dtype=torch.int8), "v": torch.ones(3, H, 4, D, dtype=torch.int8)}
CACHED = {
    "q": randn(B, H, S, D), **pages, "block_table": torch.tensor([[0, 1], [2, 0]]), "k_scale": torch.ones(1, H),
    "v_scale": torch.ones(1, H), **SCORES, "bias": randn(S, 8), "return_lse": True,
}  # fmt: skip



def part(*, batch, head, query, key):
    with mha_ext.dropout_part(batch=batch, head=head, query=query, key=key):
        pass


FUNCTIONS = {
    "dropout_part": Case(part, {"batch": 1, "head": 1, "query": 1, "key": 4}, dict.fromkeys(("batch", "head", "query"), SIZES)),
    "attention": Case(mha_ext.attention, {**tensors(), **ATTENTION}, ATTENTION_WORKS),
    "explain": Case(mha_ext.explain, {**tensors(), **ATTENTION}, ATTENTION_WORKS),
    "scaled_dot_product_attention": Case(
        mha_ext.scaled_dot_product_attention, SDPA,
        {"attn_mask": OPTIONAL | {"bool tensor", "0-d"}, "dropout_p": {"bool"}, "is_causal": FLAGS, "enable_gqa": FLAGS, "scale": OPTIONAL | NUMBERS},
        {"query": {"q", "attn_mask"}, "key": {"k", "attn_mask"}, "value": {"v"}},
    ),
    "attention_varlen": Case(
        mha_ext.attention_varlen, {**packed, **PACKED, **without_weights, "bias": randn(3, 3)}, {**ATTENTION_WORKS, **PACKED_WORK, "mask": OPTIONAL},
    ),
    "attention_qkvpacked": Case(
        mha_ext.attention_qkvpacked, {"qkv": randn(B, S, 3 * H, D), "num_heads": H, **ATTENTION}, ATTENTION_WORKS,
    ),
    "attention_cached": Case(
        torch.no_grad()(mha_ext.attention_cached), CACHED, {**SCORES_WORK, "mask": OPTIONAL, "return_lse": FLAGS},
        {"q": {"queries"}, "block_table": {"k"}},
    ),
    "masked_softmax": Case(
        mha_ext.masked_softmax, {"scores": randn(B, H, S, S), "mask": masks.Causal(), "bias": randn(S, S), "scale": 0.5, **DROPOUT},
        {"mask": SCORES_WORK["mask"], "bias": OPTIONAL, "scale": NUMBERS, **DROPOUT_WORKS}, {"scores": {"queries"}},
    ),
    "split_heads": Case(
        mha_ext.split_heads, {"x": randn(B, S, E), "num_heads": H, "bias": randn(E)}, {"bias": OPTIONAL}, {"x": {"queries"}},
    ),
    "merge_heads": Case(mha_ext.merge_heads, {"x": randn(B, H, S, D), "mix": randn(H, H)}, {"mix": OPTIONAL}, {"x": {"queries"}}),
    "merge_partials": Case(mha_ext.merge_partials, {"outs": parts[0], "lses": parts[1]}, names={"outs": {"out"}, "lses": {"lse"}}),
    "dropout_mask": Case(
        mha_ext.dropout_mask, {"rng_state": torch.tensor([1, 2]), "p": 0.5, "B": B, "H": H, "Sq": S, "Sk": S, "device": "cpu"},
        {"p": {"bool"}, "device": OPTIONAL, **dict.fromkeys(("B", "H", "Sq", "Sk"), SIZES)},
    ),
    "swap_attention": Case(mha_ext.swap_attention, {"model": torch.nn.Linear(2, 2)}),
}  # fmt: skip

SELF = {
    "d_model": E, "num_heads": H, "num_kv_heads": 2, "head_dim": D, "bias": True, "rope": True, "rope_base": 100.0,
    "rope_scaling": nn.LinearScaling(2.0), "qk_norm": True,
    "window": 3, "causal": True, "dropout": 0.1, "softcap": 2.0, "packed": False, "talking_heads": True, "head_communication": True,
    "sinks": True, "device": "cpu", "dtype": torch.float32,
}  # fmt: skip
SELF_WORKS = {
    "d_model": SIZES, "num_heads": set(), "num_kv_heads": OPTIONAL, "head_dim": OPTIONAL, "window": OPTIONAL | {"int", "huge", "beyond floats"},
    "dropout": {"bool"}, "softcap": {"int", "float", "bool", "huge"}, "rope_base": {"int", "float", "bool", "huge"}, "rope_scaling": OPTIONAL,
    "device": OPTIONAL, "dtype": OPTIONAL,
    **dict.fromkeys(("bias", "rope", "qk_norm", "causal", "packed", "talking_heads", "head_communication", "sinks"), FLAGS),
}  # fmt: skip
CROSS = {name: SELF[name] for name in inspect.signature(nn.CrossAttention).parameters if name in SELF} | {"context_dim": 7}
TORCHS = {
    "embed_dim": E, "num_heads": H, "dropout": 0.1, "bias": True, "add_bias_kv": True, "add_zero_attn": True, "kdim": 3, "vdim": 3,
    "batch_first": True, "device": "cpu", "dtype": torch.float32,
}  # fmt: skip
TORCHS_WORK = {
    "embed_dim": set(), "kdim": OPTIONAL | SIZES, "vdim": OPTIONAL | SIZES, "dropout": {"bool"}, "device": OPTIONAL, "dtype": OPTIONAL,
    **dict.fromkeys(("bias", "add_bias_kv", "add_zero_attn", "batch_first"), FLAGS),
}  # fmt: skip
NUMBERS = {"int", "float", "bool", "huge"}
YARN = {"factor": 2.0, "original_length": 64, "fast": 16.0, "slow": 0.5, "attention_factor": 1.5}
LLAMA3 = {"factor": 2.0, "original_length": 64, "low": 0.5, "high": 8.0}
CONSTRUCTORS = {
    "SelfAttention": Case(nn.SelfAttention, SELF, SELF_WORKS, {"rope_scaling": {"scaling"}, "rope": {"rope_scaling"}}),
    "CrossAttention": Case(nn.CrossAttention, CROSS, {**SELF_WORKS, "head_dim": OPTIONAL | SIZES, "context_dim": OPTIONAL | SIZES}),
    "MultiheadAttention": Case(nn.MultiheadAttention, TORCHS, TORCHS_WORK),
    "RotaryEmbedding": Case(nn.RotaryEmbedding, {"head_dim": D, "base": 100.0, "scaling": nn.NTKScaling(2.0)}, {"base": SELF_WORKS["rope_base"], "scaling": OPTIONAL}),
    "LinearScaling": Case(nn.LinearScaling, {"factor": 2.0}, {"factor": NUMBERS}),
    "NTKScaling": Case(nn.NTKScaling, {"factor": 2.0}, {"factor": NUMBERS}),
    "YaRNScaling": Case(nn.YaRNScaling, YARN, dict.fromkeys(YARN, NUMBERS) | {"attention_factor": OPTIONAL | NUMBERS}),
    "Llama3Scaling": Case(nn.Llama3Scaling, LLAMA3, dict.fromkeys(LLAMA3, NUMBERS) | {"low": NUMBERS - {"huge"}}),
}  # fmt: skip

x3 = randn(B, S, E)
FORWARD_WORKS = {"mask": SCORES_WORK["mask"], "bias": OPTIONAL, "return_weights": FLAGS, "position_ids": OPTIONAL}
FORWARDS = {
    "SelfAttention()": Case(
        nn.SelfAttention(E, H), {"x": x3, "mask": masks.Causal(), "bias": randn(S, S), "return_weights": True}, FORWARD_WORKS
    ),
    "SelfAttention(rope)()": Case(
        nn.SelfAttention(E, H, rope=True, qk_norm=True),
        {"x": x3, "mask": masks.Causal(), "bias": randn(S, S), "position_ids": torch.arange(S), "return_weights": True}, FORWARD_WORKS,
    ),
    "CrossAttention()": Case(
        nn.CrossAttention(E, H),
        {"x": x3, "context": randn(B, S, E), "mask": masks.Causal(), "bias": randn(S, S), "positions": torch.arange(S), "return_weights": True},
        FORWARD_WORKS | {"positions": OPTIONAL},
    ),
    "MultiheadAttention()": Case(
        nn.MultiheadAttention(E, H, batch_first=True),
        {
            "query": x3, "key": randn(B, S, E), "value": randn(B, S, E), "key_padding_mask": torch.zeros(B, S), "need_weights": True,
            "attn_mask": randn(S, S), "average_attn_weights": True, "is_causal": False,
        },
        {"key_padding_mask": OPTIONAL, "attn_mask": OPTIONAL | {"bool tensor"}, "need_weights": FLAGS, "average_attn_weights": FLAGS, "is_causal": FLAGS},
    ),
    "RotaryEmbedding()": Case(
        nn.RotaryEmbedding(D), {"x": randn(B, H, S, D), "start": 0, "position_ids": None}, {"start": {"int", "negative"}, "x": {"meta"}, "position_ids": OPTIONAL}
    ),
}  # fmt: skip
MASKS = {
    "Causal": Case(masks.Causal, {"align": "top_left"}),
    "Window": Case(masks.Window, {"left": 1, "right": 1}, dict.fromkeys(("left", "right"), OPTIONAL | {"int", "huge", "beyond floats"})),
    "Padding": Case(masks.Padding, {"key_lengths": torch.tensor([3, 4])}, {"key_lengths": {"tuple"}}, {"key_lengths": {"Padding"}}),
    "Dense": Case(masks.Dense, {"tensor": ones(S, S, dtype=torch.bool)}, {"tensor": {"bool tensor"}}, {"tensor": {"mask"}}),
    "Documents": Case(masks.Documents, {"ids": ones(B, S)}, {"ids": {"int tensor"}}, {"ids": {"Documents"}}),
    "Intervals": Case(
        masks.Intervals, {"begin": ones(B, S), "end": ones(B, S)}, dict.fromkeys(("begin", "end"), {"int tensor"}),
        dict.fromkeys(("begin", "end"), {"Intervals"}),
    ),
    "BlockSparse": Case(
        masks.BlockSparse, {"blocks": ones(1, 1, dtype=torch.bool), "block_size": 8}, {"blocks": {"bool tensor"}, "block_size": SIZES},
    ),
    "Strided": Case(masks.Strided, {"stride": 2, "local": 1, "block_size": 2}, dict.fromkeys(("stride", "local", "block_size"), SIZES)),
    "Dilated": Case(masks.Dilated, {"window": 2, "dilation": 1, "block_size": 2}, dict.fromkeys(("window", "dilation", "block_size"), SIZES)),
    "ALiBi": Case(biases.ALiBi, {"slopes": randn(H)}),
    "alibi_slopes": Case(biases.alibi_slopes, {"num_heads": H, "device": "cpu"}, {"num_heads": SIZES, "device": OPTIONAL}),
    "T5Relative": Case(
        biases.T5Relative, {"table": randn(32, H), "num_buckets": 32, "max_distance": 128, "bidirectional": True},
        {"bidirectional": FLAGS},
    ),
}  # fmt: skip
CASES = {**FUNCTIONS, **CONSTRUCTORS, **FORWARDS, **MASKS}
ARGUMENTS = [(name, argument) for name, case in CASES.items() for argument in case.good]


def sentence(error: BaseException, words: set[str]) -> str | None:
    """What is wrong with a refusal, or None."""
    text = str(error)
    first = text.split("\n")[0]
    if not isinstance(error, (TypeError, ValueError)):
        return f"{type(error).__name__}: {first}"
    place = traceback.extract_tb(error.__traceback__)[-1].filename
    if "mha_ext" not in place.replace("\\", "/").split("/")[-4:] and "/mha_ext/" not in place:
        return f"not ours but of {place}: {first}"
    if "\n" in text or re.search(r"[.!?]\s+[A-Z]", text) or len(text) > 500:
        return f"not one sentence: {first}"
    if "accept" not in text and "use " not in text:
        return f"does not say what is accepted: {text}"
    if not any(re.search(rf"\b{re.escape(word)}\b", text) for word in words):
        return f"names none of {words}: {text}"
    return None


@pytest.mark.filterwarnings("ignore:.*(nested|quantize|CSR|beta).*")
@pytest.mark.parametrize("name, argument", ARGUMENTS)
def test_wrong_kinds(name, argument):
    case, faults = CASES[name], []
    case.call(**case.good)
    words = {argument, *case.names.get(argument, ())}
    for kind, value in kinds().items():
        try:
            case.call(**{**case.good, argument: value})
        except Exception as error:  # noqa: BLE001
            if kind in case.works.get(argument, ()):
                faults.append(f"{kind}: refused, which should work: {error}")
            elif fault := sentence(error, words):
                faults.append(f"{kind}: {fault}")
        else:
            if kind not in case.works.get(argument, ()):
                faults.append(f"{kind}: accepted")
    assert not faults, "\n".join(faults)


def test_the_table_is_complete():
    """Every public callable, and every argument of it."""
    public = {name for name in mha_ext.__all__ if callable(getattr(mha_ext, name))} - {"Plan", "SwapReport", "SdpaUse"}  # results
    public -= {"use_for_sdpa"}  # has no arguments
    assert public <= set(FUNCTIONS)
    for name, case in CASES.items():
        call = case.call.forward if isinstance(case.call, torch.nn.Module) else case.call
        elsewhere = {"cache", "counts", "foreign"}  # test_refusals.py; below
        assert set(inspect.signature(call).parameters) - elsewhere - ({"position_ids"} if name == "SelfAttention()" else set()) == set(case.good), name


def test_block_tables_of_any_integer_type():
    out = FUNCTIONS["attention_cached"].call(**CACHED)
    for given in (CACHED["block_table"].int(), CACHED["block_table"].to(torch.uint8), CACHED["block_table"].tolist()):
        again = FUNCTIONS["attention_cached"].call(**{**CACHED, "block_table": given})
        assert all(map(torch.equal, again, out))


def test_numbers_of_numpy():
    q = randn(B, H, S, D)
    out = mha_ext.attention(q, q, q, scale=0.5)
    for scale in (numpy.float32(0.5), numpy.float64(0.5)):
        assert torch.equal(mha_ext.attention(q, q, q, scale=scale), out)
    with pytest.raises(ValueError, match="scale is an int beyond the largest float; accepted: a number"):
        mha_ext.attention(q, q, q, scale=10**400)
    with pytest.raises(ValueError, match="pre_mix has a tensor on meta but the queries are on cpu"):
        mha_ext.attention(q, q, q, pre_mix=torch.eye(H, device="meta"))
    assert mha_ext.split_heads(x3, numpy.int64(H)).shape == (B, H, S, D)


SCRIPTS = [
    mha_ext.attention, mha_ext.attention_varlen, mha_ext.scaled_dot_product_attention, mha_ext.split_heads, nn.SelfAttention(E, H),
    nn.CrossAttention(E, H), nn.MultiheadAttention(E, H), nn.RotaryEmbedding(D), torch.nn.Sequential(nn.RotaryEmbedding(D)),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("thing", SCRIPTS, ids=lambda thing: getattr(thing, "__name__", type(thing).__name__))
def test_torch_jit_script(thing):
    with pytest.raises(TypeError, match=r"was given to torch.jit.script; accepted: torch.compile or torch.export") as error:
        torch.jit.script(thing)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["attention", "masked_softmax", "merge_heads", "attention_cached", "attention_qkvpacked"])
def test_forward_mode(name):
    q = randn(B, H, S, D)
    call = {
        "attention_cached": lambda x: mha_ext.attention_cached(q, x, q), "attention": lambda x: mha_ext.attention(q, q, x, sinks=x[0, :, 0, 0]),
        "attention_qkvpacked": lambda x: mha_ext.attention_qkvpacked(x.expand(B, H, S, D).transpose(1, 2).repeat(1, 1, 3, 1), H),
    }.get(name, getattr(mha_ext, name))  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"^forward-mode differentiation \(jvp, .*; accepted: reverse mode"):
        torch.func.jvp(call, (q,), (q,))
    call(q)
    assert torch.func.jvp(lambda x: mha_ext.reference.attention(x, x, x), (q,), (q,))[1].abs().max() > 0


q4, x_of = randn(B, H, S, D), nn.SelfAttention(E, H)
FOREIGN = [
    (lambda **o: mha_ext.attention(q4, q4, q4, **o), mha_ext._foreign.FUNCTIONS, "attention"),
    (lambda **o: mha_ext.attention_varlen(*packed.values(), starts, starts, **o), mha_ext._foreign.FUNCTIONS, "attention_varlen"),
    (lambda **o: mha_ext.attention_qkvpacked(q4, 2, **o), mha_ext._foreign.FUNCTIONS, "attention_qkvpacked"),
    (lambda **o: mha_ext.attention_cached(q4, q4, q4, **o), mha_ext._foreign.FUNCTIONS, "attention_cached"),
    (lambda **o: nn.SelfAttention(E, H, **o), mha_ext._foreign.MODULES, "SelfAttention"),
    (lambda **o: nn.CrossAttention(E, H, **o), mha_ext._foreign.MODULES, "CrossAttention"),
    (lambda **o: x_of(x3, **o), mha_ext._foreign.MODULES, "SelfAttention"),
]


@pytest.mark.parametrize("call, names, called", FOREIGN, ids=[called for *_, called in FOREIGN])
def test_names_of_other_libraries(call, names, called):
    for name, fix in names.items():
        with pytest.raises(TypeError) as error:
            call(**{name: None})
        assert str(error.value) == f"{called} has no argument {name}; use {fix}."
    with pytest.raises(TypeError, match=rf"^{called} has no argument colour; accepted: .*mask|bias") as error:
        call(colour=1)
    assert not {"self", "foreign"} & set(str(error.value).rstrip(".").replace(",", "").split())


def said(name, **given):
    """The masks and biases that the sentence about another library's name gives, in its order."""
    found = re.findall(r"=((?:masks|biases)\.\w+\([^)]*\)|~?\w+(?:\.bool\(\))?\[.*?\])", mha_ext._foreign.FUNCTIONS[name])
    return [eval(expression, {"masks": masks, "biases": biases, **given}) for expression in found]


def test_the_fixes_give_what_the_names_mean():
    q, slopes, lengths = randn(B, H, S, D), torch.rand(H), torch.tensor([S, 2])
    sdpa, ours, short = torch.nn.functional.scaled_dot_product_attention, mha_ext.attention, q[:, :, :3]
    first, last = said("is_causal")
    torch.testing.assert_close(ours(short, q, q, mask=first), sdpa(short, q, q, is_causal=True))
    for mask in (last, *said("causal")):
        torch.testing.assert_close(ours(short, q, q, mask=mask), sdpa(short, q, q, torch.ones(3, S).tril(S - 3).bool()))
    hidden = torch.arange(S) >= lengths[:, None]
    paddings = [
        *said("key_padding_mask", key_padding_mask=hidden, lengths=lengths), *said("attention_mask", attention_mask=(~hidden).long(), lengths=lengths),
        *said("cache_seqlens", cache_seqlens=lengths),
    ]  # fmt: skip
    assert len(paddings) == 5
    for mask in paddings:
        torch.testing.assert_close(ours(q, q, q, mask=mask), sdpa(q, q, q, ~hidden[:, None, None, :]))
    (window,) = said("sliding_window", sliding_window=3)
    assert window.to_dense(1, 1, S, S)[0, 0].sum(-1).tolist() == [1, 2, 3, 3, 3]
    (alibi,) = said("alibi_slopes", alibi_slopes=slopes)
    distance = -(torch.arange(S)[:, None] - torch.arange(S)).abs()
    torch.testing.assert_close(ours(q, q, q, bias=alibi), sdpa(q, q, q, slopes[:, None, None] * distance))
