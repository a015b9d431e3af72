"""Writes the AOTInductor package of causal attention that example.cpp runs: python package.py FILE.pt2"""

import sys

import torch

import mha_ext


class CausalAttention(torch.nn.Module):
    """q, k, v [B,H,S,D], any B and S."""

    def forward(self, q, k, v):
        return mha_ext.attention(q, k, v, mask=mha_ext.masks.Causal())


def write(path: str) -> None:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    inputs = tuple(torch.randn(3, 3, 20, 16) for _ in "qkv")
    program = torch.export.export(CausalAttention(), inputs, dynamic_shapes=({0: batch, 2: length},) * 3)
    # The generated code only calls the op: nothing in it is worth optimising.
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=quick)


if __name__ == "__main__":
    write(sys.argv[1])
