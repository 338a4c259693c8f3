"""One token, or a few, of the recurrence, its states updated in place."""

from flashmix.ops.recurrence.step.op import delta_rule_step, dplr_step, linear_attention_step

__all__ = ["delta_rule_step", "dplr_step", "linear_attention_step"]
