"""Norms over the last axis."""

from flashmix.ops.norm.op import group_norm, l2_norm, layer_norm, rms_norm

__all__ = ["group_norm", "l2_norm", "layer_norm", "rms_norm"]
