"""One token of a whole delta-rule layer."""

from flashmix.ops.delta_net_step.op import delta_net_step

__all__ = ["delta_net_step"]
