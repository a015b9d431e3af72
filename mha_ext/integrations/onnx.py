"""The ops of mha_ext in ONNX's own operators, so that a trained model runs on ONNX Runtime.

    from mha_ext.integrations import onnx
    torch.onnx.export(model, args, dynamo=True, opset_version=23, custom_translation_table=onnx.translations())

Attention becomes ONNX's Attention (opset 23) where that says the same, rows that see no key set to 0 after it. With a bias and a
soft cap together, sinks or weights as a result it becomes the plain formula in float32. Dropout and packed sequences are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

OPSET = 23
FLOAT = 1  # onnx.TensorProto's


def translations() -> dict[Any, Callable[..., Any]]:
    """What ``torch.onnx.export(..., dynamo=True, opset_version=23, custom_translation_table=)`` takes.

    Covers attention, masked_softmax, split_heads and merge_heads in inference, with every mask, bias and grouped heads.

    Raises:
        ImportError: onnxscript is absent, or too old to have opset 23.
    """
    _op()
    ops = torch.ops.mha_ext
    return {
        ops.attention_fwd.default: attention,
        ops.masked_softmax_fwd.default: masked_softmax,
        ops.split_heads.default: split_heads,
        ops.merge_heads.default: merge_heads,
        ops.draw_rng_state.default: draw_rng_state,
    }


def _op() -> Any:
    try:
        from onnxscript import opset23
    except ImportError as error:
        raise ImportError(
            "onnxscript with opset 23 is not installed; accepted: onnxscript 0.5 or later: pip install -U onnxscript onnx."
        ) from error
    return opset23


# The exporter reads these signatures: what has a Python type is an attribute, the rest are tensors. Names are the ops'.


def attention(  # type: ignore[no-untyped-def]
    q, k, v, bias=None, mask=None, begin=None, end=None, query_ids=None, key_ids=None, blocks=None,
    left: int | None = None, right: int | None = None, top_left: bool = False, block_size: int = 0, q_starts=None, k_starts=None,
    max_q: int = 0, max_k: int = 0, sinks=None, scale: float = 1.0, softcap: float = 0.0, dropout_p: float = 0.0, rng_state=None,
    return_weights: bool = False, deterministic: bool = False,
):  # fmt: skip
    """mha_ext::attention_fwd"""
    op = _op()
    if dropout_p != 0.0 or q_starts is not None:
        what = "packed sequences" if q_starts is not None else f"dropout_p {dropout_p}"
        raise ValueError(f"attention with {what} was exported to ONNX; accepted: a model in eval(), and padded batches with a mask.")
    # torch's and ONNX's causal masks are top-left; with equal lengths so is every one.
    causal = left is None and (top_left or (right == 0 and q.shape[2] == k.shape[2] and isinstance(q.shape[2], int)))
    sizes = op.Shape(q, start=2, end=3), op.Shape(k, start=2, end=3)
    others = mask, begin, end, query_ids, key_ids, blocks
    plain = all(x is None for x in others) and bias is None and left is None and (causal or (right is None and not top_left))
    visible = _visible(op, *sizes, *others, left, right, top_left, block_size)
    scores = _scores(op, q, k, scale, softcap, bias)
    weights, lse = _softmax(op, scores, visible, sinks)
    if sinks is None and not return_weights and (plain or softcap == 0.0):
        added = None if plain else _added(op, visible, bias, q, *sizes)
        out = op.Attention(q, k, v, added, scale=scale, softcap=softcap, is_causal=int(plain and causal))
        out = out[0] if isinstance(out, (tuple, list)) else out
        if not plain:  # a row that sees no key
            out = op.Where(op.IsInf(op.Unsqueeze(lse, [-1]), detect_positive=0), op.CastLike(0.0, out), out)
    else:
        out = op.CastLike(op.MatMul(weights, op.Cast(_groups(op, v, q.shape[1]), to=FLOAT)), q)
    shown = op.CastLike(weights, q) if return_weights else op.ConstantOfShape([0])
    return out, lse, op.Sub(lse, lse), shown


def masked_softmax(  # type: ignore[no-untyped-def]
    scores, bias=None, mask=None, begin=None, end=None, query_ids=None, key_ids=None, blocks=None, left: int | None = None,
    right: int | None = None, top_left: bool = False, block_size: int = 0, scale: float = 1.0, dropout_p: float = 0.0, rng_state=None,
):  # fmt: skip
    """mha_ext::masked_softmax_fwd"""
    op = _op()
    if dropout_p != 0.0:
        raise ValueError(f"masked_softmax with dropout_p {dropout_p} was exported to ONNX; accepted: a model in eval().")
    sizes = op.Shape(scores, start=2, end=3), op.Shape(scores, start=3, end=4)
    others = mask, begin, end, query_ids, key_ids, blocks
    visible = _visible(op, *sizes, *others, left, right, top_left, block_size)
    scaled = op.Mul(op.Cast(scores, to=FLOAT), scale)
    if bias is not None:
        scaled = op.Add(scaled, op.Cast(bias, to=FLOAT))
    weights, lse = _softmax(op, scaled, visible, None)
    return op.CastLike(weights, scores), lse


def split_heads(x, num_heads: int, bias=None):  # type: ignore[no-untyped-def]
    """mha_ext::split_heads: [B,S,H*D] -> [B,H,S,D]"""
    op = _op()
    x = x if bias is None else op.Add(x, bias)
    return op.Transpose(op.Reshape(x, [0, 0, num_heads, -1]), perm=[0, 2, 1, 3])


def merge_heads(x, mix=None):  # type: ignore[no-untyped-def]
    """mha_ext::merge_heads: [B,H,S,D] -> [B,S,H*D]; new[g] = sum_h old[h] * mix[h,g]"""
    op = _op()
    x = op.Transpose(x, perm=[0, 2, 1, 3])  # [B,S,H,D]
    if mix is not None:
        x = op.MatMul(op.Transpose(mix, perm=[1, 0]), x)
    return op.Reshape(x, [0, 0, -1])


def draw_rng_state(like):  # type: ignore[no-untyped-def]
    """mha_ext::draw_rng_state"""
    raise ValueError("attention with dropout was exported to ONNX; accepted: a model without: call model.eval() first.")


# --- The formula ------------------------------------------------------------------------------------------------------


def _visible(
    op: Any, Sq: Any, Sk: Any, mask: Any, begin: Any, end: Any, query_ids: Any, key_ids: Any, blocks: Any, left: int | None,
    right: int | None, top_left: bool, block_size: int,
) -> Any:  # fmt: skip
    """masks.visible_of: bool, broadcasts to [B,H,Sq,Sk], or None for everything."""
    none = op.Constant(value_ints=[])
    i = op.Unsqueeze(op.Range(0, op.Reshape(Sq, none), 1), [1])
    j = op.Unsqueeze(op.Range(0, op.Reshape(Sk, none), 1), [0])
    here = op.Add(i, op.Sub(Sk, Sq))  # bottom-right
    parts = []
    if left is not None:
        parts.append(op.GreaterOrEqual(j, op.Sub(here, left)))
    if right is not None:
        parts.append(op.LessOrEqual(j, op.Add(here, right)))
    if top_left:
        parts.append(op.LessOrEqual(j, i))
    if begin is not None:
        parts.append(op.GreaterOrEqual(j, op.Unsqueeze(begin, [1, 3])))
    if end is not None:
        parts.append(op.Less(j, op.Unsqueeze(end, [1, 3])))
    if query_ids is not None:
        parts.append(op.Equal(op.Unsqueeze(query_ids, [1, 3]), op.Unsqueeze(key_ids, [1, 2])))
    if blocks is not None:
        rows, columns = (op.Div(op.Squeeze(x, [d]), block_size) for x, d in ((i, 1), (j, 0)))
        parts.append(op.Gather(op.Gather(blocks, rows, axis=2), columns, axis=3))
    if mask is not None:
        parts.append(mask)
    visible = None
    for part in parts:
        visible = part if visible is None else op.And(visible, part)
    return visible


def _groups(op: Any, x: Any, heads: int) -> Any:
    """[B,Hk,S,D] with each head as often as query heads share it."""
    groups = heads // x.shape[1]
    if groups == 1:
        return x
    repeated = op.Expand(op.Unsqueeze(x, [2]), [1, 1, groups, 1, 1])
    return op.Reshape(repeated, [0, heads, -1, x.shape[3]])


def _scores(op: Any, q: Any, k: Any, scale: float, softcap: float, bias: Any) -> Any:
    keys = op.Transpose(op.Cast(_groups(op, k, q.shape[1]), to=FLOAT), perm=[0, 1, 3, 2])
    scores = op.Mul(op.MatMul(op.Cast(q, to=FLOAT), keys), scale)
    if softcap != 0.0:
        scores = op.Mul(op.Tanh(op.Div(scores, softcap)), softcap)
    return scores if bias is None else op.Add(scores, op.Cast(bias, to=FLOAT))


def _softmax(op: Any, scores: Any, visible: Any, sinks: Any) -> Any:
    """(weights, logsumexp [B,H,Sq]); a row that sees no key gives 0 and -inf."""
    infinity = float("inf")
    if visible is not None:
        scores = op.Where(visible, scores, -infinity)
    largest = op.ReduceMax(scores, [-1], keepdims=1)
    if sinks is not None:
        sinks = op.Reshape(op.Cast(sinks, to=FLOAT), [1, -1, 1, 1])
        largest = op.Max(largest, sinks)
    largest = op.Where(op.Equal(largest, -infinity), 0.0, largest)
    terms = op.Exp(op.Sub(scores, largest))
    total = op.ReduceSum(terms, [-1], keepdims=1)
    if sinks is not None:
        total = op.Add(total, op.Exp(op.Sub(sinks, largest)))
    lse = op.Squeeze(op.Add(op.Log(total), largest), [-1])
    return op.Div(terms, op.Where(op.Equal(total, 0.0), 1.0, total)), lse


def _added(op: Any, visible: Any, bias: Any, like: Any, Sq: Any, Sk: Any) -> Any:
    """What ONNX's Attention adds to the scores; ONNX Runtime wants its last two dimensions in full."""
    added = None if bias is None else op.CastLike(bias, like)
    if visible is not None:
        hidden = op.CastLike(-float("inf"), like)
        added = op.Where(visible, op.CastLike(0.0, like) if added is None else added, hidden)
    return op.Expand(added, op.Concat(op.Constant(value_ints=[1, 1]), Sq, Sk, axis=0))
