"""A softmax over all tokens up to each, channel by channel."""

from flashmix.ops.running_softmax.op import running_softmax

__all__ = ["running_softmax"]
