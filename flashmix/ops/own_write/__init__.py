"""The read of a token's own write by its queries."""

from flashmix.ops.own_write.op import with_own_write

__all__ = ["with_own_write"]
