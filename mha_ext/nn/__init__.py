"""Attention modules on the functions of mha_ext."""

from .kv_cache import KVCache
from .multihead_attention import MultiheadAttention
from .rope import RotaryEmbedding
from .self_attention import CrossAttention, SelfAttention

__all__ = ["CrossAttention", "KVCache", "MultiheadAttention", "RotaryEmbedding", "SelfAttention"]
