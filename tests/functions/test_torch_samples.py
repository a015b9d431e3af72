"""torch's own samples: those that its tests draw for scaled_dot_product_attention and for nn.MultiheadAttention.

The error against torch in fp64, as a root mean square over all samples, may be twice torch's own in the same type, and three times for
gradients; to that comes one rounding of the result. Logits are in the hundreds: the samples are drawn from -9 to 9.
"""

from __future__ import annotations

import functools

import cases
import oracle
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("expecttest")  # torch's test tools need it
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

import mha_ext
from mha_ext import masks

OPS = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
MODULES = [m for m in module_db if m.name == "nn.MultiheadAttention"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_torch_has_samples():
    assert OPS and MODULES


class Errors:
    """Sums of squares over the samples, by the name of the result: of our errors, of torch's, and of the results."""

    def __init__(self):
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, where: str, names, actual, exact, rival) -> None:
        for name, a, e, r in zip(names, actual, exact, rival):
            assert a.shape == e.shape and a.dtype == r.dtype, f"{where}: {name}"
            known = e.isfinite()  # a row that sees nothing is NaN in torch
            assert a[known].isfinite().all(), f"{where}: {name} is not finite"
            squares = [t.double()[known].square().sum() for t in (a - e, r - e, e)]
            self.sums[name] = self.sums.get(name, 0) + torch.stack(squares)

    def check(self, dtype: torch.dtype) -> None:
        over = []
        for name, (own, theirs, size) in ((name, t.sqrt().tolist()) for name, t in self.sums.items()):
            factor = oracle.FORWARD if name in ("out", "weights") else oracle.GRADIENT
            if own > factor * theirs + torch.finfo(dtype).eps * size:
                over.append(f"{name} {own:.3g} (torch {theirs:.3g}, size {size:.3g})")
        assert not over, f"errors in {dtype}: " + ", ".join(over)


def run(fn, leaves, dtype):
    """Outputs of fn, and the gradients of the leaves."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in leaves]
    outs = [t for t in fn(*leaves) if t is not None]
    weighting = [cases.randn(cases.generator(n), *t.shape).to(t.dtype) for n, t in enumerate(outs)]
    grads = torch.autograd.grad(outs, leaves, weighting, allow_unused=True)
    return outs + [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.variant_test_name or "plain")
def test_scaled_dot_product_attention(op, dtype):
    torch.manual_seed(0)
    errors, n = Errors(), 0
    for n, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=True)):
        mask = sample.kwargs.get("attn_mask")
        learned = mask is not None and mask.is_floating_point()
        leaves = [sample.input, *sample.args] + ([mask] if learned else [])
        if sample.kwargs.get("dropout_p"):  # other bits are dropped: as without
            sample.kwargs["dropout_p"] = 0.0

        def call(fn, *t, kwargs=sample.kwargs, learned=learned):
            return (fn(*t[:3], **(kwargs | {"attn_mask": t[3]} if learned else kwargs)),)

        actual, exact, rival = (
            run(lambda *t, fn=fn: call(fn, *t), leaves, kind)
            for fn, kind in (
                (mha_ext.scaled_dot_product_attention, dtype),
                (F.scaled_dot_product_attention, torch.float64),
                (F.scaled_dot_product_attention, dtype),
            )
        )
        errors.add(f"sample {n}", ("out", "q", "k", "v", "attn_mask"), actual, exact, rival)
    assert n >= 10
    errors.check(dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("info", MODULES, ids=lambda m: m.name)
def test_multihead_attention(info, training, dtype):
    torch.manual_seed(0)
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    assert len(samples) >= 10
    errors = Errors()
    for n, sample in enumerate(samples):
        options = sample.constructor_input.kwargs
        theirs = torch.nn.MultiheadAttention(**options, dtype=dtype).train(training)
        ours = mha_ext.nn.MultiheadAttention(**options, dtype=dtype).train(training)
        exact = torch.nn.MultiheadAttention(**options, dtype=torch.float64).train(training)
        for module in (ours, exact):
            module.load_state_dict(theirs.state_dict())
        names, parameters = zip(*theirs.named_parameters())
        leaves, kwargs = [*sample.forward_input.args, *parameters], sample.forward_input.kwargs

        def call(module, *t, names=names, kwargs=kwargs):  # a function of the parameters, so that their gradients come along
            return torch.func.functional_call(module, dict(zip(names, t[3:])), t[:3], kwargs)

        results = (
            run(functools.partial(call, module), leaves, kind)
            for module, kind in ((ours, dtype), (exact, torch.float64), (theirs, dtype))
        )
        errors.add(f"sample {n}", ["out", "weights", "q", "k", "v", *names], *results)
    errors.check(dtype)


@pytest.mark.parametrize("what", ["plain", "causal", "top_left", "negative scale", "dropout", "bias", "soft cap", "pre_mix", "weights"])
def test_logits_in_the_hundreds(what):
    """The same rule against the eager reference, on blocks of queries and keys of every kind. (With half types it knows more than any
    kernel can: backward has the output as it was rounded.)"""
    dtype = torch.float32
    gen = cases.generator(what)
    q, k, v = (cases.randn(gen, 2, heads, 150, 40) for heads in (4, 2, 2))
    q, k = q * 9, k * 9
    more = {
        "causal": {"mask": masks.Causal()},
        "top_left": {"mask": masks.Causal("top_left")},
        "negative scale": {"scale": -0.2, "mask": masks.Window(70, 0)},
        "dropout": {"dropout_p": 0.3, "rng_state": torch.tensor([3, 5])},
        "bias": {"bias": cases.randn(gen, 4, 150, 150).view(1, 4, 150, 150) * 100},
        "soft cap": {"softcap": 300.0},
        "pre_mix": {"pre_mix": torch.eye(4) + cases.randn(gen, 4, 4) / 10},
    }.get(what, {})

    def call(attention, *t):
        given = {n: x.to(t[0].dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in more.items()}
        return attention(*t, **given, return_weights=True) if what == "weights" else (attention(*t, **given),)

    functions = (mha_ext.attention, dtype), (mha_ext.reference.attention, torch.float64), (mha_ext.reference.attention, dtype)
    results = [run(functools.partial(call, fn), [q, k, v], kind) for fn, kind in functions]
    errors = Errors()
    errors.add(what, ["out", "weights", "q", "k", "v"] if what == "weights" else ["out", "q", "k", "v"], *results)
    errors.check(dtype)
