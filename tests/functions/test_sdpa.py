"""scaled_dot_product_attention is torch's: same shapes, ranks, masks, options and results, in the dtype's own error."""

from __future__ import annotations

import cases
import oracle
import pytest
import torch
import torch.nn.functional as F

import mha_ext

ours = mha_ext.scaled_dot_product_attention


def randn(*shape, dtype=torch.float32, seed=0, device="cpu", grad=True):
    return cases.randn(cases.generator(seed), *shape, dtype=dtype).to(device).requires_grad_(grad)


def same(q, k, v, *args, bias=None, **options):
    """ours against torch's in fp64, with torch's in the tested dtype as the rival; outputs and gradients."""
    leaves = [q, k, v] + ([bias] if bias is not None else [])

    def run(fn, dtype):
        inner = [t.detach().to(dtype).requires_grad_() for t in leaves]
        rest = list(args)
        if bias is not None:
            rest = [inner[3]] + rest[1:]
        rest = [r.to(dtype) if isinstance(r, torch.Tensor) and r.is_floating_point() else r for r in rest]
        out = fn(*inner[:3], *rest, **options)
        dout = cases.randn(cases.generator(8), *out.shape, dtype=q.dtype).to(dtype).to(out.device)
        return [out, *torch.autograd.grad(out, inner, dout)]

    actual, exact, rival = (
        run(ours, q.dtype),
        run(F.scaled_dot_product_attention, torch.float64),
        run(F.scaled_dot_product_attention, q.dtype),
    )
    for (name, terms), a, e, r in zip(
        largest_terms(q, k, v, bias, options.get("scale"), actual[0]).items(), actual, exact, rival
    ):
        assert a.dtype == r.dtype
        oracle.compare(name, a, e, r, oracle.FORWARD if name == "out" else oracle.GRADIENT, terms.expand_as(e))
    return actual[0]


def largest_terms(q, k, v, bias, scale, out):
    """By name, a bound of the sums of absolute values behind the elements of the output and the gradients (see oracle)."""
    with torch.no_grad():
        q, k, v = (t.double().abs() for t in (q, k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
        scores = 1 + scale * q.shape[-1] * q.max() * k.max() + (bias.double().abs().max() if bias is not None else 0)
        dp = 2 * out.shape[-1] * 3 * v.max()  # the output's gradient is normal: below 3 in the mean of any row
        per_key = (
            out[..., 0].numel() / max(1, k[..., 0].numel()) if k.numel() else 1.0
        )  # how many rows each key sums over
        ds = dp * scores
        result = {
            "out": v.max() * scores,
            "q": scale * ds * k.max(),
            "k": scale * ds * q.max() * max(1.0, per_key),
            "v": 3 * scores * max(1.0, per_key),
        }
        if bias is not None:
            result["bias"] = ds * max(1.0, per_key)
        return result


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("Sq,Sk", [(1, 1), (7, 7), (65, 33), (33, 65), (1, 129)])
def test_plain_and_causal(Sq, Sk, is_causal, dtype, device):
    q, k, v = randn(2, 3, Sq, 16, dtype=dtype, device=device), randn(2, 3, Sk, 16, dtype=dtype, seed=1, device=device), randn(2, 3, Sk, 24, dtype=dtype, seed=2, device=device)  # fmt: skip
    same(q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3), (2, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_ranks(lead, is_causal, device):
    """[..., S, D] of any rank from 2 up, as torch takes it."""
    q, k, v = (
        randn(*lead, 5, 8, device=device),
        randn(*lead, 7, 8, seed=1, device=device),
        randn(*lead, 7, 8, seed=2, device=device),
    )
    out = same(q, k, v, is_causal=is_causal)
    assert out.shape == (*lead, 5, 8)


@pytest.mark.parametrize(
    "shape", ["5,7", "1,7", "5,1", "2,1,5,7", "2,3,5,7", "1,3,5,7", "1,1,1,7", "2,1,1,7", "2,1,5,1"]
)
@pytest.mark.parametrize("kind", ["bool", "float", "learned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_of_every_broadcast(shape, kind, dtype, device):
    q, k, v = randn(2, 3, 5, 8, dtype=dtype, device=device), randn(2, 3, 7, 8, dtype=dtype, seed=1, device=device), randn(2, 3, 7, 8, dtype=dtype, seed=2, device=device)  # fmt: skip
    sizes = tuple(map(int, shape.split(",")))
    values = randn(*sizes, seed=3, dtype=dtype, device=device, grad=False)
    if kind == "bool":
        seen = values > -0.5
        seen[..., 0] = True
        same(q, k, v, seen)
    elif kind == "float":
        same(q, k, v, values.masked_fill(values < -1.0, -torch.inf) if sizes[-1] > 1 else values)
    else:
        same(q, k, v, values, bias=values.requires_grad_())


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 5, 7)], ids=str)
def test_masks_of_other_ranks_broadcast_as_in_torch(shape, device):
    """torch's rule, not that of attention(mask=): dimensions align from the right."""
    q, k, v = (
        randn(2, 3, 5, 8, device=device),
        randn(2, 3, 7, 8, seed=1, device=device),
        randn(2, 3, 7, 8, seed=2, device=device),
    )
    seen = randn(*shape, seed=3, device=device, grad=False) > -0.7
    seen[..., 0] = True
    same(q, k, v, seen)


def test_mask_for_three_dimensional_inputs(device):
    q, k, v = (randn(4, 5, 8, seed=s, device=device) for s in range(3))
    for shape in ((5, 5), (4, 5, 5), (1, 5, 5)):
        seen = randn(*shape, seed=3, device=device, grad=False) > -0.7
        seen[..., 0] = True
        same(q, k, v, seen)


@pytest.mark.parametrize("H,Hk", [(32, 8), (4, 1), (6, 6), (6, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_enable_gqa(H, Hk, dtype, device):
    q, k, v = randn(2, H, 5, 8, dtype=dtype, device=device), randn(2, Hk, 7, 8, dtype=dtype, seed=1, device=device), randn(2, Hk, 7, 8, dtype=dtype, seed=2, device=device)  # fmt: skip
    seen = randn(2, 1, 5, 7, seed=3, device=device, grad=False) > -0.7
    seen[..., 0] = True
    same(q, k, v, seen, enable_gqa=True)
    same(q, k, v, is_causal=True, enable_gqa=True)


def test_fewer_heads_without_enable_gqa_are_refused(device):
    q, k = randn(2, 4, 5, 8, device=device), randn(2, 2, 7, 8, device=device)
    with pytest.raises((RuntimeError, ValueError), match="enable_gqa"):
        ours(q, k, k)


def test_key_and_value_batch_broadcasts(device):
    """torch broadcasts batch and head dimensions of 1."""
    q, k, v = (
        randn(3, 4, 5, 8, device=device),
        randn(1, 4, 7, 8, seed=1, device=device),
        randn(1, 1, 7, 8, seed=2, device=device),
    )
    same(q, k, v)


@pytest.mark.parametrize("scale", [None, 0.5, 0.0, -0.3, 3.0])
def test_scale(scale, device):
    q, k, v = (randn(2, 3, 9, 16, seed=s, device=device) for s in range(3))
    same(q, k, v, scale=scale)


def test_keyword_names_and_positions():
    """The signature is torch's, positionally and by name."""
    q, k, v = (randn(1, 2, 5, 8, seed=s) for s in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(
        query=q, key=k, value=v, attn_mask=mask, dropout_p=0.0, is_causal=False, scale=0.3, enable_gqa=False
    )
    torch.testing.assert_close(
        ours(query=q, key=k, value=v, attn_mask=mask, dropout_p=0.0, is_causal=False, scale=0.3, enable_gqa=False),
        expected,
    )
    torch.testing.assert_close(ours(q, k, v, mask, 0.0, False, scale=0.3), expected)


def test_dropout_rate_and_seed():
    q, k = torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 64, 8)
    v = torch.eye(64).view(1, 1, 64, 64)
    torch.manual_seed(0)
    weights = ours(q, k, v, dropout_p=0.25)  # rows of the dropped weights themselves
    kept = weights > 0
    assert abs(kept.float().mean().item() - 0.75) < 5 * (0.25 * 0.75 / 4096) ** 0.5
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / 64 / 0.75))
    torch.manual_seed(0)
    assert torch.equal(weights, ours(q, k, v, dropout_p=0.25))


def test_row_that_sees_nothing_is_zero_not_nan():
    q, k, v = (randn(1, 2, 5, 8, seed=s) for s in range(3))
    seen = torch.ones(5, 5, dtype=torch.bool)
    seen[2] = False
    for mask in (seen, torch.zeros(5, 5).masked_fill(~seen, -torch.inf)):
        out = ours(q, k, v, mask)
        assert not out[:, :, 2].any() and torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [1, 8, 59, 64, 128, 257])
def test_head_sizes(D, dtype, device):
    same(*(randn(1, 2, 33, D, dtype=dtype, seed=s, device=device) for s in range(3)), is_causal=True)


def test_in_place_of_torch_in_existing_code(monkeypatch):
    """A model that calls F.scaled_dot_product_attention runs on ours unchanged."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

        def forward(self, x):
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 17, 32)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
    for a, b in zip(torch.autograd.grad(model(x).square().sum(), list(model.parameters())), expected):
        torch.testing.assert_close(a, b)


def test_float64_stays_float64_under_autocast():
    q, bias = torch.randn(1, 2, 3, 4, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out = mha_ext.scaled_dot_product_attention(q, q, q, bias)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q, bias))
