"""Building blocks with parameters: norms, rotary embedding, short convolution, MLP, decays and losses."""

from flashmix.modules.decay import (
    BoundedDecay,
    ForgetGate,
    LogSigmoidDecay,
    MambaDecay,
    RWKV6Decay,
    RWKV7Decay,
    WriteStrength,
)
from flashmix.modules.losses import LinearCrossEntropy, next_token_targets
from flashmix.modules.mlp import LowRank, SwiGLU
from flashmix.modules.norm import GatedRMSNorm, RMSNorm
from flashmix.modules.rotary_embedding import RotaryEmbedding
from flashmix.modules.short_convolution import ShortConvolution

__all__ = [
    "BoundedDecay",
    "ForgetGate",
    "GatedRMSNorm",
    "LinearCrossEntropy",
    "LogSigmoidDecay",
    "LowRank",
    "MambaDecay",
    "RMSNorm",
    "RWKV6Decay",
    "RWKV7Decay",
    "RotaryEmbedding",
    "ShortConvolution",
    "SwiGLU",
    "WriteStrength",
    "next_token_targets",
]
