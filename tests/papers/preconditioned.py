"""Preconditioned DeltaNet as its paper writes it: the token loop, and the layer around it."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import delta_inputs, finish_gated_deltanet, finish_kda, kda_decay, linear, mamba_decay
from paper_cases import BETA, BY_CHANNEL, BY_TOKEN, CURVATURE, QKV, H, Mechanism, T, loop, rows, zeros
from torch import Tensor
from torch.nn.functional import softplus

from flashmix.layers import KDA


def preconditioned(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, curvature_beta: Tensor, curvature_log_decay: Tensor,
    log_scale: Tensor | float = -0.2, *, S: tuple[Tensor, Tensor], scale: float,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """2604.21100: A_t = alpha'_t A_{t-1} + beta'_t k_t^2, P_t = Diag(1.5^{-r/(1+|r|)}) with r = log(A_t + eps) - log_scale,
    S_t = (I - beta_t P_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t P_t k_t v_t^T; both papers' decays."""
    memory, A = S
    o = []
    for t in range(len(v)):
        A = torch.exp(curvature_log_decay[t]) * A + curvature_beta[t] * k[t] ** 2
        r = torch.log(A + 1e-6) - log_scale
        P = torch.diag(1.5 ** (-r / (1 + abs(r))))
        alpha = torch.exp(log_decay[t]) * torch.ones_like(k[t])
        transition = torch.eye(len(k[t]), dtype=k.dtype) - beta[t] * P @ torch.outer(k[t], k[t])
        memory = transition @ torch.diag(alpha) @ memory + beta[t] * P @ torch.outer(k[t], v[t])
        o.append(scale * memory.T @ q[t])
    return rows(o, v), (memory, A)


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    by_channel = isinstance(layer, KDA)
    q, k, v = delta_inputs(layer, x)
    group = layer.value_heads // layer.heads
    b2, a2 = (part.repeat_interleave(group, 1) for part in linear(x, layer.curvature.projection).chunk(2, -1))
    rate, bias, log_scale = (
        w.repeat_interleave(group)
        for w in (layer.curvature.decay.A_log, layer.curvature.decay.dt_bias, layer.curvature.log_scale)
    )
    if by_channel:
        beta, decay = torch.sigmoid(linear(x, layer.strength)), kda_decay(layer, x)
    else:
        b, a = linear(x, layer.strength_and_decay).chunk(2, -1)
        beta, decay = torch.sigmoid(b), mamba_decay(a, layer.decay)
    case = CASES["preconditioned_kda" if by_channel else "preconditioned_gated_deltanet"]
    o = loop(
        case,
        q=q,
        k=k,
        v=v,
        beta=beta,
        log_decay=decay,
        curvature_beta=torch.sigmoid(b2),
        curvature_log_decay=-rate.exp() * softplus(a2 + bias),
        log_scale=log_scale,
    )
    return (finish_kda if by_channel else finish_gated_deltanet)(layer, x, o)


CASES = {
    "preconditioned_gated_deltanet": Mechanism(
        preconditioned,
        QKV | BETA | BY_TOKEN | CURVATURE,
        ("log_scale",),
        states=("N HV K V", "N H K"),
        weak=True,
        layers={"preconditioned_gated_deltanet": {"heads": 2, "value_heads": 4}},
        layer=layer_output,
    ),
    "preconditioned_kda": Mechanism(
        preconditioned,
        QKV | BETA | BY_CHANNEL | CURVATURE,
        ("log_scale",),
        states=("N HV K V", "N H K"),
        weak=True,
        layers={"preconditioned_kda": {"heads": 2, "rank": 3}},
        layer=layer_output,
        errors=[
            ({"log_decay": zeros(1, T, H)}, ValueError, "log_decay must have shape [B, T, HV, K], got [1, 6, 2]"),
            ({"curvature_beta": zeros(1, T, 4)}, ValueError, "curvature_beta must have shape [1, 6, 2], got [1, 6, 4]"),
        ],
    ),
}
