"""Token-mixing layers, one file a family, and what they remember while decoding."""

from flashmix.layers.cache import AttentionCache, LayerCache, RecurrentCache
from flashmix.layers.delta_net import KDA, DeltaNet, GatedDeltaNet
from flashmix.layers.linear_attention import GLA, Mamba2, RetNet
from flashmix.layers.mixer import Mixer
from flashmix.layers.rwkv7 import RWKV7
from flashmix.layers.softmax_attention import SoftmaxAttention

__all__ = [
    "GLA",
    "KDA",
    "RWKV7",
    "AttentionCache",
    "DeltaNet",
    "GatedDeltaNet",
    "LayerCache",
    "Mamba2",
    "Mixer",
    "RecurrentCache",
    "RetNet",
    "SoftmaxAttention",
]
