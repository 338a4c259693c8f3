"""The write keys of the preconditioned delta rules: keys weaker along channels that recent keys have used much."""

from flashmix.ops.preconditioner.op import preconditioner

__all__ = ["preconditioner"]
