"""The models of an evaluation by name: presets, their options, and hybrids of them."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch

from flashmix.layer.cache import RecurrentCache
from flashmix.models import PRESETS, Decoder, DecoderConfig, LayerConfig, Size, preset
from flashmix.models.config import MIXERS
from flashmix.train.sizes import parsed


def contender(name: str, vocab_size: int, size: Size) -> DecoderConfig:
    """The configuration of `PRESET[_SIZE][+OPTION[=VALUE]]...[/PRESET...]`.

    An option goes to every layer that has it; without a value it is true. The presets of a hybrid, separated by slashes, take turns
    layer by layer. A preset whose name has no size has `size`; the width of a hybrid is that of its first preset.

    Raises:
        ValueError, TypeError: there is no such preset or option, or the value cannot be.

    Example:
        >>> size = Size(width=64, depth=4, head_dim=16, window=16)
        >>> config = contender("deltanet+negative_eigenvalues/transformer+window=8", 256, size)
        >>> [layer.mixer for layer in config.layers], config.layers[1].options
        (['deltanet', 'attention', 'deltanet', 'attention'], {'heads': 4, 'window': 8})
    """
    parts = [_part(text, vocab_size, size) for text in name.split("/")]
    layers = [parts[index % len(parts)].layers[index] for index in range(min(len(part.layers) for part in parts))]
    return replace(parts[0], layers=layers)


def _part(text: str, vocab_size: int, size: Size) -> DecoderConfig:
    name, *options = text.split("+")
    if name in PRESETS:
        config = DecoderConfig(vocab_size=vocab_size, width=size.width, layers=PRESETS[name](size))
    else:
        config = preset(name, vocab_size=vocab_size)
    for option in options:
        key, _, value = option.partition("=")
        if not any(key in _options_of(layer) for layer in config.layers):
            mixers = " or ".join(dict.fromkeys(layer.mixer for layer in config.layers))
            raise ValueError(f"{key} must be an option of {mixers}, got none of this name")
        config = replace(config, layers=[_with_option(layer, key, value) for layer in config.layers])
    return config


def _options_of(layer: LayerConfig) -> set[str]:
    return set(inspect.signature(MIXERS[layer.mixer].__init__).parameters)


def _with_option(layer: LayerConfig, key: str, value: str) -> LayerConfig:
    if key not in _options_of(layer):
        return layer
    return LayerConfig(layer.mixer, {**layer.options, key: parsed(value)})


@torch.no_grad()
def memory(config: DecoderConfig) -> tuple[int, bool]:
    """How many numbers the recurrent states of the model hold, and whether the model also has an attention cache, which grows.

    Example:
        >>> memory(contender("deltanet/transformer", 256, Size(width=64, depth=2, head_dim=16, window=16)))
        (1024, True)
    """
    model = Decoder(config)
    cache = model.new_cache()
    model.hidden(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
    states = [layer.state for layer in cache.layers if isinstance(layer, RecurrentCache)]
    tensors = [tensor for state in states for tensor in (state if isinstance(state, tuple) else (state,))]
    return sum(tensor.numel() for tensor in tensors if tensor is not None), len(states) < len(cache.layers)
