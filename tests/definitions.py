"""The definitions of the row-wise ops and the losses, under one name for the tests."""

from flashmix.ops.cumulative_rotary.definition import cumulative_rotary
from flashmix.ops.decay.definition import bounded_decay, softplus_decay, write_strength
from flashmix.ops.gated_product.definition import ACTIVATIONS, gelu, gelu_tanh, relu, relu2, silu, swiglu
from flashmix.ops.losses.definition import cross_entropy, grpo, kl_divergence
from flashmix.ops.norm.definition import group_norm, l2_norm, layer_norm, rms_norm
from flashmix.ops.own_write.definition import with_own_write
from flashmix.ops.rotary.definition import rotary
from flashmix.ops.running_softmax.definition import running_softmax
from flashmix.ops.scaled_rows.definition import scaled_rows
from flashmix.ops.short_conv.definition import short_conv, short_conv_qkv
from flashmix.ops.token_shift.definition import token_shift

__all__ = [
    "ACTIVATIONS",
    "bounded_decay",
    "cross_entropy",
    "cumulative_rotary",
    "gelu",
    "gelu_tanh",
    "group_norm",
    "grpo",
    "kl_divergence",
    "l2_norm",
    "layer_norm",
    "relu",
    "relu2",
    "rms_norm",
    "rotary",
    "running_softmax",
    "scaled_rows",
    "short_conv",
    "short_conv_qkv",
    "silu",
    "softplus_decay",
    "swiglu",
    "token_shift",
    "with_own_write",
    "write_strength",
]
