"""Oja's rule as its paper writes it: the token loop, and the layer around it."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import delta_inputs, finish_kda, kda_decay, linear, unit
from paper_cases import BETA, QKV, H, Mechanism, T, loop, rows, zeros
from torch import Tensor


def oja(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Oja 1982; 2206.01649: W_t = W_{t-1} + beta_t (k_t - W_{t-1} v_t) v_t^T, on a state whose columns decay."""
    o = []
    for t in range(len(v)):
        S = S if log_decay is None else S @ torch.diag(torch.exp(log_decay[t]))
        S = S + beta[t] * torch.outer(k[t] - S @ v[t], v[t])
        o.append(scale * q[t] @ S)
    return rows(o, v), S


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    q, k, v = delta_inputs(layer, x)
    o = loop(
        CASES["oja"], q=q, k=k, v=unit(v), beta=torch.sigmoid(linear(x, layer.strength)), log_decay=kda_decay(layer, x)
    )
    return finish_kda(layer, x, o)


CASES = {
    "oja": Mechanism(
        oja,
        QKV | BETA | {"log_decay": "B T HV V"},
        ("log_decay",),
        unit=("v",),
        layers={"oja": {"heads": 2, "value_heads": 4, "value_dim": 6, "rank": 3}},
        layer=layer_output,
        errors=[({"log_decay": zeros(1, T, H)}, ValueError, "log_decay must have shape [1, 6, 2, 8], got [1, 6, 2]")],
    )
}
