"""Who asks for the same bits each time is heard: what the ops are told, on every way to them, forward and backward. (On the CPU it makes no
difference; on a GPU it chooses the kernels.)"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode

import mha_ext
from mha_ext import masks

Q = torch.randn(2, 4, 9, 8)
STARTS = torch.tensor([0, 4, 9])
WAYS = {
    "attention": lambda x, **o: mha_ext.attention(x, x, x, **o),
    "all results": lambda x, **o: mha_ext.attention(x, x, x, mask=masks.Causal(), return_lse=True, return_weights=True, **o)[0],
    "talking heads": lambda x, **o: mha_ext.attention(x, x, x, pre_mix=torch.eye(4), **o),
    "varlen": lambda x, **o: mha_ext.attention_varlen(*(x[0].transpose(0, 1),) * 3, STARTS, STARTS, **o),
    "packed": lambda x, **o: mha_ext.attention_qkvpacked(torch.stack((x, x, x), 2).permute(0, 3, 2, 1, 4), 4, **o),
}


class Told(TorchDispatchMode):
    """Notes what each op of ours that has an argument `deterministic` is given for it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        names = [argument.name for argument in op._schema.arguments]
        if op.namespace == "mha_ext" and "deterministic" in names:
            self.found.append((op._opname, {**dict(zip(names, args)), **(kwargs or {})}["deterministic"]))
        return op(*args, **(kwargs or {}))


def told(way, **options):
    x = Q.clone().requires_grad_()
    with Told() as mode:
        way(x, **options).sum().backward()
    names = [name for name, _ in mode.found]
    assert any("bwd" in name for name in names) and any("bwd" not in name for name in names), names
    answers = {answer for _, answer in mode.found}
    assert len(answers) == 1, mode.found
    return answers.pop()


@pytest.fixture(params=[False, True], ids=["torch does not ask", "torch asks"])
def torchs_flag(request):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("way", WAYS)
def test_the_argument_or_torchs_flag(way, torchs_flag):
    assert told(WAYS[way]) is torchs_flag
    assert told(WAYS[way], deterministic=None) is torchs_flag
    for asked in (False, True):
        assert told(WAYS[way], deterministic=asked) is asked


def test_torchs_flag_in_calls_of_torchs_function(torchs_flag):
    with mha_ext.use_for_sdpa():
        x = torch.randn(1, 2, 300, 16, requires_grad=True)
        with Told() as mode:
            F.scaled_dot_product_attention(x, x, x).sum().backward()
    assert [answer for name, answer in mode.found if "bwd" in name] == [torchs_flag], mode.found


def fused(x):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]


def packed(x):
    packed, starts = x[0].transpose(0, 1), torch.tensor([0, 100, 300], dtype=torch.int32)
    return varlen_attn(packed, packed, packed, starts, starts, 200, 200)


@pytest.mark.parametrize("function", [fused, packed])
def test_torchs_flag_in_torchs_ops(function, torchs_flag, monkeypatch):
    """As compiled and exported programs call them, where torch's dispatcher calls ours."""
    from mha_ext._ops import calls

    answers, backward = [], calls.attention_bwd
    monkeypatch.setattr(calls, "attention_bwd", lambda *args: answers.append(args[-1]) or backward(*args))
    x = torch.randn(1, 2, 300, 16, requires_grad=True)
    with mha_ext.use_for_sdpa():
        function(x).sum().backward()
    assert answers == [torchs_flag]
