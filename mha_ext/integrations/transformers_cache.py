"""A cache for generate() of Hugging Face transformers: keys and values in 8 bits, in pages, or both.

    from mha_ext.integrations.transformers import register
    from mha_ext.integrations.transformers_cache import DecodingCache
    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="mha_ext")
    model.generate(**inputs, past_key_values=DecodingCache(model.config, dtype=torch.int8))

Attention reads them where and as they are (mha_ext.attention_cached): what update() returns in their place are tensors without
data, which lead there; a model that computes with them fails. With another attention than ours, and where weights are asked
for, they are copied to the model's type first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks
from ..nn.kv_cache import KVCache
from ..nn.paged_kv_cache import PagedKVCache
from . import transformers as integration
from ._in_place import plain, stand_ins

integration.interfaces()

from transformers.cache_utils import Cache, CacheLayerMixin

LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
FIRST = 256  # positions that there is room for at first, beyond those of the prompt


class DecodingCache(Cache):
    """A cache for generate(past_key_values=), or cache= from transformers 5.24 on, of a model with attention in all its layers.

    It does what DynamicCache does (greedy and beam search, sampling, assisted generation), without torch.compile. Positions
    that a sliding window has passed stay in memory. It grows as DynamicCache does, but by halves, so that a step copies
    nothing. Encoder-decoders take EncoderDecoderCache(DecodingCache(config), DynamicCache()).

    Args:
        config: of the model.
        dtype: torch.int8 or torch.float8_e4m3fn: quantised, each key and value by its largest element; None: the model's own.
        page_size: positions of a page; None: no pages. In pages, what beams begin with in common is kept once.
        capacity: positions of each sequence that memory is taken for at once.

    Raises:
        ImportError: transformers is absent or too old. ValueError, TypeError: a model with other layers (linear attention,
        convolutions), or arguments that do not fit.
    """

    def __init__(
        self, config: Any, *, dtype: torch.dtype | None = None, page_size: int | None = None, capacity: int = 0
    ) -> None:
        if not hasattr(config, "get_text_config"):
            raise TypeError(
                f"config is {_checks.given(config)}; accepted: a model's config: DecodingCache(model.config)."
            )
        for name, size, least in (("page_size", page_size, 1), ("capacity", capacity, 0)):
            if size is not None and _checks.at_least(least, size) is None:
                raise ValueError(f"{name} is {size!r}; DecodingCache accepts an int >= {least}.")
        if dtype is not None and dtype not in (torch.int8, torch.float8_e4m3fn):
            raise TypeError(f"dtype is {dtype!r}; DecodingCache accepts torch.int8, torch.float8_e4m3fn or None.")
        text = config.get_text_config(decoder=True)
        other = set(getattr(text, "layer_types", None) or ()) - LAYERS
        if other:
            raise ValueError(
                f"the model has layers of {', '.join(sorted(other))}; DecodingCache accepts {', '.join(sorted(LAYERS))}: use "
                "transformers' own cache for this one."
            )
        layers: Any = [_Layer(config, text, dtype, page_size, capacity) for _ in range(text.num_hidden_layers)]
        super().__init__(layers=layers)
        self.encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_is_user_defined" and self.encoder_decoder:  # generate() was given this cache, not a pair of them
            raise ValueError(
                "an encoder-decoder was given a DecodingCache, where keys of its decoder and encoder would mix; accepted: "
                "EncoderDecoderCache(DecodingCache(config), DynamicCache()) of transformers.cache_utils."
            )
        super().__setattr__(name, value)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of their scales, of all layers."""
        layers: Any = self.layers
        return sum(layer.held.nbytes for layer in layers if layer.held is not None)


class _Layer(CacheLayerMixin):
    """The KVCache of one attention layer, as transformers asks for it. All sequences have the same length."""

    is_compileable, is_croppable, is_sliding = False, True, False
    supports_early_init = False
    held: KVCache | None = None

    def __init__(self, config: Any, text: Any, dtype: torch.dtype | None, page_size: int | None, capacity: int) -> None:
        super().__init__()
        self.configs, self.dtype, self.page_size, self.capacity = (text, config), dtype, page_size, capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        k, v = key_states, value_states
        capacity = max(self.capacity, k.shape[2] + FIRST)
        options: dict[str, Any] = {"value_dim": v.shape[3], "device": k.device, "dtype": self.dtype or k.dtype}
        if self.page_size is None:
            self.held = KVCache(k.shape[0], capacity, k.shape[1], k.shape[3], **options)
        else:
            self.held = PagedKVCache(k.shape[0], capacity, k.shape[1], k.shape[3], page_size=self.page_size, **options)
        self.batch_size, self.is_initialized = k.shape[0], True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError(
                "a DecodingCache was given while gradients are recorded; accepted: under torch.no_grad() or "
                "torch.inference_mode()."
            )
        if self.held is None:
            self.lazy_initialization(key_states, value_states)
        held: Any = self.held
        n = key_states.shape[2]
        if self.length + n > held.capacity:
            held._grow(self.length + n + held.capacity // 2)
        if isinstance(held, PagedKVCache) and (lack := held._wanted(n) - len(held._free)) > 0:
            held._grow_pool(held.pages + max(lack, held.pages // 2))
        held.append(key_states, value_states)
        self.length += n
        in_place = any(getattr(c, "_attn_implementation", None) in integration.NAMES for c in self.configs)
        if in_place and (held.quantised or self.page_size is not None):
            return stand_ins(held, self.length, key_states.dtype)
        k, v = plain(held, self.length, key_states.dtype)
        return k, v

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.24

    def reset(self) -> None:
        self.held, self.is_initialized, self.length = None, False, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Removes -tokens_to_remove positions, or, before 5.24, leaves so many."""
        kept = self.length + tokens_to_remove if tokens_to_remove <= 0 else min(self.length, tokens_to_remove)
        if self.held is not None:
            self.length = max(0, kept)
            self.held.truncate(self.length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.held is not None:
            self.held.reorder(beam_idx.to(self.held.lengths.device))
            self.batch_size = self.held.batch

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.held is not None:
            self.reorder_cache(torch.arange(self.held.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.held is not None:
            self.reorder_cache(torch.arange(self.held.batch)[indices.to("cpu")])

    def offload(self) -> None:
        raise ValueError(
            "a DecodingCache was asked to move to the CPU and back; accepted: transformers' own caches for that."
        )
