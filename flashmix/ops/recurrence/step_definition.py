"""The meaning of the steps: the token loops of `definition.py` over a pool of states, and what surrounds them in a layer.

Run in float64. Nothing in the library calls this; tests and documentation compare everything else with it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashmix.ops import rowwise_definitions as rowwise
from flashmix.ops.recurrence import definition

Loop = Callable[[dict[str, Tensor], Tensor], tuple[Tensor, Tensor]]


def steps_in_pool(
    loop: Loop, x: dict[str, Tensor], pool: Tensor, state_indices: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[B, T, HV, V]`, the pool after it, and the state of each sequence after each token `[B, T, HV, K, V]`.

    `loop(x, S)` is the token loop of a rule on operands `x` (`[B, T, ...]`, or a gate `[HV]`) from states `S`. A sequence whose
    index is no slot is idle: its output is 0 and no state is touched.
    """
    B, T = x["q"].shape[:2]
    pool, o = pool.clone(), torch.zeros_like(x["v"])
    states = pool.new_zeros(B, T, *pool.shape[1:])
    for n in range(B):
        slot = n if state_indices is None else int(state_indices[n])
        if not 0 <= slot < pool.shape[0]:
            continue
        for t in range(T):
            part = {name: value if value.dim() == 1 else value[n : n + 1, t : t + 1] for name, value in x.items()}
            y, S = loop(part, pool[slot : slot + 1])
            o[n, t], pool[slot], states[n, t] = y[0, 0], S[0], S[0]
    return o, pool, states


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
        mixed, conv_state[S] = rowwise.short_conv(qkv[row], conv_weight, conv_bias, conv_state[S])
        q, k, v = mixed.split([heads * K, heads * K, HV * V], dim=-1)
        q, k = (rowwise.l2_norm(t.unflatten(-1, (heads, K))) for t in (q, k))
        beta = torch.sigmoid(strength[row]) * (2 if negative_eigenvalues else 1)
        g = None if decay is None else log_decay(decay[row], A_log, dt_bias, lower)
        y, state[S] = definition.delta_rule(q, k, v.unflatten(-1, (HV, V)), beta, g, initial_state=state[S])
        y = rowwise.rms_norm(y, norm_weight, eps=eps)
        if gate is not None:
            z = gate[row].view_as(y)
            y = y * (torch.sigmoid(z) if gate_activation == "sigmoid" else rowwise.silu(z))
        o[row] = y
    return o, state, conv_state


def log_decay(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower: float | None) -> Tensor:
    """`-exp(A_log) softplus(x + dt_bias)`, or bounded `lower sigmoid(exp(A_log) (x + dt_bias))`; a head's `A_log` for its channels."""
    assert A_log is not None and dt_bias is not None
    rate = A_log.exp() if dt_bias.dim() == 1 else A_log.exp()[:, None]
    if lower is not None:
        return lower * torch.sigmoid(rate * (x + dt_bias))
    return -rate * torch.log1p(torch.exp(x + dt_bias))
