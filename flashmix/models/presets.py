"""Published architectures as lists of layers, in a few sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashmix.models.config import DecoderConfig, LayerConfig


@dataclass(frozen=True)
class Size:
    """Channels of the residual stream, number of blocks, channels of a head, and the window of windowed attention."""

    width: int
    depth: int
    head_dim: int
    window: int

    @property
    def heads(self) -> int:
        return self.width // self.head_dim


SIZES = {
    "nano": Size(width=32, depth=4, head_dim=8, window=4),  # for tests
    "tiny": Size(width=128, depth=4, head_dim=32, window=64),  # trains on a laptop's CPU in minutes
    "small": Size(width=384, depth=8, head_dim=64, window=256),  # there in hours, on a GPU in minutes
    "base": Size(width=768, depth=12, head_dim=64, window=1024),
}

Layers = list[LayerConfig]


def retnet(size: Size) -> Layers:
    """RetNet, arXiv:2307.08621."""
    return size.depth * [LayerConfig("retnet", {"heads": size.heads})]


def gla(size: Size) -> Layers:
    """Gated linear attention, arXiv:2312.06635."""
    return size.depth * [LayerConfig("gla", {"heads": max(1, size.heads // 2)})]


def mamba2(size: Size) -> Layers:
    """Mamba-2, arXiv:2405.21060."""
    return size.depth * [LayerConfig("mamba2", {"heads": 2 * size.heads, "state_dim": 2 * size.head_dim})]


def deltanet(size: Size) -> Layers:
    """DeltaNet, arXiv:2406.06484."""
    return size.depth * [LayerConfig("deltanet", {"heads": size.heads})]


def gated_deltanet(size: Size) -> Layers:
    """Gated DeltaNet, arXiv:2412.06464."""
    return size.depth * [_gated_deltanet(size)]


def kda(size: Size) -> Layers:
    """Kimi Delta Attention in every layer, arXiv:2510.26692."""
    return size.depth * [LayerConfig("kda", {"heads": size.heads})]


def rwkv7(size: Size) -> Layers:
    """RWKV-7 time mixing, arXiv:2503.14456, with this library's SwiGLU for its channel mixing."""
    first = LayerConfig("rwkv7", {"heads": size.heads})
    later = LayerConfig("rwkv7", {"heads": size.heads, "value_residual": True})
    return [first, *(size.depth - 1) * [later]]


def linear_attention(size: Size) -> Layers:
    """The first linear attention, arXiv:2006.16236."""
    return size.depth * [LayerConfig("linear_attention", {"heads": size.heads})]


def lightning(size: Size) -> Layers:
    """Lightning attention, arXiv:2401.04658; its decays weaken from layer to layer."""
    return [
        LayerConfig("lightning", {"heads": size.heads, "layer": index, "layers": size.depth})
        for index in range(size.depth)
    ]


def hgrn2(size: Size) -> Layers:
    """HGRN-2, arXiv:2404.07904; the forget gate's floor grows from layer to layer, as its learned one begins."""
    return [LayerConfig("hgrn2", {"heads": size.heads, "lower": index / size.depth}) for index in range(size.depth)]


def rwkv6(size: Size) -> Layers:
    """RWKV-6 time mixing, arXiv:2404.05892, with this library's SwiGLU for its channel mixing."""
    ranks = {"shift_rank": max(4, size.width // 24), "decay_rank": max(4, size.width // 12)}
    return size.depth * [LayerConfig("rwkv6", {"heads": size.heads, **ranks})]


def gsa(size: Size) -> Layers:
    """Gated slot attention, arXiv:2409.07146."""
    return size.depth * [LayerConfig("gsa", {"heads": size.heads, "slots": min(64, 2 * size.head_dim)})]


def abc(size: Size) -> Layers:
    """Attention with bounded memory control, arXiv:2110.02488."""
    return size.depth * [LayerConfig("abc", {"heads": size.heads, "slots": min(64, 2 * size.head_dim)})]


def deltaproduct(size: Size) -> Layers:
    """Gated DeltaProduct with two steps a token, arXiv:2502.10297."""
    return size.depth * [LayerConfig("deltaproduct", {"heads": size.heads, "steps": 2, "negative_eigenvalues": True})]


def comba(size: Size) -> Layers:
    """Comba, arXiv:2506.02475."""
    return size.depth * [LayerConfig("comba", {"heads": size.heads})]


def gated_deltanet2(size: Size) -> Layers:
    """Gated DeltaNet-2, arXiv:2605.22791."""
    return size.depth * [LayerConfig("gated_deltanet2", {"heads": size.heads})]


def preconditioned_gated_deltanet(size: Size) -> Layers:
    """Preconditioned Gated DeltaNet, arXiv:2604.21100."""
    return size.depth * [LayerConfig("preconditioned_gated_deltanet", {"heads": size.heads})]


def preconditioned_kda(size: Size) -> Layers:
    """Preconditioned Kimi Delta Attention, arXiv:2604.21100."""
    return size.depth * [LayerConfig("preconditioned_kda", {"heads": size.heads})]


def oja(size: Size) -> Layers:
    """Oja's rule, arXiv:2206.01649."""
    return size.depth * [LayerConfig("oja", {"heads": size.heads})]


def iplr(size: Size) -> Layers:
    """Identity plus low rank without decay, arXiv:2503.14456, section 3."""
    return size.depth * [LayerConfig("iplr", {"heads": size.heads})]


def transformer(size: Size) -> Layers:
    """Full softmax attention with rotary positions, as in Llama, arXiv:2302.13971."""
    return size.depth * [LayerConfig("attention", {"heads": size.heads})]


def hybrid(size: Size) -> Layers:
    """Gated DeltaNet, every fourth layer windowed attention: a state for the past, exact attention for what is near."""
    return _every_fourth(size, _gated_deltanet(size), "attention", heads=size.heads, window=size.window)


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
    return _every_fourth(size, _gated_deltanet(size), "attention", **options)


def kimi_linear_like(size: Size) -> Layers:
    """Kimi Delta Attention with full attention without positions in every fourth layer, as in arXiv:2510.26692."""
    return _every_fourth(size, LayerConfig("kda", {"heads": size.heads}), "attention", heads=size.heads, rotary=0)


PRESETS: dict[str, Callable[[Size], Layers]] = {
    build.__name__: build
    for build in (
        retnet, gla, mamba2, deltanet, gated_deltanet, kda, rwkv7, linear_attention, lightning, hgrn2, rwkv6, gsa, abc,
        deltaproduct, comba, gated_deltanet2, preconditioned_gated_deltanet, preconditioned_kda, oja, iplr, transformer,
        hybrid, qwen3_next_like, kimi_linear_like,
    )
}  # fmt: skip


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


def _gated_deltanet(size: Size) -> LayerConfig:
    return LayerConfig(
        "gated_deltanet", {"heads": max(1, size.heads // 2), "value_heads": size.heads, "head_dim": size.head_dim}
    )


def _every_fourth(size: Size, usual: LayerConfig, fourth: str, **options: Any) -> Layers:
    """Three layers of one kind, then one of another, and so on."""
    return [LayerConfig(fourth, options) if index % 4 == 3 else usual for index in range(size.depth)]
