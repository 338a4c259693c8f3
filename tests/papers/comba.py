"""Comba as its paper writes it: the token loop, and the layer around it."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import delta_inputs, finish_gated_deltanet, linear, mamba_decay
from paper_cases import BETA, BY_TOKEN, K, Mechanism, T, loop, rows, zeros
from torch import Tensor


def comba(
    q: Tensor, k: Tensor, p: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2506.02475: S_t = S_{t-1} (alpha_t - beta_t p_t k_t^T) + beta_t v_t k_t^T, o_t = S_t q_t; `S` is `V x K`."""
    o = []
    for t in range(len(v)):
        transition = torch.exp(log_decay[t]) * torch.eye(len(k[t]), dtype=k.dtype) - beta[t] * torch.outer(p[t], k[t])
        S = S @ transition + beta[t] * torch.outer(v[t], k[t])
        o.append(scale * S @ q[t])
    return rows(o, v), S


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    q, k, v = delta_inputs(layer, x)
    b, a = linear(x, layer.strength_and_decay).chunk(2, -1)
    closeness, correction = (w.repeat_interleave(2)[:, None] for w in (layer.closeness, layer.correction))
    p = torch.sigmoid(closeness) * k
    q = q - correction * p * 8**-0.5  # q is scaled already
    o = loop(CASES["comba"], q=q, k=k, p=p, v=v, beta=torch.sigmoid(b), log_decay=mamba_decay(a, layer.decay))
    return finish_gated_deltanet(layer, x, o)


CASES = {
    "comba": Mechanism(
        comba,
        {"q": "B T H K", "k": "B T H K", "p": "B T H K", "v": "B T HV V"} | BETA | BY_TOKEN,
        values_first=True,
        draw={"p": 0.5},
        layers={"comba": {"heads": 2, "value_heads": 4}},
        layer=layer_output,
        errors=[({"p": zeros(1, T, 4, K)}, ValueError, "p must have shape [1, 6, 2, 8], got [1, 6, 4, 8]")],
    )
}
