"""flashmix mixes tokens fast: one recurrence and one attention, and every published mechanism as a call of them."""

from flashmix._checks import checks
from flashmix._dispatch import Explanation, explain
from flashmix.ops.packing import Packing
from flashmix.ops.recurrence import delta_rule, dplr, linear_attention

__version__ = "0.1.0.dev0"

__all__ = [
    "Explanation",
    "Packing",
    "checks",
    "delta_rule",
    "dplr",
    "explain",
    "linear_attention",
]
