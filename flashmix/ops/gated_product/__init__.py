"""Gated products of an MLP, and their activations."""

from flashmix.ops.gated_product.op import ACTIVATIONS, gated, swiglu

__all__ = ["ACTIVATIONS", "gated", "swiglu"]
