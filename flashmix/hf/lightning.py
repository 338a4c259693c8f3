"""Lightning attention of MiniMax models, from its input to its output projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.hf.rows import BatchRows
from flashmix.hf.told import masked
from flashmix.op.dtypes import state_dtype
from flashmix.ops.recurrence import linear_attention, linear_attention_step


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
    before = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
    if before is not None and is_step(v, before):
        state = before.clone(
            memory_format=torch.contiguous_format
        )  # callers may keep the one that an earlier call returned
        y = linear_attention_step(q, k, v, state, -self.slope_rate.flatten(), scale=1.0)
        past_key_values.set_linear_cache(self.layer_idx, state)
        return finished(self, y, hidden_states), state
    rows: BatchRows = self.flashmix_given.rows(hidden_states, attention_mask, options)
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
    return finished(self, rows.part(o), hidden_states), kept


def is_step(v: Tensor, state: Tensor) -> bool:
    """Whether `v` `[B, 1, H, V]` is one token for `linear_attention_step`: no gradient is wanted, and it takes the state's dtype."""
    if v.shape[1] != 1 or (torch.is_grad_enabled() and (v.requires_grad or state.requires_grad)):
        return False
    return state.dtype == state_dtype(v.dtype) or (state.dtype == torch.bfloat16 and v.dtype != torch.float64)


def finished(mixer: Any, o: Tensor, hidden_states: Tensor) -> Tensor:
    """The norm, the output gate and the output projection of `o` `[B, T, H, V]`."""
    gate = torch.sigmoid(mixer.output_gate(hidden_states))
    out: Tensor = mixer.out_proj(gate * mixer.norm(o.flatten(2)))
    return out
