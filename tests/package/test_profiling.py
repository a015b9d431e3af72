"""What profilers see: the ops by name, their FLOPs, and the plans that MHA_EXT_LOG prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import mha_ext
from mha_ext import masks

ROOT = Path(__file__).parents[2]
B, H, Hk, Sq, Sk, D, Dv = 2, 4, 2, 24, 30, 16, 8


def qkv(grad=True, Dv=Dv, Hk=Hk):
    sizes = (B, H, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv)
    return [torch.randn(size, requires_grad=grad) for size in sizes]


def counted(call, *inputs, backward=True) -> int:
    with FlopCounterMode(display=False) as counter:
        out = call(*inputs)
        if backward:
            out.backward(torch.ones_like(out))
    return counter.get_total_flops()


@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Window(3, 3)], ids=repr)
def test_forward_and_backward_are_counted(mask):
    """q k^T and the weighted sum forward; backward q k^T again, dout v^T, dv, dq, dk. Masks do not lower the count."""
    pairs = B * H * Sq * Sk
    attend = lambda q, k, v: mha_ext.attention(q, k, v, mask=mask)
    forward, both = 2 * pairs * (D + Dv), 2 * pairs * (D + Dv) + 2 * pairs * (3 * D + 2 * Dv)
    assert counted(attend, *qkv(grad=False), backward=False) == forward
    assert counted(attend, *qkv()) == both


def test_counts_what_torch_counts_for_attention():
    """As torch's formulas for its fused attention; forward also as the textbook's products."""
    shapes = (B, H, Sq, D), (B, H, Sk, D), (B, H, Sk, D)
    forward, backward = sdpa_flop_count(*shapes), sdpa_backward_flop_count(shapes[0], *shapes)
    assert counted(mha_ext.attention, *qkv(Dv=D, Hk=H)) == forward + backward == 3.5 * forward
    textbook = lambda q, k, v: (q @ k.transpose(-2, -1)).softmax(-1) @ v
    assert counted(textbook, *qkv(Dv=D, Hk=H), backward=False) == forward


def test_talking_heads_count_their_mixes():
    """A mix is a product over the heads for each pair; backward repeats it and has its two gradients."""
    pairs = B * H * Sq * Sk
    mix = torch.eye(H, requires_grad=True)
    for given in ({"pre_mix": mix}, {"pre_mix": mix, "post_mix": mix}):
        expected = 2 * pairs * (D + D + 3 * D + 2 * D) + 4 * len(given) * 2 * pairs * H
        assert counted(lambda q, k, v, given=given: mha_ext.attention(q, k, v, **given), *qkv(Dv=D, Hk=H)) == expected


def test_packed_sequences_count_each_sequence():
    starts_q, starts_k = torch.tensor([0, 3, 10, 24]), torch.tensor([0, 8, 8, 30])
    q, k, v = (x[0].transpose(0, 1) for x in qkv())
    pairs = H * (3 * 8 + 7 * 0 + 14 * 22)
    expected = 2 * pairs * (D + Dv) + 2 * pairs * (3 * D + 2 * Dv)
    assert counted(lambda q, k, v: mha_ext.attention_varlen(q, k, v, starts_q, starts_k), q, k, v) == expected


@pytest.mark.parametrize("paged", [False, True])
def test_attention_of_a_cache_is_counted(paged):
    q, k, v = qkv(grad=False)
    table = None
    if paged:  # 5 pages of 6 keys for each sequence
        k, v = (x.unflatten(2, (5, 6)).transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v))
        table = torch.arange(10).view(2, 5)
    attend = lambda q, k, v: mha_ext.attention_cached(q, k, v, block_table=table)
    assert counted(attend, q, k, v, backward=False) == 2 * B * H * Sq * Sk * (D + Dv)


def test_every_op_with_matrix_products_is_counted():
    """Of the ops, only these have none."""
    from torch.utils.flop_counter import flop_registry

    without = {"masked_softmax_fwd", "masked_softmax_bwd", "split_heads", "dropout_mask", "draw_rng_state"}
    ops = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("mha_ext::")}
    missing = {name for name in ops if getattr(torch.ops.mha_ext, name) not in flop_registry}
    assert missing == without


def test_modules_and_head_mixing_are_counted():
    layer = mha_ext.nn.SelfAttention(32, 4)
    x = torch.randn(2, 10, 32)
    linear = 2 * 2 * 10 * 32 * 32 * 4  # q, k, v and the output
    assert counted(layer, x, backward=False) == linear + 2 * 2 * 4 * 10 * 10 * 16
    x = torch.randn(2, 4, 10, 8)
    assert counted(mha_ext.merge_heads, x, torch.eye(4), backward=False) == 2 * 2 * 10 * 4 * 4 * 8
    assert counted(mha_ext.merge_heads, x, backward=False) == 0


def test_ops_appear_by_name_in_the_profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        mha_ext.attention(*qkv()).sum().backward()
        mha_ext.merge_heads(mha_ext.split_heads(torch.randn(2, 10, 32), 4))
        mha_ext.masked_softmax(torch.randn(5, 5))
    names = {event.key for event in profile.key_averages()}
    for name in ("attention_fwd", "attention_bwd", "split_heads", "merge_heads", "masked_softmax_fwd"):
        assert f"mha_ext::{name}" in names


LOGGED = """
import torch, mha_ext
from mha_ext import masks
q = torch.randn(1, 2, 9, 8)
for length in (9, 9, 5):
    mha_ext.attention(q, q, q, mask=masks.Causal() & masks.Padding(torch.tensor([length])))
    mha_ext.attention(q, q[:, :, :7], q[:, :, :7])
mha_ext.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
for _ in range(2):
    starts = torch.tensor([0, 2, 2, 9])
    mha_ext.attention_varlen(*[q[0].transpose(0, 1)] * 3, starts, starts, mask=masks.Causal())
    mha_ext.attention_qkvpacked(torch.randn(1, 9, 3, 2, 8), dropout_p=0.5)
    with torch.no_grad():
        mha_ext.attention_cached(q, q[:, :, :4], q[:, :, :4])
        mha_ext.attention_cached(q, *[torch.zeros(5, 2, 4, 8)] * 2, block_table=torch.tensor([[0, 3]]))
torch.vmap(mha_ext.attention)(q[None], q[None], q[None])
torch.compile(mha_ext.attention, backend="eager", fullgraph=True)(q[:, :, :3], q, q)
try:
    mha_ext.attention(q, q, q[:, :, :4])
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("value,plans", [("1", 7), ("0", 0), (None, 0)])
def test_log_prints_each_plan_once(value, plans):
    environment = {name: x for name, x in os.environ.items() if name != "MHA_EXT_LOG"}
    if value is not None:
        environment["MHA_EXT_LOG"] = value
    command = [sys.executable, "-c", LOGGED]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stderr.count("mha_ext: attention") == plans
    assert "[1,2,4,8]" in result.stdout
    if plans:
        assert result.stderr.count("mha_ext: attention of q") == 3
        assert "Causal" in result.stderr and "k [1,2,7,8]" in result.stderr and "workspace" in result.stderr
        assert "attention_varlen of q [9,2,8]" in result.stderr and "3 sequences of up to 7 queries and 7 keys" in result.stderr
        assert "autocast" not in result.stderr
        assert "attention_qkvpacked of q [1,2,9,8]" in result.stderr
        assert "attention_cached of q [1,2,9,8], k [5,2,4,8]" in result.stderr and "up to 8 keys in float32" in result.stderr
        pairs = 2 * (2 * 3 // 2 + 7 * 8 // 2) * 2 * 16  # of both heads, operations
        assert f"{pairs / 1000:.3g} KFLOP forward" in result.stderr
