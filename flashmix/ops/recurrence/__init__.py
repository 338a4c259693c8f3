"""The recurrence: one matrix state a head that decays, is written to, and corrects itself."""

from flashmix.ops.recurrence.delta_rule import delta_rule
from flashmix.ops.recurrence.dplr import dplr
from flashmix.ops.recurrence.linear_attention import linear_attention
from flashmix.ops.recurrence.step.op import delta_rule_step, dplr_step, linear_attention_step

__all__ = [
    "delta_rule",
    "delta_rule_step",
    "dplr",
    "dplr_step",
    "linear_attention",
    "linear_attention_step",
]
