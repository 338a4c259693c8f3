"""The recurrence: one matrix state a head that decays, is written to, and corrects itself."""

from flashmix.ops.recurrence.delta_rule import delta_rule
from flashmix.ops.recurrence.dplr import dplr
from flashmix.ops.recurrence.linear_attention import linear_attention

__all__ = ["delta_rule", "dplr", "linear_attention"]
