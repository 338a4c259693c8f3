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
from flashmix.modules.mlp import LowRank, SwiGLU
from flashmix.modules.norm import GatedRMSNorm, RMSNorm
from flashmix.modules.rotary_embedding import RotaryEmbedding
from flashmix.modules.short_convolution import ShortConvolution

# The MLPs of a model's blocks, by their kind in a configuration; the first argument of each is the width.
MLPS: dict[str, type[nn.Module]] = {"swiglu": SwiGLU, "experts": MixtureOfExperts}

__all__ = [
    "MLPS",
    "BoundedDecay",
    "ForgetGate",
    "GatedRMSNorm",
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
