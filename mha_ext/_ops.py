"""The ops as torch sees them: loads the compiled module and adds to its ops what can only be said in Python (fake
kernels, autograd formulas, vmap rules). The only file that uses torch.library and, with _flops.py, torch.ops.

Arguments and shapes are those of the schemas in csrc/torch/schemas.cpp.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import masks, reference
from ._checks import accumulate_dtype

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        f"mha_ext's compiled part did not load ({error}); build it for the torch that is installed "
        f"({torch.__version__}) with: pip install --no-build-isolation ."
    ) from error

build_info: dict = _C.build_info()
cpu_isa, available_isas, attention_plan = _C.cpu_isa, _C.available_isas, _C.attention_plan
# Why CUDA tensors are refused, or None.
without_cuda: str | None = None if build_info["cuda"] else build_info["cuda_reason"]
if build_info["cuda"] and torch.version.cuda is not None:
    from . import _C_cuda  # registers the CUDA kernels

    with contextlib.suppress(ImportError):  # not built where other architectures were asked for
        from . import _C_cuda_sm90

        _C_cuda.use_sm90(_C_cuda_sm90.kernels())

_lib = torch.library.Library("mha_ext", "FRAGMENT")
_lib.define(
    "draw_rng_state(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
)
# attention_fwd of q, k, v that are slices of one tensor [B,S,H+2*Hk,D]
_modifiers = str(torch.ops.mha_ext.attention_fwd.default._schema).split("Tensor v, ")[1].split(", bool return_weights")[0]
_lib.define(
    f"attention_packed_fwd(Tensor qkv, int num_heads, {_modifiers}, bool deterministic) -> (Tensor out, Tensor lse, "
    "Tensor lse_rest)"
)

attention_cached = torch.ops.mha_ext.attention_cached.default  # has no gradient
dropout_mask = torch.ops.mha_ext.dropout_mask.default
draw_rng_state = torch.ops.mha_ext.draw_rng_state.default


@torch.library.impl(_lib, "draw_rng_state", "CompositeExplicitAutograd")
def _draw_rng_state(like: Tensor) -> Tensor:
    """int64[2] (seed, offset) on like's device, from torch's default CPU generator: what torch.manual_seed seeds, what
    checkpointing saves and restores, and what compiled code draws from too."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device="cpu").to(like.device)


# --- Fake kernels: shapes, strides and types without data -------------------------------------------------------------


def _in_order_of(x: Tensor, last: int) -> Tensor:
    """[n0,n1,n2,last], dense, the first three dimensions in the order that they have in x's memory."""
    sizes = [*x.shape[:3], last]
    order = sorted(range(3), key=lambda d: -x.stride(d))
    dense = x.new_empty([sizes[d] for d in order] + [last])
    return dense.permute([*(order.index(d) for d in range(3)), 3])


def _lse_of(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:3], dtype=accumulate_dtype(x.dtype))


def _dbias_of(bias: Tensor | None, need_dbias: bool, like: Tensor) -> Tensor:
    return bias.new_empty(bias.shape) if need_dbias else like.new_empty([0], dtype=accumulate_dtype(like.dtype))


@torch.library.register_fake("mha_ext::attention_fwd", lib=_lib)
def _(q, k, v, bias, mask, begin, end, query_ids, key_ids, blocks, left, right, top_left, block_size, q_starts, k_starts,
      max_q, max_k, sinks, scale, softcap, dropout_p, rng_state, return_weights, deterministic):  # fmt: skip
    weights = [*q.shape[:3], k.shape[2]] if return_weights else [0]
    return _in_order_of(q, v.shape[3]), _lse_of(q), _lse_of(q), q.new_empty(weights)


@torch.library.register_fake("mha_ext::attention_cached", lib=_lib)
def _(q, k, v, *args):
    return _in_order_of(q, v.shape[3]), _lse_of(q)


@torch.library.register_fake("mha_ext::attention_bwd", lib=_lib)
def _(dout, dlse, dweights, q, k, v, out, lse, lse_rest, bias, mask, begin, end, query_ids, key_ids, blocks, left, right,
      top_left, block_size, q_starts, k_starts, max_q, max_k, sinks, scale, softcap, dropout_p, rng_state, need_dbias,
      deterministic):  # fmt: skip
    gradients = _in_order_of(q, q.shape[3]), _in_order_of(k, k.shape[3]), _in_order_of(v, v.shape[3])
    dsinks = q.new_empty([q.shape[1] if sinks is not None else 0], dtype=accumulate_dtype(q.dtype))
    return *gradients, _dbias_of(bias, need_dbias, q), dsinks


def packed_slices(qkv: Tensor, num_heads: int) -> list[Tensor]:
    """q [B,H,S,D], k and v [B,Hk,S,D] of qkv [B,S,H+2*Hk,D], as views."""
    num_kv_heads = (qkv.shape[2] - num_heads) // 2
    return [x.transpose(1, 2) for x in qkv.split((num_heads, num_kv_heads, num_kv_heads), 2)]


@torch.library.impl(_lib, "attention_packed_fwd", "CompositeExplicitAutograd")
def _(qkv, num_heads, *modifiers):
    op = torch.ops.mha_ext.attention_fwd.default
    return op(*packed_slices(qkv, num_heads), *modifiers[:-1], False, modifiers[-1])[:3]


@torch.library.register_fake("mha_ext::attention_packed_fwd", lib=_lib)
def _(qkv, num_heads, *modifiers):
    q = packed_slices(qkv, num_heads)[0]
    return _in_order_of(q, q.shape[3]), _lse_of(q), _lse_of(q)


@torch.library.register_fake("mha_ext::attention_packed_bwd", lib=_lib)
def _(dout, dlse, dweights, q, k, v, out, lse, lse_rest, bias, *args):
    dsinks = lse.new_empty([q.shape[1] if args[14] is not None else 0])
    dqkv = q.new_empty([q.shape[0], q.shape[2], q.shape[1] + 2 * k.shape[1], q.shape[3]])
    return dqkv, _dbias_of(bias, args[-2], q), dsinks


@torch.library.register_fake("mha_ext::attention_mixed_fwd", lib=_lib)
def _(q, k, v, pre_mix, post_mix, *args):
    weights = [*q.shape[:3], k.shape[2]] if args[-2] else [0]
    return _in_order_of(q, v.shape[3]), _lse_of(q), _lse_of(q), q.new_empty(weights)


@torch.library.register_fake("mha_ext::attention_mixed_bwd", lib=_lib)
def _(dout, dlse, dweights, q, k, v, lse, lse_rest, pre_mix, post_mix, bias, *args):
    sinks, need_dbias = args[14], args[-2]
    gradients = _in_order_of(q, q.shape[3]), _in_order_of(k, k.shape[3]), _in_order_of(v, v.shape[3])
    sums = ([q.shape[1]], sinks), ([q.shape[1]] * 2, pre_mix), ([q.shape[1]] * 2, post_mix)
    dsinks, dpre_mix, dpost_mix = (q.new_empty(n if x is not None else [0], dtype=lse.dtype) for n, x in sums)
    return *gradients, _dbias_of(bias, need_dbias, q), dsinks, dpre_mix, dpost_mix


@torch.library.register_fake("mha_ext::masked_softmax_fwd", lib=_lib)
def _(scores, *args):
    return scores.new_empty(scores.shape), _lse_of(scores)


@torch.library.register_fake("mha_ext::masked_softmax_bwd", lib=_lib)
def _(dout, scores, lse, bias, *args):
    return scores.new_empty(scores.shape), _dbias_of(bias, args[-1], scores)


@torch.library.register_fake("mha_ext::split_heads", lib=_lib)
def _(x, num_heads, bias=None):
    return x.new_empty([x.shape[0], num_heads, x.shape[1], x.shape[2] // num_heads])


@torch.library.register_fake("mha_ext::merge_heads", lib=_lib)
def _(x, mix=None):
    return x.new_empty([x.shape[0], x.shape[2], x.shape[1] * x.shape[3]])


@torch.library.register_fake("mha_ext::dropout_mask", lib=_lib)
def _(rng_state, p, B, H, Sq, Sk):
    return rng_state.new_empty([B, H, Sq, Sk], dtype=torch.bool)


@torch.library.register_fake("mha_ext::draw_rng_state", lib=_lib)
def _(like):
    return like.new_empty([2], dtype=torch.int64)


# --- Autograd ---------------------------------------------------------------------------------------------------------
# Attention saves its inputs, the output and the logsumexp; backward recomputes the rest. The backward ops are
# differentiable too: their formulas go through the reference.


def _attention_fwd_setup(ctx, inputs, output):
    q, k, v, bias, *mask_tensors = inputs[:10]
    left, right, top_left, block_size, q_starts, k_starts, max_q, max_k, sinks = inputs[10:19]
    scale, softcap, dropout_p, rng_state, return_weights, deterministic = inputs[19:]
    out, lse, lse_rest, weights = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse_rest)
    weights = weights if return_weights else None
    ctx.save_for_backward(
        q, k, v, out, lse, lse_rest, weights, bias, *mask_tensors, q_starts, k_starts, sinks, rng_state
    )
    ctx.numbers = (left, right, top_left, block_size), (max_q, max_k), (scale, softcap, dropout_p)
    ctx.deterministic = deterministic


def _attention_fwd_backward(ctx, dout, dlse, _, dweights):
    saved = ctx.saved_tensors  # once: checkpointing lets nobody read it twice
    q, k, v, out, lse, lse_rest, weights, bias, *mask_tensors = saved[:14]
    q_starts, k_starts, sinks, rng_state = saved[14:]
    nothing = (None,) * 25
    if dout is None and dlse is None and dweights is None:
        return nothing
    if dout is None:
        dout = torch.zeros_like(out)
    if weights is None:
        dweights = None  # the empty placeholder's gradient
    if dweights is not None:
        # A weight of 0 contributes nothing, whatever its gradient holds.
        product = torch.where(weights == 0, 0, weights.to(lse.dtype) * dweights)
        dlse = -product.sum(-1) if dlse is None else dlse - product.sum(-1)
    need_dbias = ctx.needs_input_grad[3]
    mask_numbers, longest, numbers = ctx.numbers
    modifiers = bias, *mask_tensors, *mask_numbers, q_starts, k_starts, *longest, sinks, *numbers, rng_state
    *gradients, dsinks = attention_bwd(
        dout, dlse, dweights, q, k, v, out, lse, lse_rest, *modifiers, need_dbias, ctx.deterministic
    )
    dsinks = dsinks if sinks is not None and ctx.needs_input_grad[18] else None
    return _where_needed(gradients, ctx) + nothing[4:18] + (dsinks,) + nothing[19:]


def _attention_bwd_setup(ctx, inputs, output):
    dout, dlse, dweights, q, k, v, _, _, _, bias, *mask_tensors = inputs[:16]
    left, right, top_left, block_size, q_starts, k_starts, max_q, max_k, sinks = inputs[16:25]
    scale, softcap, dropout_p, rng_state, need_dbias, _ = inputs[25:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dout, dlse, dweights, q, k, v, sinks, bias, *mask_tensors, q_starts, k_starts, rng_state)
    ctx.numbers = (left, right, top_left, block_size), (max_q, max_k), (scale, softcap, dropout_p)
    ctx.need_dbias = need_dbias


def _attention_bwd_backward(ctx, *gradients):
    saved = ctx.saved_tensors
    dout, dlse, dweights, q, k, v, sinks, bias, *mask_tensors = saved[:14]
    q_starts, k_starts, rng_state = saved[14:]
    mask_numbers, (max_q, max_k), (scale, softcap, dropout_p) = ctx.numbers
    args = masks.MaskArgs(*mask_tensors, *mask_numbers)
    packed, visible, keep = _reference_modifiers(args, q, k, q_starts, k_starts, max_q, max_k, dropout_p, rng_state)

    def first_order(dout, dlse, dweights, q, k, v, bias, sinks):
        def forward(q, k, v, bias, sinks):
            return reference.attend(q, k, v, bias, visible, scale, softcap, dropout_p, keep, sinks, packed)

        (_, lse, weights), pull = _vjp(forward, (q, k, v, bias, sinks))
        if dweights is None:
            return pull((dout, torch.zeros_like(lse) if dlse is None else dlse, torch.zeros_like(weights)))
        # The op takes -rowsum(weights * dweights) as a part of dlse; here autograd finds that term itself.
        product = (weights.to(lse.dtype) * dweights).sum(-1)
        return pull((dout, product if dlse is None else dlse + product, dweights))

    dq, dk, dv, dbias, dsinks = gradients
    wanted = dq, dk, dv, dbias if ctx.need_dbias else None, dsinks if sinks is not None else None
    gradients = _second_order(first_order, (dout, dlse, dweights, q, k, v, bias, sinks), wanted)
    by_input = (*gradients[:6], None, None, None, gradients[6], *(None,) * 14, gradients[7], *(None,) * 6)
    return _where_needed(by_input, ctx)


def _reference_modifiers(args, q, k, q_starts, k_starts, max_q, max_k, dropout_p, rng_state):
    """(packed, visible, keep) as reference.attend takes them."""
    packed = reference.Packed(q_starts, k_starts, max_q, max_k) if q_starts is not None else None
    B, Sq, Sk = (q.shape[0], q.shape[2], k.shape[2]) if packed is None else (len(q_starts) - 1, max_q, max_k)
    visible = masks.visible_of(args, Sq, Sk, q.device, None if packed is None else packed.lengths())
    keep = dropout_mask(rng_state, dropout_p, B, q.shape[1], Sq, Sk) if dropout_p > 0 else None
    return packed, visible, keep


def _masked_softmax_fwd_setup(ctx, inputs, output):
    scores, *modifiers, rng_state = inputs
    lse = output[1]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(scores, lse, *modifiers[:7], rng_state)
    ctx.numbers = modifiers[7:]


def _masked_softmax_fwd_backward(ctx, dout, _):
    if dout is None:
        return (None,) * 15
    scores, lse, *modifiers, rng_state = ctx.saved_tensors
    dscores, dbias = masked_softmax_bwd(dout, scores, lse, *modifiers, *ctx.numbers, rng_state, ctx.needs_input_grad[1])
    return _where_needed((dscores, dbias), ctx) + (None,) * 13


def _masked_softmax_bwd_setup(ctx, inputs, output):
    dout, scores, _, bias, *mask_tensors = inputs[:10]
    *mask_numbers, scale, dropout_p, rng_state, need_dbias = inputs[10:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dout, scores, bias, *mask_tensors, rng_state)
    ctx.numbers = *mask_numbers, scale, dropout_p
    ctx.need_dbias = need_dbias


def _masked_softmax_bwd_backward(ctx, ddscores, ddbias):
    dout, scores, bias, *mask_tensors, rng_state = ctx.saved_tensors
    *mask_numbers, scale, dropout_p = ctx.numbers
    args = masks.MaskArgs(*mask_tensors, *mask_numbers)
    visible = masks.visible_of(args, *scores.shape[2:], scores.device)
    keep = dropout_mask(rng_state, dropout_p, *scores.shape) if dropout_p > 0 else None

    def first_order(dout, scores, bias):
        def forward(scores, bias):
            return reference.softmax(scores, bias, visible, scale, dropout_p, keep)

        return _vjp(forward, (scores, bias))[1](dout)

    gradients = (ddscores, ddbias if ctx.need_dbias else None)
    ddout, dscores, dbias = _second_order(first_order, (dout, scores, bias), gradients)
    return _where_needed((ddout, dscores, None, dbias), ctx) + (None,) * 14


def _vjp(function, inputs):
    """torch.func.vjp for inputs of which some are None; the gradients of those are None."""
    there = [i for i, x in enumerate(inputs) if x is not None]

    def full(values):
        filled = [None] * len(inputs)
        for i, value in zip(there, values):
            filled[i] = value
        return filled

    outputs, pull = torch.func.vjp(lambda *given: function(*full(given)), *(inputs[i] for i in there))
    return outputs, lambda cotangents: full(pull(cotangents))


def _second_order(first_order, inputs, cotangents):
    """The gradients of inputs, given those (or None) of what first_order computes from them."""
    wanted = [i for i, c in enumerate(cotangents) if c is not None]
    if not wanted:
        return [None] * len(inputs)

    def differentiable(*values):
        results = first_order(*values)
        return tuple(results[i] for i in wanted)

    return _vjp(differentiable, inputs)[1](tuple(cotangents[i] for i in wanted))


def _where_needed(gradients, ctx):
    return tuple(g if need else None for g, need in zip(gradients, ctx.needs_input_grad))


def _split_heads_setup(ctx, inputs, output):
    ctx.has_bias = inputs[2] is not None


def _split_heads_backward(ctx, dout):
    dx = merge_heads(dout, None) if ctx.needs_input_grad[0] else None
    # Without a bias the dispatcher may drop that argument, and its flag.
    dbias = dout.sum((0, 2)).flatten() if ctx.has_bias and ctx.needs_input_grad[2] else None
    return dx, None, dbias


def _merge_heads_setup(ctx, inputs, output):
    x, mix = inputs
    ctx.heads = x.shape[1], x.shape[3]
    ctx.save_for_backward(x if mix is not None else None, mix)


def _merge_heads_backward(ctx, dout):
    x, mix = ctx.saved_tensors
    by_head = dout.unflatten(-1, ctx.heads).transpose(1, 2)
    if mix is None:
        return by_head, None
    dx = merge_heads(by_head, mix.t()).unflatten(-1, ctx.heads).transpose(1, 2)
    accumulate = accumulate_dtype(x.dtype)
    dmix = torch.einsum("bhsd,bgsd->hg", x.to(accumulate), by_head.to(accumulate)).to(mix.dtype)
    return _where_needed((dx, dmix), ctx)


# --- vmap: the mapped dimension is folded into the batch --------------------------------------------------------------

# Their first dimension may be 1 where the others' is B.
_BROADCASTING = {"bias", "mask", "begin", "end", "query_ids", "key_ids", "blocks"}


def _fold(x: Tensor, dim: int | None, n: int, B: int) -> Tensor:
    """[n*B, ...] from a tensor whose mapped dimension is dim (None: not mapped) and whose first other one is B or 1."""
    x = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
    return x.expand(n, B, *x.shape[2:]).reshape(n * B, *x.shape[2:])


def _dropout_under_vmap(p: float) -> Exception:
    return ValueError(f"dropout_p is {p} under vmap; accepted there: 0: apply dropout outside of vmap, or loop.")


def _vmap_by_folding(call, names, info, in_dims, *args):
    n, dims, given = info.batch_size, dict(zip(names, in_dims)), dict(zip(names, args))
    if given["dropout_p"] > 0:
        raise _dropout_under_vmap(given["dropout_p"])
    if given.get("q_starts") is not None or given.get("sinks") is not None:  # the first dimension isn't all of the batch
        return _vmap_by_looping(call, info, in_dims, *args)
    main = "q" if "q" in given else "scores"
    B = given[main].movedim(dims[main], 0).shape[1] if dims[main] is not None else given[main].shape[0]
    need_dbias = given.get("need_dbias", False)

    def fold(name, x):
        if not isinstance(x, Tensor) or name == "rng_state":
            return x
        shared = dims[name] is None and name in _BROADCASTING and x.shape[0] == 1
        return x if shared and not (name == "bias" and need_dbias) else _fold(x, dims[name], n, B)

    outputs = list(call(*(fold(name, x) for name, x in given.items())))
    for i, x in enumerate(outputs):
        if x.dim() > 1:  # not a placeholder
            outputs[i] = x.unflatten(0, (n, B))
    if need_dbias and B != 1 and given["bias"].shape[1 if dims["bias"] == 0 else 0] == 1:
        dbias = 3 if main == "q" else 1
        outputs[dbias] = outputs[dbias].sum(1, keepdim=True)
    return tuple(outputs), tuple(0 if x.dim() > 1 else None for x in outputs)


def _vmap_by_looping(call, info, in_dims, *args):
    results = [
        call(*(x if d is None else x.select(d, i) for x, d in zip(args, in_dims))) for i in range(info.batch_size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results))), (0,) * len(results[0])


def _vmap_heads(call, names, info, in_dims, x, *args):
    if in_dims[0] is not None and not any(d is not None for d in in_dims[1:]):
        x = x.movedim(in_dims[0], 0)
        return call(x.flatten(0, 1), *args).unflatten(0, x.shape[:2]), 0
    return _vmap_by_looping(call, info, in_dims, x, *args)


@torch.library.register_vmap("mha_ext::draw_rng_state", lib=_lib)
def _(info, in_dims, like):
    raise ValueError(
        "dropout was asked for under vmap; accepted there: dropout_p=0: apply dropout outside of vmap, or loop."
    )


# --- The ops as the package calls them --------------------------------------------------------------------------------

_below_autograd = getattr(torch._C, "_AutoDispatchBelowAutograd", contextlib.nullcontext)
transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def _callable(name, setup, backward, vmap):
    """Gives an op its formulas, and returns the function that calls it.

    The formulas are registered with the dispatcher, for compiled code. Eager code goes through an autograd.Function of
    the same formulas: torch.func only differentiates those, and a call costs some 50 us less. Where torch lets it, it
    then skips the dispatcher's autograd kernel, for another 5 us, and outside of torch.func the part of
    autograd.Function.apply that only torch.func needs (it inspects the signature), for another 15 us.
    """
    op = getattr(torch.ops.mha_ext, name).default
    torch.library.register_autograd(op.name(), backward, setup_context=setup, lib=_lib)

    def without_autograd(*args):
        with _below_autograd():
            return op(*args)

    def call(*args):
        if torch.compiler.is_compiling():
            return op(*args)
        if transforms_active() or forward_ad._current_level >= 0:
            return function.apply(*args)  # forward-mode differentiation is refused there, not ignored
        if torch.is_grad_enabled():
            for x in args:
                if isinstance(x, Tensor) and x.requires_grad:
                    return apply(*args)
        return without_autograd(*args)

    vmap = functools.partial(vmap, call, [a.name for a in op._schema.arguments])
    torch.library.register_vmap(op.name(), vmap, lib=_lib)
    methods = {"forward": without_autograd, "setup_context": setup, "backward": backward, "vmap": vmap}
    function = type(name, (torch.autograd.Function,), {key: staticmethod(method) for key, method in methods.items()})
    apply = super(torch.autograd.Function, function).apply
    return call


attention_fwd = _callable("attention_fwd", _attention_fwd_setup, _attention_fwd_backward, _vmap_by_folding)
attention_bwd = _callable("attention_bwd", _attention_bwd_setup, _attention_bwd_backward, _vmap_by_folding)
masked_softmax_fwd = _callable(
    "masked_softmax_fwd", _masked_softmax_fwd_setup, _masked_softmax_fwd_backward, _vmap_by_folding
)
masked_softmax_bwd = _callable(
    "masked_softmax_bwd", _masked_softmax_bwd_setup, _masked_softmax_bwd_backward, _vmap_by_folding
)
split_heads = _callable("split_heads", _split_heads_setup, _split_heads_backward, _vmap_heads)
merge_heads = _callable("merge_heads", _merge_heads_setup, _merge_heads_backward, _vmap_heads)
