"""Exact softmax attention."""

from flashmix.ops.attention.softmax_attention import softmax_attention

__all__ = ["softmax_attention"]
