"""Self-attention with the parts of today's models: grouped heads, rotary embedding, qk-norm, window, a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor, nn

from .. import _checks, _foreign, biases, nested
from .. import masks as m
from ..functional import attention, merge_heads
from ..masks.positions import as_mask
from ..packed import attention_qkvpacked
from . import _inputs
from ._cache_checks import check_options
from ._torchs_ways import NotScriptable, be_a_leaf
from .kv_cache import KVCache
from .paged_kv_cache import PagedKVCache
from .rope import RopeScaling, RotaryEmbedding


class Attention(NotScriptable, nn.Module):
    """What SelfAttention and CrossAttention share: the head counts, the score options and the output projection."""

    pre_mix: nn.Parameter | None
    post_mix: nn.Parameter | None
    head_mix: nn.Parameter | None
    sinks: nn.Parameter | None
    packed_name: str  # of the packed projection
    part_names: tuple[str, ...]  # of the projections that unpack() makes of it

    def __init__(
        self, d_model: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None, bias: bool, qk_norm: bool,
        window: int | tuple[int | None, int | None] | None, causal: bool, dropout: float, softcap: float,
        factory: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            if size is not None or name != "head_dim":
                _checks.size(name, size)
        _checks.flags(bias=bias, qk_norm=qk_norm, causal=causal)
        _checks.probability("dropout", dropout)
        _checks.softcap(softcap)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads, num_kv_heads are {num_heads}, {num_kv_heads}; accepted: num_heads a multiple of num_kv_heads."
            )
        if head_dim is None and d_model % num_heads:
            raise ValueError(
                f"d_model {d_model} is no multiple of num_heads {num_heads}: change one, or give head_dim."
            )
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, num_kv_heads
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.dropout, self.softcap, self.causal = dropout, softcap, causal
        self.window = _inputs.pair(window)
        self._mask = self._own_mask()
        self.out_proj = nn.Linear(num_heads * self.head_dim, d_model, bias=bias, **factory)
        for name in ("pre_mix", "post_mix", "head_mix", "sinks"):
            self.register_parameter(name, None)
        self.q_norm = nn.RMSNorm(self.head_dim, **factory) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, **factory) if qk_norm else None
        # Processes with an equal share of the heads each, and what draws their state of dropout; see HeadParallel.
        self.head_shards = 1
        self.draw_rng_state: Callable[[Tensor], Tensor] | None = None
        self.register_load_state_dict_pre_hook(_load_either_packing)
        be_a_leaf(self)

    def _own_mask(self) -> m.Mask | None:
        if self.window is None:
            return m.Causal() if self.causal else None
        left, right = self.window
        return m.Window(left, 0 if self.causal else right)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: m.Mask | Tensor | None,
        bias: Tensor | biases.Bias | None,
        given: tuple[Tensor, Tensor],
        return_weights: bool,
    ) -> Any:
        """From heads [B,H,Sq,D], [B,Hk,Sk,D] twice, to the module's output [B,Sq,d_model], or that and the weights. given:
        the module's inputs (that of the queries, that of the keys); where they are nested, the heads are those of their values."""
        options = self._options(mask, bias)
        if not given[0].is_nested:
            return self._results(attention(q, k, v, return_weights=return_weights, **options))
        if return_weights:
            raise nested.no_weights("the inputs are")
        return nested.like(self._project_out(nested.attend(q, k, v, *given, **options)), given[0])

    def _results(self, found: Any) -> Any:
        """Of what attention gave: an output of heads, or that and the weights."""
        return (self._project_out(found[0]), found[1]) if isinstance(found, tuple) else self._project_out(found)

    def _options(self, mask: m.Mask | Tensor | None, bias: Tensor | biases.Bias | None) -> dict[str, Any]:
        """What attention takes besides the heads."""
        mask = as_mask(mask)
        if self._mask is not None:
            mask = self._mask if mask is None else mask & self._mask
        dropout = self.dropout if self.training else 0.0
        return {
            "mask": mask, "bias": bias, "dropout_p": dropout, "softcap": self.softcap, "pre_mix": self.pre_mix,
            "post_mix": self.post_mix, "sinks": _local(self.sinks),
            "rng_state": self.draw_rng_state(self.out_proj.weight) if dropout and self.draw_rng_state else None,
        }  # fmt: skip

    def _project_out(self, out: Tensor) -> Tensor:
        if self.head_mix is not None:
            return self.out_proj(merge_heads(out, self.head_mix))
        return self.out_proj(out.transpose(1, 2).flatten(2))  # a view: out lies in memory as [B,Sq,H,D]

    def unpack(self) -> None:
        """Replaces the packed projection by one for each of its parts, with copies of its parameters: build optimizers
        afterwards."""
        whole = getattr(self, self.packed_name)
        if whole is None:
            return
        weights = whole.weight.detach().split(self._rows())
        biases = (None,) * len(weights) if whole.bias is None else whole.bias.detach().split(self._rows())
        for name, weight, bias in zip(self.part_names, weights, biases):
            part = nn.Linear(whole.in_features, weight.shape[0], bias=bias is not None, device="meta")
            part.weight = nn.Parameter(weight.clone(), whole.weight.requires_grad)
            if bias is not None:
                part.bias = nn.Parameter(bias.clone(), whole.bias.requires_grad)
            setattr(self, name, part.train(self.training))
        setattr(self, self.packed_name, None)

    def _rows(self) -> tuple[int, ...]:
        """Rows of the parts of the packed projection."""
        raise NotImplementedError

    def _parts(self, x: Tensor) -> list[Tensor]:
        """Heads [B,Hk or H,S,D] of each part of the projection, unpacked; sharded by heads, those of this process."""
        return [getattr(self, name)(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for name in self.part_names]

    def _check_shares(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        kv_heads = max(self.num_kv_heads, self.head_shards)  # of fewer, every process has a copy of the one that it needs
        if q.shape[1] * kv_heads != k.shape[1] * self.num_heads or k.shape[1] != v.shape[1]:
            raise ValueError(
                f"q_proj, k_proj, v_proj gave {q.shape[1]}, {k.shape[1]}, {v.shape[1]} heads of "
                f"{self.num_heads}, {self.num_kv_heads}, {self.num_kv_heads}; accepted: the same share of each: "
                "shard them over a number of processes that divides num_kv_heads."
            )

    def extra_repr(self) -> str:
        text = f"{self.d_model}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        for name in ("window", "causal", "dropout", "softcap"):
            if getattr(self, name):
                text += f", {name}={getattr(self, name)}"
        return text


class SelfAttention(Attention):
    """Multi-head self-attention (Vaswani et al., 2017) with one packed projection; kernels read its parts in place.

    Args:
        d_model: size of inputs and outputs.
        num_heads: number of query heads H.
        num_kv_heads: number of key/value heads Hk; H must be a multiple (Ainslie et al., "GQA", 2023). Default H.
        head_dim: head size; default d_model / num_heads.
        bias: whether the projections have one.
        rope: rotary position embedding (Su et al., "RoFormer", 2021; half-split convention, see RotaryEmbedding).
        rope_base: its base.
        rope_scaling: for sequences longer than those of training: LinearScaling, NTKScaling, YaRNScaling or Llama3Scaling.
        qk_norm: RMSNorm over the head size on queries and keys, before the rotation (Henry et al., "Query-key
            normalization for Transformers", 2020; here with RMSNorm).
        window: see that many keys to the left and to the right (with causal: to the left) besides the query's own, or a
            pair (left, right) of which None means no limit (Beltagy et al., "Longformer", 2020).
        causal: see no later position.
        dropout: probability of dropping an attention weight while training.
        softcap: c > 0 limits scores to c * tanh(score / c) (Gemma Team, "Gemma 2", 2024).
        packed: one projection for queries, keys and values; False: three, as tensor parallelism needs (unpack()
            changes over). A state dict of either kind loads into both.
        talking_heads: learn to mix the heads' scores before the softmax and their weights after it (Shazeer et al.,
            "Talking-heads attention", 2020).
        head_communication: learn to mix the heads' outputs before the output projection.
        sinks: learn a logit per head that joins the softmax's denominator (Xiao et al., "Efficient streaming language
            models with attention sinks", 2024).
        device, dtype: of the parameters.

    Parameters: qkv_proj ((H + 2 Hk) * head_dim rows: all queries, then keys, then values), or with packed=False q_proj,
    k_proj and v_proj; out_proj; q_norm and k_norm; pre_mix and post_mix of talking_heads and head_mix of
    head_communication, [H,H] each, at first the identity; sinks [H], at first 0.
    """

    packed_name, part_names = "qkv_proj", ("q_proj", "k_proj", "v_proj")

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        rope: bool = False,
        rope_base: float = 10000.0,
        rope_scaling: RopeScaling | None = None,
        qk_norm: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        softcap: float = 0.0,
        packed: bool = True,
        talking_heads: bool = False,
        head_communication: bool = False,
        sinks: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **foreign: NoReturn,  # nothing, to type checkers
    ) -> None:
        if foreign:
            raise _foreign.refusal(SelfAttention.__init__, foreign, of_module=True)
        factory = _inputs.factory(device, dtype)
        _checks.flags(
            rope=rope, packed=packed, talking_heads=talking_heads, head_communication=head_communication, sinks=sinks
        )
        _inputs.base_of_angles("rope_base", rope_base)
        super().__init__(
            d_model, num_heads, num_kv_heads, head_dim, bias, qk_norm, window, causal, dropout, softcap, factory
        )
        self.qkv_proj: nn.Linear | None = nn.Linear(d_model, sum(self._rows()), bias=bias, **factory)
        if rope_scaling is not None and not rope:
            raise ValueError("rope_scaling was given with rope=False; accepted: with rope=True.")
        self.rope = RotaryEmbedding(self.head_dim, rope_base, rope_scaling) if rope else None
        mixes = (("pre_mix", "post_mix") if talking_heads else ()) + (("head_mix",) if head_communication else ())
        for name in mixes:
            setattr(self, name, nn.Parameter(torch.eye(num_heads, **factory)))
        if sinks:
            self.sinks = nn.Parameter(torch.zeros(num_heads, **factory))
        if not packed:
            self.unpack()

    def _rows(self) -> tuple[int, int, int]:
        """Rows of the projections to queries, keys and values."""
        n, d = self.num_kv_heads, self.head_dim
        return self.num_heads * d, n * d, n * d

    @overload
    def forward(
        self, x: Tensor, mask: m.Mask | Tensor | None = None, *, bias: Tensor | biases.Bias | None = None,
        cache: KVCache | None = None, counts: Tensor | None = None, position_ids: Tensor | None = None,
        return_weights: Literal[False] = False, **foreign: NoReturn,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def forward(
        self, x: Tensor, mask: m.Mask | Tensor | None = None, *, bias: Tensor | biases.Bias | None = None,
        position_ids: Tensor | None = None, return_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def forward(
        self,
        x: Tensor,
        mask: m.Mask | Tensor | None = None,
        *,
        bias: Tensor | biases.Bias | None = None,
        cache: KVCache | None = None,
        counts: Tensor | None = None,
        position_ids: Tensor | None = None,
        return_weights: bool = False,
        **foreign: NoReturn,  # nothing, to type checkers
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x [B,S,d_model] -> [B,S,d_model]; or nested (layout torch.jagged), without rope and cache.

        Args:
            mask, bias: as in mha_ext.attention, with Sq = Sk = S; mask applies besides causal and window. With a cache as
                in its attend(): the same as for whole sequences at once.
            cache: x are the S next positions of its sequences: their keys and values are appended, and attention is to
                all that the cache holds. Needs causal, and no gradients: torch.no_grad() or torch.inference_mode().
            counts: with a cache, [B]: only the first counts[b] positions of x[b] count, the rest is padding.
            position_ids: integer [S] or [B,S], what rope rotates by; default: they count up from 0, or from the cache's lengths.
                Masks, windows and biases go by the order of x.
            return_weights: also return the weights [B,H,S,S] that made the output, after dropout (of heads shared out over
                processes, those of this process's). Not with a cache or nested x.

        Raises:
            ValueError, TypeError: arguments that do not fit, in one sentence with the fix.
        """
        if foreign:
            raise _foreign.refusal(SelfAttention.forward, foreign, of_module=True)
        _inputs.sequences(x, "x", self.d_model, self.q_proj if self.qkv_proj is None else self.qkv_proj)
        if cache is not None and not isinstance(cache, KVCache):
            raise TypeError(f"cache is {_checks.given(cache)}; accepted: what make_cache() gives, or None.")
        if cache is not None and not _checks.same(x.shape[0], cache.batch):
            raise ValueError(f"x has {x.shape[0]} sequences and the cache {cache.batch}; accepted: the same number of both.")
        if x.is_nested and (self.rope is not None or cache is not None or counts is not None):
            raise ValueError(
                f"x is nested and {'the module has rope' if self.rope is not None else 'a cache or counts was given'}; "
                "accepted: neither: pad x, or take its sequences one by one."
            )
        _checks.flags(return_weights=return_weights)
        if position_ids is not None and self.rope is None:
            raise ValueError("position_ids was given and the module has no rope; accepted: rope=True, or leave it out.")
        if return_weights and cache is not None:
            raise ValueError(
                "return_weights is true and a cache was given; accepted: one of them: give the whole sequence without a cache."
            )
        if counts is None and cache is None and self._reads_packed(x):
            return self._attend_packed(x, mask, bias, return_weights)
        q, k, v = self._project(nested.values_of(x, "x") if x.is_nested else x)
        q, k = _inputs.normed(self.q_norm, q), _inputs.normed(self.k_norm, k)
        if self.rope is not None:
            start = 0 if cache is None else cache.lengths
            q, k = self.rope(q, start, position_ids), self.rope(k, start, position_ids)
        if cache is not None:
            return self._attend_cached(q, k, v, mask, bias, cache, counts)
        if counts is not None:
            raise ValueError("counts was given without a cache; use mask=masks.Padding(counts).")
        return self._attend(q, k, v, mask, bias, (x, x), return_weights)

    def make_cache(self, batch: int, capacity: int, *, page_size: int | None = None, **options: Any) -> KVCache:
        """A KVCache for this module and sequences of up to capacity positions; options as KVCache's. With page_size, a
        PagedKVCache, options as its own.

        With a window, it is a ring that keeps what the window needs, where that takes less memory; pages keep all. The dtype
        is that of the activations: under torch.autocast its type, else that of the weights.

        Raises:
            ValueError: the weights are quantised, so that dtype must be given; an option that does not fit.
            TypeError: an option that there is not.
        """
        kind = KVCache if page_size is None else PagedKVCache
        check_options(page_size is not None, options)
        weight = getattr(self.out_proj, "weight", None)
        device = weight.device if isinstance(weight, Tensor) else None
        options = {"device": device, "dtype": None, **options}
        if options["dtype"] is None:
            options["dtype"] = _type_of_activations(weight)
        left = None if self.window is None else self.window[0]
        if page_size is not None:
            options["page_size"] = page_size
        elif left is not None and "window" not in options:
            kept = left + max(64, left // 4)
            if 2 * kept < capacity:
                capacity, options["window"] = kept, left
        return kind(batch, capacity, max(1, self.num_kv_heads // self.head_shards), self.head_dim, **options)

    def _attend_cached(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: m.Mask | Tensor | None,
        bias: Tensor | biases.Bias | None,
        cache: KVCache,
        counts: Tensor | None,
    ) -> Tensor:
        if not self.causal or (self.training and self.dropout > 0):
            raise ValueError(
                f"a cache was given with causal={self.causal}, dropout={self.dropout}, training={self.training}; "
                "accepted: causal attention without dropout: call eval()."
            )
        left = None if self.window is None else self.window[0]
        if left is None and cache.window is not None:
            raise ValueError(f"the cache keeps a window of {cache.window} but this module has none; make one without.")
        mask = as_mask(mask)
        out = cache.attend(
            q, k, v, counts=counts, window=left, mask=mask, bias=bias, softcap=self.softcap, sinks=_local(self.sinks),
            pre_mix=self.pre_mix, post_mix=self.post_mix,
        )  # fmt: skip
        return self._project_out(out)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads [B,H,S,D], [B,Hk,S,D] twice; with projections sharded by heads, those of this process."""
        if self.qkv_proj is None:
            q, k, v = self._parts(x)
            self._check_shares(q, k, v)
            return q, k, v
        heads = self._all_heads(x).transpose(1, 2)
        return heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)

    def _all_heads(self, x: Tensor) -> Tensor:
        """[B,S,H + 2*Hk,D] of the packed projection"""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # type: ignore[misc]  # unpack()ed modules do not come here
        if heads.shape[2] != self.num_heads + 2 * self.num_kv_heads:
            raise ValueError(
                f"qkv_proj gave {heads.shape[2]} of {self.num_heads + 2 * self.num_kv_heads} heads; accepted: all of "
                "them: shard with mha_ext.distributed.HeadParallel, or with packed=False."
            )
        return heads

    def _reads_packed(self, x: Tensor) -> bool:
        """Whether nothing comes between the packed projection and attention, so that its gradient is written in one piece."""
        parts = self.q_norm, self.rope, self.pre_mix, self.post_mix, self.head_mix
        return self.qkv_proj is not None and not x.is_nested and all(part is None for part in parts)

    def _attend_packed(
        self, x: Tensor, mask: m.Mask | Tensor | None, bias: Tensor | biases.Bias | None, return_weights: bool
    ) -> Any:
        options = self._options(mask, bias)
        found: Any = attention_qkvpacked(self._all_heads(x), self.num_heads, return_weights=return_weights, **options)
        if return_weights:
            return self.out_proj(found[0].flatten(2)), found[1]
        return self.out_proj(found.flatten(2))


def _load_either_packing(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Makes the state dict of a packed module fit an unpacked one, and the other way round."""
    for kind in ("weight", "bias"):
        whole = f"{prefix}{module.packed_name}.{kind}"
        parts = [f"{prefix}{name}.{kind}" for name in module.part_names]
        packed = getattr(module, module.packed_name) is not None
        if not packed and whole in state_dict:
            state_dict.update(zip(parts, state_dict.pop(whole).split(module._rows())))
        elif packed and all(name in state_dict for name in parts):
            state_dict[whole] = torch.cat([state_dict.pop(name) for name in parts])


def _type_of_activations(weight: Any) -> torch.dtype:
    """What a layer with this weight computes in."""
    device = weight.device.type if isinstance(weight, Tensor) else "cpu"
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    if isinstance(weight, Tensor) and weight.dtype in _checks.DTYPES:
        return weight.dtype
    what = _checks.name_of(weight.dtype) if isinstance(weight, Tensor) else "quantised"
    raise ValueError(
        f"the weights are {what}, which does not say what the activations are; make_cache() then needs dtype=, their type "
        "(or torch.int8 or torch.float8_e4m3fn for a quantised cache)."
    )


def _local(parameter: Tensor | None) -> Tensor | None:
    """The part of this process, where the module is sharded by heads."""
    shared_out = parameter is not None and _checks.is_dtensor(parameter)
    return parameter.to_local() if shared_out else parameter  # type: ignore[union-attr]
