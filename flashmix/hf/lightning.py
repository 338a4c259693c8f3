"""Lightning attention of MiniMax models, from its input to its output projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.hf.rows import BatchRows
from flashmix.hf.told import masked
from flashmix.op.dtypes import state_dtype
from flashmix.ops.recurrence import linear_attention


def forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The mixer's output `[B, T, D]`, computed by flashmix, and the state `[B, H, K, V]` that it leaves in `past_key_values`."""
    made = masked(self.act_fn(self.qkv_proj(hidden_states)), attention_mask)
    q, k, v = made.unflatten(-1, (self.num_attention_heads, 3 * self.head_dim)).split(self.head_dim, dim=-1)
    rows: BatchRows = self.flashmix_given.rows(hidden_states, attention_mask, options)
    before = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
    q, k, v = (rows.join(part) for part in (q, k, v))
    o, state = linear_attention(
        q,
        k,
        v,
        -self.slope_rate.flatten(),
        scale=1.0,
        initial_state=None if before is None else rows.initial(before.to(state_dtype(q.dtype))),
        return_state=past_key_values is not None,
        cu_seqlens=rows.packing,
    )
    kept = rows.final(state)
    if kept is not None:
        kept = kept.to(v.dtype)
        past_key_values.set_linear_cache(self.layer_idx, kept)
    o = self.norm(rows.part(o).flatten(2))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * o), kept
