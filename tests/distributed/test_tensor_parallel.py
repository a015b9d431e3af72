"""Modules with their heads over processes, and under FSDP2, in real processes against one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_dtensor import S, close, full, mesh_of, randn
from torch import nn

import mha_ext
from mha_ext import masks

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.xdist_group("processes"),
]


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
