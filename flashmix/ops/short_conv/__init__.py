"""Short causal convolution over tokens."""

from flashmix.ops.short_conv.op import short_conv, short_conv_qkv

__all__ = ["short_conv", "short_conv_qkv"]
