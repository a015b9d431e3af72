"""Attention modules on the functions of mha_ext."""

from .multihead_attention import MultiheadAttention
from .rope import RotaryEmbedding
from .self_attention import CrossAttention, SelfAttention

__all__ = ["CrossAttention", "MultiheadAttention", "RotaryEmbedding", "SelfAttention"]
