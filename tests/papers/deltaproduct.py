"""DeltaProduct as its paper writes it: the token loop, and the layer around it."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import convolve, finish_gated_deltanet, heads, linear, mamba_decay, unit
from paper_cases import STEPS, H, K, Mechanism, T, householder, loop, rows, zeros
from torch import Tensor


def deltaproduct(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2502.10297, equation 3: H_i = A(x_i) H_{i-1} + B(x_i) with A = g prod_j (I - beta_ij k_ij k_ij^T),
    B = sum_j (prod_{l > j} (I - beta_il k_il k_il^T)) beta_ij k_ij v_ij^T, o_i = H_i^T q_i."""
    o = []
    for t in range(len(q)):
        A, B = torch.eye(k.shape[-1], dtype=k.dtype), torch.zeros_like(S)
        for j in range(k.shape[1]):
            step = householder(k[t, j], beta[t, j])
            A, B = step @ A, step @ B + beta[t, j] * torch.outer(k[t, j], v[t, j])
        g = 1.0 if log_decay is None else torch.exp(log_decay[t])
        S = g * A @ S + B
        o.append(scale * S.T @ q[t])
    return rows(o, v[:, 0]), S


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    keys, values, n = layer.keys, layer.values, layer.steps
    q, k, v = convolve(linear(x, layer.qkv), layer.convolution.weight).split([keys, n * keys, n * values], -1)
    q, k = unit(heads(q, 2)) * 8**-0.5, unit(k.unflatten(-1, (n, 2, 8)))
    beta, a = linear(x, layer.strength_and_decay).split([n * 4, 4], -1)
    o = loop(
        CASES["deltaproduct"],
        q=q,
        k=k,
        v=v.unflatten(-1, (n, 4, 8)),
        beta=torch.sigmoid(beta).unflatten(-1, (n, 4)),
        log_decay=mamba_decay(a, layer.decay),
    )
    return finish_gated_deltanet(layer, x, o)


CASES = {
    "deltaproduct": Mechanism(
        deltaproduct,
        STEPS,
        ("log_decay",),
        layers={"deltaproduct": {"heads": 2, "value_heads": 4, "steps": 3}},
        layer=layer_output,
        errors=[
            ({"k": zeros(1, T, H, K)}, ValueError, "k must have shape [B, T, n, H, K], got [1, 6, 2, 8]"),
            ({"v": zeros(1, T, 3, H, K)}, ValueError, "v must have shape [1, 6, 2, 2, 8], got [1, 6, 3, 2, 8]"),
            ({"beta": zeros(1, T, H)}, ValueError, "beta must have shape [1, 6, 2, 2], got [1, 6, 2]"),
            (
                {"k": zeros(1, T, 0, H, K), "v": zeros(1, T, 0, H, K), "beta": zeros(1, T, 0, H)},
                ValueError,
                "k must have shape [B, T, n, H, K] with n >= 1, got [1, 6, 0, 2, 8]",
            ),
        ],
    )
}
