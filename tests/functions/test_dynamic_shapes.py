"""Sizes and numbers of positions that compiled and exported programs do not know: one program for all, and no graph break."""

from __future__ import annotations

import cases
import pytest
import torch
import torch._dynamo.testing
from test_compile import counting

import mha_ext
from mha_ext import masks, nn

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def randn(*shape, seed=0, grad=True):
    return cases.randn(cases.generator(seed), *shape).requires_grad_(grad)


def window_of_half(q, k):
    return mha_ext.attention(q, k, k, mask=masks.Window(q.shape[2] // 2, 0))


def varlen(q, k):
    q, k = q[0].transpose(0, 1), k[0].transpose(0, 1)
    starts = torch.tensor([0, 3]), torch.tensor([0, 2])
    starts = [torch.cat([x, torch.full((1,), t.shape[0])]) for x, t in zip(starts, (q, k))]
    return mha_ext.attention_varlen(q, k, k, *starts, max_seqlen_q=q.shape[0], max_seqlen_k=k.shape[0], mask=masks.Causal())


def paged(q, k):
    pages = k.detach().transpose(0, 2)  # [Sk,Hk,B,D]: pages of B keys
    table = torch.arange(pages.shape[0])[None].expand(q.shape[0], -1)
    with torch.no_grad():
        found = mha_ext.attention_cached(q.detach(), pages.contiguous(), pages.contiguous(), block_table=table, mask=masks.Window(q.shape[2], 0))
    return found + 0 * q


def int8(q, k):
    with torch.no_grad():
        quantised, scale = (k.detach() * 20).to(torch.int8), torch.full((1, k.shape[1]), 0.05)
        found = mha_ext.attention_cached(q.detach(), quantised, quantised, k_scale=scale, v_scale=scale)
    return found + 0 * q


def heads(q, k):
    x = mha_ext.merge_heads(q)
    return mha_ext.split_heads(x, x.shape[2] // q.shape[3]) + k.sum()


FUNCTIONS = {
    "grouped heads": lambda q, k: mha_ext.attention(q, k, k, mask=masks.Causal(), bias=mha_ext.biases.ALiBi(torch.ones(q.shape[1]))),
    "window of half": window_of_half,
    "packed": lambda q, k: mha_ext.attention_qkvpacked(torch.cat((q, q[:, ::2], q[:, ::2]), 1).transpose(1, 2), q.shape[1]) + k.sum(),
    "packed, of one number": lambda q, k: mha_ext.attention_qkvpacked(torch.stack((q,) * 3, 1).permute(0, 3, 1, 2, 4)) + k.sum(),
    "varlen": varlen,
    "paged": paged,
    "int8": int8,
    "softmax": lambda q, k: mha_ext.masked_softmax(q @ k.repeat_interleave(2, 1).mT, masks.Dilated(q.shape[2] // 4, 1, q.shape[2] + 1) | masks.Causal()),
    "sdpa": lambda q, k: mha_ext.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True),
    "weights, mixed": lambda q, k: mha_ext.attention(q, k, k, pre_mix=torch.eye(4), return_weights=True, softcap=3.0)[0],
    "heads": heads,
}  # fmt: skip


def compare(function, compiled, leaves, parameters=()):
    actual, expected = compiled(*leaves), function(*leaves)
    torch.testing.assert_close(actual, expected)
    wanted = [*leaves, *parameters]
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), wanted, allow_unused=True) for x in (actual, expected))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", FUNCTIONS)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_functions_with_grouped_heads(name):
    f = FUNCTIONS[name]
    compiled, _ = counting(f, dynamic=True)
    for B, Sq, Sk in ((3, 10, 17), (5, 14, 11)):
        Sk = Sk if name != "softmax" else Sq
        compare(f, compiled, [randn(B, 4, Sq, 8), randn(B, 2, Sk, 8, seed=1)])


MODULES = {
    "self": lambda: nn.SelfAttention(32, 4, num_kv_heads=2),
    "rope, qk_norm": lambda: nn.SelfAttention(32, 4, num_kv_heads=2, rope=True, qk_norm=True, window=3, causal=True),
    "unpacked": lambda: nn.SelfAttention(32, 4, num_kv_heads=2, packed=False, window=(None, 2)),
    "talking": lambda: nn.SelfAttention(32, 4, talking_heads=True, head_communication=True, sinks=True),
    "cross": lambda: nn.CrossAttention(32, 4, num_kv_heads=2, qk_norm=True),
    "torch's": lambda: nn.MultiheadAttention(32, 4, batch_first=True, add_bias_kv=True, add_zero_attn=True),
}


@pytest.mark.parametrize("name", MODULES)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_modules_with_grouped_heads(name):
    torch.manual_seed(0)
    module = MODULES[name]()
    inputs = {"cross": 2, "torch's": 3}.get(name, 1)

    def f(*x):
        out = module(*x)
        return out[0] if isinstance(out, tuple) else out

    compiled, _ = counting(f, dynamic=True)
    for B, S in ((3, 10), (5, 14)):
        compare(f, compiled, [randn(B, S + 2 * min(n, 1), 32, seed=n) for n in range(inputs)], list(module.parameters()))


@pytest.mark.slow
def test_with_the_default_backend():
    """Inductor generates code around numbers that it does not know."""
    layer = nn.SelfAttention(32, 4, num_kv_heads=2)
    f = lambda x, n: layer(x, masks.Window(n, x.shape[1] // 2))
    compiled = torch.compile(f, fullgraph=True, dynamic=True)
    for S, n in ((10, 3), (14, 5)):
        x = randn(3, S, 32)
        actual, expected = compiled(x, n), f(x, n)
        torch.testing.assert_close(actual, expected)
        for a, b in zip(*(torch.autograd.grad(y.sum(), x) for y in (actual, expected))):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("how", ["a number", "an object"])
def test_twelve_windows_are_one_program(how):
    """After the first, which is for its number alone, and those of 0 and 1, which torch never generalises."""
    f = lambda q, n: mha_ext.attention(q, q, q, mask=masks.Window(n, 0) if isinstance(n, int) else n)
    compiled, counter = counting(f)
    q = randn(1, 2, 17, 8)
    for n in range(2, 14):
        actual, expected = (g(q, n if how == "a number" else masks.Window(n, 0)) for g in (compiled, f))
        assert torch.equal(actual, expected)
        for a, b in zip(*(torch.autograd.grad(x.sum(), q) for x in (actual, expected))):
            assert torch.equal(a, b)
    assert counter.frame_count <= 2


def test_exported_with_a_window_and_blocks_of_any_size():
    class Model(torch.nn.Module):
        def forward(self, x, q, n):
            a = mha_ext.attention(q, q, q, mask=masks.Window(n, q.shape[2] // 2) & masks.Causal())
            return a, mha_ext.split_heads(x, x.shape[2] // 8)

    batch, length, size = (torch.export.Dim(name, min=3) for name in ("batch", "length", "size"))
    shapes = {"x": {0: batch, 2: 8 * size}, "q": {0: batch, 2: length}, "n": torch.export.Dim.DYNAMIC}
    program = torch.export.export(Model(), (randn(3, 7, 32), randn(3, 2, 10, 8), 5), dynamic_shapes=shapes)
    for B, S, m, n in ((4, 17, 3, 2), (5, 11, 6, 9)):
        args = randn(B, 7, 8 * m), randn(B, 2, S, 8), n
        for a, b in zip(program.module()(*args), Model()(*args)):
            assert torch.equal(a, b)


# A size that is marked as dynamic in one tensor and not in another ------------------------------------------------------

layer = nn.SelfAttention(32, 4)
torchs = nn.MultiheadAttention(32, 4, batch_first=True)
MARKED = {
    "dense": (lambda x, p: layer(x, masks.Causal() & masks.Dense(p)), lambda B, S: torch.rand(B, 1, 1, S) < 0.7),
    "2-d": (lambda x, p: layer(x, p), lambda B, S: torch.rand(S, S) < 0.7),
    "bias": (lambda x, p: layer(x, bias=p), lambda B, S: torch.rand(1, 4, S, S)),
    "documents": (lambda x, p: layer(x, masks.Documents(p)), lambda B, S: torch.randint(0, 2, (B, S))),
    "intervals": (lambda x, p: layer(x, masks.Intervals(p, p + 3)), lambda B, S: torch.randint(0, S, (B, S))),
    "lengths": (lambda x, p: layer(x, masks.Padding(p)), lambda B, S: torch.randint(1, S, (B,))),
    "key_padding_mask": (lambda x, p: torchs(x, x, x, key_padding_mask=p)[0], lambda B, S: torch.rand(B, S) < 0.3),
    "attn_mask": (lambda x, p: torchs(x, x, x, attn_mask=p, need_weights=False)[0], lambda B, S: torch.rand(S, S) < 0.3),
}


@pytest.mark.parametrize("name", MARKED)
def test_marked_in_x_but_not_in_its_mask(name):
    f, make = MARKED[name]
    compiled, counter = counting(f)
    dim = 0 if name == "lengths" else 1
    for n in (9, 12, 15):
        B, S = (n, 7) if dim == 0 else (2, n)
        x, p = randn(B, S, 32), make(B, S)
        torch._dynamo.mark_dynamic(x, dim)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, p), f(x, p))
    assert counter.frame_count <= 2


def test_sizes_that_do_not_fit_are_still_refused():
    compiled, _ = counting(MARKED["dense"][0], dynamic=True)
    with pytest.raises(RuntimeError, match=r"mask has shape \[2,1,1,8\]"):
        compiled(randn(2, 9, 32), torch.ones(2, 1, 1, 8, dtype=torch.bool))
    compiled, _ = counting(MARKED["dense"][0], dynamic=False)
    with pytest.raises(Exception, match=r"mask has shape \[2,1,1,8\]"):
        compiled(randn(2, 9, 32), torch.ones(2, 1, 1, 8, dtype=torch.bool))
