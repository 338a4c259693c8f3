"""The token before each token."""

from flashmix.ops.token_shift.op import shifted, token_shift

__all__ = ["shifted", "token_shift"]
