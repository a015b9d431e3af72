"""swap_attention: the attention modules of a finished model, replaced in place."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._checks import name_of
from .nn import MultiheadAttention
from .nn._torchs_ways import NotScriptable, be_a_leaf, call_forward_always
from .sdpa import scaled_dot_product_attention


class PackedAttention(NotScriptable, torch.nn.Module):
    """Self-attention of vision transformers with one packed projection, in the shape of timm's ``Attention``.

    swap_attention makes modules into this; it is not built by itself. Submodules: qkv, proj, and where there are such
    q_norm, k_norm (over the head size), attn_drop, norm, gate and proj_drop; num_heads and scale.
    """

    qkv: torch.nn.Module
    proj: torch.nn.Module
    attn_drop: Any
    gate: Any
    num_heads: int
    scale: float

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x [B,N,C] -> [B,N,C]. attn_mask, is_causal: as in torch's scaled_dot_product_attention."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [B,H,N,D] each
        q, k = self._through("q_norm", q), self._through("k_norm", k)
        dropout = self.attn_drop.p if self.training and getattr(self, "attn_drop", None) is not None else 0.0
        out = scaled_dot_product_attention(q, k, v, attn_mask, dropout, is_causal, self.scale)
        out = self._through("norm", out.transpose(1, 2).flatten(2))
        if getattr(self, "gate", None) is not None:
            out = out * self.gate(x).sigmoid()
        return self._through("proj_drop", self.proj(out))

    def _through(self, name: str, x: Tensor) -> Tensor:
        module = getattr(self, name, None)
        return x if module is None else module(x)


@dataclasses.dataclass
class SwapReport:
    """What swap_attention did. Names are those of named_modules().

    replaced: what each replaced module was, by name.
    kept: why a module that looks like attention stays as it is, by name.
    """

    replaced: dict[str, str] = dataclasses.field(default_factory=dict)
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    _changes: list[Any] = dataclasses.field(
        default_factory=list, repr=False
    )  # (module, class before, class now, our hook)

    def undo(self) -> None:
        """Makes every replaced module what it was; weights, hooks and flags stay as they are by then.

        Raises:
            ValueError: a module was changed since, for example by fully_shard; then nothing is undone.
        """
        for (name, was), (module, _, now, _) in zip(self.replaced.items(), self._changes):
            if type(module) is not now:
                raise ValueError(
                    f"{name or 'the model'} is a {type(module).__name__} by now; accepted: the {now.__name__} that "
                    f"swap_attention made of {was}: undo before anything else wraps it."
                )
        for module, before, _, hook in self._changes:
            module.__class__ = before
            if hook is not None:
                hook.remove()
                del module.__module__
        self.replaced, self._changes = {}, []

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} attention modules replaced, {len(self.kept)} kept"]
        lines += [f"  {name or '(the model)'}: was {was}" for name, was in self.replaced.items()]
        lines += [f"  {name or '(the model)'}: kept, {why}" for name, why in self.kept.items()]
        return "\n".join(lines)


def swap_attention(model: torch.nn.Module) -> SwapReport:
    """Lets the attention modules in a model run on the kernels of this package.

    Replaced are torch.nn.MultiheadAttention (in torch's transformer layers too, whose fast path for inference computes
    attention by itself otherwise) and modules in the shape of timm's ``Attention``. They change their class in place: they
    stay the same objects with the same parameters, buffers, hooks, flags, types and devices, and give the same results,
    except that queries that see no key give 0 instead of NaN.

    A module in timm's shape is replaced only if a copy of it gives the same on random inputs before and after: outputs and
    gradients, in evaluation and training, at several lengths, with dropout off and total, in float64, the module's type and
    under autocast, and without anything that it keeps of its calls. What is in doubt stays as it is.

    Call it before fully_shard or FullyShardedDataParallel; torch.compile and DistributedDataParallel take both orders.

    Returns:
        What was replaced, what was not and why; its undo() takes everything back.

    Raises:
        TypeError: model is no module.
        ValueError: the model is sharded already. Nothing was replaced.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; accepted: a torch.nn.Module.")
    _refuse_sharded(model)
    report = SwapReport()
    known: set[Any] = set()
    for name, module in list(model.named_modules()):
        choice = _choice(module, known)
        if isinstance(choice, str):
            report.kept[name] = choice
        elif choice is not None:
            before, hook = type(module), None
            module.__class__ = choice
            if choice is MultiheadAttention:  # as its __init__
                be_a_leaf(module)
                hook = call_forward_always(module)
            report.replaced[name] = _name(before)
            report._changes.append((module, before, choice, hook))
    return report


def _choice(module: torch.nn.Module, known: set[Any]) -> type | str | None:
    """The class that a module gets, or why it keeps its own, or None if it has nothing to do with attention. known: what
    _differs has tried."""
    kind = type(module)
    if kind.__module__.startswith("mha_ext."):
        return None
    torchs = isinstance(module, torch.nn.MultiheadAttention)
    packed = all(isinstance(getattr(module, part, None), torch.nn.Module) for part in ("qkv", "proj"))
    if (torchs or packed) and "forward" in vars(module):
        return f"the forward of this {_name(kind)} was set on the object, which a new class does not change"
    if kind is torch.nn.MultiheadAttention:
        if _has_hooks(module.out_proj):
            return "it has hooks on out_proj, which torch reads and does not call, so that they would run only now"
        return MultiheadAttention
    if torchs:
        return (
            f"{_name(kind)} may do more than torch.nn.MultiheadAttention, which it is made from; accepted: that itself"
        )
    if packed:
        return _why_not_packed(module, known) or PackedAttention
    if "attention" not in kind.__name__.lower():
        return None
    if kind.__module__.startswith("transformers."):
        return f"{_name(kind)} is served by register() of mha_ext.integrations.transformers"
    return f"{_name(kind)} is neither torch.nn.MultiheadAttention nor has qkv and proj as timm's Attention does"


def _has_hooks(module: Any) -> bool:
    """On its calls."""
    return any(hooks for name, hooks in vars(module).items() if re.match("_(forward|backward).*_hooks", name) and hooks)


def _name(kind: type) -> str:
    if kind is torch.nn.MultiheadAttention:
        return "torch.nn.MultiheadAttention"
    return f"{kind.__module__}.{kind.__qualname__}"


def _refuse_sharded(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if any(base.__name__ in ("FSDPModule", "FullyShardedDataParallel") for base in type(module).__mro__):
            raise ValueError(
                f"{name or 'the model'} is sharded already ({type(module).__name__}); accepted: a model that is not: call "
                "swap_attention before fully_shard or FullyShardedDataParallel."
            )


PARTS = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop"}


def _why_not_packed(module: torch.nn.Module, known: set[Any]) -> str | None:
    """Why a module that has qkv and proj cannot become PackedAttention, or None."""
    kind = type(module)
    children = {name for name, child in module._modules.items() if child is not None}
    if children - PARTS:
        return f"{_name(kind)} has {', '.join(sorted(children - PARTS))} besides what timm's Attention has"
    own = [name for name, x in (*module._parameters.items(), *module._buffers.items()) if x is not None]
    if own:
        return f"{_name(kind)} has tensors of its own ({', '.join(own)}), which timm's Attention has not"
    for name in ("num_heads", "scale"):
        if not isinstance(getattr(module, name, None), (int, float)):
            return f"{_name(kind)} has no number {name}, as timm's Attention has"
    drop: Any = module.attn_drop if "attn_drop" in children else torch.nn.Dropout()
    if type(drop) is not torch.nn.Dropout:
        return f"{_name(kind)} has a {type(drop).__name__} as attn_drop; accepted: torch.nn.Dropout"
    if _has_hooks(drop):
        return f"{_name(kind)} has hooks on attn_drop, which would not run"
    options = list(inspect.signature(kind.forward).parameters)[2:]
    if options not in ([], ["attn_mask"], ["attn_mask", "is_causal"]):
        return f"{_name(kind)}.forward takes {', '.join(options)}; accepted: x, attn_mask, is_causal"
    return _differs(module, options, known)


SIZES = (2, 5), (1, 1), (2, 9), (1, 34)  # batches and lengths that modules are tried on


def _differs(module: torch.nn.Module, options: list[str], known: set[Any]) -> str | None:
    """Why a copy gives something else as PackedAttention, or None if it does not. Of modules that differ in the values of their
    parameters alone, the first is tried in every way; known has them."""
    kind = type(module)
    plain = sorted((name, repr(x)) for name, x in vars(module).items() if not isinstance(x, dict))
    alike = kind, repr(module), str(plain), str([(p.dtype, p.requires_grad) for p in module.parameters()])
    if any(x.is_meta for x in module.parameters()):
        return f"{_name(kind)} is on the meta device, where it cannot be tried: give it weights first"
    try:
        with _without_hooks(module), torch.random.fork_rng(devices=[]):
            where = _where_copies_differ(module, options, alike not in known)
    except Exception as error:  # noqa: BLE001  (of code that is not ours)
        return f"{_name(kind)} could not be tried on a copy ({type(error).__name__}: {error})"
    known.add(alike)
    return None if where is None else f"{_name(kind)} computes something else than timm's Attention {where} (tried on a copy)"


def _where_copies_differ(module: torch.nn.Module, options: list[str], in_every_way: bool) -> str | None:
    """Two copies in float64, one of them as PackedAttention, are tried in evaluation and in training, at several lengths, with
    every argument, with dropout off or total; then in the module's own type, and under autocast, where rounding counts."""
    copies: tuple[Any, Any] = copy.deepcopy(module).cpu(), copy.deepcopy(module).cpu()
    own = next(module.parameters()).dtype
    for each in copies:
        each.to(torch.float64)
    copies[1].__class__ = PackedAttention
    features = next(p.shape[-1] for p in copies[0].qkv.parameters() if p.dim() > 1)
    generator = torch.Generator().manual_seed(0)
    tried: list[Any] = []

    def differ(B: int, N: int, call: dict[str, Any], dtype: torch.dtype = torch.float64, eps: float | None = None) -> bool:
        x = torch.randn(B, N, features, generator=generator, dtype=torch.float64).to(dtype)
        results: list[Any] = []
        for each in copies:
            torch.manual_seed(0)
            try:
                results.append(_results(each, x, call, with_gradients=N == SIZES[0][1]))
            except Exception as error:  # noqa: BLE001  (both may refuse one token, say; but not the first call)
                if not tried:
                    raise
                results.append(type(error))
        tried.append(call)
        if any(isinstance(found, type) for found in results):
            return results[0] is not results[1]
        return not _same(results[0], results[1], torch.finfo(dtype).eps if eps is None else eps)

    if not in_every_way:
        for each in copies:
            each.eval()
        return f"on {SIZES[0][0]} sequences of {SIZES[0][1]} tokens" if differ(*SIZES[0], {}) else None
    for training in (False, True):
        while_training = " while training" if training else ""
        for attn_drop, proj_drop in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)) if training else ((0.0, 0.0),):
            for each in copies:
                each.train(training)
                _set_dropout(each, attn_drop, proj_drop)
            for B, N in SIZES:
                if differ(B, N, {}):
                    return f"on {B} sequences of {N} tokens{while_training}"
        for each in copies:
            _set_dropout(each, 0.0, 0.0)
        for call in _calls(options, *SIZES[0], generator):
            if differ(*SIZES[0], call):
                return f"with {', '.join(call)}{while_training}"
    for each in copies:
        each.eval().to(own)
    if differ(*SIZES[2], {}, own):
        return f"in {name_of(own)}"
    with torch.autocast("cpu", torch.bfloat16):
        if own == torch.float32 and differ(*SIZES[2], {}, own, torch.finfo(torch.bfloat16).eps):
            return "under autocast"
    return _kept_by_calls(*copies)


def _set_dropout(module: Any, attn_drop: float, proj_drop: float) -> None:
    for name, p in (("attn_drop", attn_drop), ("proj_drop", proj_drop)):
        if isinstance(getattr(module, name, None), torch.nn.Dropout):
            getattr(module, name).p = p


def _calls(options: list[str], B: int, N: int, generator: torch.Generator) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    if "attn_mask" in options:
        seen = torch.eye(N, dtype=torch.bool) | (torch.rand(B, 1, N, N, generator=generator) < 0.5)
        bias = torch.randn(1, 1, N, N, generator=generator, dtype=torch.float64)
        calls += [{"attn_mask": seen}, {"attn_mask": bias}]
    if "is_causal" in options:
        calls.append({"is_causal": True})
    return calls


def _results(module: Any, x: Tensor, call: dict[str, Any], with_gradients: bool) -> list[Tensor]:
    """The output, gradients, and what the modules inside keep of the call."""
    with torch.no_grad():
        found = [module(x, **call)]
    if with_gradients:
        parameters = [p for p in module.parameters() if p.requires_grad]
        x = x.requires_grad_()
        with torch.enable_grad():
            out = module(x, **call)
            gradients = torch.autograd.grad(out.square().sum(), [x, *parameters], allow_unused=True)
        found += [out.detach(), *(torch.zeros(()) if g is None else g for g in gradients)]
    return found + [b.detach().clone() for b in module.buffers()]


def _same(found: list[Tensor], expected: list[Tensor], eps: float) -> bool:
    """Another order of sums differs in the last digits, another formula in the first. A gradient may be 0 but for what
    rounding leaves of others (that of the keys' bias): so the largest of all sets a floor."""
    floor = 1e-3 * max([1.0, *(float(x.double().abs().max()) for x in expected if x.numel() > 0)])
    for a, b in zip(found, expected):
        a, b = a.double(), b.double()
        if a.dim() == 0 or b.dim() == 0:  # no gradient is one of 0
            a, b = torch.broadcast_tensors(a, b)
        if a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=eps**0.5 * max(floor, float(b.abs().max()) if b.numel() > 0 else 0.0)):
            return False
    return True


def _kept_by_calls(theirs: Any, ours: Any) -> str | None:
    """What the forward of a module has set on it, which PackedAttention does not do."""
    for name, value in vars(theirs).items():
        if name not in vars(ours):
            return f"in what it keeps as {name}"
        plain = isinstance(value, (bool, int, float, str, type(None)))
        if plain and vars(ours)[name] != value:
            return f"in what it keeps as {name}"
    return None


@contextlib.contextmanager
def _without_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Takes the hooks away for a while: a copy that is tried must not run them, nor copy what they hold."""
    kept = [
        (owner, name, hooks)
        for owner in module.modules()
        for name, hooks in vars(owner).items()
        if "_hooks" in name and isinstance(hooks, dict)
    ]
    for owner, name, hooks in kept:
        setattr(owner, name, type(hooks)())
    try:
        yield
    finally:
        for owner, name, hooks in kept:
            setattr(owner, name, hooks)
