"""Language models: a configuration, the decoder that it describes, presets, and generation."""

from flashmix.models.cache import ModelCache
from flashmix.models.config import DecoderConfig, LayerConfig
from flashmix.models.decoder import Decoder, parameter_groups
from flashmix.models.generate import generate, stream
from flashmix.models.presets import PRESETS, SIZES, Size, preset
from flashmix.models.speculative import Acceptance, generate_speculatively, stream_speculatively

__all__ = [
    "PRESETS",
    "SIZES",
    "Acceptance",
    "Decoder",
    "DecoderConfig",
    "LayerConfig",
    "ModelCache",
    "Size",
    "generate",
    "generate_speculatively",
    "parameter_groups",
    "preset",
    "stream",
    "stream_speculatively",
]
