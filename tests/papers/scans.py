"""Recurrent units that are scans, HGRN, minGRU and minLSTM, as their papers write them: the token loops."""

from __future__ import annotations

import torch
from paper_cases import H, K, Mechanism, T, rows, zeros
from torch import Tensor


def hgrn(i: Tensor, log_forget: Tensor, *, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """2311.04823, section 3.2: h_t = lambda_t h_{t-1} + (1 - lambda_t) i_t."""
    h = []
    for t in range(len(i)):
        f = torch.exp(log_forget[t])
        S = f * S + (1 - f) * i[t]
        h.append(S)
    return rows(h, i), S


def positive(c: Tensor) -> Tensor:
    """2410.01201, appendix B: g(c) = c + 0.5 for c >= 0, else sigmoid(c)."""
    return torch.where(c >= 0, c + 0.5, torch.sigmoid(c))


def mingru(gate: Tensor, candidate: Tensor, *, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """2410.01201, section 3.1: h_t = (1 - z_t) h_{t-1} + z_t g(c_t)."""
    h = []
    for t in range(len(gate)):
        z = torch.sigmoid(gate[t])
        S = (1 - z) * S + z * positive(candidate[t])
        h.append(S)
    return rows(h, gate), S


def minlstm(forget: Tensor, write: Tensor, candidate: Tensor, *, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """2410.01201, section 3.2: f' = f / (f + i), i' = i / (f + i), h_t = f' h_{t-1} + i' g(c_t)."""
    h = []
    for t in range(len(forget)):
        f, i = torch.sigmoid(forget[t]), torch.sigmoid(write[t])
        S = f / (f + i) * S + i / (f + i) * positive(candidate[t])
        h.append(S)
    return rows(h, forget), S


UNIT = "B T HV V"
CASES = {
    "hgrn": Mechanism(
        hgrn,
        {"i": UNIT, "log_forget": UNIT},
        scale=1.0,
        grouped=False,
        states=("N HV V",),
        errors=[
            ({"i": zeros(T, H)}, ValueError, "i must have shape [B, T, D], got [6, 2]"),
            ({"log_forget": zeros(H, K)}, ValueError, "log_forget must have shape [1, 6, 2, 8], got [2, 8]"),
        ],
    ),
    "mingru": Mechanism(mingru, {"gate": UNIT, "candidate": UNIT}, scale=1.0, grouped=False, states=("N HV V",)),
    "minlstm": Mechanism(
        minlstm, {"forget": UNIT, "write": UNIT, "candidate": UNIT}, scale=1.0, grouped=False, states=("N HV V",)
    ),
}
