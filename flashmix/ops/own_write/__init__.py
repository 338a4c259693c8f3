"""What the queries of a token read of the token's own write."""

from flashmix.ops.own_write.op import with_own_write

__all__ = ["with_own_write"]
