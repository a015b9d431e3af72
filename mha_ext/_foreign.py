"""Names that arguments have in other libraries, and what to write here: an unknown keyword ends in that sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

CAUSAL = "mask=masks.Causal()"
FUNCTIONS = {
    "is_causal": f'mask=masks.Causal("top_left"), or {CAUSAL} where the queries are the last positions',
    "causal": CAUSAL,
    "attn_mask": "mask= for a bool tensor (True = attend), bias= for one that is added to the scores",
    "attention_mask": "mask=attention_mask.bool()[:, None, None, :] for padding [B,Sk], or mask=masks.Padding(lengths)",
    "key_padding_mask": "mask=~key_padding_mask[:, None, None, :], or mask=masks.Padding(lengths)",
    "attn_bias": "bias= for a tensor that is added to the scores, mask= for a mask",
    "dropout": "dropout_p=",
    "p": "dropout_p=",
    "softmax_scale": "scale=",
    "scaling": "scale=",
    "window_size": "mask=masks.Window(left, right), with None for -1",
    "sliding_window": "mask=masks.Window(sliding_window - 1, 0): a window does not count the query's own position",
    "alibi_slopes": "bias=biases.ALiBi(alibi_slopes)",
    "cache_seqlens": "mask=masks.Padding(cache_seqlens), or a cache of mha_ext.nn.KVCache",
    "score_mod": "bias=, softcap= or a mask of mha_ext.masks, which say what it computes",
    "block_mask": "a mask of mha_ext.masks, such as masks.BlockSparse",
    "enable_gqa": "nothing: fewer key/value heads than query heads are understood",
    "logits_soft_cap": "softcap=",
    "return_softmax_lse": "return_lse=",
    "return_attn_probs": "return_weights=",
    "need_weights": "return_weights=",
    "s_aux": "sinks=",
    "cu_seqlens": "cu_seqlens_q=, cu_seqlens_k= of mha_ext.attention_varlen",
    "rope_theta": "mha_ext.nn.RotaryEmbedding on queries and keys before",
    "position_ids": "mha_ext.nn.RotaryEmbedding on queries and keys before",
}
MODULES = {
    "embed_dim": "d_model=",
    "hidden_size": "d_model=",
    "nhead": "num_heads=",
    "num_attention_heads": "num_heads=",
    "num_key_value_heads": "num_kv_heads=",
    "qkv_bias": "bias=",
    "rope_theta": "rope=True, rope_base=",
    "batch_first": "nothing: inputs are [B,S,d_model]",
    "kdim": "context_dim= of mha_ext.nn.CrossAttention",
    "vdim": "context_dim= of mha_ext.nn.CrossAttention",
    "is_causal": "causal=True",
    "dropout_p": "dropout=",
    "attention_dropout": "dropout=",
    "attn_drop": "dropout=",
    "window_size": "window=(left, right), with None for -1",
    "sliding_window": "window=sliding_window - 1: a window does not count the query's own position",
    "alibi_slopes": "bias=biases.ALiBi(alibi_slopes) in the call",
    "rope_parameters": "rope=True, rope_base=, rope_scaling=mha_ext.nn.RopeScaling.of(rope_parameters)",
    "past_key_values": "cache=, which make_cache() gives",
    "use_cache": "cache=, which make_cache() gives",
    "cache_seqlens": "cache=, which make_cache() gives",
    "need_weights": "return_weights=",
    "output_attentions": "return_weights=",
}


def refusal(function: Callable[..., Any], names: dict[str, Any], of_module: bool = False) -> Exception:
    """names: the keyword arguments that the function does not have."""
    name = next(iter(names))
    known = {**FUNCTIONS, **MODULES} if of_module else FUNCTIONS
    own = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD and p.name != "self"]
    called = function.__qualname__.removesuffix(".__init__").removesuffix(".forward")
    fix = f"use {known[name]}" if name in known else f"accepted: {', '.join(own)}"
    return TypeError(f"{called} has no argument {name}; {fix}.")
