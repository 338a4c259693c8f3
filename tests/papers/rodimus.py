"""Rodimus as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import QKV, H, K, Mechanism, T, rows, zeros
from torch import Tensor


def rodimus(
    q: Tensor, k: Tensor, v: Tensor, selection_gate: Tensor, temperature_gate: Tensor, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2410.06577, section 3: S_t = Diag(alpha_t) S_{t-1} + (alpha^_t * k_t)^T v_t with alpha = exp(-g tau), alpha^ = g^tau and keys of
    length 1."""
    o = []
    for t in range(len(v)):
        g, tau = selection_gate[t], temperature_gate[t]
        key = k[t] / torch.sqrt(k[t] @ k[t])
        S = torch.diag(torch.exp(-g * tau)) @ S + torch.outer(g**tau * key, v[t])
        o.append(scale * q[t] @ S)
    return rows(o, v), S


GATE = "B T H K"
CASES = {
    "rodimus": Mechanism(
        rodimus,
        QKV | {"selection_gate": GATE, "temperature_gate": GATE},
        rare=True,
        errors=[
            (
                {"temperature_gate": zeros(1, T, H)},
                ValueError,
                f"temperature_gate must have shape [1, {T}, {H}, {K}], got [1, {T}, {H}]",
            )
        ],
    )
}
