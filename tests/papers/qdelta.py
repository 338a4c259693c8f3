"""Q-Delta as its paper writes it: the token loop, and the layer around it."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import delta_inputs, finish_gated_deltanet, linear, mamba_decay
from paper_cases import BETA, BY_TOKEN, QKV, H, Mechanism, T, loop, rows, zeros
from torch import Tensor


def qdelta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, feedback_gate: Tensor, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2606.08804, section 3: S_t = alpha_t S_{t-1} (I - beta_t (k_t + lambda_t q_t) k_t^T) + beta_t v_t k_t^T; `S` is `V x K`."""
    o = []
    for t in range(len(v)):
        mixed = k[t] + feedback_gate[t] * q[t]
        transition = torch.eye(len(k[t]), dtype=k.dtype) - beta[t] * torch.outer(mixed, k[t])
        S = torch.exp(log_decay[t]) * S @ transition + beta[t] * torch.outer(v[t], k[t])
        o.append(scale * S @ q[t])
    return rows(o, v), S


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    q, k, v = delta_inputs(layer, x)
    q = q * layer.head_dim**0.5  # the query in the correction has length 1
    b, a = linear(x, layer.strength_and_decay).chunk(2, -1)
    feedback = torch.sigmoid(linear(x, layer.feedback) - 0.9)
    decay = mamba_decay(a, layer.decay)
    scale = layer.head_dim**-0.5
    o = loop(CASES["qdelta"], scale, q=q, k=k, v=v, beta=torch.sigmoid(b), log_decay=decay, feedback_gate=feedback)
    return finish_gated_deltanet(layer, x, o)


CASES = {
    "qdelta": Mechanism(
        qdelta,
        QKV | BETA | BY_TOKEN | {"feedback_gate": "B T HV"},
        values_first=True,
        unit=("q", "k"),
        layers={"qdelta": {"heads": 2, "value_heads": 4}},
        layer=layer_output,
        errors=[
            ({"feedback_gate": zeros(1, T, 4)}, ValueError, "feedback_gate must have shape [1, 6, 2], got [1, 6, 4]"),
            ({"log_decay": zeros(1, T, H, 8)}, ValueError, "log_decay must have shape [B, T, HV], got [1, 6, 2, 8]"),
        ],
    )
}
