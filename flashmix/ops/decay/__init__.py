"""Parametrisations of the log decay and of beta."""

from flashmix.ops.decay.op import bounded_decay, softplus_decay, write_strength

__all__ = ["bounded_decay", "softplus_decay", "write_strength"]
