"""The gated short convolution of LFM-2 models, from its input to its output projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.hf.cached import Cached
from flashmix.hf.rows import BatchRows
from flashmix.hf.told import hooks_of, masked
from flashmix.ops.short_conv.op import short_conv


def forward(
    self: Any,
    hidden_states: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """The mixer's output `[B, T, D]`, computed by flashmix; the inputs in `past_key_values` go on in place."""
    x = masked(hidden_states, attention_mask)
    with hooks_of(self, "conv"):
        cached = Cached(past_key_values, self.layer_idx, self.conv_kernel_size)
        before, after, value = self.in_proj(x).chunk(3, dim=-1)
        gated = before * value
        weight, bias = self.conv.weight.squeeze(1), self.conv.bias
        if cached.steps_in_place(gated, weight):
            window = torch.cat([cached.inputs[:, :, 1:], gated.mT], dim=-1)  # [B, C, W]
            cached.inputs.copy_(window)
            y = (window * weight).sum(-1)
            y = (y if bias is None else y + bias).to(x.dtype).unsqueeze(1)
        else:
            rows: BatchRows = self.flashmix_given.rows(x, attention_mask, {"seq_idx": seq_idx})
            recent, packing = cached.recent(rows), rows.packing
            y, _ = short_conv(rows.join(gated), weight, bias, activation=None, initial_state=recent, cu_seqlens=packing)
            y = rows.part(y)
            cached.keep_inputs(gated)
        out: Tensor = self.out_proj(after * y)
        return out
