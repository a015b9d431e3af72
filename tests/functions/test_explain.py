"""explain: what it says is what attention does, and it refuses what attention refuses."""

from __future__ import annotations

import inspect
import platform

import pytest
import torch

import mha_ext
from mha_ext import _call, biases, explain, masks
from mha_ext.explain import _band, log, plan_of


def qkv(B=2, H=4, Hk=2, Sq=96, Sk=96, D=16, Dv=8, dtype=torch.float32, device="cpu"):
    sizes = ((B, H, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv))
    return [torch.randn(*size, device=device).to(dtype) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_names_the_call_and_the_kernel(dtype):
    plan = explain(*qkv(dtype=dtype), mask=masks.Causal() & masks.Padding(torch.tensor([96, 40])))
    for part in ("[2,4,96,16]", "[2,2,96,16]", "[2,2,96,8]", str(dtype).removeprefix("torch."), "Causal", "Padding"):
        assert part in plan.call
    assert mha_ext._ops.cpu_isa() in plan.kernel and plan.threads == torch.get_num_threads()
    assert ("double" in plan.kernel) == (dtype == torch.float64)
    for part in (plan.call, plan.kernel, "{} queries x {} keys".format(*plan.blocks)):
        assert part in str(plan)


def test_bytes_are_those_of_every_input_and_output():
    """Keys and values of grouped heads count once for all of their queries, what is broadcast once for all that reads it."""
    q, k, v = qkv(Sk=50)
    out, lse = mha_ext.attention(q, k, v, return_lse=True)
    plain = sum(x.nbytes for x in (q, k, v, out)) + 2 * lse.nbytes  # with what rounding took from the logsumexp
    assert explain(q, k, v).bytes_moved == plain
    lengths = torch.tensor([50, 7])
    bias = torch.zeros(4, 1, 1).expand(4, 96, 50)[None]
    more = explain(q, k, v, mask=masks.Padding(lengths), bias=bias, return_weights=True)
    assert more.bytes_moved - plain == 2 * 8 + 4 * 4 + 4 * 2 * 4 * 96 * 50


@pytest.mark.parametrize("Sq,Sk", [(33, 70), (70, 33)])
def test_advice_names_the_alignment(Sq, Sk):
    q, k, v = qkv(Sq=Sq, Sk=Sk)
    for align in ("bottom_right", "top_left"):
        (advice,) = explain(q, k, v, mask=masks.Causal(align).to_dense(Sq, Sk)).advice
        assert ("masks.Causal() says" in advice) == (align == "bottom_right")
        assert ('masks.Causal("top_left") says' in advice) == (align == "top_left")


@pytest.mark.parametrize("sizes", [{"B": 0}, {"H": 0, "Hk": 0}, {"Sq": 0}, {"Sk": 0}, {"D": 0}, {"Dv": 0}], ids=str)
def test_sizes_of_zero(sizes):
    plan = explain(*qkv(**sizes), mask=masks.Causal())
    assert plan.memory >= 0 and str(plan) and plan.advice == []
    assert ("Sq" not in sizes and "B" not in sizes) or plan.keys_per_query == (0, 0)
    assert (plan.flops_dense == 0) == (sizes not in ({"D": 0}, {"Dv": 0}))


def test_tasks_and_workspace_follow_the_problem():
    small, big = explain(*qkv(H=2)), explain(*qkv(H=8, Hk=8, Sq=960))
    for before, after in zip(small.tasks, big.tasks):
        assert 0 < before < after
    assert min(small.workspace) > 0
    assert small.memory >= small.workspace[0] + 2 * 2 * 96 * (8 + 2) * 4  # with the output and the row statistics


def test_what_is_not_used_has_a_reason(monkeypatch):
    plan = explain(*qkv())
    x86, arm = ["avx2", "avx512", "avx512_bf16", "amx"], ["neon", "neon_bf16"]
    isas = ["scalar", *{"x86_64": x86, "AMD64": x86, "aarch64": arm, "arm64": arm}.get(platform.machine(), [])]
    better = isas[isas.index(mha_ext._ops.cpu_isa()) + 1 :]
    assert set(plan.refusals) == {*better, "cuda"} and all(plan.refusals.values())
    if mha_ext._ops.without_cuda:
        assert plan.refusals["cuda"] == mha_ext._ops.without_cuda
    monkeypatch.setattr(mha_ext._ops, "cpu_isa", lambda: "scalar")
    for isa, reason in explain(*qkv()).refusals.items():
        there = isa in mha_ext._ops.available_isas()
        assert isa == "cuda" or ("names another" if there else "does not have it") in reason


def test_copies_have_a_reason_and_take_memory():
    q, k, v = qkv()
    assert explain(q, k, v).copies == []
    assert explain(q.transpose(1, 2).contiguous().transpose(1, 2), k, v).copies == []
    strided = k.transpose(2, 3).contiguous().transpose(2, 3)
    plan = explain(q, strided, v)
    assert len(plan.copies) == 1 and plan.copies[0].startswith("k: ") and "not contiguous" in plan.copies[0]
    assert plan.memory - explain(q, k, v).memory == 4 * k.numel()
    assert any(advice.startswith("k: ") for advice in plan.advice)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = explain(q, k, v)
    assert len(plan.copies) == 3 and all("float32 to bfloat16" in copy for copy in plan.copies)


@pytest.mark.parametrize("Sq,Sk", [(96, 96), (1, 96), (33, 70), (70, 33)])
@pytest.mark.parametrize(
    "mask",
    [None, masks.Causal(), masks.Causal("top_left"), masks.Window(5, 3), masks.Padding(torch.tensor([0, 30])),
     masks.LeftPadding(torch.tensor([3, 10])) & masks.Causal(), masks.Prefix(torch.tensor([7, 20]))],
    ids=repr,
)  # fmt: skip
def test_flops_count_the_visible_scores(mask, Sq, Sk):
    plan = explain(*qkv(Sq=Sq, Sk=Sk), mask=mask)
    visible = 2 * 4 * Sq * Sk if mask is None else int(mask.to_dense(2, 4, Sq, Sk).sum())
    assert plan.flops_exact and plan.flops == 2 * visible * (16 + 8)
    assert plan.flops_dense == 2 * 2 * 4 * Sq * Sk * (16 + 8) and plan.memory_unfused == 4 * 2 * 4 * Sq * Sk


def test_flops_are_a_bound_where_the_mask_has_values_of_its_own():
    plan = explain(*qkv(), mask=masks.Documents(torch.arange(96)[None] // 10))
    assert not plan.flops_exact and "at most" in str(plan)


@pytest.mark.parametrize(
    "advised,given",
    [
        ("masks.Causal()", {"mask": torch.ones(96, 96, dtype=torch.bool).tril()}),
        ("masks.Padding", {"mask": (torch.arange(96) < torch.tensor([[50], [96]]))[:, None, None]}),
        ("masks.LeftPadding", {"mask": (torch.arange(96) >= torch.tensor([[50], [1]]))[:, None, None]}),
        ("mask=(bias == 0)", {"bias": torch.zeros(96, 96).masked_fill(torch.rand(96, 96) < 0.5, -torch.inf)}),
        ("return_weights", {"return_weights": True}),
    ],
)
def test_advice(advised, given):
    q, k, v = qkv()
    assert any(advised in advice for advice in explain(q, k, v, **given).advice)
    assert advised in str(explain(q, k, v, **given))
    assert explain(q, k, v).advice == []


def test_advice_on_small_masks():
    def advice(*seen):
        return explain(*qkv(Sq=1, Sk=len(seen)), mask=torch.tensor([seen], dtype=torch.bool)).advice

    assert advice() == advice(1) == advice(0) == advice(0, 1, 0) == advice(1, 0, 1) == []
    assert ["masks.Padding" in x for x in advice(1, 0)] == ["masks.LeftPadding" in x for x in advice(0, 1)] == [True]
    assert ["masks.Padding" in x for x in advice(1, 1, 1)] == [True]
    assert explain(*qkv(Sq=2, Sk=0), mask=torch.ones(2, 0, dtype=torch.bool)).advice == []
    assert "masks.Causal() says" in explain(*qkv(Sq=2, Sk=2), mask=torch.ones(2, 2, dtype=torch.bool).tril()).advice[0]
    assert explain(*qkv(Sk=0), bias=torch.zeros(96, 0)).advice == explain(*qkv(), bias=torch.eye(96)).advice == []
    assert len(explain(*qkv(), bias=torch.zeros(1, 1)).advice) == 1


@pytest.mark.parametrize("H,S,D,copied", [(1, 5, 4, "qkv"), (3, 1, 4, "qkv"), (3, 4, 2, "qkv"), (3, 5, 1, "")])
def test_features_that_lie_apart_are_copied(H, S, D, copied):
    """Where there is more than one."""
    plan = explain(*(torch.randn(2, H, S, 2 * D)[..., ::2] for _ in range(3)))
    for lines in (plan.copies, plan.advice):
        assert "".join(line[0] for line in lines if line[1] == ":") == copied == "".join(line[0] for line in lines)


@pytest.mark.parametrize(
    "wrong",
    [{"mask": torch.ones(3, 96)}, {"mask": torch.ones(5, 96, dtype=torch.bool)}, {"bias": torch.ones(5, 96)},
     {"dropout_p": 1.5}, {"dropout_p": 0.5, "rng_state": torch.zeros(2)}, {"dropout_p": 1.0, "rng_state": 3}, {"softcap": -1.0}, {"scale": "big"},
     {"deterministic": 1}, {"sinks": torch.zeros(5)}],
    ids=lambda given: ",".join(given),
)  # fmt: skip
def test_raises_what_attention_raises(wrong):
    errors = []
    for function in (mha_ext.attention, explain):
        with pytest.raises((ValueError, TypeError)) as caught:
            function(*qkv(), **wrong)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


def test_dropout_takes_room_and_nothing_is_drawn():
    x = qkv()
    plain, before = explain(*x, rng_state=torch.zeros(2)), torch.get_rng_state()  # which attention would not look at either
    for p in (0.5, 1.0):
        plan = explain(*x, dropout_p=p)
        assert all(more > less for more, less in zip(plan.workspace, plain.workspace))
    assert torch.equal(torch.get_rng_state(), before)


def test_refuses_the_layouts_that_attention_refuses():
    q, k, v = qkv()
    messages = []
    for function in (mha_ext.attention, explain):
        with pytest.raises(TypeError) as caught:
            function(q, k.to_sparse(), v)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    "mask,fewest,most,words",
    [(masks.Window(7, 0), 1, 8, "each query sees 1 to 8 keys"), (masks.Padding(torch.tensor([96, 40])), 40, 96, "each query sees 40 to 96 keys"),
     (masks.Padding(torch.tensor([9, 9])), 9, 9, "each query sees 9 keys"), (None, 96, 96, None),
     (masks.Causal() & masks.Documents(torch.arange(96)[None] // 10), 1, 96, "each query sees at most 96 keys")],
    ids=repr,
)  # fmt: skip
def test_how_many_keys_a_query_sees(mask, fewest, most, words):
    """A window of 7 shows 8 keys: the query's own counts."""
    plan = explain(*qkv(), mask=mask)
    assert plan.keys_per_query == (fewest, most)
    assert (words is None and "each query sees" not in str(plan)) or words in str(plan)
    if plan.flops_exact:
        seen = torch.ones(1, 1, 96, 96) if mask is None else mask.to_dense(2, 4, 96, 96)
        assert (int(seen.sum(-1).min()), int(seen.sum(-1).max())) == (fewest, most)


def test_keys_of_packed_sequences():
    """Rows beyond a sequence's length do not count."""
    from mha_ext.explain import _visible_pairs

    lengths = torch.tensor([3, 9])
    for mask, expected in ((masks.Window(4, 0), (1, 5)), (None, (3, 9))):
        args = masks.lower(mask, 2, 4, 9, 9, lengths.device, (lengths, lengths))
        assert _visible_pairs(args, 2, 9, 9, (lengths, lengths))[1] == expected


def test_advice_where_heads_and_positions_look_swapped():
    q, k, v = (x.transpose(1, 2) for x in qkv())
    (advice,) = explain(q, k, v).advice
    assert "96 heads of 4 queries" in advice and "q.transpose(1, 2)" in advice and advice in str(explain(q, k, v))
    for legal in ({"Sq": 1}, {"Sq": 2, "Sk": 96}, {"Sq": 2, "Sk": 3, "Hk": 4}, {"Sq": 1, "Sk": 1, "Hk": 4}, {"Sq": 2, "Sk": 2, "Hk": 2}, {"Sq": 4, "Sk": 4, "Hk": 4}):
        assert explain(*qkv(**legal)).advice == []
    for swapped in ({"Sq": 2, "Sk": 2, "Hk": 4}, {"Sq": 2, "Sk": 1, "Hk": 4}):
        assert len(explain(*qkv(**swapped)).advice) == 1
    assert explain(*qkv(Sq=2, Sk=0, Hk=4)).advice == []


def test_a_plan_in_a_notebook():
    plan = explain(*qkv(), mask=masks.Causal() & masks.Window(3, None))
    assert plan._repr_html_().startswith("<pre>attention of q [2,4,96,16]") and "&amp; Window" in plan._repr_html_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_memory_is_that_of_outputs_and_workspace(dtype):
    q, k, v = qkv(dtype=dtype)
    out, lse, weights = mha_ext.attention(q, k, v, return_lse=True, return_weights=True)
    plan, more = explain(q, k, v), explain(q, k, v, return_weights=True)
    assert plan.memory == out.nbytes + 2 * lse.nbytes + plan.workspace[0]
    assert more.memory - plan.memory == more.bytes_moved - plan.bytes_moved == weights.nbytes
    strided = [x.mT.contiguous().mT for x in (q, k, v)]
    assert explain(*strided).memory - plan.memory == q.nbytes + k.nbytes + v.nbytes
    with torch.autocast("cpu", dtype=torch.float16):
        cast = explain(q, k, v)
    if dtype != torch.float64:
        copies = sum(2 * x.numel() for x in (q, k, v))
        assert cast.memory == 2 * out.numel() + 2 * lse.nbytes + cast.workspace[0] + copies and len(cast.copies) == 3
    else:
        assert cast == plan


def test_work_of_talking_heads():
    """Each mix is a product over heads more."""
    q, k, v = qkv()
    pairs, mix = 2 * 96 * 96, torch.eye(4)
    assert explain(q, k, v).flops == pairs * 4 * 2 * (16 + 8)
    for one in ({"pre_mix": mix}, {"post_mix": mix}):
        plan = explain(q, k, v, **one)
        assert plan.flops == pairs * 4 * 2 * (16 + 8 + 4) and "attention_mixed_fwd" in plan.kernel
    both = explain(q, k, v, pre_mix=mix, post_mix=mix)
    assert (
        both.flops == pairs * 4 * 2 * (16 + 8 + 8) and "attention_mixed_fwd" in both.kernel and "pre_mix" in str(both)
    )


def test_amounts_in_words():
    amount = mha_ext.explain.__globals__["_amount"]
    for n, words in (
        (0, "0 B"),
        (1023, "1.02e+03 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1 MiB"),
        (3 * 2**50, "3 PiB"),
        (2**70, "1.05e+06 PiB"),
    ):
        assert amount(n, "B") == words
    assert amount(999, "FLOP", 1000) == "999 FLOP" and amount(2.5e12, "FLOP", 1000) == "2.5 TFLOP"
    plan = explain(*qkv(), mask=masks.Causal())
    assert f"{amount(plan.flops, 'FLOP', 1000)} forward (51 % of the unmasked)" in str(plan)
    assert f"reads and writes {amount(plan.bytes_moved, 'B')};" in str(plan)
    assert f"scores alone would take {amount(plan.memory_unfused, 'B')}" in str(plan)
    assert (
        f"allocates {amount(plan.memory, 'B')}, {amount(plan.workspace[0], 'B')} of it workspace ({amount(plan.workspace[1], 'B')} in backward)"
        in str(plan)
    )


def test_threads_in_words():
    before = torch.get_num_threads()
    for n, words in ((1, "1 thread\n"), (2, "2 threads\n")):
        torch.set_num_threads(n)
        assert words in str(explain(*qkv()))
    torch.set_num_threads(before)
    assert "copy         none" in str(explain(*qkv()))


@pytest.mark.parametrize(
    "mask,bias",
    [(torch.ones(96, 96, dtype=torch.bool).tril(1), None), (torch.rand(2, 1, 1, 96) < 0.5, None), (None, torch.randn(96, 96)),
     (None, torch.zeros(96, 96, requires_grad=True)), (torch.ones(2, 4, 96, 96, dtype=torch.bool).tril() & (torch.arange(4) > 0)[:, None, None], None)],
    ids=["nearly causal", "holes", "bias", "learned", "causal in some heads"],
)  # fmt: skip
def test_no_advice_where_it_would_be_wrong(mask, bias):
    assert explain(*qkv(), mask=mask, bias=bias).advice == []


def test_predicts_how_busy_threads_are():
    """64 threads are busy with long heads and idle with few short ones; of a causal mask the pairs count that it leaves."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        small, large = explain(*qkv()), explain(*qkv(B=1, H=32, Hk=8, Sq=2048, Sk=2048, D=4, Dv=4), mask=masks.Causal())
        torch.set_num_threads(64)
        many = explain(*qkv(B=1, H=32, Hk=8, Sq=2048, Sk=2048, D=4, Dv=4), mask=masks.Causal())
    finally:
        torch.set_num_threads(before)
    assert set(small.efficiency) == set(large.efficiency) == {2, 64} and set(many.efficiency) == {64}
    assert all(0 < x <= 0.5 for x in small.efficiency[64]) and all(x >= 0.9 for x in large.efficiency[64])
    assert many.efficiency[64] == large.efficiency[64]
    assert many.tasks[1] >= 4 * 64 > large.tasks[1]
    words = "on 64: {:.0f} % forward, {:.0f} % backward".format(*(100 * x for x in large.efficiency[64]))
    assert words in str(large) and "on 2: " in str(large)
    plain = explain(*qkv(B=1, H=1, Hk=1, Sq=640, Sk=640)).efficiency[64]
    assert plain != explain(*qkv(B=1, H=1, Hk=1, Sq=640, Sk=640), mask=masks.Causal()).efficiency[64]
    assert explain(*qkv(B=0)).efficiency[64] == (0, 0) and "?" in str(explain(*qkv(B=0)))


def test_takes_what_attention_takes():
    ours, attentions = ([(x.name, x.kind, x.default) for x in inspect.signature(f).parameters.values()] for f in (explain, mha_ext.attention))
    assert ours == [x for x in attentions if x[0] != "foreign"]


def plan_during(call):
    """The plan of the one call of attention in there."""
    found, before = [], _call.listener
    _call.listener = lambda given, call: found.append(plan_of(given, call))
    try:
        call()
    finally:
        _call.listener = before
    (plan,) = found
    return plan


def test_a_plan_of_packed_sequences():
    """Of the pairs that they have together, with blocks and tasks as of the longest alone."""
    q, k, v = torch.randn(12, 4, 16), torch.randn(14, 2, 16), torch.randn(14, 2, 8)
    starts = torch.tensor([0, 3, 12]), torch.tensor([0, 5, 14])
    plan = plan_during(lambda: mha_ext.attention_varlen(q, k, v, *starts))
    assert plan.call.startswith("attention_varlen of q [12,4,16], k [14,2,16], v [14,2,8] in float32 on cpu, ")
    assert plan.call.endswith("2 sequences of up to 9 queries and 9 keys")
    assert plan.flops == plan.flops_dense == 2 * 4 * (16 + 8) * (3 * 5 + 9 * 9)
    assert plan.memory_unfused == 4 * 4 * (3 * 5 + 9 * 9) and plan.keys_per_query == (5, 9)
    out_and_statistics = 12 * 4 * (8 + 2) * 4
    assert plan.bytes_moved == q.nbytes + k.nbytes + v.nbytes + out_and_statistics
    longest = explain(*qkv(B=1, Sq=9, Sk=9))
    assert plan.blocks == longest.blocks and plan.tasks == longest.tasks and plan.advice == []
    assert plan.memory == out_and_statistics + plan.workspace[0]


@pytest.mark.parametrize("stored,scales_of", [(torch.int8, (2, 2)), (torch.int8, (7, 2, 8)), (torch.float32, None)], ids=str)
def test_a_plan_of_a_cache(stored, scales_of):
    q, table = torch.randn(2, 4, 1, 16), torch.tensor([[0, 5, 1], [3, 2, 4]])
    k, v = (torch.zeros(7, 2, 8, n, dtype=stored) for n in (16, 8))
    scales = {name: torch.ones(scales_of) for name in ("k_scale", "v_scale") if scales_of}
    read = 2 * 4 * {None: 0, (2, 2): 2 * 2, (7, 2, 8): 2 * 2 * 24}[scales_of]  # pages: those of the tables alone
    plan = plan_during(lambda: mha_ext.attention_cached(q, k, v, block_table=table, **scales))
    assert plan.call == "attention_cached of q [2,4,1,16], k [7,2,8,16], v [7,2,8,8] in float32 on cpu, up to 24 keys in " + str(stored)[6:]
    assert plan.kernel == f"attention_cached on the CPU, {mha_ext._ops.cpu_isa()}" and plan.blocks is plan.efficiency is None
    assert plan.flops == 2 * 2 * 4 * 24 * (16 + 8) and plan.memory == 2 * 4 * (8 + 2) * 4
    assert plan.bytes_moved == q.nbytes + 2 * 2 * 24 * (16 + 8) * stored.itemsize + read + plan.memory
    assert "blocks" not in str(plan) and "workspace" not in str(plan) and "busy" not in str(plan)


def test_a_plan_of_tensors_without_a_kernel_of_ours():
    plan = explain(*qkv(device="meta"))
    assert plan.kernel == "attention_fwd on meta" and plan.threads == 1 and plan.refusals == {} and plan.blocks is None


@pytest.mark.parametrize("Sq,Sk", [(9, 9), (6, 9), (9, 6)])
@pytest.mark.parametrize(
    "mask",
    [masks.Causal(), masks.Causal("top_left"), masks.Window(2, 1), masks.Window(None, 2), masks.Window(3, None), masks.Window(4, 1) & masks.Causal("top_left"),
     masks.Window(0, 0) & masks.Causal("top_left")],
    ids=repr,
)  # fmt: skip
def test_the_band_is_that_of_the_mask(mask, Sq, Sk):
    """Which is told to the planner; where none of the pairs on an edge exists, it may be wider."""
    q, k, v = qkv(Sq=Sq, Sk=Sk)
    low, high = _band(_call.lower(q, k, v, mask=mask), Sq, Sk)
    distance = torch.arange(Sk) - torch.arange(Sq)[:, None]
    inside = torch.ones(Sq, Sk, dtype=torch.bool)
    for limit, side in ((low, distance.ge), (high, distance.le)):
        inside &= True if limit is None else side(limit)
    assert torch.equal(inside, mask.to_dense(Sq, Sk)[0, 0])
    assert (low is None) == ("Window(None" in repr(mask) or "Window" not in repr(mask)) and (high is None) == (repr(mask) == "Window(3, None)")


LEARNED = {"of each head": torch.zeros(2, 8, 256, 256), "of all": torch.zeros(256, 256), "of no pairs": torch.zeros(1, 8, 1, 1), "relative": torch.ones(8)}


@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_bias_that_heads_share_is_planned_for(name):
    """Heads that add to one gradient take turns, or are one thread's."""
    (q, k, v), given = qkv(B=2, H=8, Hk=8, Sq=256, Sk=256), LEARNED[name]
    plain, learned = (explain(q, k, v, bias=biases.ALiBi(x) if name == "relative" else x) for x in (given, given.clone().requires_grad_()))
    assert (learned.efficiency == plain.efficiency and learned.tasks == plain.tasks) == (name == "of each head")
    assert all(0 < x <= 1 for both in learned.efficiency.values() for x in both) and "?" not in str(learned)
    assert learned.tasks[0] == plain.tasks[0] and learned.efficiency[64][1] <= plain.efficiency[64][1]


def test_tensors_without_values(capsys, monkeypatch):
    """On the meta device nobody knows how much lengths hide; nothing is logged."""
    q, k, v = (x.to("meta") for x in qkv())
    lengths, seen = torch.tensor([96, 40], device="meta"), torch.ones(96, 96, dtype=torch.bool, device="meta")
    plain = explain(q, k, v)
    for mask in (masks.Padding(lengths), masks.LeftPadding(lengths), masks.Dense(seen)):
        plan = explain(q, k, v, mask=mask, bias=torch.zeros(96, 96, device="meta"))
        assert plan.flops == plain.flops and plain.flops_exact and not plan.flops_exact and "at most" in str(plan)
    monkeypatch.setattr(_call, "listener", log)
    assert mha_ext.attention(q, k, v, mask=masks.Padding(lengths)).is_meta and capsys.readouterr().err == ""


def test_the_log_prints_each_kind_of_call_once(capsys, monkeypatch):
    monkeypatch.setattr(_call, "listener", log)
    monkeypatch.setitem(log.__globals__, "_logged", set())
    q, k, v = qkv(Hk=4)
    kinds = [
        lambda: mha_ext.attention(q, k, v),
        lambda: mha_ext.attention(q, k, v, mask=masks.Causal()),
        lambda: mha_ext.attention(q, k, v, bias=torch.zeros(96, 96)),
        lambda: mha_ext.attention(q, k, v, dropout_p=0.5),
        lambda: mha_ext.attention(q, k, v, return_weights=True),
        lambda: mha_ext.attention(q, k, v, pre_mix=torch.eye(4)),
        lambda: mha_ext.attention(q, k, v, pre_mix=torch.eye(4), return_weights=True),
        lambda: mha_ext.attention(q, k, v, post_mix=torch.eye(4), dropout_p=0.5),
        lambda: mha_ext.attention(q.mT.contiguous().mT, k, v),
        lambda: mha_ext.attention_qkvpacked(torch.randn(1, 9, 3, 2, 8)),
    ]
    for call in kinds:
        for plans in (1, 0):
            call()
            out, err = capsys.readouterr()
            assert out == "" and err.count("mha_ext: attention") == plans
    strange = torch.randn(3, 1, 2, 5, 8)
    torch.vmap(mha_ext.attention)(strange, strange, strange)
    sub = torch.randn(1, 2, 6, 8).as_subclass(type("Sub", (torch.Tensor,), {}))
    mha_ext.attention(sub, sub, sub)
    mha_ext.attention(*(x.to("meta") for x in (q, k, v)), mask=masks.Padding(torch.ones(q.shape[0]).long().to("meta")))
    mha_ext.attention(sub, *[torch.randn(1, 2, 6, 8)] * 2)
    assert capsys.readouterr().err == ""
