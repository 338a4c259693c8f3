"""Lightning attention of MiniMax models, from its input to its output projection."""

from __future__ import annotations

from collections.abc import Sequence
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
    before = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
    if before is not None and is_step(made, before):
        y, state = one_token(self, made, before)
        past_key_values.set_linear_cache(self.layer_idx, state)
        return finished(self, y, hidden_states), state
    q, k, v = split(self, made)
    rows: BatchRows = self.flashmix_given.rows(hidden_states, attention_mask, options)
    q, k, v = (rows.join(part) for part in (q, k, v))
    o, after = linear_attention(
        q,
        k,
        v,
        decays(self)[0],
        scale=1.0,
        initial_state=None if before is None else rows.initial(before.to(state_dtype(q.dtype))),
        return_state=past_key_values is not None,
        cu_seqlens=rows.packing,
    )
    kept = rows.final(after)
    if kept is not None:
        kept = kept.to(v.dtype)
        past_key_values.set_linear_cache(self.layer_idx, kept)
    return finished(self, rows.part(o), hidden_states), kept


def split(mixer: Any, made: Tensor) -> Sequence[Tensor]:
    """q, k and v `[B, T, H, D]`, which lie side by side in each head of `made` `[B, T, 3 H D]`."""
    return made.unflatten(-1, (mixer.num_attention_heads, 3 * mixer.head_dim)).split(mixer.head_dim, dim=-1)


def is_step(made: Tensor, state: Tensor) -> bool:
    """Whether `made` `[B, 1, 3 H D]` is one token for `linear_attention_step`: no gradient is wanted, and it takes the state's dtype."""
    if made.shape[1] != 1 or (torch.is_grad_enabled() and (made.requires_grad or state.requires_grad)):
        return False
    return state.dtype == state_dtype(made.dtype) or (state.dtype == torch.bfloat16 and made.dtype != torch.float64)


def one_token(mixer: Any, made: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Output `[B, 1, H, D]` of one token and the state `[B, H, D, D]` after it; callers may keep the one before."""
    if before.is_cpu and before.dtype == made.dtype == state_dtype(
        made.dtype
    ):  # products of torch, and no checks of an op
        q, k, v = made.view(-1, 3, 1, mixer.head_dim).unbind(1)  # [B * H, 1, D]
        S = (before * decays(mixer)[1]).flatten(0, 1).baddbmm_(k.mT, v)
        return torch.bmm(q, S).view(made.shape[0], 1, -1, mixer.head_dim), S.view(before.shape)
    q, k, v = split(mixer, made)
    state = before.clone(memory_format=torch.contiguous_format)
    return linear_attention_step(q, k, v, state, decays(mixer)[0], scale=1.0), state


def decays(mixer: Any) -> tuple[Tensor, Tensor]:
    """The decay of each head: its logarithm `[H]`, and itself `[H, 1, 1]`."""

    def make(slopes: tuple[Tensor, ...], _: None) -> tuple[Tensor, Tensor]:
        return -slopes[0].flatten(), torch.exp(-slopes[0])

    found: tuple[Tensor, Tensor] = mixer.flashmix_given.kept.of((mixer.slope_rate,), None, make)
    return found


def finished(mixer: Any, o: Tensor, hidden_states: Tensor) -> Tensor:
    """The norm, the output gate and the output projection of `o` `[B, T, H, V]`."""
    gate = torch.sigmoid(mixer.output_gate(hidden_states))
    out: Tensor = mixer.out_proj(gate * mixer.norm(o.flatten(2)))
    return out
