"""The scan a token at a time."""

from flashmix.ops.scan.step.op import scan_step

__all__ = ["scan_step"]
