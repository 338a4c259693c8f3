"""Elementwise recurrences: one number a channel that decays and is added to."""

from flashmix.ops.scan.op import scan, scan_max
from flashmix.ops.scan.step.op import scan_step

__all__ = ["scan", "scan_max", "scan_step"]
