"""Cross-attention, with a context that may be projected once for many queries."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, NoReturn, overload

import torch
from torch import Tensor, nn

from .. import _checks, _foreign, biases, nested
from .. import masks as m
from ..functional import attention
from ..masks.places import Lowered, Places, at, depends_on_position
from . import _inputs
from .self_attention import Attention


class ProjectedContext(NamedTuple):
    """The keys and values of a context, as CrossAttention.project() makes them once for many queries."""

    k: Tensor  # [B,Hk,Sk,D]
    v: Tensor  # [B,Hk,Sk,D]


class CrossAttention(Attention):
    """Multi-head attention of one sequence to another, with a packed key/value projection. Arguments as SelfAttention.

    Args:
        context_dim: size of the context's features; default d_model.

    Parameters: q_proj, kv_proj (2 Hk * head_dim rows: all keys, then values), or with packed=False k_proj and v_proj;
    out_proj; q_norm and k_norm.
    """

    packed_name, part_names = "kv_proj", ("k_proj", "v_proj")

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        context_dim: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        dropout: float = 0.0,
        softcap: float = 0.0,
        packed: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **foreign: NoReturn,  # nothing, to type checkers
    ) -> None:
        if foreign:
            raise _foreign.refusal(CrossAttention.__init__, foreign, of_module=True)
        factory = _inputs.factory(device, dtype)
        _checks.flags(packed=packed)
        if context_dim is not None:
            _checks.size("context_dim", context_dim)
        super().__init__(
            d_model, num_heads, num_kv_heads, head_dim, bias, qk_norm, window, False, dropout, softcap, factory
        )
        self.context_dim = d_model if context_dim is None else context_dim
        self.q_proj = nn.Linear(d_model, self.num_heads * self.head_dim, bias=bias, **factory)
        self.kv_proj: nn.Linear | None = nn.Linear(self.context_dim, sum(self._rows()), bias=bias, **factory)
        if not packed:
            self.unpack()

    def _rows(self) -> tuple[int, int]:
        """Rows of the projections to keys and values."""
        return (self.num_kv_heads * self.head_dim,) * 2

    @overload
    def forward(
        self, x: Tensor, context: Tensor | ProjectedContext, mask: m.Mask | Tensor | None = None, *,
        bias: Tensor | biases.Bias | None = None, positions: Tensor | None = None, return_weights: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def forward(
        self, x: Tensor, context: Tensor | ProjectedContext, mask: m.Mask | Tensor | None = None, *,
        bias: Tensor | biases.Bias | None = None, positions: Tensor | None = None, return_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def forward(
        self,
        x: Tensor,
        context: Tensor | ProjectedContext,
        mask: m.Mask | Tensor | None = None,
        *,
        bias: Tensor | biases.Bias | None = None,
        positions: Tensor | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x [B,Sq,d_model], context [B,Sk,context_dim] -> [B,Sq,d_model].

        Args:
            context: or what project() gave for it, to be used for x after x.
            mask, bias: as in mha_ext.attention.
            positions: integer [Sq] or [B,Sq], where among the context's positions the queries stand, for the window, masks
                and biases. Default: the last Sq. So needed where a projected context meets some of the queries at a time.
            return_weights: also return the weights [B,H,Sq,Sk] that made the output, after dropout (of heads shared out over
                processes, those of this process's). Not of nested inputs.

        Raises:
            ValueError, TypeError: arguments that do not fit, in one sentence with the fix.
        """
        _inputs.sequences(x, "x", self.d_model, self.q_proj)
        _checks.flags(return_weights=return_weights)
        if isinstance(context, ProjectedContext):
            if x.is_nested:
                raise ValueError("x is nested and the context projected; accepted: a nested context, or x padded.")
            k, v = context
            given = x, x
        else:
            self._check_context(context)
            given = x, context
            if x.is_nested != context.is_nested:
                raise ValueError("one of x and context is nested; accepted: both or neither: pad.")
            if x.is_nested and positions is not None:
                raise ValueError("positions was given with nested inputs; accepted: neither: pad, or leave it out.")
            if x.is_nested:
                x, context = (nested.values_of(t, name) for t, name in zip(given, ("x", "context")))
            k, v = self.project(context)
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        self._check_shares(q, k, v)
        q = _inputs.normed(self.q_norm, q)
        if positions is not None or isinstance(context, ProjectedContext):
            return self._attend_at(q, k, v, mask, bias, positions, return_weights)
        return self._attend(q, k, v, mask, bias, given, return_weights)

    def project(self, context: Tensor) -> ProjectedContext:
        """context [B,Sk,context_dim] -> its keys and values, for forward()."""
        self._check_context(context)
        if context.is_nested:
            raise ValueError("context is nested; project() accepts [B,Sk,context_dim]: pad it, or give it to forward().")
        if self.kv_proj is None:
            k, v = self._parts(context)
        else:
            k, v = self.kv_proj(context).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).chunk(2, dim=1)
        return ProjectedContext(_inputs.normed(self.k_norm, k), v)

    def _check_context(self, context: Tensor) -> None:
        projection = self.k_proj if self.kv_proj is None else self.kv_proj
        _inputs.sequences(context, "context", self.context_dim, projection)

    def _attend_at(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, positions: Tensor | None, return_weights: bool
    ) -> Any:  # fmt: skip
        options = {"return_weights": return_weights, **self._options(mask, bias)}
        mask = options["mask"]
        if positions is None:
            if depends_on_position(mask) or isinstance(bias, biases.Bias):
                raise ValueError(
                    "a projected context was given with a window, or a mask or bias that depends on where the queries stand; "
                    "accepted: with positions=, one for each query, as all of the queries may be more than these."
                )
            return self._results(attention(q, k, v, **options))
        B, H, S, Sk = *q.shape[:3], k.shape[2]
        positions = _checks.integer_tensor(positions, "positions", "[B,Sq]", 2 if getattr(positions, "ndim", 1) == 2 else 1)
        if positions.shape not in ((S,), (1, S), (B, S)):
            raise ValueError(f"positions has shape {list(positions.shape)}; accepted: [Sq] or [B,Sq] = [{B},{S}].")
        _checks.same_device(positions, "positions", q.device)
        positions = positions.expand(B, S)
        places = Places(positions, H, Sk, Sk, positions.new_full((B,), Sk), 0, S, queries_are_keys=False)
        if isinstance(bias, biases.Bias):
            options["bias"] = bias.at(places, _checks.accumulate_dtype(q.dtype))
        return self._results(attention(q, k, v, **options | {"mask": Lowered(at(mask, places))}))
