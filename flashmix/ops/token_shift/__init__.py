"""The token before each token."""

from flashmix.ops.token_shift.op import token_shift

__all__ = ["token_shift"]
