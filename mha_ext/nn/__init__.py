"""Attention modules on the functions of mha_ext."""

from .cross_attention import CrossAttention, ProjectedContext
from .kv_cache import KVCache
from .multihead_attention import MultiheadAttention
from .paged_kv_cache import PagedKVCache
from .rope import LinearScaling, Llama3Scaling, NTKScaling, RopeScaling, RotaryEmbedding, YaRNScaling
from .self_attention import SelfAttention

__all__ = [
    "CrossAttention",
    "KVCache",
    "LinearScaling",
    "Llama3Scaling",
    "MultiheadAttention",
    "NTKScaling",
    "PagedKVCache",
    "ProjectedContext",
    "RopeScaling",
    "RotaryEmbedding",
    "SelfAttention",
    "YaRNScaling",
]
