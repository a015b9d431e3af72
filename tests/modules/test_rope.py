"""Rotary embeddings with scaling and given positions: against the formulas of transformers, and by what they mean."""

from __future__ import annotations

import pytest
import torch
from test_refusals import refusal
from test_self_attention import randn, rotate

from mha_ext import nn
from mha_ext.nn import LinearScaling, Llama3Scaling, NTKScaling, RopeScaling, RotaryEmbedding, YaRNScaling

SCALINGS = [LinearScaling(4.0), NTKScaling(4.0), YaRNScaling(8.0, 128), YaRNScaling(8.0, 64, 16.0, 0.5, 1.5), Llama3Scaling(8.0, 64, 1.0, 4.0)]  # fmt: skip
OF_TRANSFORMERS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 128},
    "yarn, all given": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "beta_fast": 16.0, "beta_slow": 2.0,
        "attention_factor": 1.5,
    },
    "yarn, far apart": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024, "beta_fast": 64.0, "beta_slow": 0.01,
    },
    "yarn, less than one turn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 6},
}  # fmt: skip


def angles_of(rope, positions):
    """[n,half] and the magnitude, read from what a rotation does to the first of each pair of features."""
    half = rope.head_dim // 2
    x = torch.cat((torch.ones(half), torch.zeros(half))).double().expand(1, 1, len(positions), -1)
    out = rope(x, position_ids=positions)[0, 0]
    return torch.atan2(out[:, half:], out[:, :half]), out[:, :half].hypot(out[:, half:])


def frequencies_of(rope):
    angles, magnitude = angles_of(rope, torch.tensor([1]))
    torch.testing.assert_close(magnitude, torch.full_like(magnitude, magnitude[0, 0].item()))
    return angles[0], magnitude[0, 0].item()


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
@pytest.mark.parametrize("head_dim,base", [(64, 10000.0), (128, 500000.0), (8, 100.0)])
def test_frequencies_are_those_of_transformers(kind, head_dim, base):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": base, "rope_type": kind, **OF_TRANSFORMERS[kind]}
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 2, num_attention_heads=2, max_position_embeddings=1024, rope_parameters=dict(parameters)
    )
    rope = RotaryEmbedding(head_dim, base, RopeScaling.of(config.rope_parameters))
    found, magnitude = frequencies_of(rope)
    if kind == "default":
        assert rope.scaling is None
        theirs, factor = base ** (-torch.arange(0, head_dim, 2).double() / head_dim), 1.0
    else:
        theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
        assert not torch.allclose(theirs.double(), base ** (-torch.arange(0, head_dim, 2).double() / head_dim), rtol=1e-3)
    torch.testing.assert_close(found, theirs.double(), rtol=1e-5, atol=0)
    assert abs(magnitude - factor) < 1e-12


def test_rope_makes_scores_depend_on_distance_alone():
    rope = RotaryEmbedding(8)
    q, k = randn(1, 1, 1, 8), randn(1, 1, 1, 8, seed=1)
    scores = [(rope(q, start=5 + n) * rope(k, start=2 + n)).sum().item() for n in (0, 3, 40)]
    assert max(scores) - min(scores) < 1e-10
    x = randn(2, 3, 6, 8, seed=2)
    torch.testing.assert_close(rope(x), rotate(x, torch.arange(6), 10000.0))
    torch.testing.assert_close(rope(x, torch.tensor([4, 9]))[1], rotate(x[1], torch.arange(9, 15), 10000.0))
    torch.testing.assert_close(rope(x).norm(dim=-1), x.norm(dim=-1))
    far = rope(x.bfloat16(), 30000)  # a position that bfloat16 does not hold: the angles are made in float32
    torch.testing.assert_close(far.float(), rotate(x.bfloat16().float(), torch.arange(30000, 30006), 10000.0), atol=0.02, rtol=0.01)


def test_ntk_divides_the_slowest_pair_and_keeps_the_fastest():
    plain, scaled = (frequencies_of(RotaryEmbedding(64, 10000.0, s))[0] for s in (None, NTKScaling(4.0)))
    ratio = plain / scaled
    assert ratio[0] == 1 and abs(ratio[-1] - 4) < 1e-9 and (ratio.diff() > 0).all()
    # As by a larger base.
    torch.testing.assert_close(scaled, frequencies_of(RotaryEmbedding(64, 10000.0 * 4 ** (64 / 62)))[0], rtol=1e-9, atol=0)
    four, scaled = (frequencies_of(RotaryEmbedding(4, 10000.0, s))[0] for s in (None, NTKScaling(4.0)))
    torch.testing.assert_close(four / scaled, torch.tensor([1.0, 4.0]).double())
    two = RotaryEmbedding(2, 10000.0, NTKScaling(4.0))
    assert frequencies_of(two)[0].tolist() == frequencies_of(RotaryEmbedding(2))[0].tolist()


@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_factor_1_changes_no_frequency(scaling):
    one = type(scaling)(**{**vars(scaling), "factor": 1.0})
    plain, scaled = (frequencies_of(RotaryEmbedding(32, 1000.0, s))[0] for s in (None, one))
    torch.testing.assert_close(plain, scaled, rtol=1e-12, atol=0)


def test_yarn_mixes_between_its_two_numbers_of_turns():
    plain, scaled = (frequencies_of(RotaryEmbedding(64, 10000.0, s))[0] for s in (None, YaRNScaling(8.0, 256, 8.0, 2.0)))
    turns, ratio = 256 * plain / (2 * torch.pi), plain / scaled
    torch.testing.assert_close(ratio[turns > 12], torch.ones_like(ratio[turns > 12]), rtol=1e-12, atol=0)
    assert (turns > 12).any() and (turns < 1.5).any()
    torch.testing.assert_close(ratio[turns < 1.5], torch.full_like(ratio[turns < 1.5], 8))
    between = ratio[(turns < 8) & (turns > 2)]
    assert ((between > 1) & (between < 8)).all() and len(between)


@pytest.mark.parametrize("scaling", [None, *SCALINGS], ids=repr)
def test_position_ids(scaling):
    rope, x = RotaryEmbedding(8, 100.0, scaling), torch.randn(2, 3, 5, 8)
    torch.testing.assert_close(rope(x, position_ids=torch.arange(5)), rope(x), rtol=0, atol=0)
    starts = torch.tensor([4, 9])
    ids = starts[:, None] + torch.arange(5)
    torch.testing.assert_close(rope(x, position_ids=ids), rope(x, starts), rtol=0, atol=0)
    torch.testing.assert_close(rope(x, position_ids=ids[:1]), rope(x, 4), rtol=0, atol=0)
    order = torch.tensor([3, 0, 4, 4, 1])
    for given in (order, order.tolist()):
        torch.testing.assert_close(rope(x[:, :, order], position_ids=given), rope(x)[:, :, order], rtol=0, atol=0)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("scaling", [None, *SCALINGS], ids=repr)
@torch.no_grad()
def test_self_attention_is_attention_of_rotated_heads(scaling, packed):
    """And step by step what it is at once."""
    layer = nn.SelfAttention(32, 4, num_kv_heads=2, rope=True, rope_base=100.0, rope_scaling=scaling, causal=True, packed=packed).eval()
    x = torch.randn(2, 9, 32)
    q, k, v = layer._project(x)
    ids = torch.stack((torch.arange(9), torch.arange(9) * 3 + 5))
    for given in (None, ids):
        rope = RotaryEmbedding(8, 100.0, scaling)
        turned = [rope(t, position_ids=given) for t in (q, k)]
        weights = (turned[0] @ turned[1].repeat_interleave(2, 1).mT / 8**0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
        expected = layer.out_proj((weights.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2))
        torch.testing.assert_close(layer(x, position_ids=given), expected)
        cache = layer.make_cache(2, 9)
        steps = [
            layer(x[:, i:j], cache=cache, position_ids=None if given is None else given[:, i:j]) for i, j in ((0, 5), (5, 6), (6, 9))
        ]
        torch.testing.assert_close(torch.cat(steps, 1), expected)
    assert not torch.allclose(layer(x, position_ids=ids), layer(x), atol=1e-3)


def test_refusals():
    x = torch.randn(2, 3, 5, 8)
    for wrong in (torch.arange(4), torch.zeros(3, 5, dtype=torch.int64)):
        refusal(lambda wrong=wrong: RotaryEmbedding(8)(x, position_ids=wrong), "position_ids", "[2,5]", kind=ValueError)
    refusal(lambda: RotaryEmbedding(8)(x, position_ids=torch.zeros(5)), "position_ids", "integer tensor", kind=ValueError)
    refusal(lambda: RotaryEmbedding(8)(x, position_ids=torch.zeros(5, dtype=torch.int64, device="meta")), "position_ids", "meta", kind=ValueError)
    refusal(lambda: RotaryEmbedding(8)(x[..., :6]), "[2,3,5,6]", "[B,H,S,8]", kind=ValueError)
    refusal(lambda: RotaryEmbedding(8)(x.long()), "x is int64", "float32", kind=TypeError)
    for wrong in (True, 1.5):
        refusal(lambda wrong=wrong: RotaryEmbedding(8)(x, wrong), f"start is {wrong}", "an int", kind=TypeError)
    for B, n in ((1, 2), (3, 4)):
        refusal(
            lambda B=B, n=n: RotaryEmbedding(8)(torch.randn(B, 1, 5, 8), torch.arange(n)), f"start has shape [{n}]", f"[B] = [{B}]",
            kind=ValueError,
        )  # fmt: skip
    refusal(lambda: RotaryEmbedding(7), "head_dim is 7", "even", kind=ValueError)
    refusal(lambda: RotaryEmbedding(0), "head_dim is 0", "int >= 1", kind=ValueError)
    unfinished = RotaryEmbedding(4, scaling=RopeScaling(2.0))
    refusal(lambda: unfinished(torch.zeros(1, 1, 1, 4)), "RopeScaling has no frequencies", kind=NotImplementedError)
    refusal(lambda: nn.SelfAttention(8, 2)(torch.randn(1, 3, 8), position_ids=torch.arange(3)), "position_ids", "rope", kind=ValueError)
    refusal(lambda: nn.SelfAttention(8, 2, rope_scaling=LinearScaling(2.0)), "rope_scaling", "rope=True", kind=ValueError)
    refusal(lambda: RotaryEmbedding(8, 100.0, 4.0), "scaling is 4.0", "LinearScaling", kind=TypeError)
    refusal(lambda: LinearScaling(0.5), "factor is 0.5", ">= 1", kind=ValueError)
    refusal(lambda: LinearScaling(None), "factor is None", "a number", kind=TypeError)
    refusal(lambda: YaRNScaling(2.0, 64, attention_factor=-1.0), "attention_factor is -1.0", "positive", kind=ValueError)
    refusal(lambda: YaRNScaling(2.0, 0), "original_length is 0", "positive", kind=ValueError)
    refusal(lambda: YaRNScaling(2.0, 8, float("inf")), "fast is inf", "positive", kind=ValueError)
    refusal(lambda: Llama3Scaling("2"), "factor is", "a number", kind=TypeError)
    refusal(lambda: Llama3Scaling(2.0, 64, 4.0, 4.0), "low, high are 4.0, 4.0", "high > low", kind=ValueError)
    for kind in ({"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}):
        refusal(lambda kind=kind: RopeScaling.of(kind), kind["rope_type"], "llama3", kind=ValueError)


def test_nothing_is_scaled_where_nothing_says_so():
    assert RopeScaling.of(None) is None and RopeScaling.of({"rope_type": "default", "rope_theta": 3.0}) is None
    assert RopeScaling.of({"type": "linear", "factor": 2.0}) == LinearScaling(2.0)
    assert "scaling=NTKScaling(factor=2.0)" in repr(RotaryEmbedding(8, scaling=NTKScaling(2.0)))


def test_compiled_with_dynamic_shapes(fresh_compiler):
    rope = RotaryEmbedding(8, 100.0, YaRNScaling(8.0, 64))
    compiled = torch.compile(lambda x, ids: rope(x, position_ids=ids), backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (3, 7):
        x, ids = torch.randn(2, 2, n, 8), torch.randint(0, 100, (2, n))
        torch.testing.assert_close(compiled(x, ids), rope(x, position_ids=ids))
