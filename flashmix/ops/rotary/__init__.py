"""Rotary position embedding and its scalings."""

from flashmix.ops.rotary.op import rotary, rotary_qk, rotary_table

__all__ = ["rotary", "rotary_qk", "rotary_table"]
