"""A small GPT on real text over several processes; every way gives the losses of one process.

    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel data       FSDP2: parameters and batch sharded
    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel tensor     heads sharded
    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel sequence   one long sequence, sharded
    python examples/train_distributed.py                                            one process, for comparison

NCCL with a GPU for each process where there are GPUs, gloo on the CPU otherwise.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from real_text import Characters, language_reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mha_ext
from mha_ext.distributed import HeadParallel, ring_attention, sequence_positions

LAYOUT = "zigzag"  # the same work for every process under a causal mask


class SequenceParallelAttention(nn.Module):
    """Causal self-attention of which each process has a part of the sequence."""

    def __init__(self, d_model: int, num_heads: int, num_kv_heads: int):
        super().__init__()
        self.sizes = num_heads, num_kv_heads, num_kv_heads
        self.head_dim = d_model // num_heads
        self.out_proj = nn.Linear(d_model, d_model)  # first, as in SelfAttention: the same random weights
        self.qkv_proj = nn.Linear(d_model, sum(self.sizes) * self.head_dim)

    def forward(self, x):
        q, k, v = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(self.sizes, dim=1)
        out = ring_attention(q, k, v, mask=mha_ext.masks.Causal(), layout=LAYOUT)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, parallel: str, d_model: int, num_heads: int, num_kv_heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        if parallel == "sequence":
            self.attention = SequenceParallelAttention(d_model, num_heads, num_kv_heads)
        else:
            self.attention = mha_ext.nn.SelfAttention(d_model, num_heads, num_kv_heads=num_kv_heads, causal=True)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, parallel: str, vocabulary: int, length: int, d_model: int, layers: int):
        super().__init__()
        self.characters, self.places = nn.Embedding(vocabulary, d_model), nn.Embedding(length, d_model)
        self.blocks = nn.Sequential(*(Block(parallel, d_model, 4, 2) for _ in range(layers)))
        self.head = nn.Linear(d_model, vocabulary)

    def forward(self, ids, positions):
        x = self.blocks(self.characters(ids) + self.places(positions))
        return self.head(x.flatten(0, 1))  # [N*S,vocabulary]


def parallelize(model: GPT, parallel: str, device_type: str) -> None:
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    for block in model.blocks:
        if parallel == "data":
            fully_shard(block, mesh=mesh)
        elif parallel == "tensor":
            plan = {"attention": HeadParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh, plan)
    if parallel == "data":
        fully_shard(model, mesh=mesh)


def part_of(ids: torch.Tensor, targets: torch.Tensor, parallel: str):
    """This process's (ids, targets, positions) of a batch [N,S] that is the same on all."""
    positions = torch.arange(ids.shape[1])
    if parallel == "data":
        ids, targets = (x.chunk(dist.get_world_size())[dist.get_rank()] for x in (ids, targets))
    elif parallel == "sequence":
        positions = sequence_positions(ids.shape[1], layout=LAYOUT)
        ids, targets = ids[:, positions], targets[:, positions]
    return ids, targets, positions


def train(args: argparse.Namespace, parallel: str, device: torch.device) -> list[float]:
    text = language_reference()
    characters = Characters("".join(sorted(set(text))))
    data = torch.tensor(characters.encode(text))
    torch.manual_seed(0)
    model = GPT(parallel, len(characters), args.length, args.d_model, args.layers).to(device)
    processes = dist.get_world_size()
    parallelize(model, parallel, device.type)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, foreach=False)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(args.steps):
        starts = torch.randint(len(data) - args.length, (args.batch,), generator=generator)
        rows = torch.stack([data[s : s + args.length + 1] for s in starts])
        ids, targets, positions = (x.to(device) for x in part_of(rows[:, :-1], rows[:, 1:], parallel))
        optimizer.zero_grad()
        # Of the whole batch; this process adds its part of the sum.
        loss = F.cross_entropy(model(ids, positions), targets.flatten(), reduction="sum")
        loss = loss / rows[:, 1:].numel()
        (loss * processes if parallel == "data" else loss).backward()  # FSDP takes the mean of the gradients
        if parallel == "sequence":
            for p in model.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()
        total = loss.detach().clone()
        if parallel != "tensor":
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parallel", nargs="+", choices=["data", "tensor", "sequence"], default=["sequence"])
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--length", type=int, default=512)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--d-model", type=int, default=64)
    options.add_argument("--float64", action="store_true", help="so that losses can be compared to the last digit")
    args = options.parse_args()
    if args.float64:
        torch.set_default_dtype(torch.float64)
    rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.is_available()
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    backend = "nccl" if gpus else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for parallel in args.parallel:
        losses = train(args, parallel, device)
        if dist.get_rank() == 0:
            print(f"{parallel}, {dist.get_world_size()} processes: " + " ".join(f"{x:.6f}" for x in losses), flush=True)
    dist.barrier()  # a thread of gloo that still holds a tensor lets go of it here, and not when Python has ended
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
