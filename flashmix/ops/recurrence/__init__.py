"""The recurrence: one matrix state per head that decays, is written to, and corrects itself."""

from flashmix.ops.recurrence.op import delta_rule, dplr, linear_attention
from flashmix.ops.recurrence.step.op import delta_rule_step, dplr_step, linear_attention_step

__all__ = ["delta_rule", "delta_rule_step", "dplr", "dplr_step", "linear_attention", "linear_attention_step"]
