"""Cross entropy, of logits and of a head without logits."""

from flashmix.ops.cross_entropy.op import cross_entropy, linear_cross_entropy

__all__ = ["cross_entropy", "linear_cross_entropy"]
