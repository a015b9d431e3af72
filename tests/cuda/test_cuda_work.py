"""How the CUDA kernels share out their work: more of it than a GPU has multiprocessors, whose blocks take one part after the other; query
heads that share keys and values, side by side in one tile. Neither may show in a bit of the result."""

from __future__ import annotations

import cases
import oracle
import pytest
import torch
from on_cuda import forward, modifiers, moved, prepared, to_cuda, truth

import mha_ext
from mha_ext import masks

pytestmark = pytest.mark.cuda


def case(B, H, Hk, Sq, Sk, D, Dv, dtype, mask, bias="none", **more) -> cases.Case:
    return cases.Case(B, H, Hk, Sq, Sk, D, Dv, dtype, mask, bias, layout="aligned", **more)


# 140 query tiles or so each, for 132 multiprocessors.
MORE_THAN_BLOCKS = [
    case(2, 35, 35, 130, 150, 64, 64, torch.bfloat16, "causal"),
    case(1, 140, 140, 40, 33, 128, 111, torch.float16, "causal", sinks=True),  # the first rows see nothing
    case(1, 70, 70, 140, 140, 64, 64, torch.float16, "none"),  # loads shared by two
    case(3, 24, 24, 130, 140, 128, 128, torch.bfloat16, "none"),
    case(1, 140, 140, 20, 100, 192, 128, torch.bfloat16, "window"),
    case(2, 70, 70, 20, 70, 256, 256, torch.bfloat16, "causal"),
    case(2, 70, 70, 20, 150, 64, 64, torch.bfloat16, "padding"),
    case(1, 140, 140, 20, 100, 64, 64, torch.float16, "causal", "1,H,Sq,Sk", softcap=4.0),
]

# Few queries of several heads to a key/value head.
GROUPS = [
    case(2, 8, 2, 20, 300, 64, 64, torch.bfloat16, "causal"),
    case(2, 16, 2, 37, 150, 128, 111, torch.float16, "causal & padding", sinks=True),
    case(1, 64, 2, 5, 130, 128, 128, torch.bfloat16, "window"),
    case(1, 128, 1, 3, 130, 192, 128, torch.float16, "causal"),
    case(2, 4, 2, 33, 100, 256, 256, torch.bfloat16, "prefix"),
    case(1, 8, 2, 70, 200, 64, 64, torch.float16, "none"),
    case(1, 8, 1, 100, 90, 64, 64, torch.float16, "causal"),  # more rows than tiles of them; the first ones see nothing
    case(1, 6, 2, 20, 130, 64, 64, torch.bfloat16, "causal"),  # three heads don't fit into a tile
    case(1, 280, 70, 9, 70, 64, 64, torch.bfloat16, "causal"),
    case(2, 8, 2, 6, 1500, 128, 128, torch.bfloat16, "causal", sinks=True),  # keys in parts
]


@pytest.mark.parametrize("c", MORE_THAN_BLOCKS + GROUPS, ids=lambda c: c.id)
def test_right_and_as_a_head_alone(c):
    c, x = prepared(c)
    tensors, given = [to_cuda(t.detach()) for t in (x.q, x.k, x.v)], moved(modifiers(c, x))
    out, lse = (t.cpu() for t in forward(*tensors, given)[:2])
    oracle.check({"out": out, "lse": lse}, truth(c, x))
    if c.Sk > 512:  # a head alone has its keys in more parts
        return
    for b, h in ((0, 0), (c.B - 1, c.H - 1), (c.B // 2, c.H // 2 + 1)):
        of = slice(b, b + 1), slice(h, h + 1)
        key_head = slice(h // (c.H // c.Hk), h // (c.H // c.Hk) + 1)
        one = {name: given[name] for name in ("begin", "end")}
        one = {name: t if t is None or len(t) == 1 else t[of[0]] for name, t in one.items()}
        one["sinks"] = None if x.sinks is None else x.sinks.detach()[of[1]].cuda()
        one["bias"] = None if given["bias"] is None else given["bias"][:, of[1]]
        q, k, v = tensors[0][of], tensors[1][of[0], key_head], tensors[2][of[0], key_head]
        alone = [t.cpu() for t in forward(q, k, v, {**given, **one})[:2]]
        assert torch.equal(alone[0], out[of]) and torch.equal(alone[1], lse[of])


def test_keys_beyond_what_a_cache_holds():
    """The 16 heads then go through the GPU in three sections. What the window doesn't show is NaN."""
    H, Sk, seen = 16, 100_000, 256
    c, x = prepared(cases.Case(1, H, H, 130, seen, 8, 8, torch.bfloat16, layout="plain"))
    mask = masks.Window(60, 0)
    x.seen = mask.to_dense(1, H, c.Sq, seen)
    k, v = torch.full((2, 1, H, Sk, 8), float("nan"), dtype=c.dtype)
    k[:, :, -seen:], v[:, :, -seen:] = x.k.detach(), x.v.detach()
    out, lse = mha_ext.attention(to_cuda(x.q.detach()), k.cuda(), v.cuda(), mask=mask, return_lse=True)
    oracle.check({"out": out.cpu(), "lse": lse.cpu()}, truth(c, x))


@pytest.mark.parametrize("dtype, head_dim", [(torch.bfloat16, 64), (torch.float16, 128), (torch.bfloat16, 256)])
def test_later_rows_that_see_earlier_keys(dtype, head_dim):
    """Warps that share a tile of queries then begin with different keys, of which one holds NaN."""
    Sk = 256
    c, x = prepared(cases.Case(1, 1, 1, 128, Sk, head_dim, head_dim, dtype, layout="plain"))
    begin = torch.tensor([[128] * 64 + [0] * 64])
    mask = masks.Intervals(begin, torch.full((1, 128), Sk))
    x.seen = mask.to_dense(1, 1, c.Sq, Sk)
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    poisoned = v.index_fill(2, torch.tensor([5]), float("nan"))
    on_gpu = masks.Intervals(begin.cuda(), mask.end.cuda())
    out, lse = mha_ext.attention(q.cuda(), k.cuda(), poisoned.cuda(), mask=on_gpu, return_lse=True)
    assert out[:, :, 64:].cpu().isnan().all()
    clean = mha_ext.attention(q.cuda(), k.cuda(), v.cuda(), mask=on_gpu).cpu()
    oracle.check({"out": torch.cat([out.cpu()[:, :, :64], clean[:, :, 64:]], 2), "lse": lse.cpu()}, truth(c, x))
