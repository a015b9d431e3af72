"""Attention modules on the functions of mha_ext."""

from .kv_cache import KVCache
from .multihead_attention import MultiheadAttention
from .paged_kv_cache import PagedKVCache
from .rope import RotaryEmbedding
from .self_attention import CrossAttention, SelfAttention

__all__ = ["CrossAttention", "KVCache", "MultiheadAttention", "PagedKVCache", "RotaryEmbedding", "SelfAttention"]
