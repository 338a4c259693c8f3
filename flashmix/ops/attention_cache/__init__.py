"""Attention of new tokens to a cache of keys and values."""

from flashmix.ops.attention_cache.op import KVCache, attention_with_cache

__all__ = ["KVCache", "attention_with_cache"]
