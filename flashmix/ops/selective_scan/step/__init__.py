"""The selective scan a token at a time."""

from flashmix.ops.selective_scan.step.op import selective_scan_step

__all__ = ["selective_scan_step"]
