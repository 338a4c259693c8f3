"""Building blocks with parameters: norms, rotary embedding, short convolution, MLP, decays and losses."""

from torch import nn

from flashmix.modules.decay import (
    BoundedDecay,
    ForgetGate,
    LogSigmoidDecay,
    MambaDecay,
    RWKV6Decay,
    RWKV7Decay,
    WriteStrength,
)
from flashmix.modules.experts import MixtureOfExperts
from flashmix.modules.losses import LinearCrossEntropy, next_token_targets
from flashmix.modules.mlp import ChannelMixing, GatedMLP, LowRank, SwiGLU
from flashmix.modules.norm import GatedRMSNorm, LayerNorm, RMSNorm
from flashmix.modules.rotary_embedding import RotaryEmbedding
from flashmix.modules.short_convolution import ShortConvolution

MLPS: dict[str, type[nn.Module]] = {
    "swiglu": SwiGLU,
    "gated": GatedMLP,
    "experts": MixtureOfExperts,
    "channel_mixing": ChannelMixing,
}
"""The MLPs of a model's blocks, by their kind in a configuration; the first argument of each is the width."""

__all__ = [
    "MLPS",
    "BoundedDecay",
    "ChannelMixing",
    "ForgetGate",
    "GatedMLP",
    "GatedRMSNorm",
    "LayerNorm",
    "LinearCrossEntropy",
    "LogSigmoidDecay",
    "LowRank",
    "MambaDecay",
    "MixtureOfExperts",
    "RMSNorm",
    "RWKV6Decay",
    "RWKV7Decay",
    "RotaryEmbedding",
    "ShortConvolution",
    "SwiGLU",
    "WriteStrength",
    "next_token_targets",
]
