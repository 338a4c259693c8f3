"""mLSTM as its paper writes it: the token loop, and the layer of xLSTM-7B around it."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import heads, linear
from paper_cases import QKV, H, K, Mechanism, T, loop, rows, zeros
from torch import Tensor
from torch.nn.functional import layer_norm, logsigmoid


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_write: Tensor,
    log_forget: Tensor,
    *,
    S: tuple[Tensor, Tensor, Tensor],
    scale: float,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """2405.04517, equations 19 to 27: C_t = f_t C_{t-1} + i_t v_t k_t^T, n_t = f_t n_{t-1} + i_t k_t,
    h_t = C_t q_t / max(|n_t^T q_t|, 1). The state is divided by e^m, equation 15, which is a constant of the gradient."""
    C, n, m = torch.exp(S[2]) * S[0].T, torch.exp(S[2]) * S[1], S[2].detach()
    h = []
    for t in range(len(v)):
        f, i = torch.exp(log_forget[t]), torch.exp(log_write[t])
        C, n = f * C + i * torch.outer(v[t], k[t]), f * n + i * k[t]
        h.append(C @ (scale * q[t]) / torch.maximum((n @ (scale * q[t])).abs(), torch.ones_like(m)))
        m = torch.maximum(log_forget[t] + m, log_write[t]).detach()
    return rows(h, v), ((torch.exp(-m) * C).T, torch.exp(-m) * n, m)


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    q, k, v, gate = (heads(part, 2) for part in linear(x, layer.qkvg).split(layer.qkvg.sizes, -1))
    logits = 15 * torch.tanh((linear(x, layer.gates) + layer.gates.bias) / 15)
    i, f = logits.chunk(2, -1)
    if layer.input_gate == "sigmoid":
        i = logsigmoid(i)
    h = loop(CASES["mlstm"], layer.head_dim**-0.5, q=q, k=k, v=v, log_write=i, log_forget=logsigmoid(f))
    h = layer_norm(h, h.shape[-1:], eps=1e-6).flatten(1) * layer.norm_weight
    return linear(h * torch.sigmoid(gate.flatten(1)), layer.output)


CASES = {
    "mlstm": Mechanism(
        mlstm,
        QKV | {"log_write": "B T H", "log_forget": "B T H"},
        states=("N HV K V", "N H K", "N H"),
        layers={  # the exponential gate: tests/test_layer_peers.py
            "mlstm": {"heads": 2, "head_dim": 6, "value_dim": 5, "input_gate": "sigmoid", "divisor_eps": 0.0}
        },
        layer=layer_output,
        errors=[
            ({"log_write": zeros(1, T, H, K)}, ValueError, "log_write must have shape [1, 6, 2], got [1, 6, 2, 8]"),
            ({"log_forget": zeros(1, T)}, ValueError, "log_forget must have shape [1, 6, 2], got [1, 6]"),
            ({"eps": -1.0}, ValueError, "eps must be at least 0.0, got -1.0"),
        ],
    )
}
