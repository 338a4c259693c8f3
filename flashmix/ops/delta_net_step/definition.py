"""The meaning of one token of a delta-rule layer, in float64: each line is an op of the library.

Only tests, the self-test and docs import this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops.gated_product.definition import silu
from flashmix.ops.norm.definition import l2_norm, rms_norm
from flashmix.ops.recurrence import definition
from flashmix.ops.short_conv.definition import short_conv


def delta_net_step(
    qkv: Tensor, strength: Tensor, state: Tensor, conv_state: Tensor, conv_weight: Tensor, heads: int, *,
    conv_bias: Tensor | None = None, decay: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower: float | None = None, negative_eigenvalues: bool = False,
    norm_weight: Tensor | None = None, gate: Tensor | None = None, gate_activation: str = "silu", eps: float = 1e-6,
    state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output `[B, 1, HV, V]`, the states and the convolution's states after one token; each line is an op of the library."""
    HV, K, V = state.shape[1:]
    B = qkv.shape[0]
    o, state, conv_state = qkv.new_zeros(B, 1, HV, V), state.clone(), conv_state.clone()
    for n in range(B):
        slot = n if state_indices is None else int(state_indices[n])
        if not 0 <= slot < state.shape[0]:
            continue
        row, S = slice(n, n + 1), slice(slot, slot + 1)
        mixed, conv_state[S] = short_conv(qkv[row], conv_weight, conv_bias, conv_state[S])
        q, k, v = mixed.split([heads * K, heads * K, HV * V], dim=-1)
        q, k = (l2_norm(t.unflatten(-1, (heads, K))) for t in (q, k))
        beta = torch.sigmoid(strength[row]) * (2 if negative_eigenvalues else 1)
        g = None if decay is None else log_decay(decay[row], A_log, dt_bias, lower)
        y, state[S] = definition.delta_rule(q, k, v.unflatten(-1, (HV, V)), beta, g, initial_state=state[S])
        y = rms_norm(y, norm_weight, eps=eps)
        if gate is not None:
            z = gate[row].view_as(y)
            y = y * (torch.sigmoid(z) if gate_activation == "sigmoid" else silu(z))
        o[row] = y
    return o, state, conv_state


def log_decay(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower: float | None) -> Tensor:
    """`-exp(A_log) softplus(x + dt_bias)`, or bounded `lower sigmoid(exp(A_log) (x + dt_bias))`; a head's `A_log` for its channels."""
    assert A_log is not None and dt_bias is not None
    rate = A_log.exp() if dt_bias.dim() == 1 else A_log.exp()[:, None]
    if lower is not None:
        return lower * torch.sigmoid(rate * (x + dt_bias))
    return -rate * torch.log1p(torch.exp(x + dt_bias))
