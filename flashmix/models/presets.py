"""Published architectures as lists of layers, in a few sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flashmix.mechanisms.registry import Size, presets
from flashmix.models.config import DecoderConfig, LayerConfig

SIZES = {
    "nano": Size(width=32, depth=4, head_dim=8, window=4),  # for tests
    "tiny": Size(width=128, depth=4, head_dim=32, window=64),  # trains on a laptop's CPU in minutes
    "small": Size(width=384, depth=8, head_dim=64, window=256),  # on a CPU in hours, on a GPU in minutes
    "base": Size(width=768, depth=12, head_dim=64, window=1024),
}
"""The sizes of the presets, by the last part of a preset's name."""

Layers = list[LayerConfig]


def layers_of(mixer: str, size: Size) -> Layers:
    """The layers of a mechanism's own preset."""
    return [LayerConfig(mixer, options) for options in presets()[mixer](size)]


def transformer(size: Size) -> Layers:
    """Full softmax attention with rotary positions, as in Llama, arXiv:2302.13971."""
    return size.depth * [LayerConfig("attention", {"heads": size.heads})]


def hybrid(size: Size) -> Layers:
    """Gated DeltaNet, every fourth layer windowed attention: a state for the past, exact attention to near tokens."""
    return _every_fourth(layers_of("gated_deltanet", size), "attention", heads=size.heads, window=size.window)


def qwen3_next_like(size: Size) -> Layers:
    """Gated DeltaNet, every fourth layer gated full attention with a quarter of the channels rotated (Qwen3-Next)."""
    options: dict[str, Any] = {
        "heads": size.heads,
        "kv_heads": max(1, size.heads // 4),
        "rotary": max(2, size.head_dim // 4),
        "base": 1e7,
        "qk_norm": True,
        "gated": True,
    }
    return _every_fourth(layers_of("gated_deltanet", size), "attention", **options)


def kimi_linear_like(size: Size) -> Layers:
    """Kimi Delta Attention with full attention without positions in every fourth layer, as in arXiv:2510.26692."""
    return _every_fourth(layers_of("kda", size), "attention", heads=size.heads, rotary=0)


def falcon_mamba_like(size: Size) -> Layers:
    """Mamba without MLPs, its step sizes, B and C normalised without weights, as in arXiv:2410.05355."""
    options = {"state_dim": 16, "norms": True, "norm_weights": False}
    return size.depth * [LayerConfig("mamba", options, mlp={"kind": "none"})]


def jamba_like(size: Size) -> Layers:
    """Mamba with norms of dt, B and C, one layer of eight attention without positions, as in arXiv:2403.19887; no experts."""
    period = min(size.depth, 8)
    scan = LayerConfig("mamba", {"state_dim": 16, "norms": True})
    attention = LayerConfig("attention", {"heads": size.heads, "rotary": 0})
    return [attention if i % period == period // 2 else scan for i in range(size.depth)]


def recurrent_gemma_like(size: Size) -> Layers:
    """Two layers of RG-LRU, then one of attention to a window with one key head; gated MLPs, as in arXiv:2404.07839."""
    mlp = {"kind": "gated", "hidden": 3 * size.width, "activation": "gelu_tanh", "bias": True}
    attention = {"heads": size.heads, "kv_heads": 1, "window": size.window, "rotary": size.head_dim // 2}
    kinds = [("rg_lru", {"heads": size.heads}), ("rg_lru", {"heads": size.heads}), ("attention", attention)]
    return [LayerConfig(*kinds[i % 3], mlp=mlp) for i in range(size.depth)]


PRESETS: dict[str, Callable[[Size], Layers]] = {mixer: partial(layers_of, mixer) for mixer in presets()} | {
    build.__name__: build
    for build in (
        transformer,
        hybrid,
        qwen3_next_like,
        kimi_linear_like,
        falcon_mamba_like,
        jamba_like,
        recurrent_gemma_like,
    )
}
"""The published architectures by name: each makes the list of layers of a size."""


def preset(name: str, *, vocab_size: int = 256) -> DecoderConfig:
    """The configuration of a published architecture in one of the `SIZES`.

    Args:
        name: a key of `PRESETS`, an underscore, a key of `SIZES`: "hybrid_tiny"; without a size it is "small".
        vocab_size: number of tokens; 256 for bytes.

    Raises:
        ValueError: the architecture or the size is unknown.

    Example:
        >>> config = preset("hybrid_nano")
        >>> [layer.mixer for layer in config.layers]
        ['gated_deltanet', 'gated_deltanet', 'gated_deltanet', 'attention']
    """
    architecture, _, size = name.rpartition("_")
    if size not in SIZES:
        architecture, size = name, "small"
    if architecture not in PRESETS:
        raise ValueError(
            f"name must be one of {', '.join(PRESETS)}, with _{', _'.join(SIZES)} for its size, got {name!r}"
        )
    chosen = SIZES[size]
    return DecoderConfig(vocab_size=vocab_size, width=chosen.width, layers=PRESETS[architecture](chosen))


def _every_fourth(layers: Layers, mixer: str, **options: Any) -> Layers:
    """The layers with every fourth replaced by one of another kind."""
    return [LayerConfig(mixer, options) if index % 4 == 3 else layer for index, layer in enumerate(layers)]
