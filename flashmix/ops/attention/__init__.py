"""Exact softmax attention."""

from flashmix.ops.attention.kv_cache import KVCache, attention_with_cache
from flashmix.ops.attention.softmax_attention import softmax_attention

__all__ = ["KVCache", "attention_with_cache", "softmax_attention"]
