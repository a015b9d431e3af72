"""Rows for the parts of attention (split, merge, masked softmax) and for what masks, bias, dropout and modules cost."""

import copy
import math
from functools import partial
from typing import Any

import torch

import mha_ext

from .contenders import Shape, eager, flex, ours, sdpa, talking_heads, training
from .measure import Case, relative_error
from .rows import BF16, FP16, FP32, NAMES, Row, compare, direction, dtype_key

SHAPE = Shape(8, 12, 512, 64)
LARGE_SHAPE = Shape(1, 4, 512, 64)
TALKING_SHAPE = Shape(4, 12, 1024, 64)
LONG_SHAPE = Shape(1, 8, 2048, 64)
LENGTHS = (512, 400, 300, 256, 200, 150, 100, 60)


def split_case(dtype: torch.dtype) -> Case:
    x = torch.randn(8, 512, 768).to(dtype)
    calls = {
        "clone": lambda: x.clone().view(8, 512, 12, 64).transpose(1, 2),
        "mha_ext": lambda: mha_ext.split_heads(x, 12),
        "view+contiguous": lambda: x.view(8, 512, 12, 64).transpose(1, 2).contiguous(),
    }
    return Case(calls, "clone", lambda: x.view(8, 512, 12, 64).transpose(1, 2), bytes=2 * x.nbytes)


def merge_case(dtype: torch.dtype) -> Case:
    x = torch.randn(8, 12, 512, 64).to(dtype)
    merged = x.transpose(1, 2).reshape(8, 512, 768)
    calls = {
        "clone": lambda: merged.clone(),
        "mha_ext": lambda: mha_ext.merge_heads(x),
        "transpose+reshape": lambda: x.transpose(1, 2).reshape(8, 512, 768),
    }
    return Case(calls, "clone", lambda: merged, bytes=2 * x.nbytes)


def softmax_case(dtype: torch.dtype, backward: bool) -> Case:
    torch.manual_seed(0)
    scores = torch.randn(8, 12, 512, 512).to(dtype).requires_grad_(backward)
    visible = torch.rand(8, 1, 1, 512) > 0.1
    hidden = ~visible
    calls = {
        "scale+masked_fill+softmax": lambda: (scores * 0.125).masked_fill(hidden, float("-inf")).softmax(-1),
        "mha_ext": lambda: mha_ext.masked_softmax(scores, visible, scale=0.125),
    }
    wide = scores.detach().float().requires_grad_(backward)
    forward = lambda: (wide * 0.125).masked_fill(hidden, float("-inf")).softmax(-1)
    expected = forward
    if backward:
        dout = torch.randn_like(scores)
        calls = {name: training(call, [scores], dout) for name, call in calls.items()}
        expected = training(forward, [wide], dout.float())
    moved = (5 if backward else 2) * scores.nbytes  # forward reads one and writes one; backward reads two, writes one
    return Case(calls, "scale+masked_fill+softmax", expected, bytes=moved)


def part_rows(full: bool) -> list[Row]:
    rows = []
    for dtype in (FP32, BF16):
        rows.append(Row("parts", f"split_heads [8,512,768] {NAMES[dtype]}", partial(split_case, dtype)))
        rows.append(Row("parts", f"merge_heads [8,12,512,64] {NAMES[dtype]}", partial(merge_case, dtype)))
        for backward in (False, True) if full else (False,):
            name = f"masked_softmax [8,12,512,512] {NAMES[dtype]} {direction(backward)}"
            rows.append(Row("parts", name, partial(softmax_case, dtype, backward)))
    return rows


def dropout_case(dtype: torch.dtype, backward: bool) -> Case:
    """Dropped elements differ between contenders, so the check is the distance from the undropped output.

    Dropping with probability p leaves an expected relative distance of sqrt(p / (1 - p)).
    """
    p = 0.1
    inputs = SHAPE.inputs(dtype, requires_grad=backward)
    calls = {
        "sdpa": lambda: sdpa(*inputs, dropout_p=p),
        "mha_ext": lambda: ours(*inputs, dropout_p=p),
        "eager": lambda: eager(*inputs, dropout_p=p),
    }
    undropped = sdpa(*(x.detach() for x in inputs))

    def check(result: Any) -> float:
        out = result[0] if backward else result
        return abs(relative_error(out.detach(), undropped) / math.sqrt(p / (1 - p)) - 1) / 0.1

    return compare(calls, inputs, backward=backward, flops=SHAPE.flops(backward), check=check)


def bias_case(dtype: torch.dtype) -> Case:
    inputs = SHAPE.inputs(dtype, requires_grad=True)
    inputs.append(torch.randn(1, SHAPE.heads, SHAPE.queries, SHAPE.queries).to(dtype).requires_grad_())
    q, k, v, bias = inputs
    dout = torch.randn_like(q)
    calls = {
        "sdpa": lambda: sdpa(q, k, v, attn_mask=bias),
        "mha_ext": lambda: ours(q, k, v, bias=bias),
        "eager": lambda: eager(q, k, v, bias=bias),
    }
    wide = [x.detach().float().requires_grad_() for x in inputs]
    expected = training(lambda: sdpa(*wide[:3], attn_mask=wide[3]), wide, dout.float())
    calls = {name: training(call, inputs, dout) for name, call in calls.items()}
    return Case(calls, "sdpa", expected, flops=SHAPE.flops(True), peak=dtype_key(dtype))


def padded_case(dtype: torch.dtype, backward: bool) -> Case:
    inputs = SHAPE.inputs(dtype, requires_grad=backward)
    lengths = torch.tensor(LENGTHS)
    visible = (torch.arange(SHAPE.queries) < lengths[:, None])[:, None, None]
    hidden = ~visible
    calls = {
        "sdpa": lambda: sdpa(*inputs, attn_mask=visible),
        "mha_ext": lambda: ours(*inputs, mask=mha_ext.masks.Padding(lengths)),
        "eager": lambda: eager(*inputs, hidden=hidden),
    }
    pairs = SHAPE.queries * sum(LENGTHS) / len(LENGTHS)
    return compare(
        calls,
        inputs,
        backward=backward,
        expected=lambda *wide: sdpa(*wide, attn_mask=visible),
        flops=SHAPE.flops(backward, pairs),
    )


def window_case(dtype: torch.dtype, backward: bool) -> Case:
    shape, window = Shape(1, 8, 8192, 64), 256
    inputs = shape.inputs(dtype, requires_grad=backward)
    i, j = torch.arange(shape.queries)[:, None], torch.arange(shape.queries)
    visible = (j <= i) & (i - j < window)
    mask = mha_ext.masks.Window(window - 1, 0)
    calls = {"sdpa": lambda: sdpa(*inputs, attn_mask=visible), "mha_ext": lambda: ours(*inputs, mask=mask)}
    skipped = {"flex": "has no backward on CPU"} if backward else {}
    if not backward:
        q, k, v = inputs
        calls["flex"] = flex(q, k, v, visible=lambda b, h, i, j: (i >= j) & (i - j < window))
    pairs = visible.sum().item()
    return compare(
        calls,
        inputs,
        backward=backward,
        expected=lambda *wide: sdpa(*wide, attn_mask=visible),
        flops=shape.flops(backward, pairs),
        skipped=skipped,
    )


def block_sparse_case(dtype: torch.dtype, backward: bool) -> Case:
    """A tenth of the blocks and the diagonal, against a dense mask."""
    blocks = (torch.rand(LONG_SHAPE.queries // 64, LONG_SHAPE.Sk // 64) < 0.1) | torch.eye(
        LONG_SHAPE.queries // 64
    ).bool()
    mask = mha_ext.masks.BlockSparse(blocks, 64)
    visible = mask.to_dense(1, 1, LONG_SHAPE.queries, LONG_SHAPE.Sk)
    inputs = LONG_SHAPE.inputs(dtype, requires_grad=backward)
    calls = {"sdpa": lambda: sdpa(*inputs, attn_mask=visible), "mha_ext": lambda: ours(*inputs, mask=mask)}
    expected = lambda *wide: sdpa(*wide, attn_mask=visible)
    flops = LONG_SHAPE.flops(backward, visible.sum().item())
    return compare(calls, inputs, backward=backward, expected=expected, flops=flops)


def alibi_case(dtype: torch.dtype, backward: bool) -> Case:
    """Causal, against the same bias (and mask) as a tensor."""
    bias = mha_ext.biases.ALiBi(mha_ext.biases.alibi_slopes(LONG_SHAPE.heads))
    hidden = torch.ones(LONG_SHAPE.queries, LONG_SHAPE.Sk, dtype=torch.bool).triu_(1)
    dense = bias.to_dense(LONG_SHAPE.queries, LONG_SHAPE.Sk).masked_fill(hidden, float("-inf"))[None]
    inputs = LONG_SHAPE.inputs(dtype, requires_grad=backward)
    tensor = dense.to(dtype)
    calls = {"sdpa": lambda: sdpa(*inputs, attn_mask=tensor), "mha_ext": lambda: ours(*inputs, causal=True, bias=bias)}
    pairs = LONG_SHAPE.queries * (LONG_SHAPE.queries + 1) / 2
    expected = lambda *wide: sdpa(*wide, attn_mask=dense)
    return compare(calls, inputs, backward=backward, expected=expected, flops=LONG_SHAPE.flops(backward, pairs))


def sinks_case(dtype: torch.dtype, backward: bool) -> Case:
    inputs = LONG_SHAPE.inputs(dtype, requires_grad=backward)
    sinks = torch.randn(LONG_SHAPE.heads)
    textbook = lambda *x: mha_ext.reference.attention(*x, sinks=sinks)
    calls = {"eager": lambda: textbook(*inputs), "mha_ext": lambda: ours(*inputs, sinks=sinks)}
    flops = LONG_SHAPE.flops(backward)
    return compare(calls, inputs, backward=backward, baseline="eager", expected=textbook, flops=flops)


def varlen_case(dtype: torch.dtype) -> Case:
    """Sequences of different lengths, packed or padded; the result is packed both times."""
    padded = SHAPE.inputs(dtype)
    inside = torch.arange(SHAPE.queries) < torch.tensor(LENGTHS)[:, None]
    q, k, v = (x.transpose(1, 2)[inside] for x in padded)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    visible = inside[:, None, None]
    by_padding = lambda q, k, v: sdpa(q, k, v, attn_mask=visible).transpose(1, 2)[inside]
    calls = {
        "sdpa, padded": lambda: by_padding(*padded),
        "mha_ext": lambda: mha_ext.attention_varlen(q, k, v, starts, starts),
    }
    flops = 4 * SHAPE.heads * SHAPE.head_dim * sum(n * n for n in LENGTHS)
    expected = lambda: by_padding(*(x.float() for x in padded))
    return Case(calls, "sdpa, padded", expected, flops=flops, peak=dtype_key(dtype))


def talking_heads_case(dtype: torch.dtype, backward: bool) -> Case:
    shape = TALKING_SHAPE
    inputs = shape.inputs(dtype, requires_grad=backward)
    H = shape.heads
    inputs += [(torch.eye(H) + 0.1 * torch.randn(H, H)).to(dtype).requires_grad_(backward) for _ in range(2)]
    q, k, v, pre_mix, post_mix = inputs
    calls = {
        "eager einsum": lambda: talking_heads(*inputs),
        "mha_ext": lambda: ours(q, k, v, pre_mix=pre_mix, post_mix=post_mix),
    }
    mixes = (8 if backward else 2) * 2 * shape.batch * H * H * shape.queries * shape.Sk
    flops = shape.flops(backward) + mixes
    return compare(calls, inputs, backward=backward, baseline="eager einsum", expected=talking_heads, flops=flops)


def module_case(dtype: torch.dtype, backward: bool) -> Case:
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(768, 12, batch_first=True, dtype=dtype).train(backward)
    mine = mha_ext.nn.MultiheadAttention(768, 12, batch_first=True, dtype=dtype).train(backward)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(8, 512, 768).to(dtype)
    truth = copy.deepcopy(theirs).float()
    dout = torch.randn_like(x)

    def call_of(module: torch.nn.Module, x: torch.Tensor, dout: torch.Tensor) -> Any:
        forward = lambda: module(x, x, x, need_weights=False)[0]
        if backward:
            return training(forward, list(module.parameters()), dout)
        return torch.no_grad()(forward)

    calls = {"torch.nn": call_of(theirs, x, dout), "mha_ext.nn": call_of(mine, x, dout)}
    projections = 2 * 4 * 8 * 512 * 768 * 768
    flops = SHAPE.flops(backward) + projections * (3 if backward else 1)
    return Case(calls, "torch.nn", call_of(truth, x.float(), dout.float()), flops=flops, peak=dtype_key(dtype))


def model_case(dtype: torch.dtype, backward: bool) -> Case:
    """A whole model of torch's modules, with one line added to the program."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, 0.0, "gelu", batch_first=True, norm_first=True, dtype=dtype)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(backward)
    x, hidden = torch.randn(2, 1024, 512).to(dtype), torch.nn.Transformer.generate_square_subsequent_mask(1024, dtype=dtype)
    truth, dout = copy.deepcopy(model).float(), torch.randn_like(x)

    def call_of(model: torch.nn.Module, x: torch.Tensor, hidden: torch.Tensor, dout: torch.Tensor) -> Any:
        forward = lambda: model(x, hidden, is_causal=True)
        # Not the norms': torch sums their gradients in bf16, off by a quarter.
        weights: list[torch.Tensor] = [p for p in model.parameters() if p.dim() > 1]
        return training(forward, weights, dout) if backward else torch.no_grad()(forward)

    plain = call_of(model, x, hidden, dout)

    def in_use() -> Any:
        with mha_ext.use_for_sdpa():
            return plain()

    expected = call_of(truth, x.float(), hidden.float(), dout.float())
    return Case({"torch": plain, "mha_ext": in_use}, "torch", expected)


def large_logits_case() -> Case:
    """fp16 scores beyond 65504 before scaling: the textbook overflows, and must not be taken for a result."""
    inputs = [x * 80 if i < 2 else x for i, x in enumerate(LARGE_SHAPE.inputs(FP16))]
    calls = {"sdpa": lambda: sdpa(*inputs), "mha_ext": lambda: ours(*inputs), "eager": lambda: eager(*inputs)}
    return compare(calls, inputs, backward=False, flops=LARGE_SHAPE.flops(False))


def feature_rows(full: bool) -> list[Row]:
    dtypes = (FP32, BF16) if full else (FP32,)
    rows = []
    for dtype in dtypes:
        for backward in (False, True) if full else (True,):
            name = f"dropout 0.1 {SHAPE} {NAMES[dtype]} {direction(backward)}"
            rows.append(Row("features", name, partial(dropout_case, dtype, backward)))
        for backward in (False, True) if full else (False,):
            kind = f"{NAMES[dtype]} {direction(backward)}"
            args = (dtype, backward)
            rows += [
                Row("features", f"padded batch {SHAPE} {kind}", partial(padded_case, *args)),
                Row("features", f"window 256 B1 H8 S8192 D64 {kind}", partial(window_case, *args)),
            ]
        for backward in (False, True) if full else (False,):
            kind = f"{NAMES[dtype]} {direction(backward)}"
            rows += [
                Row("features", f"10 % of the blocks {LONG_SHAPE} {kind}", partial(block_sparse_case, dtype, backward)),
                Row("features", f"causal ALiBi {LONG_SHAPE} {kind}", partial(alibi_case, dtype, backward)),
                Row("features", f"sinks {LONG_SHAPE} {kind}", partial(sinks_case, dtype, backward)),
            ]
        name = f"packed sequences {SHAPE} {NAMES[dtype]} fwd"
        rows.append(Row("features", name, partial(varlen_case, dtype)))
        name = f"learned bias [1,12,512,512] {SHAPE} {NAMES[dtype]} fwd+bwd"
        rows.append(Row("features", name, partial(bias_case, dtype)))
        for backward in (False, True) if full else (False,):
            name = f"talking heads {TALKING_SHAPE} {NAMES[dtype]} {direction(backward)}"
            rows.append(Row("features", name, partial(talking_heads_case, dtype, backward)))
    for dtype in (FP32, BF16):
        for backward in (False, True) if full or dtype == BF16 else (False,):
            name = f"MultiheadAttention(768, 12) B8 S512 {NAMES[dtype]} {direction(backward)}"
            rows.append(Row("modules", name, partial(module_case, dtype, backward)))
            name = f"use_for_sdpa, 2 layers of 512, causal B2 S1024 {NAMES[dtype]} {direction(backward)}"
            rows.append(Row("modules", name, partial(model_case, dtype, backward)))
    rows.append(Row("features", f"fp16 large logits {LARGE_SHAPE} fp16 fwd", large_logits_case))
    return rows
