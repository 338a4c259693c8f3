"""How much of a GPU's matrix products a training step uses (MFU: model floating-point operations utilisation)."""

from __future__ import annotations

import torch
from torch import nn

from flashmix.models import Decoder

# Dense bfloat16 matrix products, in floating-point operations a second (makers' data sheets), by a part of the GPU's name; first match.
PEAKS = {
    "H200": 989.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.5e12,
    "H800": 989.5e12,
    "GH200": 989.5e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


def peak_of(device: torch.device) -> float | None:
    """The GPU's peak, None of a CPU or a GPU that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def work_of(model: Decoder, tokens: float) -> float:
    """Floating-point operations of a training step per token, in sequences of so many tokens.

    Six for each number in a matrix (forward and backward, 2 and 4), and those of causal attention's products of scores and values;
    recurrences add little and are left out.

    Example:
        >>> from flashmix.models import preset
        >>> model = Decoder(preset("transformer_nano"))
        >>> work_of(model, 100.0) - work_of(model, 0.0) == 4 * 6 * 100.0 * 32
        True
    """
    matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    seen = 0.0
    for layer in model.config.layers:
        if layer.mixer in ("attention", "latent_attention"):
            window = layer.options.get("window")
            channels = layer.options.get("heads", 1) * (layer.options.get("head_dim") or 0) or model.config.width
            seen += channels * (tokens / 2 if window is None else min(tokens / 2, window))
    return 6.0 * matrices + 12.0 * seen
