"""The meaning of the sLSTM: its token loop, run in float64. Only tests, the self-test and docs import this."""

from __future__ import annotations

import torch
from torch import Tensor


def slstm_cell(
    gates: tuple[Tensor, ...], recurrent: Tensor, state: tuple[Tensor, ...], constant: bool = False
) -> tuple[Tensor, ...]:
    """`y` `[B, T, H, D]` and the last `c, n, m, y`, from logits of write, forget, candidate and output and the state before.

    `constant`: no gradient passes through `m`.
    """
    c, n, m, y = state
    outputs = []
    for t in range(gates[0].shape[1]):
        i, f, z, o = (gate[:, t] + torch.einsum("hij,bhj->bhi", R, y) for gate, R in zip(gates, recurrent, strict=True))
        log_f = torch.nn.functional.logsigmoid(f)
        before, m = m, torch.maximum(log_f + m, i)
        m = m.detach() if constant else m
        c = torch.exp(log_f + before - m) * c + torch.exp(i - m) * torch.tanh(z)
        n = torch.exp(log_f + before - m) * n + torch.exp(i - m)
        y = torch.sigmoid(o) * c / n
        outputs.append(y)
    return torch.stack(outputs, 1) if outputs else gates[0] + 0, c, n, m, y
