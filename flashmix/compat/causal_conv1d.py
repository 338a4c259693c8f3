"""The functions of causal_conv1d, whose tensors have the channels before the tokens.

Example:
    >>> import torch
    >>> from flashmix.compat.causal_conv1d import causal_conv1d_fn
    >>> causal_conv1d_fn(torch.randn(2, 16, 5), torch.randn(16, 4), activation="silu").shape
    torch.Size([2, 16, 5])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.compat.surface import Surface, refuse
from flashmix.op.packing import Packing
from flashmix.ops.short_conv.op import short_conv

CONV = Surface("causal_conv1d")
ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}


def activation_of(label: str, activation: str | None) -> str | None:
    """The name of the activation here; raises NotImplementedError for others than silu, as the original does."""
    refuse(label, f"activation {activation!r}", activation in ACTIVATIONS)
    return ACTIVATIONS[activation]


def packing_of(seq_idx: Tensor) -> Packing:
    """The packing of rows `[B, T]` of sequence numbers, laid end to end: a sequence ends with its row, or where the number changes."""
    rows, tokens = seq_idx.shape
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    edges = starts.flatten().nonzero().flatten()
    return Packing(torch.cat([edges, edges.new_tensor([rows * tokens])]), rows * tokens)


@CONV.function(
    "causal_conv1d_fn",
    "x weight bias=None seq_idx=None initial_states=None return_final_states=False final_states_out=None activation=None",
    "`seq_idx` with states",
)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    return_final_states: bool,
    final_states_out: Tensor | None,
    activation: str | None,
) -> Any:
    """`flashmix.short_conv` of `x` `[B, D, T]`; states are `[B, D, W - 1]`. No activation by default."""
    activation = activation_of("causal_conv1d.causal_conv1d_fn", activation)
    x = x.mT
    if seq_idx is not None:
        stateless = initial_states is None and not return_final_states
        refuse("causal_conv1d.causal_conv1d_fn", "states together with seq_idx", stateless)
        packed = x.reshape(1, -1, x.shape[2])
        y, _ = short_conv(packed, weight, bias, activation=activation, cu_seqlens=packing_of(seq_idx))
        return y.view(x.shape).mT
    state = None if initial_states is None else initial_states.mT.to(x.dtype)
    y, final = short_conv(x, weight, bias, activation=activation, initial_state=state, return_state=return_final_states)
    if final is None:
        return y.mT
    last = final.mT if final_states_out is None else final_states_out.copy_(final.mT)
    return y.mT, last


@CONV.function(
    "causal_conv1d_update", "x conv_state weight bias=None activation=None !cache_seqlens=None conv_state_indices=None"
)
def causal_conv1d_step(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    """The next tokens `[B, D]` or `[B, D, T]`; `conv_state` `[.., D, L]`, `L >= W - 1`, is updated in place."""
    activation = activation_of("causal_conv1d.causal_conv1d_update", activation)
    new = x.unsqueeze(-1) if x.dim() == 2 else x
    rows = conv_state if conv_state_indices is None else conv_state[conv_state_indices.long()]
    width = weight.shape[1] - 1
    state = rows[..., rows.shape[-1] - width :].mT.to(x.dtype)
    y, _ = short_conv(new.mT, weight, bias, activation=activation, initial_state=state)
    with torch.no_grad():
        last = torch.cat([rows, new.to(rows.dtype)], -1)[..., -rows.shape[-1] :]
        if conv_state_indices is None:
            conv_state.copy_(last)
        else:
            conv_state[conv_state_indices.long()] = last
    return y.mT.squeeze(-1) if x.dim() == 2 else y.mT


globals().update(CONV.names)
__getattr__ = CONV.lookup
__all__ = sorted(CONV.names)
