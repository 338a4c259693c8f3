"""Rows that have a factor each."""

from flashmix.ops.scaled_rows.op import scaled_rows

__all__ = ["scaled_rows"]
