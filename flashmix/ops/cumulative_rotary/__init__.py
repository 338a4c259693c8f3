"""Queries and keys rotated by angles that add up over tokens, keys as the token after them writes them."""

from flashmix.ops.cumulative_rotary.call import CumulativeRotaryCall
from flashmix.ops.cumulative_rotary.op import cumulative_rotary

__all__ = ["CumulativeRotaryCall", "cumulative_rotary"]
