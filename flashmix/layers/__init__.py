"""Token-mixing layers, one file a family, and what they remember while decoding."""

from flashmix.layer.cache import AttentionCache, LayerCache, RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layers.delta_net import KDA, DeltaNet, GatedDeltaNet
from flashmix.layers.delta_variants import (
    IPLR,
    Comba,
    DeltaProduct,
    GatedDeltaNet2,
    Oja,
    PreconditionedGatedDeltaNet,
    PreconditionedKDA,
)
from flashmix.layers.linear_attention import GLA, Mamba2, RetNet
from flashmix.layers.plain_linear import HGRN2, Lightning, LinearAttention
from flashmix.layers.rwkv6 import RWKV6
from flashmix.layers.rwkv7 import RWKV7
from flashmix.layers.slots import ABC, GSA
from flashmix.layers.softmax_attention import SoftmaxAttention

__all__ = [
    "ABC",
    "GLA",
    "GSA",
    "HGRN2",
    "IPLR",
    "KDA",
    "RWKV6",
    "RWKV7",
    "AttentionCache",
    "Comba",
    "DeltaNet",
    "DeltaProduct",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "LayerCache",
    "Lightning",
    "LinearAttention",
    "Mamba2",
    "Mixer",
    "Oja",
    "PreconditionedGatedDeltaNet",
    "PreconditionedKDA",
    "RecurrentCache",
    "RetNet",
    "SoftmaxAttention",
]
