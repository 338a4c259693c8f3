"""Exact softmax attention."""

from flashmix.ops.attention.op import softmax_attention

__all__ = ["softmax_attention"]
