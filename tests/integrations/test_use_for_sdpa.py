"""use_for_sdpa: torch's attention on these kernels, however it is called, and on torch's own where it should be."""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
import subprocess
import sys
import threading

import cases
import pytest
import torch
import torch.nn.functional as F
from op_names import Ops
from torch import nn
from torch.nn import attention as torchs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

import mha_ext

imported_before = F.scaled_dot_product_attention
ours = mha_ext.scaled_dot_product_attention


@pytest.fixture
def in_use():
    with mha_ext.use_for_sdpa():
        yield


def inputs(*shape, Sk=None, Hk=None, dtype=torch.float32, grad=True):
    B, H, S, D = shape or (2, 4, 40, 16)
    sizes = (B, H, S, D), (B, Hk or H, Sk or S, D), (B, Hk or H, Sk or S, D)
    made = (cases.randn(cases.generator(i), *size, dtype=dtype) for i, size in enumerate(sizes))
    return [x.requires_grad_(grad) for x in made]


def on_ours(*args, **options) -> bool:
    with Ops() as ops:
        F.scaled_dot_product_attention(*args, **options)
    names = {name.split("::")[0] for name in ops.names if "attention" in name}
    assert len(names) == 1, ops.names
    return names == {"mha_ext"}


def kernels_of(call):
    """(what it returns, how often each kernel of ours ran): below autograd too, where a dispatch mode does not look."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = call()
    return found, {e.key.split("::")[1]: e.count for e in profile.key_averages() if e.key.startswith("mha_ext::")}


def assert_within_rounding(actual, expected):
    """Both are float64."""
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


# --- What it does to a process ----------------------------------------------------------------------------------------


def in_a_process(program: str, **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ, **environment), timeout=120
    )
    assert found.returncode == 0, found.stderr
    return found.stdout + found.stderr


def test_import_makes_the_name_known_and_changes_nothing():
    program = """
import torch
from torch.nn.attention import current_flash_attention_impl, list_flash_attention_impls
def kernels():
    names = "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu", "_native_multi_head_attention"
    return [torch._C._dispatch_dump(f"aten::{name}") for name in names]
before = kernels()
import mha_ext
assert kernels() == before and torch.compiler.config.cache_key_tag == ""
assert "mha_ext" in list_flash_attention_impls() and current_flash_attention_impl() is None
mha_ext.use_for_sdpa()
assert kernels() != before and torch.compiler.config.cache_key_tag == "+mha_ext"
"""
    assert "Overriding" not in in_a_process(program)


def test_torchs_own_switch():
    q, k, v = inputs()
    assert not on_ours(q, k, v)
    torchs.activate_flash_attention_impl("mha_ext")
    assert torchs.current_flash_attention_impl() == "mha_ext" and on_ours(q, k, v)
    torchs.activate_flash_attention_impl("mha_ext")  # which restores first
    assert on_ours(q, k, v)
    torchs.restore_flash_attention_impl()
    assert torchs.current_flash_attention_impl() is None and not on_ours(q, k, v)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_uses_end_in_any_order(order):
    q, k, v = inputs()
    uses = [mha_ext.use_for_sdpa() for _ in range(3)]
    for n, i in enumerate(order):
        assert on_ours(q, k, v), n
        uses[i].undo()
        uses[i].undo()  # does nothing
    assert not on_ours(q, k, v) and torch.compiler.config.cache_key_tag == ""


def test_a_use_begins_again_in_a_with_block():
    q, k, v = inputs()
    use = mha_ext.use_for_sdpa()
    for _ in range(2):
        with use:
            assert on_ours(q, k, v)
        assert not on_ours(q, k, v)


def test_a_copy_is_no_use():
    q, k, v = inputs()
    use = mha_ext.use_for_sdpa()
    copies = copy.deepcopy(use), copy.copy(use), pickle.loads(pickle.dumps(use))
    for each in copies:
        each.undo()
        assert on_ours(q, k, v)
    use.undo()
    with copies[0]:  # a use of its own
        assert on_ours(q, k, v)
    assert not on_ours(q, k, v)


def test_torchs_fused_op_refuses_dropout_as_before(in_use):
    """Its backward could not know what was dropped."""
    with pytest.raises(RuntimeError, match="dropout"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs(grad=False), 0.5)


def test_an_exception_ends_a_use():
    q, k, v = inputs()
    with pytest.raises(KeyError), mha_ext.use_for_sdpa():
        raise KeyError
    assert not on_ours(q, k, v)


def test_threads():
    """Uses begin and end in some threads while others attend; it holds for all of them."""
    q, k, v = inputs(dtype=torch.float64, grad=False)
    expected = F.scaled_dot_product_attention(q, k, v)
    wrong, stop = [], threading.Event()

    def attend():
        while not stop.is_set():
            out = F.scaled_dot_product_attention(q, k, v)
            if not torch.allclose(out, expected, rtol=1e-9):
                wrong.append(out)

    def switch():
        for _ in range(100):
            with mha_ext.use_for_sdpa(), mha_ext.use_for_sdpa():
                pass

    with mha_ext.use_for_sdpa():
        seen = []
        thread = threading.Thread(target=lambda: seen.append(on_ours(q, k, v)))
        thread.start()
        thread.join()
        assert seen == [True]
    readers, writers = [threading.Thread(target=attend) for _ in range(3)], [threading.Thread(target=switch) for _ in range(2)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert not wrong and not on_ours(q, k, v)


def test_models_are_pickled_as_without(in_use):
    layer = nn.MultiheadAttention(16, 2)
    copy, saved = pickle.loads(pickle.dumps(layer)), io.BytesIO()
    torch.save(layer, saved)
    assert type(copy) is nn.MultiheadAttention and b"mha_ext" not in saved.getvalue()


def test_log_says_once_what_runs_on_torchs_kernels():
    program = """
import torch, mha_ext
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
mha_ext.use_for_sdpa()
x = torch.randn(1, 4, 64, 8)
for _ in range(2):
    F.scaled_dot_product_attention(x[:, :, :2], x, x)
    F.scaled_dot_product_attention(x, x, x)
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(x, x, x)
"""
    told = [line for line in in_a_process(program, MHA_EXT_LOG="1").splitlines() if "torch's own kernel" in line]
    reasons = "it is faster for so few queries and keys", "torch.nn.attention.sdpa_kernel chose backends without FLASH_ATTENTION"
    assert told == [f"mha_ext: scaled_dot_product_attention runs on torch's own kernel: {why}" for why in reasons]
    assert "torch's own" not in in_a_process(program, MHA_EXT_LOG="0")


# --- Results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float", "learned", "grouped", "dropout", "no queries see"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_as_our_function(kind, dtype, in_use):
    """Which test_sdpa.py compares with torch's in float64. Forward and backward; and with inference mode."""
    q, k, v = inputs(2, 4, 70, 16, Sk=50, Hk=2 if kind == "grouped" else None, dtype=dtype)
    options, leaves = {}, [q, k, v]
    if kind == "causal":
        options["is_causal"] = True
    elif kind in ("bool", "no queries see"):
        options["attn_mask"] = torch.rand(70, 50) < (0.5 if kind == "bool" else 0.02)
    elif kind in ("float", "learned"):
        options["attn_mask"] = torch.randn(2, 1, 70, 50, dtype=dtype, requires_grad=kind == "learned")
        leaves += [options["attn_mask"]] * (kind == "learned")
    elif kind == "grouped":
        options["enable_gqa"] = True
    elif kind == "dropout":
        options["dropout_p"] = 0.3
    found = []
    for function in (ours, F.scaled_dot_product_attention, imported_before):
        torch.manual_seed(3)
        out = function(q, k, v, **options)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
        torch.manual_seed(3)
        with torch.inference_mode():
            found[-1].append(function(q, k, v, **options))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)
    assert on_ours(q, k, v, **options)
    if kind == "no queries see":
        assert not found[0][0][:, :, ~options["attn_mask"].any(-1)].any()


def test_autocast(in_use):
    q, k, v = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, ours(*(x.bfloat16() for x in (q, k, v))))


def test_small_problems_stay_on_torchs_kernels(in_use):
    for dtype, few, more in ((torch.float32, 15, 17), (torch.bfloat16, 2, 17)):
        for S, expected in ((few, False), (more, True)):
            q, k, v = inputs(2, 4, S, 16, dtype=dtype)
            assert on_ours(q, k, v) == expected, (dtype, S)
    one, more = inputs(1, 4, 1, 16, Sk=1000), inputs(8, 16, 1, 16, Sk=1000)
    assert not on_ours(*one) and on_ours(*more)
    assert on_ours(*one, attn_mask=torch.ones(1, 1000, dtype=torch.bool))


@pytest.mark.parametrize("backends, expected", [
    ([SDPBackend.MATH], "_scaled_dot_product_attention_math"), ([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], None),
    ([SDPBackend.FLASH_ATTENTION], "ours"), ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], "ours"),
], ids=str)  # fmt: skip
def test_sdpa_kernel_is_obeyed(backends, expected, in_use):
    q, k, v = inputs()
    with sdpa_kernel(backends), Ops() as ops:
        F.scaled_dot_product_attention(q, k, v)
    assert bool(ops.ours()) == (expected == "ours") and not any("flash" in name for name in ops.names)
    assert on_ours(q, k, v)


def test_what_is_refused_gets_torchs_own_answer(in_use):
    """Its results, and its errors."""
    q, k, v = inputs(grad=False)
    wrong = (q, k[..., :8], v), (q, k, v.double()), (q.int(), k.int(), v.int())
    for tensors in wrong:
        with pytest.raises(RuntimeError) as told:
            F.scaled_dot_product_attention(*tensors)
        with pytest.raises(RuntimeError) as torchs_own, sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(*tensors)
        assert type(told.value) is type(torchs_own.value)
    with pytest.raises(ValueError, match="key/value lengths"):  # torch's kernel would read beyond the values
        F.scaled_dot_product_attention(q, k, v[:, :, :7])
    meta = [x.to("meta") for x in (q, k, v)]
    assert F.scaled_dot_product_attention(*meta).is_meta
    nested = torch.nested.nested_tensor([q[0], q[1, :, :30]], layout=torch.strided)
    assert F.scaled_dot_product_attention(nested, nested, nested).is_nested
    ambiguous = torch.rand(4, 40, 40) < 0.9  # ours refuses a mask that may be per batch element or per head
    q, k, v = inputs(4, 4, 40, 16)
    torch.testing.assert_close(
        F.scaled_dot_product_attention(q, k, v, ambiguous), F.scaled_dot_product_attention(q, k, v, ambiguous[None])
    )


# --- What torch makes of the call where it is left to torch -----------------------------------------------------------


def test_torch_func(in_use):
    q, k, v = inputs(dtype=torch.float64)

    def loss(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).sin().sum()

    found, kernels = kernels_of(lambda: torch.func.grad(loss, (0, 1, 2))(q, k, v))
    assert kernels == {"attention_fwd": 1, "attention_bwd": 1}
    assert_within_rounding(found, torch.autograd.grad(loss(q, k, v), (q, k, v)))
    mapped = torch.vmap(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))(q, k, v)
    assert_within_rounding([mapped], [ours(q, k, v)])


@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
def test_the_op_of_torchs_cpu_kernel(kind):
    """Forward and backward by ours and by torch's, in all pairs: they agree about the logsumexp; and about the strides."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(dtype=torch.float64, grad=False))
    options = {"is_causal": kind == "causal"}
    mask = torch.zeros(40, 40, dtype=torch.float64).masked_fill(torch.rand(40, 40) < 0.5, -torch.inf)
    mask[7] = -torch.inf
    if kind == "mask":
        options["attn_mask"] = mask
    ops = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # fmt: skip
    dout = torch.randn_like(q)

    def run(forward, backward):
        with mha_ext.use_for_sdpa() if forward else sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out, lse = ops[0](q, k, v, 0.0, **options)
        causal = options["is_causal"]
        with mha_ext.use_for_sdpa() if backward else sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return [out, *ops[1](dout, q, k, v, out, lse, 0.0, causal, attn_mask=options.get("attn_mask")), lse]

    expected = run(False, False)
    for pair in ((True, True), (True, False), (False, True)):
        found = run(*pair)
        if kind != "mask":
            assert_within_rounding(found, expected)
        else:
            rows = mask.isfinite().any(-1)
            assert_within_rounding([x[:, :, rows] for x in found[:2]], [x[:, :, rows] for x in expected[:2]])
            assert_within_rounding(found[2:4], expected[2:4])
        assert [x.stride() for x in found] == [x.stride() for x in expected]


def test_flops_are_counted_as_torchs(in_use):
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = inputs(grad=False)
    counts = []
    for function in (ours, F.scaled_dot_product_attention):
        with FlopCounterMode(display=False) as counter:
            function(q, k, v)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 4 * 2 * 4 * 40 * 40 * 16


# --- torch's modules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "attn_mask", "key_padding_mask", "both", "float", "causal"])
@pytest.mark.parametrize("weights", [False, "averaged", "each"])
def test_multihead_attention_in_inference(mask, weights):
    """The fast path, which does not call scaled_dot_product_attention."""
    module = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64).eval()
    nn.init.normal_(module.in_proj_bias)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    hidden = torch.rand(40, 40) < 0.4
    hidden.fill_diagonal_(False)
    padding = torch.arange(40)[None] >= torch.tensor([40, 25])[:, None]
    options = {
        "attn_mask": hidden if mask in ("attn_mask", "both") else torch.zeros(40, 40, dtype=torch.float64).masked_fill(hidden, -torch.inf) if mask == "float"
        else nn.Transformer.generate_square_subsequent_mask(40, dtype=torch.float64) if mask == "causal" else None,
        "key_padding_mask": padding if mask in ("key_padding_mask", "both") else None, "is_causal": mask == "causal",
        "need_weights": bool(weights), "average_attn_weights": weights == "averaged",
    }  # fmt: skip
    with torch.no_grad():
        expected = module(x, x, x, **options)
        with Ops() as ops:
            module(x, x, x, **options)
        fast = "aten::_native_multi_head_attention" in ops.names
        with mha_ext.use_for_sdpa():
            found, kernels = kernels_of(lambda: module(x, x, x, **options))
    assert kernels.get("attention_fwd", 0) == (fast or not weights) and (fast or mask in ("float", "causal"))
    assert_within_rounding(found, expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_layer(training, norm_first):
    layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    padding = torch.arange(40)[None] >= torch.tensor([40, 25])[:, None]
    layer.train(training)
    with torch.set_grad_enabled(training):
        expected = layer(x, src_key_padding_mask=padding)
        with Ops() as ops:
            layer(x, src_key_padding_mask=padding)
        assert ("aten::_transformer_encoder_layer_fwd" in ops.names) == (not training)
        with mha_ext.use_for_sdpa():
            found, kernels = kernels_of(lambda: layer(x, src_key_padding_mask=padding))
    assert kernels == {"attention_fwd": 1}
    assert_within_rounding([found[~padding]], [expected[~padding]])


def test_cross_attention_and_encoder_decoder():
    model = nn.Transformer(32, 4, 1, 1, 48, 0.0, batch_first=True, dtype=torch.float64)
    source, target = torch.randn(2, 40, 32, dtype=torch.float64), torch.randn(2, 30, 32, dtype=torch.float64)

    def run():
        out = model(source, target, tgt_mask=model.generate_square_subsequent_mask(30, dtype=torch.float64), tgt_is_causal=True)
        return [out, *torch.autograd.grad(out.sin().sum(), list(model.parameters()))]

    expected = run()
    with mha_ext.use_for_sdpa(), Ops() as ops:
        found = run()
    assert ops.ours() == 3
    assert_within_rounding(found, expected)


# --- torch.nn.attention.varlen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 4)], ids=str)
def test_varlen(window, in_use):
    """On the CPU, where torch has no kernel for it."""
    q, k, v = (torch.randn(n, 4 if n == 90 else 2, 16, dtype=torch.float64, requires_grad=True) for n in (90, 110, 110))
    starts = torch.tensor([0, 30, 30, 90], dtype=torch.int32), torch.tensor([0, 45, 50, 110], dtype=torch.int32)
    options = {"window_size": window, "enable_gqa": True, "scale": 0.2}
    out, lse = varlen_attn(q, k, v, *starts, 60, 60, return_aux=AuxRequest(lse=True), **options)
    mask = {(-1, -1): None, (-1, 0): mha_ext.masks.Causal()}.get(window) if window[0] < 0 else mha_ext.masks.Window(*window)
    expected, expected_lse = mha_ext.attention_varlen(q, k, v, *starts, mask=mask, scale=0.2, return_lse=True)
    assert_within_rounding([out, lse], [expected, expected_lse])
    dout = torch.randn_like(out)
    gradients = [torch.autograd.grad(x, (q, k, v), dout) for x in (out, expected)]
    assert_within_rounding(*gradients)
    into = torch.empty_like(out)
    varlen_attn_out(into, q.detach(), k.detach(), v.detach(), *starts, 60, 60, **options)
    assert torch.equal(into, out)


def test_varlen_refusals():
    q, starts = torch.randn(90, 4, 16), torch.tensor([0, 30, 90], dtype=torch.int32)
    with mha_ext.use_for_sdpa():
        with pytest.raises(ValueError, match="seqused_k was given .* accepted: packed sequences"):
            varlen_attn(q, q, q, starts, starts, 60, 60, seqused_k=torch.tensor([3, 4], dtype=torch.int32))
        varlen_attn(q, q, q, starts, starts, 60, 60)
    with pytest.raises(NotImplementedError, match="accepted: calls while"):
        varlen_attn(q, q, q, starts, starts, 60, 60)
