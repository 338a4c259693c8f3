"""MesaNet as its paper writes it: the token loop with an exact solve."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import convolve, heads, linear, rms, unit
from paper_cases import BETA, BY_TOKEN, QKV, H, K, Mechanism, T, loop, rows, zeros
from torch import Tensor
from torch.nn.functional import logsigmoid, silu, softplus


def mesa_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    ridge: Tensor,
    *,
    steps: int,
    S: tuple[Tensor, Tensor],
    scale: float,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """2506.05233, section 3: H_t = gamma_t H_{t-1} + beta_t k_t k_t^T, G_t = gamma_t G_{t-1} + beta_t v_t k_t^T,
    o_t = G_t (H_t + Lambda)^{-1} q_t; here G^T."""
    R, memory = S
    o = []
    for t in range(len(v)):
        gamma = torch.exp(log_decay[t])
        R = gamma * R + beta[t] * torch.outer(k[t], k[t])
        memory = gamma * memory + beta[t] * torch.outer(k[t], v[t])
        o.append(scale * torch.linalg.solve(R.T + torch.diag(ridge), q[t]) @ memory)
    return rows(o, v), (R, memory)


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    q, k, v, gate = linear(x, layer.qkvg).split(layer.qkvg.sizes, -1)
    q, k = convolve(torch.cat([q, k], -1), layer.convolution.weight, layer.convolution.bias).chunk(2, -1)
    strength, decay = (linear(x, layer.strength_and_decay) + layer.strength_and_decay.bias).chunk(2, -1)
    ridge = softplus(layer.ridge) + 0.25
    q, k, v = (heads(part, 4) for part in (q, k, v))
    q, k = unit(q), unit(k)
    o = loop(CASES["mesa_net"], q=q, k=k, v=v, beta=torch.sigmoid(strength), log_decay=logsigmoid(decay), ridge=ridge)
    o = rms(o) * layer.norm.weight * silu(heads(gate, 4))
    return linear(o.flatten(1), layer.output)


CASES = {
    "mesa_net": Mechanism(
        mesa_net,
        QKV | BETA | BY_TOKEN | {"ridge": "HV K"},
        rare=True,
        options={"steps": 12},  # two for each channel; the loop is exact
        scale=1.0,
        states=("N HV K K", "N HV K V"),
        layers={"mesa_net": {"heads": 4, "steps": 4, "output_gate": "silu", "conv_bias": True}},
        layer=layer_output,
        errors=[
            ({"steps": 0}, ValueError, "steps must be between 1 and 1000, got 0"),
            ({"ridge": zeros(K)}, ValueError, f"ridge must have shape [{H}, {K}], got [{K}]"),
            (
                {"log_decay": zeros(1, T, H, K)},
                ValueError,
                f"log_decay must have shape [B, T, HV], got [1, {T}, {H}, {K}]",
            ),
        ],
    )
}
