"""The short convolutions of LFM-2 and LFM-3 models, from their input to their output projection, and those of Inkling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.hf.cached import Cached
from flashmix.hf.rows import BatchRows
from flashmix.hf.told import hooks_of, masked
from flashmix.ops.short_conv.op import short_conv


def forward(
    self: Any, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """The mixer's output `[B, T, D]`, computed by flashmix; the inputs in `past_key_values` go on in place."""
    x = masked(hidden_states, attention_mask)
    with hooks_of(self, "conv"):
        cached = Cached(past_key_values, self.layer_idx, self.conv_kernel_size)
        before, after, value = self.in_proj(x).chunk(3, dim=-1)
        y = convolved(self, self.conv, before * value, cached, attention_mask, options)
        out: Tensor = self.out_proj(after * y.to(x.dtype))
        return out


def inkling(
    self: Any, hidden_states: Tensor, past_key_values: Any = None, conv_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """The input `[B, T, D]` and its convolution added, in float32; the inputs in `past_key_values` go on in place."""
    return added(self, hidden_states, past_key_values, conv_mask, options).to(hidden_states.dtype)


def inkling2(
    self: Any, hidden_states: Tensor, past_key_values: Any = None, conv_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """The same, divided by the root of the number of terms."""
    y = added(self, hidden_states, past_key_values, conv_mask, options)
    return (y / (self.conv_kernel_size + 1) ** 0.5).to(hidden_states.dtype)


def added(mixer: Any, x: Tensor, cache: Any, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """The input and its convolution added, in float32."""
    x = x.float()
    with hooks_of(mixer, "conv1d"):
        cached = Cached(cache, mixer.layer_idx, mixer.conv_kernel_size, mixer.conv_idx)
        return x + convolved(mixer, mixer.conv1d, masked(x, mask), cached, mask, options)


def convolved(mixer: Any, conv: Any, x: Tensor, cached: Cached, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """The convolution of `x` `[B, T, C]`; its newest inputs are kept in the cache."""
    weight, bias = conv.weight.squeeze(1), conv.bias
    if cached.steps_in_place(x, weight):
        window = torch.cat([cached.inputs[:, :, 1:], x.mT], dim=-1)  # [B, C, W]
        cached.inputs.copy_(window)
        y = (window * weight).sum(-1)
        return (y if bias is None else y + bias).unsqueeze(1)
    rows: BatchRows = mixer.flashmix_given.rows(x, mask, options)
    recent, packing = cached.recent(rows), rows.packing
    y, _ = short_conv(rows.join(x), weight, bias, activation=None, initial_state=recent, cu_seqlens=packing)
    cached.keep_inputs(x)
    return rows.part(y)
