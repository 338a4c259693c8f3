"""Token-mixing layers, one per mechanism that has one (`flashmix.mechanisms`), and their caches for decoding."""

from typing import TYPE_CHECKING

from flashmix.layer.cache import AttentionCache, LayerCache, RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.mechanisms.registry import mixers

if TYPE_CHECKING:
    from flashmix.mechanisms import *  # noqa: F403

globals().update({layer.__name__: layer for layer in mixers().values()})

__all__ = ["AttentionCache", "LayerCache", "Mixer", "RecurrentCache", *(layer.__name__ for layer in mixers().values())]
