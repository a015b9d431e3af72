"""SelfAttention with three projections instead of one."""

from __future__ import annotations

import pytest
import torch

from mha_ext import nn

OPTIONS = {"num_kv_heads": 2, "head_dim": 6, "causal": True, "rope": True, "qk_norm": True}


@pytest.mark.parametrize("bias", [True, False])
def test_unpacked_is_the_same_function_and_loads_either_state_dict(bias):
    packed = nn.SelfAttention(16, 4, bias=bias, dtype=torch.float64, **OPTIONS)
    packed.qkv_proj.weight.requires_grad_(False)
    saved = {name: x.clone() for name, x in packed.state_dict().items()}
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    expected = packed(x)

    unpacked = nn.SelfAttention(16, 4, bias=bias, packed=False, dtype=torch.float64, **OPTIONS)
    assert {"q_proj.weight", "k_proj.weight", "v_proj.weight"} <= set(unpacked.state_dict())
    assert not any("qkv_proj" in name for name in unpacked.state_dict())
    unpacked.load_state_dict(saved)
    torch.testing.assert_close(unpacked(x), expected)

    other = torch.nn.Sequential(nn.SelfAttention(16, 4, bias=bias, dtype=torch.float64, **OPTIONS))
    other.load_state_dict({f"0.{name}": value for name, value in unpacked.state_dict().items()})
    assert all(torch.equal(other[0].state_dict()[name], value) for name, value in saved.items())

    packed.eval().unpack()
    packed.unpack()
    assert not packed.k_proj.weight.requires_grad and not packed.k_proj.training and (packed.k_proj.bias is not None) == bias
    torch.testing.assert_close(packed(x), expected)
    with pytest.raises(RuntimeError, match="Missing key.*v_proj.weight"):
        unpacked.load_state_dict({name: x for name, x in unpacked.state_dict().items() if name != "v_proj.weight"})


def test_unequal_shares_of_heads_are_refused():
    module = nn.SelfAttention(24, 12, num_kv_heads=3, packed=False)
    module.q_proj, module.k_proj, module.v_proj = (torch.nn.Linear(24, n) for n in (12, 4, 4))  # 6 of 12, 2 of 3
    with pytest.raises(ValueError, match="gave 6, 2, 2 heads of 12, 3, 3; accepted: the same share"):
        module(torch.randn(1, 5, 24))
    module = nn.SelfAttention(16, 4)
    module.qkv_proj = torch.nn.Linear(16, 24)
    with pytest.raises(ValueError, match="qkv_proj gave 6 of 12 heads; .*HeadParallel"):
        module(torch.randn(1, 5, 16))
