"""What the CUDA tests share. They make data on the CPU, move it, and compare on the CPU, so that they also run on the simulated device of
tests/ptxsim, where this project's kernels run and torch's own do not."""

from __future__ import annotations

import dataclasses

import cases
import oracle
import torch

from mha_ext import _ops, biases, masks


def to_cuda(t: torch.Tensor | None) -> torch.Tensor | None:
    """t with its strides and with all that lies around it in memory."""
    if t is None:
        return None
    whole = torch.empty(0, dtype=t.dtype).set_(t.detach().untyped_storage())
    return whole.cuda().as_strided(t.size(), t.stride(), t.storage_offset()).requires_grad_(t.requires_grad)


def prepared(c: cases.Case) -> tuple[cases.Case, cases.Inputs]:
    """The inputs of c on the CPU, without what the ops would leave to torch's kernels: copies of tensors whose last dimension is not
    contiguous, and the rounding of the gradient of a half precision bias."""
    if c.layout == "last_sparse":
        c = dataclasses.replace(c, layout="padded")
    x = cases.build(c)
    if isinstance(x.bias, torch.Tensor) and c.dtype in (torch.float16, torch.bfloat16):
        x.bias = cases.surrounded(x.bias.detach().float()).requires_grad_()
    if isinstance(x.bias, torch.Tensor) and x.bias.dim() == 2:
        x.bias = x.bias.detach()[None, None].requires_grad_()
    return c, x


def modifiers(c: cases.Case, x: cases.Inputs) -> dict:
    """The ops' arguments for mask, bias and the like, on the CPU."""
    args = masks.lower(x.mask, c.B, c.H, c.Sq, c.Sk, torch.device("cpu"))
    scale = c.D**-0.5 if c.scale is None else c.scale
    rest = {"scale": scale, "softcap": c.softcap, "dropout_p": c.dropout_p, "rng_state": x.rng_state}
    bias = x.bias
    if isinstance(bias, biases.Bias):  # what the ops take is a leaf there: named() goes on to the parameter
        bias = lowered(c, x).detach().contiguous().requires_grad_()
    return {"bias": bias, "sinks": x.sinks, **args._asdict(), **rest}


def lowered(c: cases.Case, x: cases.Inputs) -> torch.Tensor:
    """A bias object as the ops take it."""
    return x.bias.lower(c.H, c.Sq, c.Sk, oracle.accumulate_dtype(c.dtype), torch.device("cpu"))


def moved(arguments: dict) -> dict:
    return {name: to_cuda(value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def keep_of(c: cases.Case, x: cases.Inputs) -> torch.Tensor | None:
    return _ops.dropout_mask(x.rng_state, c.dropout_p, c.B, c.H, c.Sq, c.Sk) if c.dropout_p else None


def truth(c: cases.Case, x: cases.Inputs, **more) -> dict[str, oracle.Truth]:
    return oracle.truths(x.q, x.k, x.v, **x.definition(), keep=keep_of(c, x), **c.options(), **more)


def forward(q, k, v, given: dict, return_weights=False, deterministic=False):
    """(out, lse, lse_rest, weights)"""
    op = torch.ops.mha_ext.attention_fwd.default
    more = {"return_weights": return_weights, "deterministic": deterministic}
    return _ops.attention_fwd(*cases.op_arguments(op, q=q, k=k, v=v, **given, **more))


def backward(dout, q, k, v, outputs, given: dict, deterministic=False, dlse=None, dweights=None):
    """(dq, dk, dv, dbias) by the op itself. dweights' part of dlse is the caller's."""
    out, lse, lse_rest, _ = outputs
    op = torch.ops.mha_ext.attention_bwd.default
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "lse_rest": lse_rest}
    need_dbias = given["bias"] is not None
    more = {"dlse": dlse, "dweights": dweights, "need_dbias": need_dbias, "deterministic": deterministic}
    with torch.no_grad():
        return _ops.attention_bwd(*cases.op_arguments(op, dout=dout, **tensors, **given, **more))


def named(gradients, x: cases.Inputs) -> dict[str, torch.Tensor]:
    """Gradients on the CPU by the names of the leaves."""
    found = {name: g.cpu() for name, g in zip(x.leaves(), gradients)}
    if isinstance(x.bias, biases.Bias):
        Sq, Sk = x.q.shape[2], x.k.shape[2]
        given = x.bias.lower(x.q.shape[1], Sq, Sk, oracle.accumulate_dtype(x.q.dtype), torch.device("cpu"))
        found["bias"] = torch.autograd.grad(given, x.bias_leaf(), found["bias"])[0]
    return found
