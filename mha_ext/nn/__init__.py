"""Attention modules on the functions of mha_ext."""

from .cross_attention import CrossAttention, ProjectedContext
from .kv_cache import KVCache
from .multihead_attention import MultiheadAttention
from .paged_kv_cache import PagedKVCache
from .rope import RotaryEmbedding
from .self_attention import SelfAttention

__all__ = [
    "CrossAttention",
    "KVCache",
    "MultiheadAttention",
    "PagedKVCache",
    "ProjectedContext",
    "RotaryEmbedding",
    "SelfAttention",
]
