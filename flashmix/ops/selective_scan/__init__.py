"""The selective scan of Mamba: a diagonal state per channel whose decay, input and output depend on the token."""

from flashmix.ops.selective_scan.op import selective_scan

__all__ = ["selective_scan"]
