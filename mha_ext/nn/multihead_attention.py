"""torch.nn.MultiheadAttention on the kernels of this package."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _checks, masks, nested
from .._checks import same, text
from ..functional import attention
from . import _inputs
from ._torchs_ways import NotScriptable, be_a_leaf, call_forward_always


class MultiheadAttention(NotScriptable, torch.nn.MultiheadAttention):
    """A drop-in for torch.nn.MultiheadAttention (Vaswani et al., "Attention is all you need", 2017).

    Arguments, parameters, their initial values, state_dict, shapes and mask polarity (True = masked out) are torch's,
    and so are outputs and gradients, in training and evaluation, with two differences: where every key of a query is
    masked out, attention and its weights are 0 instead of NaN; and keys that add_bias_kv or add_zero_attn adds stay visible
    where is_causal stands for attn_mask (torch hides them from all queries if need_weights is False, but not if it is
    True). Nothing of size L x S is stored unless need_weights or a mask asks.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("kdim", kdim), ("vdim", vdim)):
            if size is not None or name in ("embed_dim", "num_heads"):
                _checks.size(name, size)
        _checks.probability("dropout", dropout)
        _checks.flags(bias=bias, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, batch_first=batch_first)
        if embed_dim % num_heads:
            raise ValueError(
                f"embed_dim is {embed_dim} and num_heads is {num_heads}; accepted: embed_dim a multiple of num_heads."
            )
        factory = _inputs.factory(device, dtype)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, **factory
        )
        be_a_leaf(self)
        call_forward_always(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in torch.nn.MultiheadAttention.

        Args:
            query, key, value: (L,N,E), (S,N,kdim), (S,N,vdim); with batch_first (N,L,E), ...; unbatched (L,E), ...
            key_padding_mask: (N,S), or (S) unbatched: bool (True = ignore the key) or floating-point (added).
            need_weights: also return the weights, averaged over the heads if average_attn_weights.
            attn_mask: (L,S) or (N*num_heads,L,S): bool (True = masked out) or floating-point (added).
            is_causal: a hint that attn_mask is the causal mask, which then need not be read; it needs attn_mask.

        Returns:
            The output in query's shape, and the weights (N,L,S) or (N,num_heads,L,S) (unbatched without N) or None.

        Raises:
            ValueError, TypeError, RuntimeError: inputs that do not fit, in one sentence.
        """
        if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
            raise _checks.not_tensors(("query", "key", "value"), query, key, value)
        if need_weights is not False or average_attn_weights is not True or is_causal is not False:
            _checks.flags(need_weights=need_weights, average_attn_weights=average_attn_weights, is_causal=is_causal)
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal was given without attn_mask; it is a hint about attn_mask: pass that too.")
        if query.is_nested or key.is_nested or value.is_nested:
            return self._forward_nested(query, key, value, key_padding_mask, need_weights, attn_mask)
        batched = query.dim() == 3
        self._check(query, key, value, key_padding_mask, attn_mask)
        batch_dim = 1 if not batched or not self.batch_first else 0
        if not batched:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        q, k, v = self._project(query, key, value, batch_dim)
        trust_causal_hint = is_causal and not need_weights and self.bias_k is None and not self.add_zero_attn
        mask, bias = self._mask_and_bias(q, key_padding_mask, attn_mask, trust_causal_hint)
        dropout = self.dropout if self.training else 0.0
        found: Any = attention(q, k, v, mask=mask, bias=bias, dropout_p=dropout, return_weights=need_weights)
        out, weights = found if need_weights else (found, None)
        out = out.permute(2, 0, 1, 3) if batch_dim == 1 else out.transpose(1, 2)  # the order in which it lies in memory
        out = self.out_proj(out.flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            out, weights = out.squeeze(1), None if weights is None else weights.squeeze(0)
        return out, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor, batch_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Heads [N,num_heads,L or S,head_dim], as views of the projections where no key is added."""
        weight, bias, E = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        if weight is None:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), self._weights(), biases))
        elif query is key and key is value:
            q, k, v = F.linear(query, weight, bias).chunk(3, dim=-1)
        elif key is value:
            q = F.linear(query, weight[:E], None if bias is None else bias[:E])
            k, v = F.linear(key, weight[E:], None if bias is None else bias[E:]).chunk(2, dim=-1)
        else:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weight.chunk(3), biases))
        length_dim = 1 - batch_dim
        extra_k, extra_v = [], []
        shape = (1, k.shape[1], E) if batch_dim == 1 else (k.shape[0], 1, E)
        if self.bias_k is not None and self.bias_v is not None:
            extra_k.append(self.bias_k.to(k.dtype).expand(shape))
            extra_v.append(self.bias_v.to(v.dtype).expand(shape))
        if self.add_zero_attn:
            extra_k.append(k.new_zeros(shape))
            extra_v.append(v.new_zeros(shape))
        if extra_k:
            k, v = torch.cat([k, *extra_k], dim=length_dim), torch.cat([v, *extra_v], dim=length_dim)
        to_heads = (1, 2, 0, 3) if batch_dim == 1 else (0, 2, 1, 3)
        return tuple(x.unflatten(-1, (self.num_heads, self.head_dim)).permute(to_heads) for x in (q, k, v))

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the projections, where they are not packed"""
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight  # type: ignore[return-value]

    def _mask_and_bias(
        self, q: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, trust_causal_hint: bool
    ) -> Any:
        """(mask, bias) as mha_ext.attention takes them. Keys that the module itself adds are visible to all."""
        N, H = q.shape[0], self.num_heads
        parts: list[Tensor] = []
        biases: list[Tensor] = []
        if trust_causal_hint and key_padding_mask is None:
            # As torch without weights and padding: the hint stands for the mask, aligned at the top left.
            return masks.Causal("top_left"), None
        if attn_mask is not None:
            attn_mask = self._for_added_keys(attn_mask)
            shape = (1, 1, *attn_mask.shape) if attn_mask.dim() == 2 else (N, H, *attn_mask.shape[1:])
            (parts if attn_mask.dtype == torch.bool else biases).append(attn_mask.view(shape))
        if key_padding_mask is not None:
            key_padding_mask = self._for_added_keys(key_padding_mask)[:, None, None, :]
            (parts if key_padding_mask.dtype == torch.bool else biases).append(key_padding_mask)
        mask: masks.Mask | None = None
        for part in parts:
            mask = masks.Dense(part.logical_not()) if mask is None else mask & masks.Dense(part.logical_not())
        bias = None
        for part in biases:
            part = part.to(q.dtype) if q.dtype == torch.float64 else part.float()
            bias = part if bias is None else bias + part
        return mask, bias

    def _for_added_keys(self, mask: Tensor) -> Tensor:
        added = (self.bias_k is not None) + self.add_zero_attn
        return F.pad(mask, (0, added)) if added > 0 else mask  # with False, or 0

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
    ) -> None:
        weights = (self.in_proj_weight,) * 3 if self.in_proj_weight is not None else self._weights()
        for x, name, weight in zip((query, key, value), ("query", "key", "value"), weights):
            if x.layout is not torch.strided:
                _checks.dense(x, name)
            if x.dtype != weight.dtype or x.device != weight.device:
                _inputs.fits_weight(x, name, weight)
        sizes = self.embed_dim, self.kdim, self.vdim
        if query.dim() not in (2, 3) or not (query.dim() == key.dim() == value.dim()):
            raise ValueError(
                f"{_shapes(query, key, value)}; accepted: all three of three dimensions, or of two without a batch."
            )
        if (query.shape[-1], key.shape[-1], value.shape[-1]) != sizes:
            raise ValueError(
                f"{_shapes(query, key, value)}; accepted: {sizes[0]}, {sizes[1]}, {sizes[2]} in the last dimension."
            )
        batched, batch_dim = query.dim() == 3, 0 if self.batch_first else 1
        if key.shape[:-1] != value.shape[:-1] or (batched and query.shape[batch_dim] != key.shape[batch_dim]):
            raise ValueError(
                f"{_shapes(query, key, value)}; accepted: one batch size, and one length for key and value."
            )
        length_dim = 1 - batch_dim if batched else 0
        N, L, S = query.shape[batch_dim] if batched else 1, query.shape[length_dim], key.shape[length_dim]
        for name, mask, accepted in (
            ("key_padding_mask", key_padding_mask, [(N, S)] if batched else [(S,)]),
            ("attn_mask", attn_mask, [(L, S), (N * self.num_heads, L, S)]),
        ):
            if mask is None:
                continue
            if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.dtype in _checks.DTYPES):
                raise TypeError(
                    f"{name} is {_checks.given(mask)}; accepted: a bool tensor (True = masked out) or a floating-point one."
                )
            _checks.dense(mask, name)
            if not any(len(shape) == mask.dim() and all(map(same, mask.shape, shape)) for shape in accepted):
                raise ValueError(f"{name} has shape {text(mask.shape)}; accepted: {' or '.join(map(text, accepted))}.")
            _checks.same_device(mask, name, query.device)

    def _forward_nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
    ) -> Any:
        """Jagged tensors are computed as packed sequences. Of the other layout are those that torch.nn.TransformerEncoder
        makes of padded batches in evaluation; this takes them back."""
        jagged = all(x.is_nested and x.layout == torch.jagged for x in (query, key, value))
        if not self.batch_first or need_weights or not (jagged or (query is key and key is value)):
            raise ValueError(
                "nested tensors were given; accepted: with batch_first=True and need_weights=False, query, key and value "
                "all of layout torch.jagged (or, for self-attention, all one tensor): pad."
            )
        if key_padding_mask is not None or attn_mask is not None:
            raise ValueError("nested tensors and masks were given; accepted: one of them: pad the tensors.")
        if jagged:
            if self.bias_k is not None or self.add_zero_attn:
                raise ValueError(
                    "nested tensors were given; accepted: a module without add_bias_kv and add_zero_attn: pad."
                )
            same = query is key and key is value
            x = nested.values_of(query, "query")
            kv = (x, x) if same else tuple(nested.values_of(t, n) for t, n in ((key, "key"), (value, "value")))
            q, k, v = self._project(x, kv[0], kv[1], 0)
            out = nested.attend(q, k, v, query, key, dropout_p=self.dropout if self.training else 0.0)
            return nested.like(self.out_proj(out.transpose(1, 2).flatten(2)), query), None
        lengths = [x.shape[0] for x in query.unbind()]
        x = query.to_padded_tensor(0.0)
        padding = torch.arange(x.shape[1], device=x.device) >= torch.tensor(lengths, device=x.device)[:, None]
        out, _ = self.forward(x, x, x, padding, need_weights=False)
        return torch.nested.as_nested_tensor([row[:n] for row, n in zip(out, lengths)]), None


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query, key, value have shapes {text(query.shape)}, {text(key.shape)}, {text(value.shape)}"
