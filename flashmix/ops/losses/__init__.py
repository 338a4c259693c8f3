"""Losses over a vocabulary: of given logits, and of a language model's head without the logits of all tokens."""

from flashmix.ops.losses.op import cross_entropy, linear_cross_entropy, linear_grpo, linear_kl_divergence

__all__ = ["cross_entropy", "linear_cross_entropy", "linear_grpo", "linear_kl_divergence"]
