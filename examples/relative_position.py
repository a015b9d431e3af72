"""Relative position representations (Shaw et al., "Self-attention with relative position representations", 2018) from public
pieces of mha_ext: each query meets, besides the keys, one learned vector per clipped distance.

    score[i,j] = scale * q_i . (k_j + key_table[c(j - i)])          c clips to [-max_distance, max_distance]
    out[i]     = sum_j weight[i,j] * (v_j + value_table[c(j - i)])

The first is attention with a bias, q . key_table gathered along the diagonals. The second takes the weights, whose sums by
distance meet value_table; leave it out (value_table=None), as later models do, and no weights are stored.

    python examples/relative_position.py [steps]

trains a layer to copy the token three places to the left, which needs no content, only positions.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import mha_ext


def shaw_attention(q: Tensor, k: Tensor, v: Tensor, key_table: Tensor, value_table: Tensor | None = None, mask=None) -> Tensor:
    """q, k, v [B,H,S,D]; key_table, value_table [2 * max_distance + 1,D]. Gives [B,H,S,D]."""
    S, max_distance, scale = q.shape[2], (key_table.shape[0] - 1) // 2, q.shape[3] ** -0.5
    position = torch.arange(S, device=q.device)
    distance = (position - position[:, None]).clamp(-max_distance, max_distance) + max_distance  # [S,S]
    distance = distance.expand(*q.shape[:2], S, S)
    bias = (q @ key_table.t() * scale).gather(3, distance)
    if value_table is None:
        return mha_ext.attention(q, k, v, bias=bias, mask=mask)
    out, weights = mha_ext.attention(q, k, v, bias=bias, mask=mask, return_weights=True)
    by_distance = weights.new_zeros(*q.shape[:3], value_table.shape[0]).scatter_add(3, distance, weights)
    return out + by_distance @ value_table


class ShawAttention(nn.Module):
    """Self-attention [B,S,d_model] -> [B,S,d_model] that knows positions by distance only."""

    def __init__(self, d_model: int, num_heads: int, max_distance: int):
        super().__init__()
        self.num_heads, size = num_heads, d_model // num_heads
        self.qkv_proj, self.out_proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.key_table, self.value_table = (nn.Parameter(torch.randn(2 * max_distance + 1, size) * 0.1) for _ in range(2))

    def forward(self, x: Tensor, mask=None) -> Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = shaw_attention(q, k, v, self.key_table, self.value_table, mask)
        return self.out_proj(out.transpose(1, 2).flatten(2))


def train(steps: int, tokens: int = 11, length: int = 24, shift: int = 3) -> float:
    """The share of tokens that a trained layer copies from `shift` places to the left."""
    torch.manual_seed(0)
    embed, layer, read = nn.Embedding(tokens, 32), ShawAttention(32, 2, 8), nn.Linear(32, tokens)
    parameters = [p for m in (embed, layer, read) for p in m.parameters()]
    optimizer = torch.optim.Adam(parameters, 1e-2)
    for _ in range(steps):
        x = torch.randint(tokens, (16, length))
        logits = read(layer(embed(x), mha_ext.masks.Causal()))[:, shift:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), x[:, :-shift].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        x = torch.randint(tokens, (64, length))
        found = read(layer(embed(x), mha_ext.masks.Causal())).argmax(-1)
    return (found[:, shift:] == x[:, :-shift]).float().mean().item()


if __name__ == "__main__":
    print(f"copied {100 * train(int(sys.argv[1]) if len(sys.argv) > 1 else 300):.1f} % of the tokens three to the left")
