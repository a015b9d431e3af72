"""What is hidden has no influence, and what is seen is not swallowed: rows that see nothing, NaN and Inf behind masks. Rows of the table in
docs/design.md, as in test_semantics.py."""

from __future__ import annotations

import cases
import pytest
import torch
from test_semantics import qkv

import mha_ext
from mha_ext import masks

# fully masked row -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("how", ["dense", "padding", "left padding", "documents", "bias", "causal"])
def test_fully_masked_row(how, dtype, device):
    """Output 0, lse -inf, weights 0, every gradient finite and 0 there, whatever hides the row."""
    q, k, v = qkv(device, Hk=4, Sk=33, dtype=dtype)
    bias = torch.zeros(2, 1, 33, 33, dtype=dtype, device=device).requires_grad_()
    mask, dead = None, torch.zeros(2, 33, dtype=torch.bool, device=device)
    if how == "dense":
        dense = torch.rand(2, 1, 33, 33, device=device) < 0.5
        dense[:, :, 5:9] = False
        dead = ~dense[:, 0].any(-1)
        mask = masks.Dense(dense)
    elif how == "padding":
        mask = masks.Padding(torch.tensor([0, 20], device=device))
        dead[0] = True
    elif how == "left padding":
        mask = masks.LeftPadding(torch.tensor([33, 0], device=device))
        dead[0] = True
    elif how == "documents":
        ids = torch.arange(33, device=device).expand(2, 33)
        mask = masks.Documents(ids) & masks.LeftPadding(torch.tensor([10, 0], device=device))
        dead[0, :10] = True
    elif how == "bias":
        bias = bias.detach().clone()
        bias[:, :, 7] = -torch.inf
        bias.requires_grad_()
        dead[:, 7] = True
    else:
        q = q.detach()[:, :, :33].requires_grad_()
        k, v = (t.detach()[:, :, :20].contiguous().requires_grad_() for t in (k, v))
        bias = bias.detach()[..., :20].contiguous().requires_grad_()
        mask = masks.Causal()
        dead[:, :13] = True
    out, lse, weights = mha_ext.attention(q, k, v, mask=mask, bias=bias, return_lse=True, return_weights=True)
    dead4 = dead[:, None, :, None]
    assert dead.any()
    assert not out.masked_select(dead4).any() and not weights.masked_select(dead4).any()
    assert (lse.masked_select(dead[:, None]) == -torch.inf).all() and torch.isfinite(
        lse.masked_select(~dead[:, None])
    ).all()
    for loss in (out.sum(), out.sum() + weights.square().sum() + lse.masked_fill(lse.isinf(), 0).sum()):
        dq, dk, dv, dbias = torch.autograd.grad(loss, [q, k, v, bias], retain_graph=True)
        for g in (dq, dk, dv, dbias):
            assert torch.isfinite(g).all()
        assert not dq.masked_select(dead4).any() and not dbias.masked_select(dead4).any()
        if dead.all(1).any():
            assert not dk[dead.all(1)].any() and not dv[dead.all(1)].any()


# NaN/Inf in a masked-out key or value ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "dtype,length",
    # Half types pair keys: at 41 the last visible one has a hidden neighbour.
    [*((dtype, 40) for dtype in cases.DTYPES), (torch.bfloat16, 41), (torch.float16, 41)],
    ids=str,
)
@pytest.mark.parametrize("how", ["dense key", "dense 2d", "padding", "left padding", "window", "prefix"])
def test_hidden_keys_have_no_influence(length, how, dtype, value, device):
    q, k, v = (t.detach() for t in qkv(device, Sq=65, Sk=65, D=32, Dv=32, dtype=dtype))
    hidden = torch.zeros(65, dtype=torch.bool, device=device)
    hidden[length:] = True
    if how == "dense key":
        hidden[::3] = True
        mask = masks.Dense(~hidden.view(1, 1, 1, -1))
    elif how == "dense 2d":
        mask = (torch.rand(65, 65, device=device) < 0.7) & ~hidden
    elif how == "padding":
        mask = masks.Padding(torch.tensor([length, length], device=device))
    elif how == "left padding":
        hidden = ~hidden
        mask = masks.LeftPadding(torch.tensor([length, length], device=device))
    elif how == "window":
        mask = masks.Window(None, 0) & masks.Padding(torch.tensor([length, length], device=device))
    else:
        mask = masks.Prefix(torch.tensor([20, 30], device=device)) & masks.Padding(
            torch.tensor([length, length], device=device)
        )
    dout = cases.randn(cases.generator(1), 2, 4, 65, 32, dtype=dtype).to(device)
    results = []
    for fill in (0.0, value):
        leaves = [q.clone(), k.clone(), v.clone()]
        leaves[1][:, :, hidden] = fill
        leaves[2][:, :, hidden] = fill
        leaves = [t.requires_grad_() for t in leaves]
        out, lse, weights = mha_ext.attention(*leaves, mask=mask, return_lse=True, return_weights=True)
        grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        more = torch.autograd.grad(
            weights.square().sum() + lse.masked_fill(lse.isinf(), 0).sum(), leaves, allow_unused=True
        )
        assert not grads[1][:, :, hidden].any() and not grads[2][:, :, hidden].any()
        results.append((out, lse, weights, *grads, *(g for g in more if g is not None)))
    for a, b in zip(*results):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_queries_have_no_influence(dtype, device):
    """A query row that sees nothing may hold NaN, and so may its output gradient: the keys' gradients stay clean."""
    q, k, v = (t.detach() for t in qkv(device, Sq=65, Sk=65, D=32, Dv=32, dtype=dtype))
    rows = torch.ones(65, dtype=torch.bool, device=device)
    rows[10:50] = False
    dout = cases.randn(cases.generator(1), 2, 4, 65, 32, dtype=dtype).to(device)
    results = []
    for fill in (0.0, float("nan")):
        leaves = [q.clone(), k.clone(), v.clone()]
        leaves[0][:, :, ~rows] = fill
        g = dout.clone()
        g[:, :, ~rows] = fill
        leaves = [t.requires_grad_() for t in leaves]
        out = mha_ext.attention(*leaves, mask=masks.Dense(rows.view(1, 1, -1, 1)) & masks.Causal())
        results.append((out, *torch.autograd.grad(out, leaves, g)))
    for a, b in zip(*results):
        assert torch.isfinite(a).all() and torch.equal(a, b)


def test_visible_nan_is_not_swallowed(device):
    """The other side of the promise: NaN that is visible shows in the output."""
    q, k, v = (t.detach().clone() for t in qkv(device, Hk=4, Sk=33))
    v[0, 1, 3, 2] = torch.nan
    out = mha_ext.attention(q, k, v)
    assert out[0, 1, :, 2].isnan().all() and out.isnan().sum() == 33
    k[1, 2, 4, 0] = torch.nan
    out = mha_ext.attention(q, k, v)
    assert out[1, 2].isnan().all() and not out[1, 3].isnan().any()
    q[0, 0, 5, 1] = torch.nan
    out = mha_ext.attention(q, k, v)
    assert out[0, 0, 5].isnan().all() and not out[0, 0, 6].isnan().any()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Window(49, 0)], ids=["none", "causal", "window"])
@pytest.mark.parametrize("what", ["first keys", "middle key", "value"])
def test_visible_nan_stays_in_long_rows(what, mask, dtype, device):
    """However many keys come after: a kernel that keeps running sums must not forget. Other rows keep every bit."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 40, dtype=dtype).to(device) for _ in range(3))
    before, lse_before = mha_ext.attention(q, k, v, mask=mask, return_lse=True)
    key = {"first keys": 5, "middle key": 150, "value": 7}[what]
    (v if what == "value" else k)[:, :, key] = torch.nan
    out, lse = mha_ext.attention(q, k, v, mask=mask, return_lse=True)
    i, seen = torch.arange(300, device=device), torch.ones(300, dtype=torch.bool, device=device)
    if mask is not None:
        seen = i >= key
    if isinstance(mask, masks.Window):
        seen &= i < key + 50
    assert out[:, :, seen].isnan().all()
    assert torch.equal(out[:, :, ~seen], before[:, :, ~seen]) and torch.equal(lse[:, :, ~seen], lse_before[:, :, ~seen])


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Window(49, 0)], ids=["none", "causal", "window"])
@pytest.mark.parametrize("what", ["query", "bias", "dout"])
def test_a_row_of_nan_shows_and_changes_no_other(what, mask, dtype, device):
    """Row 70 in its output, logsumexp and gradients, and in those of the keys that it sees; all else keeps every bit."""
    gen = cases.generator(what)
    q, k, v, dout = (cases.randn(gen, 1, 2, 150, 40, dtype=dtype) for _ in range(4))
    bias = cases.randn(gen, 1, 1, 150, 150, dtype=dtype) if what == "bias" else None
    results = []
    for poisoned in (False, True):
        if poisoned:
            {"query": q, "bias": bias, "dout": dout}[what][:, :, 70] = torch.nan
        leaves = [t.to(device).requires_grad_() for t in (q, k, v)]
        out, lse = mha_ext.attention(*leaves, mask=mask, bias=None if bias is None else bias.to(device), return_lse=True)
        results.append([t.cpu() for t in (out, lse, *torch.autograd.grad(out, leaves, dout.to(device)))])
        q, k, v = (t.detach().clone() for t in (q, k, v))
    row = torch.arange(150) == 70
    seen = torch.ones(150, dtype=torch.bool) if mask is None else mask.to_dense(1, 1, 150, 150)[0, 0, 70]
    affected = {"out": row, "lse": row, "q": row, "k": seen, "v": seen}
    if what == "dout":
        affected.update(out=row & False, lse=row & False)
    for (name, where), clean, found in zip(affected.items(), *results):
        assert found[:, :, where].isnan().all(), name
        assert torch.equal(found[:, :, ~where], clean[:, :, ~where]), name
