"""torch.ops.mha_ext.* do not trust their callers: what each check of the C++ layer refuses, beside a call that it lets pass.

What is on another device they refuse here where it is a meta tensor, and the op is told to run on the CPU all the same; tests/cuda has two devices.
"""

from __future__ import annotations

import cases
import pytest
import torch
from test_refusals import refusal

B, H, HK, SQ, SK, D, DV = 2, 4, 2, 5, 7, 8, 6
PAGES, PAGE = 5, 4


def ones(*shape, dtype=torch.int64):
    return torch.ones(shape, dtype=dtype)


def attention():
    return {
        "q": torch.randn(B, H, SQ, D),
        "k": torch.randn(B, HK, SK, D),
        "v": torch.randn(B, HK, SK, DV),
        "scale": 0.3,
    }


def packed_sequences():
    """Of 2 and 3 queries, and of 3 and 4 keys."""
    heads = {"q": torch.randn(1, H, 5, D), "k": torch.randn(1, HK, 7, D), "v": torch.randn(1, HK, 7, DV), "scale": 0.3}
    return heads | {"q_starts": torch.tensor([0, 2, 5]), "k_starts": torch.tensor([0, 3, 7]), "max_q": 3, "max_k": 4}


def backward(out=True):
    rows = {name: torch.zeros(B, H, SQ) for name in ("lse", "lse_rest")}
    return attention() | rows | {name: torch.randn(B, H, SQ, DV) for name in (("dout", "out") if out else ("dout",))}


def packed_backward():
    """Where q, k, v are slices of one tensor."""
    of_q, of_k = torch.randn(B, H, SQ, D), torch.randn(B, HK, SQ, D)
    rows = {name: torch.zeros(B, H, SQ) for name in ("lse", "lse_rest")}
    return {"q": of_q, "k": of_k, "v": of_k, "dout": of_q, "out": of_q, "scale": 0.3} | rows


def cached(stored=torch.float32, paged=True, scales=(1, HK)):
    kv = [torch.zeros(*((PAGES, HK, PAGE) if paged else (B, HK, SK)), n).to(stored) for n in (D, DV)]
    given = {"q": torch.randn(B, H, SQ, D), "k": kv[0], "v": kv[1], "scale": 0.3}
    given |= {"block_table": torch.tensor([[0, 3], [4, 1]]), "page_size": PAGE} if paged else {}
    return given | ({name: torch.ones(scales) for name in ("k_scale", "v_scale")} if stored == torch.int8 else {})


def softmax():
    return {"scores": torch.randn(B, H, SQ, SK), "scale": 1.0}


def softmax_backward():
    return softmax() | {"dout": torch.randn(B, H, SQ, SK), "lse": torch.zeros(B, H, SQ)}


CALLS = {
    "attention_fwd": attention, "attention_fwd, packed": packed_sequences, "attention_bwd": backward, "attention_packed_bwd": packed_backward,
    "attention_packed_fwd": lambda: {"qkv": torch.randn(B, SQ, H + 2 * HK, D), "num_heads": H, "scale": 0.3},
    "attention_cached": cached, "attention_cached, int8": lambda: cached(torch.int8),
    "attention_cached, scales of keys": lambda: cached(torch.int8, scales=(PAGES, HK, PAGE)),
    "attention_cached, one piece": lambda: cached(paged=False),
    "attention_mixed_fwd": lambda: attention() | {"pre_mix": torch.eye(H), "post_mix": torch.eye(H)},
    "attention_mixed_bwd": lambda: backward(out=False) | {"pre_mix": torch.eye(H)},
    "masked_softmax_fwd": softmax, "masked_softmax_bwd": softmax_backward,
    "split_heads": lambda: {"x": torch.randn(B, SQ, H * D), "num_heads": H, "bias": torch.randn(H * D)},
    "merge_heads": lambda: {"x": torch.randn(B, H, SQ, D), "mix": torch.eye(H)},
    "dropout_mask": lambda: {"rng_state": torch.tensor([1, 2]), "p": 0.5, "B": B, "H": H, "Sq": SQ, "Sk": SK},
}  # fmt: skip
double, half, boolean = torch.float64, torch.float16, torch.bool
starts = torch.tensor
# The call, what is changed in it, and words of the refusal.
REFUSED = [
    ("attention_fwd", {"q": torch.randn(H, SQ, D)}, ["[4,5,8]", "accepts [B,H,S,D]"]),
    ("attention_fwd", {"k": torch.randn(HK, SK, D)}, ["[2,7,8]", "accepts [B,H,S,D]"]),
    ("attention_fwd", {"v": torch.randn(HK, SK, D)}, ["[2,7,8]", "accepts [B,H,S,D]"]),
    ("attention_fwd", {"k": torch.zeros(B, HK, SK, D, dtype=double)}, ["Float, Double, Float", "one dtype"]),
    ("attention_fwd", {"v": torch.zeros(B, HK, SK, DV, dtype=half)}, ["Float, Float, Half", "one dtype"]),
    ("attention_fwd", {name: ones(*x.shape) for name, x in attention().items() if name in "qkv"}, ["q has dtype Long"]),
    ("attention_fwd", {"q": torch.zeros(B, 3, SQ, D)}, ["q has 3 heads and k has 2"]),
    ("attention_fwd", {"k": torch.zeros(B, 0, SK, D), "v": torch.zeros(B, 0, SK, DV)}, ["q has 4 heads and k has 0"]),
    ("attention_fwd", {"k": torch.zeros(1, HK, SK, D)}, ["k has shape [1,2,7,8]; the op accepts [2,2,any,8]"]),
    ("attention_fwd", {"k": torch.zeros(B, HK, SK, 7)}, ["k has shape [2,2,7,7]"]),
    ("attention_fwd", {"v": torch.zeros(B, HK, 3, DV)}, ["v has shape [2,2,3,6]; the op accepts [2,2,7,any]"]),
    ("attention_fwd", {"v": torch.zeros(B, 1, SK, DV)}, ["v has shape [2,1,7,6]"]),
    ("attention_fwd", {"bias": torch.ones(SQ, SK)}, ["bias has shape [5,7]; the op accepts [1or2,1or4,1or5,1or7]"]),
    ("attention_fwd", {"bias": torch.ones(3, 1, 1, 1)}, ["bias has shape [3,1,1,1]"]),
    ("attention_fwd", {name: torch.zeros(0, *x.shape[1:]) for name, x in attention().items() if name in "qkv"} | {"bias": torch.ones(2, 1, 1, 1)},
     ["bias has shape [2,1,1,1]; the op accepts [1or0,1or4,1or5,1or7]"]),
    ("attention_fwd", {"bias": torch.ones(1, H, SK)}, ["bias has shape [1,4,7]; the op accepts [1or2,1or4,11]"]),
    ("attention_fwd", {"bias": torch.ones(1, 1, 1, SK, dtype=double)}, ["bias has dtype Double; the op accepts Float"]),
    ("attention_fwd", {"bias": ones(1, 1, 1, SK)}, ["bias has dtype Long"]),
    ("attention_fwd", {"mask": torch.ones(1, 1, SQ, SK)}, ["mask has dtype Float; the op accepts bool"]),
    ("attention_fwd", {"mask": ones(1, 1, SQ, 6, dtype=boolean)}, ["[1,1,5,6]"]),
    ("attention_fwd", {"mask": ones(1, 3, SQ, SK, dtype=boolean)}, ["[1,3,5,7]"]),
    ("attention_fwd", {"begin": ones(B, 4)}, ["begin has shape [2,4]; the op accepts [1or2,1or5]"]),
    ("attention_fwd", {"end": ones(3, SQ)}, ["end has shape [3,5]"]),
    ("attention_fwd", {"begin": torch.ones(B, SQ)}, ["begin has dtype Float; the op accepts int64"]),
    ("attention_fwd", {"query_ids": ones(B, SQ)}, ["one of query_ids and key_ids is missing"]),
    ("attention_fwd", {"key_ids": ones(B, SK)}, ["one of query_ids and key_ids is missing"]),
    ("attention_fwd", {"query_ids": ones(B, SQ), "key_ids": ones(B, 6)}, ["key_ids has shape [2,6]; the op accepts [1or2,7]"]),
    ("attention_fwd", {"query_ids": ones(B, 1), "key_ids": ones(B, SK)}, ["query_ids has shape [2,1]"]),
    ("attention_fwd", {"query_ids": ones(B, SQ), "key_ids": torch.ones(B, SK)}, ["key_ids has dtype Float"]),
    ("attention_fwd", {"blocks": ones(1, 1, 2, 2, dtype=boolean), "block_size": 0}, ["block_size is 0"]),
    ("attention_fwd", {"blocks": ones(1, 1, 2, 2), "block_size": 4}, ["blocks has dtype Long; the op accepts bool"]),
    ("attention_fwd", {"blocks": ones(1, 1, 2, 3, dtype=boolean), "block_size": 4}, ["[1,1,2,3]; the op accepts [1or2,1or4,2,2]"]),
    ("attention_fwd", {"blocks": ones(1, 1, 2, 1, dtype=boolean), "block_size": 5}, ["[1,1,2,1]; the op accepts [1or2,1or4,1,2]"]),
    ("attention_fwd", {"sinks": torch.ones(3)}, ["sinks has shape [3]; the op accepts [4]"]),
    ("attention_fwd", {"sinks": torch.ones(H, dtype=double)}, ["sinks has dtype Double; the op accepts Float"]),
    ("attention_fwd", {"softcap": -1.0}, ["softcap is -1"]),
    ("attention_fwd", {"dropout_p": 0.5}, ["rng_state is missing"]),
    ("attention_fwd", {"dropout_p": 0.5, "rng_state": ones(3)}, ["rng_state has shape [3]; the op accepts [2]"]),
    ("attention_fwd", {"dropout_p": 0.5, "rng_state": ones(B, H, 2)}, ["rng_state has shape [2,4,2]; the op accepts [any,any,6]"]),
    ("attention_fwd", {"dropout_p": 0.5, "rng_state": ones(1, 6)}, ["rng_state has shape [1,6]; the op accepts [6]"]),
    ("attention_fwd", {"dropout_p": 0.5, "rng_state": ones(6)}, ["the first key at 1; the op accepts multiples of 4"]),
    ("attention_fwd", {"dropout_p": 0.5, "rng_state": torch.ones(2)}, ["rng_state has dtype Float"]),
    ("attention_fwd", {"dropout_p": 1.5, "rng_state": ones(2)}, ["dropout_p is 1.5"]),
    ("attention_fwd", {"dropout_p": -0.5, "rng_state": ones(2)}, ["dropout_p is -0.5"]),
    ("attention_fwd, packed", {"k_starts": None}, ["one of q_starts and k_starts is missing"]),
    ("attention_fwd, packed", {"q_starts": None}, ["one of q_starts and k_starts is missing"]),
    ("attention_fwd, packed", {name: torch.zeros(2, n, 5, 8) for name, n in (("q", H), ("k", HK), ("v", HK))}, ["q has batch size 2"]),
    ("attention_fwd, packed", {"max_q": -1}, ["the longest lengths are -1 and 4"]),
    ("attention_fwd, packed", {"max_k": -1}, ["the longest lengths are 3 and -1"]),
    ("attention_fwd, packed", {"q_starts": ones(1, 3)}, ["q_starts has shape [1,3]; the op accepts [sequences+1]"]),
    ("attention_fwd, packed", {"q_starts": ones(0), "k_starts": ones(0)}, ["q_starts has shape [0]"]),
    ("attention_fwd, packed", {"q_starts": starts([1, 2, 5])}, ["q_starts goes from 1 to 5; it must go from 0 to the number of packed rows, 5"]),
    ("attention_fwd, packed", {"k_starts": starts([0, 3, 6])}, ["k_starts goes from 0 to 6"]),
    ("attention_fwd, packed", {"q_starts": starts([0, 4, 3, 5]), "k_starts": starts([0, 3, 5, 7]), "max_q": 4}, ["sequence 1 the length -1"]),
    ("attention_fwd, packed", {"max_k": 3}, ["k_starts gives sequence 1 the length 4; accepted: lengths from 0 to the longest, 3"]),
    ("attention_fwd, packed", {"q_starts": starts([0, 4, 5])}, ["q_starts gives sequence 0 the length 4"]),
    ("attention_fwd, packed", {"k_starts": starts([0, 3, 5, 7])}, ["k_starts has shape [4]; the op accepts [3]"]),
    ("attention_fwd, packed", {"q_starts": torch.tensor([0.0, 2, 5])}, ["q_starts has dtype Float"]),
    ("attention_fwd, packed", {"return_weights": True}, ["return_weights is true for packed sequences"]),
    ("attention_packed_fwd", {"qkv": torch.randn(B, SQ, H * D)}, ["qkv has shape [2,5,32]"]),
    ("attention_packed_fwd", {"num_heads": 3}, ["num_heads is 3"]),
    ("attention_packed_fwd", {"num_heads": -2}, ["num_heads is -2"]),
    ("attention_packed_fwd", {"num_heads": 10}, ["num_heads is 10"]),
    ("attention_packed_fwd", {"num_heads": H + 2 * HK}, ["q has 8 heads and k has 0"]),
    ("attention_bwd", {"dout": torch.zeros(B, H, SQ, D)}, ["dout has shape [2,4,5,8]; the op accepts [2,4,5,6]"]),
    ("attention_bwd", {"out": torch.zeros(B, H, SK, DV)}, ["out has shape [2,4,7,6]"]),
    ("attention_bwd", {"dout": torch.zeros(B, H, SQ, DV, dtype=half)}, ["dout and q have different dtypes"]),
    ("attention_bwd", {"lse": torch.zeros(B, H, SK)}, ["lse has shape [2,4,7]; the op accepts [2,4,5]"]),
    ("attention_bwd", {"lse_rest": torch.zeros(B, 1, SQ)}, ["lse_rest has shape [2,1,5]"]),
    ("attention_bwd", {"lse": torch.zeros(B, H, SQ, dtype=double)}, ["lse has dtype Double; the op accepts Float"]),
    ("attention_bwd", {"dlse": torch.zeros(B, H, SQ, 1)}, ["dlse has shape"]),
    ("attention_bwd", {"dweights": torch.zeros(B, H, SQ, SQ)}, ["dweights has shape [2,4,5,5]; the op accepts [2,4,5,7]"]),
    ("attention_bwd", {"dweights": torch.zeros(B, H, SQ, SK, dtype=half)}, ["dweights and q have different dtypes"]),
    ("attention_bwd", {"need_dbias": True}, ["need_dbias is true but there is no bias"]),
    ("attention_packed_bwd", {name: torch.randn(B, HK, SK, D) for name in "kv"}, ["the op accepts one length and head size"]),
    ("attention_packed_bwd", {"v": torch.randn(B, HK, SQ, DV), **{name: torch.randn(B, H, SQ, DV) for name in ("out", "dout")}}, ["one length and head size"]),
    ("attention_packed_bwd", {**{name: x[:1] for name, x in packed_backward().items() if name != "scale"}, "q_starts": starts([0, SQ]),
                              "k_starts": starts([0, SQ]), "max_q": SQ, "max_k": SQ}, ["no packed sequences"]),
    ("attention_cached", {"q": torch.randn(H, SQ, D)}, ["[4,5,8]", "[pages,Hk,page_size,D]"]),
    ("attention_cached", {"k": torch.randn(HK, PAGE, D)}, ["[2,4,8]", "[pages,Hk,page_size,D]"]),
    ("attention_cached", {"v": torch.randn(HK, PAGE, D)}, ["[2,4,8]", "[pages,Hk,page_size,D]"]),
    ("attention_cached", {"q": torch.randn(B, 3, SQ, D)}, ["q has 3 heads and k has 2"]),
    ("attention_cached", {"k": torch.zeros(PAGES, HK, PAGE, D).half()}, ["k has dtype Half and q Float"]),
    ("attention_cached", {"v": torch.zeros(PAGES, HK, PAGE, DV).half()}, ["k and v have different dtypes"]),
    ("attention_cached", {"block_table": ones(3, 2)}, ["block_table has shape [3,2]; the op accepts [2,any]"]),
    ("attention_cached", {"block_table": torch.ones(B, 2)}, ["block_table has dtype Float"]),
    ("attention_cached", {"page_size": 0}, ["page_size is 0; it must be positive"]),
    ("attention_cached", {"page_size": 2}, ["k has shape [5,2,4,8]; the op accepts [any,2,2,8]"]),
    ("attention_cached", {"v": torch.zeros(4, HK, PAGE, DV)}, ["v has shape [4,2,4,6]; the op accepts [5,2,4,any]"]),
    ("attention_cached", {"k_scale": torch.ones(1, HK)}, ["k_scale or v_scale is given for keys and values that are not quantised"]),
    ("attention_cached", {"v_scale": torch.ones(1, HK)}, ["k_scale or v_scale is given for keys and values that are not quantised"]),
    ("attention_cached, one piece", {"k": torch.zeros(3, HK, SK, D), "v": torch.zeros(3, HK, SK, DV)}, ["k has shape [3,2,7,8]; the op accepts [2,2,any,8]"]),
    ("attention_cached, int8", {"k_scale": None}, ["k_scale is missing"]),
    ("attention_cached, int8", {"v_scale": None}, ["v_scale is missing"]),
    ("attention_cached, int8", {"k_scale": torch.ones(3, HK)}, ["k_scale has shape [3,2]; the op accepts [1or2,2]"]),
    ("attention_cached, int8", {"k_scale": torch.ones(1, HK, dtype=double)}, ["k_scale has dtype Double; the op accepts float32"]),
    ("attention_cached, int8", {"k_scale": torch.ones(B, HK)}, ["k_scale and v_scale have shapes [2,2] and [1,2]"]),
    ("attention_cached, int8", {"v_scale": torch.ones(PAGES, HK, PAGE)}, ["k_scale and v_scale have shapes"]),
    ("attention_cached, int8", {"q": torch.zeros(B, H, SQ, D, dtype=double)}, ["q is float64 with quantised keys"]),
    ("attention_cached, scales of keys", {"v_scale": torch.ones(PAGES, HK, 3)}, ["v_scale has shape [5,2,3]; the op accepts [5,2,4]"]),
    ("attention_mixed_fwd", {"pre_mix": torch.eye(3)}, ["pre_mix has shape [3,3]; the op accepts [4,4]"]),
    ("attention_mixed_fwd", {"post_mix": torch.eye(H, dtype=double)}, ["post_mix has dtype Double; the op accepts Float"]),
    ("attention_mixed_bwd", {"post_mix": torch.eye(3)}, ["post_mix has shape [3,3]"]),
    ("attention_mixed_bwd", {"lse": torch.zeros(B, H, SK)}, ["lse has shape [2,4,7]"]),
    ("masked_softmax_fwd", {"scores": torch.randn(H, SQ, SK)}, ["scores has shape [4,5,7]; the op accepts [any,any,any,any]"]),
    ("masked_softmax_fwd", {"scores": ones(B, H, SQ, SK)}, ["scores has dtype Long"]),
    ("masked_softmax_fwd", {"bias": torch.ones(1, H, SQ + SK - 1)}, ["bias has shape [1,4,11]; this op accepts four dimensions"]),
    ("masked_softmax_bwd", {"dout": torch.randn(B, H, SQ, SQ)}, ["dout has shape [2,4,5,5]"]),
    ("masked_softmax_bwd", {"lse": torch.randn(B, H, SK)}, ["lse has shape [2,4,7]"]),
    ("masked_softmax_bwd", {"dout": torch.randn(B, H, SQ, SK).half()}, ["dtypes Half and Float; the op accepts those of forward: Float and Float"]),
    ("masked_softmax_bwd", {"lse": torch.zeros(B, H, SQ, dtype=double)}, ["dtypes Float and Double"]),
    ("masked_softmax_bwd", {"need_dbias": True}, ["need_dbias is true but there is no bias"]),
    ("split_heads", {"x": torch.randn(B, SQ, 10)}, ["[2,5,10]", "num_heads is 4"]),
    ("split_heads", {"x": torch.randn(B, 1, SQ, H * D)}, ["[2,1,5,32]"]),
    ("split_heads", {"x": torch.randn(B, 1, H, D)}, ["[2,1,4,8]"]),
    ("split_heads", {"num_heads": 0}, ["num_heads is 0"]),
    ("split_heads", {"bias": torch.randn(H)}, ["bias has shape [4]; the op accepts [32]"]),
    ("split_heads", {"bias": torch.zeros(H * D, dtype=half)}, ["bias and x have different dtypes"]),
    ("merge_heads", {"x": torch.randn(B, SQ, 10)}, ["[2,5,10]"]),
    ("merge_heads", {"mix": torch.eye(3)}, ["mix has shape [3,3]"]),
    ("merge_heads", {"mix": torch.eye(H, dtype=half)}, ["mix and x have different dtypes"]),
    ("dropout_mask", {"rng_state": torch.tensor([1.0, 2.0])}, ["rng_state has dtype Float"]),
    ("dropout_mask", {"rng_state": torch.tensor(1)}, ["rng_state has shape []; the op accepts [2]"]),
    ("dropout_mask", {"p": 1.5}, ["p is 1.5"]),
    ("dropout_mask", {"p": -0.5}, ["p is -0.5"]),
    *(("dropout_mask", {name: -2}, ["-2", "sizes must not be negative"]) for name in ("B", "H", "Sq", "Sk")),
]  # fmt: skip


def run(name, changed):
    op = getattr(torch.ops.mha_ext, name.split(",")[0]).default
    return op(*cases.op_arguments(op, **{**CALLS[name](), **changed}))


@pytest.mark.parametrize(
    "name,changed,words", REFUSED, ids=[f"{name}: {' '.join(changed)}" for name, changed, _ in REFUSED]
)
def test_ops_refuse(name, changed, words):
    refusal(lambda: run(name, changed), *words, kind=RuntimeError)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_changed_there_runs_as_it_was(name):
    run(name, {})


EVERYTHING = {
    "bias": torch.zeros(1, 1, 1, SK), "mask": ones(1, 1, 1, SK, dtype=boolean), "begin": ones(1, 1), "end": ones(1, 1), "query_ids": ones(1, SQ),
    "key_ids": ones(1, SK), "blocks": ones(1, 1, 1, 1, dtype=boolean), "block_size": 8, "sinks": torch.zeros(H), "dropout_p": 0.5, "rng_state": ones(2),
}  # fmt: skip
WITH_MORE = CALLS | {
    "attention_fwd": lambda: attention() | EVERYTHING,
    "attention_bwd": lambda: backward() | {"dlse": torch.zeros(B, H, SQ), "dweights": torch.zeros(B, H, SQ, SK)},
}
WITH_ONE_TENSOR = ("attention_packed_fwd", "masked_softmax_fwd", "dropout_mask")


@pytest.mark.parametrize(
    "name,moved",
    [
        (name, moved)
        for name, call in WITH_MORE.items()
        for moved, x in call().items()
        if isinstance(x, torch.Tensor) and name not in WITH_ONE_TENSOR
    ],
)
def test_ops_refuse_tensors_of_another_device(name, moved):
    op, given = getattr(torch.ops.mha_ext, name.split(",")[0]).default, WITH_MORE[name]()
    on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    op.redispatch(on_cpu, *cases.op_arguments(op, **given))
    given[moved] = given[moved].to("meta")
    words = "on different devices" if moved in ("q", "x", "scores") else f"{moved} and"
    refusal(lambda: op.redispatch(on_cpu, *cases.op_arguments(op, **given)), words, "devices", kind=RuntimeError)


def test_what_broadcasts_is_accepted():
    one = {
        "bias": torch.ones(1, 1, 1, 1),
        "mask": ones(B, 1, 1, SK, dtype=boolean),
        "begin": torch.zeros(1, 1).long(),
        "end": ones(B, 1) * SK,
    }
    run(
        "attention_fwd",
        one
        | {
            "query_ids": ones(1, SQ),
            "key_ids": ones(B, SK),
            "blocks": ones(B, 1, 2, 2, dtype=boolean),
            "block_size": 4,
        },
    )
    run(
        "attention_fwd",
        {"bias": torch.ones(1, H, SQ + SK - 1), "dropout_p": 0.5, "rng_state": torch.tensor([1, 2, 0, 0, 0, 4])},
    )
    run("attention_fwd", {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2, 0, 0, 0, 4]).expand(B, H, 6)})


@pytest.mark.parametrize("name", ["attention_bwd", "attention_packed_bwd", "masked_softmax_bwd"])
def test_the_gradient_of_a_bias_has_its_type(name):
    given = {
        key: x.bfloat16() if isinstance(x, torch.Tensor) and "lse" not in key else x for key, x in CALLS[name]().items()
    }
    for dtype in (torch.bfloat16, torch.float32):
        found = run(name, given | {"bias": torch.zeros(1, H, 1, 1, dtype=dtype), "need_dbias": True})
        (dbias,) = (x for x in found if x.shape == (1, H, 1, 1))
        assert dbias.dtype == dtype and dbias.isfinite().all()


def test_strides_of_what_a_mask_has_for_each_sequence():
    """One row for all, or rows that lie apart: as their contiguous copies."""
    big = torch.randint(0, 3, (2 * B, 2 * SK), generator=cases.generator(0))
    for rows in (slice(1), slice(0, 2 * B, 2)):
        for columns in (slice(SK), slice(None, None, 2)):
            ids = big[rows, columns]
            end = big[rows, columns][:, :SQ] * 3
            given = {"query_ids": ids[:, SK - SQ :], "key_ids": ids, "end": end}
            copies = {name: x.expand(B, -1).contiguous() for name, x in given.items()}
            q = attention()
            assert torch.equal(run("attention_fwd", q | given)[0], run("attention_fwd", q | copies)[0])


ZERO = {name: torch.zeros(B, n, 0, D) for name, n in (("q", H), ("k", HK), ("v", HK))}
# The call, what is changed in it, and the shape of its first output.
AT_THE_EDGE = [
    ("attention_fwd", ZERO | {"bias": torch.zeros(1, H, 0)}, (B, H, 0, D)),
    ("attention_fwd", {name: torch.zeros(0, *x.shape[1:]) for name, x in attention().items() if name in "qkv"} |
     {"bias": torch.zeros(1, 1, 1, 1), "mask": ones(0, 1, 1, 1, dtype=boolean), "dropout_p": 0.5, "rng_state": ones(0, H, 6)}, (0, H, SQ, DV)),
    ("attention_fwd", {"q": torch.zeros(B, 0, SQ, D)}, (B, 0, SQ, DV)),
    ("attention_fwd", {"q": torch.zeros(B, 0, SQ, D), "k": torch.zeros(B, 0, SK, D), "v": torch.zeros(B, 0, SK, DV)}, (B, 0, SQ, DV)),
    ("attention_fwd", {"k": torch.zeros(B, 1, SK, D), "v": torch.zeros(B, 1, SK, DV)}, (B, H, SQ, DV)),
    ("attention_fwd", {"blocks": ones(1, 1, SQ, SK, dtype=boolean), "block_size": 1}, (B, H, SQ, DV)),
    ("attention_fwd", {"dropout_p": 1.0, "rng_state": starts([1, 2, 1, 1, 1, 1])[:2]}, (B, H, SQ, DV)),  # what comes after is not its own
    ("attention_fwd, packed", {"q_starts": starts([0, 2, 5, -9])[:3], "k_starts": starts([0, 3, 7, -9])[:3]}, (1, H, 5, DV)),
    ("attention_fwd, packed", {"q_starts": starts([0, 0, 3, 5]), "k_starts": starts([0, 3, 7, 7]), "max_q": 3}, (1, H, 5, DV)),
    ("attention_fwd, packed", {name: x[:, :, :0] for name, x in packed_sequences().items() if name in "qkv"} |
     {"q_starts": starts([0]), "k_starts": starts([0]), "max_q": 0, "max_k": 0}, (1, H, 0, DV)),
    ("attention_packed_fwd", {"qkv": torch.zeros(B, SQ, H + 2 * HK, 3)}, (B, H, SQ, 3)),
    ("attention_packed_fwd", {"num_heads": 0}, (B, 0, SQ, D)),
    ("attention_packed_fwd", {"qkv": torch.zeros(B, SQ, 0, D), "num_heads": 0}, (B, 0, SQ, D)),
    ("attention_packed_fwd", {"qkv": torch.zeros(1, SQ, H + 2 * HK, D), "q_starts": starts([0, 2, SQ]), "k_starts": starts([0, 2, SQ]),
                              "max_q": 3, "max_k": 3}, (1, H, SQ, D)),
    ("attention_cached", {"k": torch.zeros(PAGES, HK, 1, D), "v": torch.zeros(PAGES, HK, 1, DV), "page_size": 1}, (B, H, SQ, DV)),
    ("attention_cached", {"q": torch.zeros(B, 0, SQ, D), "k": torch.zeros(PAGES, 0, PAGE, D), "v": torch.zeros(PAGES, 0, PAGE, DV)}, (B, 0, SQ, DV)),
    ("attention_cached", {"k": torch.zeros(PAGES, 1, PAGE, D), "v": torch.zeros(PAGES, 1, PAGE, DV)}, (B, H, SQ, DV)),
    ("split_heads", {"num_heads": 1}, (B, 1, SQ, H * D)),
    *(("dropout_mask", {"p": p}, (B, H, SQ, SK)) for p in (0.0, 1.0)),
    *(("dropout_mask", {name: 0}, [0 if name == key else n for key, n in (("B", B), ("H", H), ("Sq", SQ), ("Sk", SK))])
      for name in ("B", "H", "Sq", "Sk")),
]  # fmt: skip


@pytest.mark.parametrize("name,changed,shape", AT_THE_EDGE)
def test_what_is_just_accepted(name, changed, shape):
    found = run(name, changed)
    assert (found if isinstance(found, torch.Tensor) else found[0]).shape == tuple(shape)


@pytest.mark.parametrize("name", ["attention_bwd", "attention_packed_bwd"])
def test_without_query_heads_keys_and_values_have_gradients_of_zero(name):
    """In memory that held something else before."""
    none = {key: x[:, :0] for key, x in CALLS[name]().items() if key not in ("k", "v", "scale")}
    for n in (D, DV, H + 2 * HK):
        [torch.full((B, HK, max(SQ, SK), n), torch.nan) for _ in range(20)]
    found = run(name, none)
    for grad in found[:1] if name == "attention_packed_bwd" else found[1:3]:
        assert grad.numel() and not grad.any()


@pytest.mark.parametrize("last", [0, 1, 3])
@pytest.mark.parametrize("sizes", [(2, 3, 4), (1, 3, 4), (2, 0, 4), (2, 3, 1), (1, 1, 1)])
def test_outputs_are_dense(sizes, last):
    """With torch's strides, those of attention in the order of the queries'."""
    mask = run("dropout_mask", dict(zip(("B", "H", "Sq", "Sk"), (*sizes, last))))
    assert mask.stride() == torch.empty(*sizes, last).stride()
    b, h, s = sizes
    v = torch.zeros(b, h, SK, last)
    for q in (torch.zeros(b, h, s, D), torch.zeros(D).as_strided((b, h, s, D), (0, 0, 0, 1))):
        assert run("attention_fwd", {"q": q, "k": v.new_zeros(b, h, SK, D), "v": v})[0].stride() == mask.stride()
    q = torch.zeros(s, b, h, D).permute(1, 2, 0, 3)
    out = run("attention_fwd", {"q": q, "k": v.new_zeros(b, h, SK, D), "v": v})[0]
    if max(sizes) > 1 and min(sizes) > 1:
        assert out.stride() == torch.empty(s, b, h, last).permute(1, 2, 0, 3).stride()


@pytest.mark.parametrize("width", [1, 2, D])
def test_only_what_has_another_last_stride_is_copied(width):
    given = {name: torch.randn(B, 8, n, 2 * width) for name, n in (("q", H), ("k", HK), ("v", HK))}
    whole = {name: x[..., :width].transpose(1, 2) for name, x in given.items()}
    apart = {name: x[..., ::2].transpose(1, 2) for name, x in given.items()}
    for views, copied in ((whole, False), (apart, width > 1)):
        with torch.profiler.profile() as profile:
            out = run("attention_fwd", views)[0]
        assert ("aten::clone" in {event.key for event in profile.key_averages()}) == copied
        copies = {name: x.contiguous() for name, x in views.items()}
        assert torch.equal(out, run("attention_fwd", copies)[0])


@pytest.mark.parametrize("name", WITH_MORE)
def test_outputs_are_as_fakes_tell(name):
    """Those that nobody asked for, too, which are empty."""
    op, given = getattr(torch.ops.mha_ext, name.split(",")[0]).default, WITH_MORE[name]()
    real, fake = (
        op(*cases.op_arguments(op, **args))
        for args in (given, {key: x.to("meta") if isinstance(x, torch.Tensor) else x for key, x in given.items()})
    )
    for x, told in zip(*((found,) if isinstance(found, torch.Tensor) else found for found in (real, fake))):
        assert (x.shape, x.dtype, x.stride()) == (told.shape, told.dtype, told.stride())


def test_cached_attention_takes_relative_biases():
    given = attention() | {"bias": torch.randn(1, H, SQ + SK - 1)}
    assert torch.equal(run("attention_cached, one piece", given)[0], run("attention_fwd", given)[0])


@pytest.mark.parametrize("threads", [1, 4])
def test_a_page_that_is_not_there(threads):
    """Found by the kernels, in whichever thread."""
    torch.set_num_threads(threads)
    table = torch.arange(8 * 64).view(8, 64) % 64
    given = {
        "q": torch.randn(8, H, 64, 64),
        "k": torch.randn(64, HK, 64, 64),
        "v": torch.randn(64, HK, 64, 64),
        "block_table": table,
        "page_size": 64,
    }
    run("attention_cached", given)
    table[5, 40] = 64
    refusal(lambda: run("attention_cached", given), "block_table has an entry that is no page", kind=RuntimeError)


@pytest.mark.parametrize("sizes", [(1, 1), (B, 1), (1, H)])
def test_one_relative_bias_for_several_heads(sizes):
    given, bias = attention(), torch.randn(*sizes, SQ + SK - 1)
    each = given | {"bias": bias.expand(B, H, -1).contiguous()}
    assert torch.equal(run("attention_fwd", given | {"bias": bias})[0], run("attention_fwd", each)[0])
