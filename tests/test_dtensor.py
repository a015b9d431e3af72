"""Attention on DTensors in real processes against the same in one; tensor parallelism and FSDP2 of the modules."""

from __future__ import annotations

import subprocess
import sys

import cases
import pytest
import torch
import torch.distributed as dist
from torch import nn

import mha_ext
from mha_ext import masks

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.xdist_group("processes"),
]

B, H, Hk, S, D = 4, 8, 4, 12, 6


def close(actual, expected):
    """The same sums in perhaps another order."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def randn(*shape, seed=0):
    return cases.randn(cases.generator(seed), *shape, dtype=torch.float64)


def mesh_of(*shape):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape)


def placements_of(text):
    from torch.distributed.tensor import Replicate, Shard

    return [{"r": Replicate(), "b": Shard(0), "h": Shard(1), "s": Shard(2)}[c] for c in text]


def mask_of(kind):
    lengths, starts = torch.tensor([12, 7, 0, 5]), torch.tensor([0, 2, 3, 12])
    return {
        "none": None,
        "causal": masks.Causal(),
        "padding": masks.Padding(lengths),
        "left_padding": masks.LeftPadding(starts) & masks.Window(4, None),
        "prefix": masks.Prefix(lengths[:1]),
        "documents": masks.Documents(torch.arange(S)[None] // 5),
        "dense": masks.Dense(torch.rand(B, H, S, S, generator=cases.generator(5)) < 0.5),
        "blocks": masks.BlockSparse(torch.rand(1, H, 3, 3, generator=cases.generator(6)) < 0.5, 4) & masks.Causal(),
        "dense_1h": torch.rand(1, H, S, S, generator=cases.generator(5)) < 0.5,
    }[kind]


ATTENTION = [
    # mesh, placements of q, k, v, mask, shape of the bias
    ((2,), "bbb", "none", None),
    ((2,), "hhh", "causal", (1, H, S, S)),
    ((2,), "bbb", "padding", (1, H, S, S)),
    ((2,), "hhh", "left_padding", (B, 1, S, S)),
    ((2,), "bbb", "documents", (B, H, 1, S)),
    ((2,), "sss", "prefix", (S, S)),  # changed to one that works
    ((2,), "sss", "padding", None),
    ((2,), "sss", "left_padding", None),  # the same tensors as with padding, in other places
    ((2,), "hbr", "dense", None),
    ((4,), "hhh", "dense_1h", (S, S)),
    ((2,), "hhh", "blocks", "alibi"),
    ((4,), "bbb", "blocks", "alibi"),
    ((2, 2), ("bh", "bh", "bh"), "dense", (1, H, S, S)),
    ((2, 2), ("rh", "rh", "rh"), "causal", (B, H, S, S)),
]


def attention_on(mesh_shape, placements, kind, bias_shape, heads=(H, Hk)):
    from torch.distributed.tensor import distribute_tensor

    mesh = mesh_of(*mesh_shape)
    H, Hk = heads
    shapes = (B, H, S, D), (B, Hk, S, D), (B, Hk, S, D + 1)
    whole = [randn(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    bias = sinks = None
    if bias_shape == "alibi":
        bias, sinks = randn(H, seed=7).requires_grad_(), randn(H, seed=8).requires_grad_()
    elif bias_shape is not None:
        bias = randn(*bias_shape, seed=7).requires_grad_()
    shards = [distribute_tensor(x.detach(), mesh, placements_of(p)).requires_grad_() for x, p in zip(whole, placements)]
    other_bias = None if bias is None else bias.detach().clone().requires_grad_()
    results = []
    for (q, k, v), b in ((whole, bias), (shards, other_bias)):
        options = {"bias": b if sinks is None else mha_ext.biases.ALiBi(b), "sinks": sinks, "softcap": 3.0}
        out, lse = mha_ext.attention(q, k, v, mask=mask_of(kind), return_lse=True, **options)
        leaves = [x for x in (q, k, v, b, sinks) if x is not None]
        shape = dict(zip(("out", "lse"), (out, lse)))
        loss = (out * out).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()
        results.append([out, lse, *torch.autograd.grad(loss, leaves)])
    for i, (expected, actual) in enumerate(zip(*results)):
        close(full(actual), expected)
        if i < 2 and set("".join(placements)) <= {"b", "h"} and "dense" != kind:
            assert list(actual.placements) == placements_of(placements[0]), shape
    return True


@pytest.mark.parametrize("mesh, placements, kind, bias", ATTENTION, ids=str)
def test_attention(processes, mesh, placements, kind, bias):
    processes[torch.Size(mesh).numel()].run(attention_on, mesh, placements, kind, bias)


def test_heads_that_do_not_divide_are_gathered(processes):
    """3 key/value heads on 2 processes would part groups of query heads from their key/value head."""
    processes[2].run(attention_on, (2,), "hhr", "causal", None, (12, 3))


def drop_in_on(n):
    from torch.distributed.tensor import distribute_tensor

    whole = [randn(B, heads, S, D, seed=i) for i, heads in enumerate((H, Hk, Hk))]
    seen = torch.rand(S, S, generator=cases.generator(5)) < 0.7
    options = {"attn_mask": seen, "is_causal": True, "enable_gqa": True}
    expected = mha_ext.scaled_dot_product_attention(*whole, **options)
    for letter in "bh":
        shards = [distribute_tensor(x, mesh_of(n), placements_of(letter)) for x in whole]
        actual = mha_ext.scaled_dot_product_attention(*shards, **options)
        assert list(actual.placements) == placements_of(letter)
        close(full(actual), expected)


def test_scaled_dot_product_attention(processes):
    processes[2].run(drop_in_on, 2)


def compiled_on(n):
    from torch.distributed.tensor import distribute_tensor

    shapes = (B, H, S, D), (B, Hk, S, D), (B, Hk, S, D)
    q, k, v = (distribute_tensor(randn(*s, seed=i), mesh_of(n), placements_of("h")).requires_grad_() for i, s in enumerate(shapes))

    mask = mask_of("padding")

    def function(q, k, v):
        return 2 * mha_ext.attention(q, k, v, mask=mask)

    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        out = call(q, k, v)
        results.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
    for eager, other in zip(*results):
        close(full(other), full(eager))


def test_compiled(processes):
    processes[2].run(compiled_on, 2)


def packed_sequences_on(n):
    from torch.distributed.tensor import distribute_tensor

    whole = [randn(15, heads, D, seed=i).requires_grad_() for i, heads in enumerate((H, Hk, Hk))]
    shards = [distribute_tensor(x.detach(), mesh_of(n), placements_of("h")).requires_grad_() for x in whole]
    starts = torch.tensor([0, 4, 4, 15])
    results = []
    for q, k, v in (whole, shards):
        out, lse = mha_ext.attention_varlen(q, k, v, starts, starts, mask=masks.Causal(), return_lse=True)
        results.append([out, lse, *torch.autograd.grad((out * out).sum(), (q, k, v))])
    for a, b in zip(*results):
        assert list(b.placements) == placements_of("b" if b is results[1][1] else "h")
        close(full(b), a)


def test_packed_sequences(processes):
    processes[2].run(packed_sequences_on, 2)


def other_ops_on(n):
    from torch.distributed.tensor import distribute_tensor

    mesh = mesh_of(n)
    scores, x, heads = randn(B, H, S, S), randn(B, S, H * D, seed=1), randn(B, H, S, D, seed=2)
    bias, row, mix = randn(1, H, S, S, seed=3), randn(H * D, seed=4), randn(H, H, seed=5)
    cases_ = [
        ("bhs", scores, bias, lambda t, b: mha_ext.masked_softmax(t, mask_of("padding"), bias=b, scale=0.7)),
        ("bhs", x, row, lambda t, b: mha_ext.split_heads(t, H, b)),
        ("bhs", heads, mix, mha_ext.merge_heads),
        ("bhs", heads, row, lambda t, b: mha_ext.merge_heads(t)),
    ]
    for letters, tensor, other, function in cases_:
        tensor.requires_grad_(), other.requires_grad_()
        expected = function(tensor, other)
        weight = torch.randn_like(expected)
        dist.broadcast(weight, 0)
        wanted = torch.autograd.grad(expected, (tensor, other), weight, allow_unused=True)
        for letter in letters:
            if letter == "s" and tensor.dim() == 3:
                placements = placements_of("h")
            else:
                placements = placements_of("s" if letter == "h" and tensor.dim() == 3 else letter)
            shard = distribute_tensor(tensor.detach(), mesh, placements).requires_grad_()
            actual = function(shard, other)
            close(actual.full_tensor(), expected)
            dweight = distribute_tensor(weight, mesh, placements_of("r"))
            got = torch.autograd.grad(actual, (shard, other), dweight, allow_unused=True)
            for a, b in zip(got, wanted):
                close(full(a), b)


@pytest.mark.parametrize("n", [2, 4])
def test_other_ops(processes, n):
    processes[n].run(other_ops_on, n)


def refusals():
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of(2)
    q = distribute_tensor(randn(2, 2, 3, 4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="dropout_p is 0.1 and the inputs are DTensors"):
        mha_ext.attention(q, q, q, dropout_p=0.1)
    head_parallel = mha_ext.distributed.HeadParallel()
    with pytest.raises(TypeError, match="HeadParallel was given a Linear"):
        head_parallel._apply(nn.Linear(2, 2), mesh)
    with pytest.raises(ValueError, match="1 key/value heads do not divide evenly among 2"):
        head_parallel._apply(mha_ext.nn.SelfAttention(8, 4, num_kv_heads=1), mesh)
    module = mha_ext.nn.SelfAttention(8, 4)
    module.extra = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="parameter extra, which HeadParallel cannot shard"):
        head_parallel._apply(module, mesh)


def test_refusals(processes):
    processes[2].run(refusals)


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.attention = mha_ext.nn.SelfAttention(24, 8, num_kv_heads=4, causal=True, rope=True, head_dim=6, **options)
        self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 24)

    def forward(self, x):
        x = x + self.attention(self.norm(x), masks.Window(7, None))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def model_of(**options):
    torch.manual_seed(3)
    return nn.Sequential(Block(**options), Block(**options)).double()


def steps(model, data, elements=2 * S * 24):
    """The losses of a few steps, one on each input, and the gradients of the last; the loss is a sum divided by elements."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, foreach=False)
    losses = []
    for x in data:
        optimizer.zero_grad()
        loss = model(x).square().sum() / elements
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = {name: full(p.grad) for name, p in model.named_parameters()}
    return losses, grads


def unpacked(tensors):
    """By the names of the unpacked modules."""
    sizes = (8 * 6, 4 * 6, 4 * 6)
    result = {}
    for name, x in tensors.items():
        if "qkv_proj" in name:
            for part, rows in zip(("q_proj", "k_proj", "v_proj"), x.split(sizes)):
                result[name.replace("qkv_proj", part)] = rows
        else:
            result[name] = x
    return result


def tensor_parallel(n, options, sequence):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    alone, model = model_of(**options), model_of(**options)
    layouts = {"input_layouts": Shard(1), "output_layouts": Shard(1)} if sequence else {}
    plan = {"attention": mha_ext.distributed.HeadParallel(**layouts)}
    if sequence:
        plan |= {"norm": SequenceParallel(use_local_output=True), "up": ColwiseParallel(input_layouts=Shard(1))}
        plan |= {"down": RowwiseParallel(output_layouts=Shard(1))}
    else:
        plan |= {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh_of(n), plan)
    data = [randn(2, S, 24, seed=i) for i in range(3)]
    losses, grads = steps(alone, data)
    if sequence:
        rank = dist.get_rank()
        data = [x.chunk(n, 1)[rank] for x in data]
    other_losses, other_grads = steps(model, data)
    for a, b in zip(losses, other_losses):
        if sequence:
            dist.all_reduce(b)
        close(b, a)
    saved = {name: full(x) for name, x in model.state_dict().items()}
    whole = [name for name in saved if not sequence or "attention" in name]  # others' gradients are of a part of the sequence
    close({name: other_grads[name] for name in whole}, {name: unpacked(grads)[name] for name in whole})
    close({name: saved[name] for name in whole}, {name: unpacked(alone.state_dict())[name] for name in whole})
    alone_again = model_of(**options)
    alone_again.load_state_dict(saved)
    if not sequence:
        close(alone_again(data[0]), model(data[0]))


@pytest.mark.parametrize("n, options, sequence", [
    (2, {}, False), (4, {"qk_norm": True}, False), (2, {"packed": False, "bias": False, "softcap": 5.0}, False),
    (2, {"qk_norm": True}, True),
], ids=str)  # fmt: skip
def test_tensor_parallel_modules(processes, n, options, sequence):
    processes[n].run(tensor_parallel, n, options, sequence)


def cross_attention(n, layouts):
    """x and context, each whole or a part of the sequence; as keywords too."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    options = {"context_dim": 10, "num_kv_heads": 4, "head_dim": 6, "qk_norm": True, "window": 9, "dtype": torch.float64}
    torch.manual_seed(3)
    alone = mha_ext.nn.CrossAttention(24, 8, **options)
    model = mha_ext.nn.CrossAttention(24, 8, **options)
    model.load_state_dict(alone.state_dict())
    whole = [randn(2, S, 24).requires_grad_(), randn(2, 2 * S, 10, seed=1).requires_grad_()]
    expected = alone(*whole)
    wanted = torch.autograd.grad(expected.square().sum(), [*whole, *alone.parameters()])
    layout = Shard(1) if layouts == "sequence" else Replicate()
    style = mha_ext.distributed.HeadParallel(input_layouts=layout, output_layouts=layout)
    model = parallelize_module(model, mesh_of(n), style)
    cut = lambda x: x.detach().chunk(n, 1)[dist.get_rank()] if layouts == "sequence" else x.detach()
    mine = [cut(x).requires_grad_() for x in whole]
    out = model(mine[0], context=mine[1])
    close(out, cut(expected))
    out.square().sum().backward()
    for x, gradient in zip(mine, wanted):
        close(x.grad, cut(gradient))
    gradients = dict(zip((name for name, _ in alone.named_parameters()), wanted[2:]))
    for kind in ("weight", "bias"):
        parts = gradients.pop(f"kv_proj.{kind}").chunk(2)
        gradients |= {f"{name}_proj.{kind}": part for name, part in zip("kv", parts)}
    close({name: full(p.grad) for name, p in model.named_parameters()}, gradients)
    alone.load_state_dict({name: full(x) for name, x in model.state_dict().items()})
    close(alone(*whole), expected)


@pytest.mark.parametrize("n, layouts", [(2, "whole"), (4, "whole"), (2, "sequence")])
def test_cross_attention_with_sharded_heads(processes, n, layouts):
    processes[n].run(cross_attention, n, layouts)


def by_hand(n):
    """torch's own styles on the three projections are enough; on the packed one they are refused."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    alone, model = model_of(packed=False), model_of(packed=False)
    plan = {f"attention.{name}_proj": ColwiseParallel() for name in "qkv"} | {"attention.out_proj": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh_of(n), plan)
    data = [randn(2, S, 24, seed=i) for i in range(3)]
    for a, b in zip(steps(alone, data), steps(model, data)):
        close(b, a)
    packed = parallelize_module(model_of()[0], mesh_of(n), {"attention.qkv_proj": ColwiseParallel()})
    with pytest.raises(ValueError, match="qkv_proj gave .* of 16 heads; .*HeadParallel"):
        packed(data[0])


def test_projections_sharded_by_hand(processes):
    processes[2].run(by_hand, 2)


def decode_with_sharded_heads(n):
    from torch.distributed.tensor.parallel import parallelize_module

    alone, model = model_of(), model_of()
    for block in model:
        parallelize_module(block, mesh_of(n), {"attention": mha_ext.distributed.HeadParallel()})
    attention, x = model[0].attention.eval(), randn(2, 5, 24)
    cache = attention.make_cache(2, 8)
    with torch.no_grad():
        actual = torch.cat([attention(x[:, :3], cache=cache), attention(x[:, 3:], cache=cache)], dim=1)
        close(actual, alone[0].attention(x))
    assert cache.k.shape[1] == 4 // n


def test_caches_with_sharded_heads(processes):
    processes[2].run(decode_with_sharded_heads, 2)


class Encoder(nn.Module):
    """Block, and torch's module on our kernels."""

    def __init__(self):
        super().__init__()
        self.block = Block(qk_norm=True)
        self.attention = mha_ext.nn.MultiheadAttention(24, 4, batch_first=True)

    def forward(self, x):
        x = self.block(x)
        return x + self.attention(x, x, x, need_weights=False)[0]


def fully_sharded(n, tensor_parallel_size):
    """FSDP2, and with tensor parallelism inside it: equal to one process on the whole batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    torch.manual_seed(4)
    alone = nn.Sequential(Encoder(), Encoder()).double()
    model = nn.Sequential(Encoder(), Encoder()).double()
    model.load_state_dict(alone.state_dict())
    shape = n // tensor_parallel_size, tensor_parallel_size
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    for encoder in model:
        if tensor_parallel_size > 1:
            parallelize_module(encoder.block, mesh["tensor"], {"attention": mha_ext.distributed.HeadParallel()})
        fully_shard(encoder, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    data = [randn(2, S, 24, seed=i) for i in range(3)]
    losses, grads = steps(alone, data)
    parts, mine = shape[0], mesh.get_local_rank("data")
    # FSDP takes the mean of the gradients over the processes.
    other_losses, other_grads = steps(model, [x.chunk(parts)[mine] for x in data], 2 * S * 24 // parts)
    for a, b in zip(losses, other_losses):
        dist.all_reduce(b)
        close(b / n, a)
    saved, expected = {name: full(x) for name, x in model.state_dict().items()}, alone.state_dict()
    if tensor_parallel_size > 1:
        grads, expected = unpacked(grads), unpacked(expected)
    close(other_grads, grads)
    close(saved, expected)


@pytest.mark.parametrize("n, tensor_parallel_size", [(2, 1), (4, 2)])
def test_fully_sharded_modules(processes, n, tensor_parallel_size):
    processes[n].run(fully_sharded, n, tensor_parallel_size)


def test_importing_the_package_does_not_bring_distributed():
    code = "import sys, mha_ext; assert 'torch.distributed.tensor' not in sys.modules; mha_ext.distributed.HeadParallel"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="mha_ext.*nothing"):
        _ = mha_ext.nothing
