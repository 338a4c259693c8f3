"""Losses of a language model's head that never hold all logits."""

from flashmix.ops.losses.op import linear_grpo, linear_kl_divergence

__all__ = ["linear_grpo", "linear_kl_divergence"]
